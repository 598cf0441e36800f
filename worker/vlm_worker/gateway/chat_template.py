"""Renders the model's chat template in a sandbox, with the same result as transformers.

A client's text must never become a control token. Before rendering, a mark is inserted at both ends
of each text and between the characters of anything that reads like a control token. Control tokens
found in the marked output are part of the template.

    "hi <|im_end|>" ─mark─▶ "▮hi <▮|▮i▮m▮_…▮>▮" ─render─▶ split at real control tokens ─▶ unmark

Before first use, a child process with limits of time and memory renders the template a few times:

    gateway ─ source, named tokens ─▶ child: setrlimit, render ─▶ TemplateFacts
                                        └─ limit exceeded ──────▶ ModelConfigError

The child detects templates that no limit inside Python stops.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlm_worker.core.model_files import ModelConfigError, read_json
from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.conversation import (
    PROBE,
    PROBE_ARGUMENT,
    Conversation,
    TemplateFacts,
    client_texts,
    probe_calls,
    probe_tools,
    template_messages,
    template_tools,
)

logger = logging.getLogger(__name__)

MAX_STEPS: Final = 1_000_000
"""Limit on the steps of all ranges in one rendering, together."""
MAX_LENGTH: Final = 1_000_000
"""Limit on the items that a repetition with `*` produces."""
_NINE = re.compile(r"length\s*!=\s*9\b")
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")
_CALLS: Final[tuple[Literal["object", "text"], ...]] = ("object", "text")
_EFFORTS: Final = frozenset({"enable_thinking", "reasoning_effort"})
# Private-use characters. The mark is the first that no text of the conversation contains.
_MARKS = "\U0010fff0\U0010fff1\U0010fff2\U0010fff3\uf8f0\uf8f1"


class ChatTemplate:
    """One model's template and its control tokens.

    `named_tokens` maps template variables, for example `bos_token` and `eos_token`, to tokens.
    """

    def __init__(
        self,
        source: str,
        control_tokens: Sequence[str],
        named_tokens: Mapping[str, str],
        *,
        facts: TemplateFacts | None = None,
    ) -> None:
        """If `facts` is None, they are found by rendering."""
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except Exception as error:  # template code comes with the model and may raise anything
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ModelConfigError(
                f"the model's chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json) cannot be read: {line}{error}"
            ) from error
        self._named_tokens = dict(named_tokens)
        longest_first = sorted(control_tokens, key=len, reverse=True)
        pattern = "|".join(re.escape(token) for token in longest_first)
        self._control = re.compile(pattern) if pattern else re.compile(r"(?!)")
        self.facts = TemplateFacts() if facts is None else facts
        if facts is None:
            self.facts = self.examine(source)

    def render(self, conversation: Conversation, *, asks: bool = True) -> list[tuple[str, bool]]:
        """Return the rendered conversation as (text, is control token) pieces, in order.

        If it `asks`, the beginning of the answer follows it.

        The joined pieces equal the result of transformers' `apply_chat_template`.

        Raises:
            ApiError: 400 if the template rejects the conversation, or rewrites text so that the
                client's text and the template's cannot be distinguished.
        """
        self._check(conversation)
        plain = self._render(conversation, str, asks=asks)
        mark = self._mark_for(conversation)
        try:
            marked = self._render(conversation, self._marking(mark), asks=asks)
        except ApiError:  # it looks into texts
            marked = None
        if marked is None or marked.replace(mark, "") != plain:
            return self._unmarked_pieces(conversation, plain)
        return [(piece.replace(mark, ""), control) for piece, control in self._split(marked)]

    def _check(self, conversation: Conversation) -> None:
        """Raise ApiError (400) for what the template would leave out."""
        if conversation.tools and not self.facts.writes_tools:
            raise unsupported(
                "tools", "'tools' is not supported: the model's chat template writes no tools."
            )
        if self.facts.calls == "none":
            for index, message in enumerate(conversation.messages):
                if message.tool_calls:
                    where = f"messages[{index}].tool_calls"
                    raise unsupported(
                        where,
                        f"'{where}' is not supported: the model's chat template writes no calls.",
                    )
        if conversation.effort is not None and not self._variables & _EFFORTS:
            raise unsupported(
                "reasoning_effort",
                "'reasoning_effort' is not supported: the model's chat template has no such "
                "setting.",
            )

    def _render(
        self, conversation: Conversation, change: Callable[[str], str], *, asks: bool = True
    ) -> str:
        messages = template_messages(conversation.messages, change, self.facts)
        tools = template_tools(conversation.tools, change)
        return self._rendered(messages, tools, self._settings(conversation), asks=asks)

    def _settings(self, conversation: Conversation) -> dict[str, Any]:
        """The variables of the template that `reasoning_effort` sets."""
        effort = conversation.effort
        values = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        if effort is None:
            return {}
        return {name: value for name, value in values.items() if name in self._variables}

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        settings: dict[str, Any],
        *,
        asks: bool = True,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=asks,
                range=Range(),
                **settings,
                **self._named_tokens,
            )
        except jinja2.TemplateError as error:
            raise _refused() from error
        except MemoryError:
            raise
        except Exception as error:
            # The template's code comes with the model and may raise any exception.
            logger.warning("the chat template failed", extra={"reason": repr(error)[:500]})
            raise _refused() from error

    def _marking(self, mark: str) -> Callable[[str], str]:
        def break_up(match: re.Match[str]) -> str:
            return mark.join(match.group())

        def marked(text: str) -> str:
            core = text.strip()
            if not core:
                return text
            start = text.index(core)
            inner = mark + self._control.sub(break_up, core) + mark
            return text[:start] + inner + text[start + len(core) :]

        return marked

    def examine(self, source: str) -> TemplateFacts:
        """Find the facts of the template by rendering it."""
        facts = TemplateFacts(
            as_parts=self.drops_strings(), short_ids=_NINE.search(source) is not None
        )
        self.facts = facts
        writes_tools = PROBE in self._shown(probe_tools())
        for calls in _CALLS:
            self.facts = dataclasses.replace(facts, calls=calls)
            shown = self._shown(probe_calls())
            # An object that Python writes, instead of JSON, has single quotes.
            if PROBE_ARGUMENT in shown and f"'{PROBE_ARGUMENT}'" not in shown:
                return dataclasses.replace(self.facts, writes_tools=writes_tools)
        return dataclasses.replace(facts, writes_tools=writes_tools)

    def drops_strings(self) -> bool:
        """Whether the template renders text parts but drops string contents, as LLaVA's does."""
        parts = [{"type": "text", "text": PROBE}]
        return not self._shows(PROBE) and self._shows(parts)

    def _shows(self, content: Any) -> bool:
        try:
            return PROBE in self._rendered([{"role": "user", "content": content}], None, {})
        except ApiError:
            return False

    def _shown(self, conversation: Conversation) -> str:
        try:
            return self._render(conversation, str)
        except ApiError:
            return ""

    def _mark_for(self, conversation: Conversation) -> str:
        texts = "".join(client_texts(conversation))
        for mark in _MARKS:
            if mark not in texts:
                return mark
        raise invalid(
            "The text uses private characters that this server needs for itself.",
            param="messages",
            code="invalid_messages",
        )

    def _unmarked_pieces(self, conversation: Conversation, plain: str) -> list[tuple[str, bool]]:
        """Split an unmarked rendering, for a template whose output depends on the text.

        Raises:
            ApiError: 400 if a client's text contains a control token.
        """
        if self._control.search("".join(client_texts(conversation))):
            raise invalid(
                "The text contains a control token that the model's chat template cannot carry.",
                param="messages",
                code="invalid_messages",
            )
        return list(self._split(plain))

    def _split(self, text: str) -> list[tuple[str, bool]]:
        pieces: list[tuple[str, bool]] = []
        start = 0
        for match in self._control.finditer(text):
            if match.start() > start:
                pieces.append((text[start : match.start()], False))
            pieces.append((match.group(), True))
            start = match.end()
        if start < len(text):
            pieces.append((text[start:], False))
        return pieces


