"""Text and bytes of single tokens, from a model's `tokenizer.json`.

    byte-level vocabularies   "Ġred"  ->  " red"        "ðŁĺ"  ->  f0 9f 98
    sentencepiece's           "▁red"  ->  " red"        "<0xF0>"  ->  f0

The gateway shows them, and grammars read them. The joined bytes of an answer's tokens are its text
(except a space that sentencepiece puts before the first word).
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # engines read no text
    from tokenizers import Tokenizer


_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_PIECE = "▁"


LONG_TEXT = 2048
"""Characters from which on a text is encoded without keeping other threads from running."""


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, without those that the tokenizer adds.

    `encode` keeps the interpreter's lock, 0.8 ms per KB; `encode_batch` gives it away.
    """
    if len(text) < LONG_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    else:
        ids = tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
    return ids


class TokenTexts:
    """Text and bytes of single tokens of one tokenizer, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _kinds(tokenizer)
        self._byte_of = _byte_table() if "ByteLevel" in decoders else None
        self._has_byte_pieces = "ByteFallback" in decoders
        self._has_space_pieces = bool(decoders & {"Metaspace", "Replace"})
        self._added = tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        self.of = functools.cache(self._of)

    def is_text(self, token_id: int) -> bool:
        """Whether the token has text in an answer. Control tokens and unknown ids have none."""
        added = self._added.get(token_id)
        return not added.special if added is not None else bool(self.of(token_id)[1])

    def _of(self, token_id: int) -> tuple[str, bytes]:
        r"""Return text and bytes. Bytes that are not UTF-8 alone become `\xf0\x9f` in the text."""
        utf8_bytes = self._utf8_bytes(token_id)
        return utf8_bytes.decode(errors="backslashreplace"), utf8_bytes

    def _utf8_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        piece: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_of is not None and all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        match = _BYTE_PIECE.fullmatch(piece) if self._has_byte_pieces else None
        if match:
            return bytes([int(match[1], 16)])
        return (piece.replace(_SPACE_PIECE, " ") if self._has_space_pieces else piece).encode()


def _kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the types of the decoder's parts."""
    if tokenizer.decoder is None:
        return set()
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_table() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level vocabulary.

    Printable bytes map to themselves, the others to the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}
