"""Builds prompts: messages to token ids, with the same result as transformers' processor.

messages ─▶ template ─▶ pieces ─▶ ids, one placeholder per image ─▶ one per visual token

Text of clients never becomes a control token.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vlm_worker.core.families import ControlToken, Family, ModelConfigError, load_family
from vlm_worker.core.model_files import LFS_POINTER, ConfigFields, check_no_pointer, read_json
from vlm_worker.core.token_texts import TokenTexts, ids_of
from vlm_worker.errors import InvalidRequestError
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.chat_template import ChatTemplate, examine, read_template
from vlm_worker.gateway.conversation import Conversation, continued, outline, shortened
from vlm_worker.gateway.responding.builtin import Responding, choose
from vlm_worker.types import PARAMETERS

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# The end of a prompt in which an answer's beginning is looked for.
_END_PIECES = 16
_END_TEXT = 1024
# Upper bound: normalizers shrink text most by composing Hangul and accents, to a third.
_NORMALIZER_SHRINKS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens; image k has `counts[k]` placeholders from `offsets[k]` on.

    `opening` is the beginning of the answer that a chat template writes, such as `<think>`.
    `num_history_tokens` precede the last user turn; 0 if they are not counted.
    """

    token_ids: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    opening: str = ""
    num_history_tokens: int = 0

    @property
    def num_image_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_text_tokens(self) -> int:
        return len(self.token_ids) - self.num_image_tokens