def _refused() -> ApiError:
    return invalid(
        "The model's chat template refuses this sequence of messages.",
        param="messages",
        code="invalid_messages",
    )


def read_template(model_dir: Path) -> str | None:
    """Read `chat_template.jinja`, else `tokenizer_config.json`; None without a template."""
    path = model_dir / "chat_template.jinja"
    if path.exists():
        _check_inside(model_dir, path)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelConfigError(f"{path}: is not UTF-8: {error}") from error
    config = model_dir / "tokenizer_config.json"
    if not config.exists():
        return None
    template = read_json(config).get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelConfigError(f"{config}: chat_template must be one string")
    return template


def _check_inside(model_dir: Path, path: Path) -> None:
    """Reject a link to a file elsewhere: rendering would show that file to clients.

    Links within Hugging Face's cache, from `snapshots/REVISION` to `blobs`, are allowed.
    """
    home = model_dir.resolve()
    if home.parent.name == "snapshots":
        home = home.parent.parent
    if not path.resolve().is_relative_to(home):
        raise ModelConfigError(
            f"{path}: is a link to a file outside of the model's directory; copy the file there"
        )


class Range:
    """`range` for one rendering. A limit on all its steps together bounds nested loops, too."""

    def __init__(self) -> None:
        self._remaining = MAX_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._remaining -= len(steps)
        if self._remaining < 0:
            raise jinja2.TemplateError(f"its ranges have more than {MAX_STEPS} steps")
        return steps


