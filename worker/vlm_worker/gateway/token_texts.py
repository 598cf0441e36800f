"""What a single token reads like, for log-probabilities: its bytes, and a text that shows them.

    byte-level vocabularies   "Ġred"  ->  " red"        "ðŁĺ"  ->  f0 9f 98
    sentencepiece's           "▁red"  ->  " red"        "<0xF0>"  ->  f0

The bytes of an answer's tokens, joined, are its text (but for a space that sentencepiece puts
before the first word).
"""

from __future__ import annotations

import json
import re
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
