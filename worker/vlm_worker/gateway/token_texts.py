"""What a single token reads like, for log-probabilities: its bytes, their text, and their place.

    byte-level vocabularies   "Ġred"  ->  " red"        "ðŁĺ"  ->  f0 9f 98
    sentencepiece's           "▁red"  ->  " red"        "<0xF0>"  ->  f0

The bytes of an answer's tokens, joined, are its text (but for a space that sentencepiece puts
before the first word).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_PIECE = "▁"


class TokenTexts:
    """Of one tokenizer; remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _kinds(tokenizer)
        self._byte_of = _byte_table() if "ByteLevel" in decoders else None
        self._has_byte_pieces = "ByteFallback" in decoders
        self._has_space_pieces = bool(decoders & {"Metaspace", "Replace"})
        self._added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, tuple[str, bytes]] = {}

    def is_text(self, token_id: int) -> bool:
        """Whether the token stands in answers: control tokens do not, nor what has no piece."""
        added = self._added.get(token_id)
        return not added.special if added is not None else bool(self.of(token_id)[1])

    def of(self, token_id: int) -> tuple[str, bytes]:
        r"""Text and bytes; bytes that are no text by themselves show as `\xf0\x9f`."""
        known = self._known.get(token_id)
        if known is None:
            octets = self._octets(token_id)
            known = self._known[token_id] = (octets.decode(errors="backslashreplace"), octets)
        return known

    def _octets(self, token_id: int) -> bytes:
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
    """Types of the decoder's parts."""
    if tokenizer.decoder is None:
        return set()
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_table() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def begins_in(text: str, octets: Sequence[bytes]) -> list[int]:
    """Characters of `text` before each of the tokens that make it.

    Bytes that are no UTF-8 together show as U+FFFD, as many as there are, where bytes stand as
    tokens; elsewhere the figure is near. A space that is not shown comes before the first word.
    """
    begins, count = [], 0
    valid = _is_text(b"".join(octets))
    for one in octets:
        inside = valid and not _begins_character(one[0])
        begins.append(count - inside)
        count += sum(map(_begins_character, one)) if valid else len(one.decode(errors="replace"))
    hidden = max(count - len(text), 0)
    return [min(max(begin - hidden, 0), max(len(text) - 1, 0)) for begin in begins]


def _begins_character(byte: int) -> bool:
    return byte & 0xC0 != 0x80


def _is_text(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True