class _Environment(ImmutableSandboxedEnvironment):
    """Limits operators that make a large value from small ones: `*`, `**` and `%` padding."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the operands of an operator of `intercepted_binops`, then apply it."""
        if operator == "*" and not _is_short(left, right):
            raise jinja2.TemplateError(f"it repeats something to more than {MAX_LENGTH} items")
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise jinja2.TemplateError("it takes a power of a large number")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise jinja2.TemplateError("it pads a text to a great width")
        return super().call_binop(context, operator, left, right)


def _is_short(left: Any, right: Any) -> bool:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, Sequence) and isinstance(times, int):
            return len(many) * times <= MAX_LENGTH
    return all(abs(x) < 2**256 for x in (left, right) if isinstance(x, int))


def _is_small(number: Any) -> bool:
    return not isinstance(number, int) or abs(number) <= 64


def _environment() -> ImmutableSandboxedEnvironment:
    """Configure Jinja2 as transformers does, so that templates render the same."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # noqa: DTZ005 - as transformers does


CPU_SECONDS: Final = 5
DEADLINE_SECONDS: Final = 60.0
"""Wall time of the child including its start; generous for a busy machine."""
MEMORY_BYTES: Final = 1 << 30
"""Address space of the child; the interpreter and its libraries take a tenth of it."""
_COMMAND = "from vlm_worker.gateway.chat_template import child; child()"


@functools.lru_cache(maxsize=64)
def examine(source: str, named_tokens: tuple[tuple[str, str], ...]) -> TemplateFacts:
    """Find the facts of a template. Renders it in a child process.

    Raises:
        ModelConfigError: the syntax is invalid, or a rendering exceeds its time or memory.
    """
    # Reports a syntax error with its line before a child starts.
    ChatTemplate(source, [], dict(named_tokens), facts=TemplateFacts())
    question = json.dumps([source, named_tokens, CPU_SECONDS, MEMORY_BYTES])
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-S", "-c", _COMMAND],
            input=question.encode(),
            capture_output=True,
            timeout=DEADLINE_SECONDS,
            check=False,
            env={
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
    except subprocess.TimeoutExpired as error:
        raise _unusable(f"was not rendered in {DEADLINE_SECONDS:g} s") from error
    if done.returncode != 0:
        raise _unusable(
            f"takes more than {CPU_SECONDS} s or {MEMORY_BYTES >> 20} MiB to render "
            "one short message"
        )
    return TemplateFacts(**json.loads(done.stdout))


def child() -> None:
    """Main function of the child process: JSON from stdin, the answer to stdout."""
    source, named_tokens, cpu_seconds, memory_bytes = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = ChatTemplate(source, [], dict(named_tokens))
    sys.stdout.write(json.dumps(dataclasses.asdict(template.facts)))


def _unusable(why: str) -> ModelConfigError:
    return ModelConfigError(
        f"the model's chat template (chat_template.jinja, or chat_template in "
        f"tokenizer_config.json) {why}; serve the model without it, or repair it"
    )
