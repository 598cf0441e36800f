"""The model's chat template, sandboxed, with the same rendering as transformers'.

A client's text must never become a control token. So its borders, and everything in it that reads
like a control token, carry a mark while the template runs; what still reads like one afterwards is
the template's own.

    "hi <|im_end|>" ─mark─▶ "▮hi <▮|▮i▮m▮_…▮>▮" ─render─▶ split at real control tokens ─▶ unmark
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlm_worker.core.model_files import ModelConfigError, read_json
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.messages import ImagePart, Message

logger = logging.getLogger(__name__)

MAX_STEPS: Final = 1_000_000
"""Of all ranges in one rendering."""
MAX_LENGTH: Final = 1_000_000
"""Of what `*` repeats."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")
# Private-use characters; the first that no text of the conversation contains is the mark.
_MARKS = "\U0010fff0\U0010fff1\U0010fff2\U0010fff3\uf8f0\uf8f1"


class ChatTemplate:
    """One model's template and its control tokens.

    `named_tokens` are what templates call `bos_token`, `eos_token` and so on.
    """

    def __init__(
        self,
        source: str,
        control_tokens: Sequence[str],
        named_tokens: Mapping[str, str],
        *,
        as_parts: bool | None = None,
    ) -> None:
        """`as_parts`: whether a text alone is shown as a part; None renders to find out."""
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # its code is the model's: anything may come of it
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ModelConfigError(
                f"the model's chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json) cannot be read: {line}{error}"
            ) from error
        self._named_tokens = dict(named_tokens)
        longest_first = sorted(control_tokens, key=len, reverse=True)
        pattern = "|".join(re.escape(token) for token in longest_first)
        self._control = re.compile(pattern) if pattern else re.compile(r"(?!)")
        self._as_parts = False if as_parts is None else as_parts
        if as_parts is None:
            self._as_parts = self.drops_strings()

    def render(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The conversation as pieces, in order; True where a piece is a control token.

        Joined, the pieces are what transformers' `apply_chat_template` renders.

        Raises:
            ApiError: 400; the template refuses the conversation, or rewrites text so that the
                client's words cannot be told from its own.
        """
        plain = self._render(self._conversation(messages))
        mark = self._mark_for(messages)
        marked = self._render(self._marked(messages, mark))
        if marked.replace(mark, "") != plain:
            return self._unmarked_pieces(messages, plain)
        return [(piece.replace(mark, ""), control) for piece, control in self._split(marked)]

    def _render(self, conversation: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=conversation,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                range=Range(),
                **self._named_tokens,
            )
        except jinja2.TemplateError as error:
            raise _refused() from error
        except MemoryError:
            raise
        except Exception as error:
            # Whatever Python says of the template's code: it is the model's, not ours.
            logger.warning("the chat template failed", extra={"reason": repr(error)[:500]})
            raise _refused() from error

    def _marked(self, messages: Sequence[Message], mark: str) -> list[dict[str, Any]]:
        def break_up(match: re.Match[str]) -> str:
            return mark.join(match.group())

        def marked(text: str) -> str:
            core = text.strip()
            if not core:
                return text
            start = text.index(core)
            inner = mark + self._control.sub(break_up, core) + mark
            return text[:start] + inner + text[start + len(core) :]

        return self._conversation(messages, marked)

    def _conversation(
        self, messages: Sequence[Message], change: Callable[[str], str] = str
    ) -> list[dict[str, Any]]:
        return _conversation(messages, change, as_parts=self._as_parts)

    def drops_strings(self) -> bool:
        """Whether only parts are rendered; LLaVA's template drops a string without a word."""
        probe = "a8b1c6"
        parts = [{"type": "text", "text": probe}]
        return not self._shows(probe, probe) and self._shows(parts, probe)

    def _shows(self, content: Any, probe: str) -> bool:
        try:
            return probe in self._render([{"role": "user", "content": content}])
        except ApiError:
            return False

    def _mark_for(self, messages: Sequence[Message]) -> str:
        texts = "".join(_texts(messages))
        for mark in _MARKS:
            if mark not in texts:
                return mark
        raise invalid(
            "The text uses private characters that this server needs for itself.",
            param="messages",
            code="invalid_messages",
        )

    def _unmarked_pieces(self, messages: Sequence[Message], plain: str) -> list[tuple[str, bool]]:
        """A template that looks into text is trusted where no text reads like a control token."""
        if self._control.search("".join(_texts(messages))):
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
    """`chat_template.jinja`, else what stands in `tokenizer_config.json`; None without either."""
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
    """A link to a file elsewhere would show that file to every client.

    Hugging Face's cache links from `snapshots/REVISION` to `blobs` beside it.
    """
    home = model_dir.resolve()
    if home.parent.name == "snapshots":
        home = home.parent.parent
    if not path.resolve().is_relative_to(home):
        raise ModelConfigError(
            f"{path}: is a link to a file outside of the model's directory; copy the file there"
        )


def _conversation(
    messages: Sequence[Message], change: Callable[[str], str], *, as_parts: bool
) -> list[dict[str, Any]]:
    """What templates read, every text changed; a text alone is a part of its own if need be."""
    conversation: list[dict[str, Any]] = []
    for message in messages:
        content: Any
        if isinstance(message.content, str):
            text = change(message.content)
            content = [{"type": "text", "text": text}] if as_parts else text
        else:
            content = [
                {"type": "image"}
                if isinstance(part, ImagePart)
                else {"type": "text", "text": change(part.text)}
                for part in message.content
            ]
        conversation.append({"role": message.role, "content": content})
    return conversation


def _texts(messages: Sequence[Message]) -> list[str]:
    return [p.text for m in messages for p in m.parts if not isinstance(p, ImagePart)]


class Range:
    """`range` of one rendering: all its ranges together are bounded, so nested loops are, too."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def __call__(self, *bounds: int) -> range:
        """As Python's."""
        found = range(*bounds)
        self._left -= len(found)
        if self._left < 0:
            raise jinja2.TemplateError(f"its ranges have more than {MAX_STEPS} steps")
        return found


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses what makes much of little: repetition, powers, and padding by `%`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """One of the operators above."""
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
    """Jinja2 as transformers sets it up, so that templates mean the same."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        """The body of the block, as it stands."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # noqa: DTZ005 - as transformers does