class PromptBuilder:
    """A model's tokenizer, chat template and sampling defaults, read from its files.

    Raises:
        ModelConfigError: a file cannot be used.
    """

    def __init__(self, model_dir: Path) -> None:
        self.family: Family = load_family(model_dir)
        self.tokenizer: Tokenizer = _load_tokenizer(model_dir)
        _check_ids(model_dir / "tokenizer.json", self.tokenizer, self.family)
        self._pieces = PieceEncoder(self.tokenizer, self.family)
        self._longest_token = max(len(token) for token in self.tokenizer.get_vocab())
        self._prefix, self._suffix, self._bos = self._surroundings(model_dir)
        source = read_template(model_dir)
        named = _named_tokens(model_dir)
        self._template = source and ChatTemplate(
            source,
            self._pieces.control_tokens,
            named,
            facts=examine(source, tuple(named.items())),
        )
        own = _read_optional(model_dir / "tokenizer_config.json").get("response_template")
        self.responding: Responding = choose(own, source or "")
        if self.responding.problem:
            logger.warning(
                "the model's response_template in tokenizer_config.json is not used",
                extra={"reason": self.responding.problem},
            )
        self.defaults = _sampling_defaults(model_dir)
        self.token_texts = TokenTexts(self.tokenizer)

    @property
    def control_tokens(self) -> list[str]:
        return self._pieces.control_tokens

    @property
    def control_ids(self) -> dict[str, int]:
        """The ids of the control tokens, by their texts."""
        return self._pieces.control_ids

    def ids_of(self, control_tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of control tokens of this tokenizer."""
        return frozenset(self.control_ids[token] for token in control_tokens)

    def chat(
        self, conversation: Conversation, counts: Sequence[int], *, mark_history: bool = False
    ) -> Prompt:
        """Build the prompt of a conversation without skipped images.

        `counts` are the visual tokens of each image, in order. With `mark_history`, the tokens
        before the last user turn are counted, for which the earlier turns are encoded again.

        Raises:
            ApiError: 400; the model has no template, or the template rejects the conversation.
        """
        if not isinstance(self._template, ChatTemplate):
            raise invalid(
                "This model has no chat template; use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        pieces = self._template.render(conversation, asks=conversation.asks)
        token_ids = self._encode(pieces)
        try:
            expanded, offsets = self.family.expand(token_ids, counts)
        except InvalidRequestError as error:
            raise invalid(
                "The model's chat template cannot place the images of these messages.",
                param="messages",
                code="invalid_messages",
            ) from error
        num_history = 0
        if mark_history:
            num_history = self._num_history_tokens(conversation, token_ids, counts)
        return Prompt(
            tuple(expanded), tuple(offsets), tuple(counts), self._opening(pieces), num_history
        )

    def _opening(self, pieces: Sequence[PromptPiece]) -> str:
        template = self.responding.template
        if template is None:
            return ""
        return template.opening("".join(text for text, _ in pieces[-_END_PIECES:])[-_END_TEXT:])

    def next_turn(
        self, said: Conversation, answer: Message, counts: Sequence[int]
    ) -> Prompt | None:
        """Build the beginning that all prompts share which continue a conversation.

        They have the messages, tools and effort of `said`, then `answer` of the assistant, and the
        results of its calls or one more message of the user. If `said` has no reasoning, they have
        that of `answer` or not. The beginning ends with a control token: the tokens before it
        depend on no text behind it. None if the template refuses such a conversation, or its
        prompts share no such beginning.
        """
        if not isinstance(self._template, ChatTemplate):
            return None
        sends_reasoning = any(m.reasoning is not None for m in said.messages)
        ways = list(continued(answer, sends_reasoning=sends_reasoning))
        # The outline shows which ways differ most, so that few long conversations are rendered.
        short = outline(said)
        outlines = [
            self._continuation(short, way)
            for way in continued(shortened(answer), sends_reasoning=sends_reasoning)
        ]
        rendered = [
            self._continuation(said, ways[index]) for index in _most_different(outlines, ways)
        ]
        pieces = self._pieces.shared([one for one in rendered if one is not None])
        if not pieces or None in rendered:
            return None
        token_ids = self._pieces.encode(pieces)
        if pieces[0] != (self._bos, True):
            token_ids = [*self._prefix, *token_ids]
        try:
            expanded, offsets = self.family.expand(token_ids, counts)
        except InvalidRequestError:
            return None
        return Prompt(tuple(expanded), tuple(offsets), tuple(counts))

    def _continuation(
        self, said: Conversation, following: Sequence[Message]
    ) -> list[PromptPiece] | None:
        """Render a conversation that goes on; None if the template refuses it."""
        assert isinstance(self._template, ChatTemplate)
        try:
            return self._template.render(
                dataclasses.replace(said, messages=(*said.messages, *following))
            )
        except ApiError:
            return None

    def _encode(self, pieces: Sequence[PromptPiece]) -> list[int]:
        """The ids of a rendered conversation, one placeholder per image."""
        token_ids = self._pieces.encode(pieces)
        if pieces and pieces[0] == (self._bos, True):
            return token_ids
        return [*self._prefix, *token_ids, *self._suffix]

    def _num_history_tokens(
        self, conversation: Conversation, token_ids: Sequence[int], counts: Sequence[int]
    ) -> int:
        """The tokens of a prompt before its last user turn, those of images included.

        They are what the prompt has in common with that of the earlier turns alone. 0 if the
        template refuses those alone, as if there were none.
        """
        assert isinstance(self._template, ChatTemplate)
        messages = conversation.messages
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if len(users) < 2:
            return 0
        try:
            begun = dataclasses.replace(conversation, messages=messages[: users[-1]])
            earlier = self._template.render(begun, asks=False)
        except ApiError:
            return 0
        pairs = zip(self._encode(earlier), token_ids, strict=False)
        common = [id_ for id_, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        num_images = common.count(self.family.image_token_id)
        return len(self.family.expand(common, counts[:num_images])[0])

    def completion(self, text: str, *, is_bare: bool = False) -> Prompt:
        """Build the prompt of a text. A bare one lacks what the tokenizer adds around a text."""
        token_ids = self._pieces.encode([(text, False)])
        if is_bare:
            return Prompt(tuple(token_ids))
        return Prompt((*self._prefix, *token_ids, *self._suffix))

    def check_ids(self, token_ids: Sequence[int], param: str, *, with_images: bool) -> None:
        """Raise ApiError (400) if an id is no token, or of an image while these are not allowed."""
        family = self.family
        of_images = {family.image_token_id, family.marker_token_id}
        for index, token_id in enumerate(token_ids):
            where = f"{param}[{index}]"
            if token_id in of_images:
                if not with_images:
                    raise invalid(
                        f"'{where}' is the placeholder of an image; send images to "
                        "/v1/chat/completions.",
                        param=where,
                    )
            elif token_id >= family.vocab_size:
                raise invalid(
                    f"'{where}' is a token that the model does not have; its ids are below "
                    f"{family.vocab_size}.",
                    param=where,
                )

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; control tokens have theirs."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def min_tokens(self, num_bytes: int) -> int:
        """Return a lower bound on the tokens of `num_bytes` of text, without encoding it."""
        return num_bytes // (self._longest_token * _NORMALIZER_SHRINKS)

    def _surroundings(self, model_dir: Path) -> tuple[list[int], list[int], str | None]:
        """Return the ids that the tokenizer adds before and after a text, and the BOS token."""
        bare = self.tokenizer.encode("a", add_special_tokens=False).ids
        full = self.tokenizer.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        if not bare or at is None:
            raise ModelConfigError(
                f"{model_dir / 'tokenizer.json'}: the letter 'a' has no tokens; use the tokenizer "
                "that belongs to these weights"
            )
        return full[:at], full[at + len(bare) :], _named_tokens(model_dir).get("bos_token")


def check_context(
    prompt: Prompt, max_tokens: int | None, limit: int, *, param: str, max_tokens_param: str
) -> int:
    """Return the maximum number of tokens of the answer.

    Raises:
        ApiError: 400 `context_length_exceeded`; the message has the numbers.
    """
    num_free = limit - len(prompt.token_ids)
    if num_free >= (max_tokens or 1):
        return num_free if max_tokens is None else max_tokens
    what = (
        f"the prompt has {len(prompt.token_ids)} ({prompt.num_text_tokens} of text, "
        f"{prompt.num_image_tokens} of images)"
    )
    if num_free < 1:
        raise context_exceeded(what, limit, param)
    what = f"{what} and '{max_tokens_param}' asks for {max_tokens}"
    raise context_exceeded(what, limit, max_tokens_param)


def context_exceeded(what: str, limit: int, param: str) -> ApiError:
    return invalid(
        f"The context of this model is {limit} tokens; {what}.",
        param=param,
        code="context_length_exceeded",
    )


def _load_tokenizer(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if path.is_file():
        with path.open("rb") as file:
            check_no_pointer(path, file.read(len(LFS_POINTER)))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises nothing narrower
        raise ModelConfigError(f"{path}: cannot be read: {error}") from error


def _check_ids(path: Path, tokenizer: Tokenizer, family: Family) -> None:
    """Raise ModelConfigError if a token, except the image placeholder, has no embedding."""
    beyond = [
        (token_id, token)
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
        if token_id >= family.vocab_size and token_id != family.image_token_id
    ]
    if not beyond:
        return
    token_id, token = min(beyond)
    raise ModelConfigError(
        f"{path}: {token!r} has the id {token_id}, one of {len(beyond)} tokens without an "
        f"embedding; vocab_size in config.json gives one to ids below {family.vocab_size}. Use the "
        "tokenizer that belongs to these weights, or call resize_token_embeddings and save again"
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _named_tokens(model_dir: Path) -> dict[str, str]:
    config = _read_optional(model_dir / "tokenizer_config.json")
    named = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _sampling_defaults(model_dir: Path) -> dict[str, float]:
    """Defaults of sampling parameters, from `generation_config.json`."""
    path = model_dir / "generation_config.json"
    # 0 and null mean that a field is not set
    given = {name: value for name, value in _read_optional(path).items() if value}
    config = ConfigFields(str(path), given)
    defaults: dict[str, float] = {}
    for field, parameter in PARAMETERS:
        name, value = field.name, parameter.model_default
        if value is None or not (parameter.greedy_model_default or "do_sample" in config):
            continue
        if name in config:
            value = config.count(name) if field.kind is int else config.number(name, value)
        for bound in field.bounds:
            if not bound.accepts(value):
                raise ModelConfigError(f"{path}: {name} {bound.problem(value)}")
        defaults[name] = value
    return defaults


PromptPiece = tuple[str, bool]
"""Text, and whether it is a control token."""


class PieceEncoder:
    """Encodes pieces of one model's prompts. Text pieces never become control tokens.

    Raises:
        ModelConfigError: the tokenizer lacks the control tokens of the family's images.
    """

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        tokenizer.encode_special_tokens = True
        self._first, self._later = tokenizer, _without_first_space(tokenizer)
        self._later.encode_special_tokens = True
        self._control = {
            token.content: (token_id, token)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.control_ids = {text: token_id for text, (token_id, _) in self._control.items()}
        self._marker = self._piece(family.marker_token_id)
        self._image = [self._piece(part) for part in family.image_text]

    @property
    def control_tokens(self) -> list[str]:
        return list(self._control)

    def encode(self, pieces: Sequence[PromptPiece]) -> list[int]:
        """Return token ids with one placeholder per image.

        Spaces next to a control token are removed if its `lstrip` or `rstrip` is set.
        """
        token_ids: list[int] = []
        strip_next = False
        pieces = self._written_out(pieces)
        for i, (piece, control) in enumerate(pieces):
            if control:
                token_id, token = self._control[piece]
                token_ids.append(token_id)
                strip_next = token.rstrip
                continue
            text = piece.lstrip() if strip_next else piece
            if i + 1 < len(pieces) and self._control[pieces[i + 1][0]][1].lstrip:
                text = text.rstrip()
            strip_next = False
            tokenizer = self._later if i else self._first
            token_ids += ids_of(tokenizer, text)
        return token_ids

    def shared(self, renderings: Sequence[Sequence[PromptPiece]]) -> list[PromptPiece]:
        """Return the pieces that all renderings begin with, to their last control token.

        It is not the marker of an image: a family may write text behind an image, and that text
        joins the next one.
        """
        shared = list(_shared_pieces(renderings))
        while shared and (not shared[-1][1] or shared[-1] == self._marker):
            shared.pop()
        return shared

    def _written_out(self, pieces: Sequence[PromptPiece]) -> list[PromptPiece]:
        """Replace image markers by the family's image text and join adjacent texts."""
        out: list[PromptPiece] = []
        for piece in pieces:
            for text, control in self._image if piece == self._marker else (piece,):
                if not control and out and not out[-1][1]:
                    out[-1] = (out[-1][0] + text, False)
                else:
                    out.append((text, control))
        return out

    def _piece(self, part: int | str | ControlToken) -> PromptPiece:
        if isinstance(part, str):
            return part, False
        named = part.text if isinstance(part, ControlToken) else part
        content = named if isinstance(named, str) else self._first.id_to_token(named)
        if content not in self._control:
            raise ModelConfigError(
                f"tokenizer.json: has no control token {named}, which images of this model need"
            )
        return content, True


def _most_different(
    outlines: Sequence[Sequence[PromptPiece] | None], ways: Sequence[Sequence[Message]]
) -> list[int]:
    """Indices of ways that share as little as all do; empty without two that are rendered.

    They are the first one, and per role of what follows the one that shares least with it. A role
    may change earlier messages, which an outline lacks: templates drop old reasoning by it.
    """
    first, *others = [index for index, one in enumerate(outlines) if one is not None] or [0]
    least: dict[str, tuple[int, int]] = {}
    for index in others:
        pair = outlines[first] or (), outlines[index] or ()
        num_shared = sum(1 for _ in _shared_pieces(pair))
        role = ways[index][1].role
        least[role] = min(least.get(role, (num_shared, index)), (num_shared, index))
    return [first, *(index for _, index in least.values())] if least else []


def _shared_pieces(renderings: Sequence[Sequence[PromptPiece]]) -> Iterator[PromptPiece]:
    """Yield the pieces with which all renderings begin."""
    for first, *others in zip(*renderings, strict=False):
        if any(piece != first for piece in others):
            return
        yield first


def _without_first_space(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy for text after a control token.

    Some tokenizers add a space before the first text of a prompt only.
    """
    fields = json.loads(tokenizer.to_str())
    _forget_first(fields["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(fields))


def _forget_first(pre_tokenizer: dict[str, object] | None) -> None:
    if pre_tokenizer is None:
        return
    if pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
    inner = pre_tokenizer.get("pretokenizers")
    for part in inner if isinstance(inner, list) else ():
        _forget_first(part)
