r"""Pieces of a prompt to token ids: as one text would be tokenised, control tokens known.

a template's    <start_of_turn> "user\n"        <start_of_image> "hi"
written out     <start_of_turn> "user\n" "\n\n" <start_of_image> <image> <end_of_image> "\n\n" ...
                                └── one text ─┘
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer

from vlm_worker.core.families import Family, ModelConfigError

Piece = tuple[str, bool]
"""Text, and whether it is a control token."""


class PieceEncoder:
    """Of one model. Text from clients never becomes a control token, whatever it reads like.

    Raises:
        ModelConfigError: the tokenizer lacks the control tokens of the family's pictures.
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
        self._marker = self._piece(family.marker_token_id)
        self._picture = [self._piece(part) for part in family.picture_text]

    @property
    def control_tokens(self) -> list[str]:
        """Whatever has a meaning of its own in a prompt."""
        return list(self._control)

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Token ids, one placeholder a picture.

        A control token takes the spaces beside it that it asks for.
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
            token_ids += tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def _written_out(self, pieces: Sequence[Piece]) -> list[Piece]:
        """With what the family's processor writes for a picture; texts that meet are one."""
        out: list[Piece] = []
        for piece in pieces:
            for text, control in self._picture if piece == self._marker else (piece,):
                if not control and out and not out[-1][1]:
                    out[-1] = (out[-1][0] + text, False)
                else:
                    out.append((text, control))
        return out

    def _piece(self, part: int | str) -> Piece:
        if isinstance(part, str):
            return part, False
        content = self._first.id_to_token(part)
        if content not in self._control:
            raise ModelConfigError(
                f"tokenizer.json: has no control token {part}, which config.json names for pictures"
            )
        return content, True


def _without_first_space(tokenizer: Tokenizer) -> Tokenizer:
    """The same for text behind a control token, where some put no space that they put at first."""
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
