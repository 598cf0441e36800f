"""What every family says of itself, and what the rest of the worker asks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from vlm_worker.core import positions as position_rules
from vlm_worker.core.geometry import Geometry, Processor
from vlm_worker.core.model_files import Fields
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import ImageItem

LOW_DETAIL_PIXELS = 512 * 512

Detail = Literal["auto", "low", "high", "original"]
Int8Part = Literal["encoder", "layers", "head"]


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """A model's files; `processor` is empty where there is no `processor_config.json`."""

    config: Fields
    image_processor: Fields
    processor: Fields


@dataclasses.dataclass(frozen=True, slots=True)
class FamilySpec:
    """What code knows about a `model_type`.

    Attributes:
        module: the one transformers module to import.
        model_class: the class in it that holds both halves.
        encoder_children: children of `model.model` that only the stage `encoder` needs.
        lm_children: children of `model.model` that only the stages `prefill` and `decode` need.
        head: the language model's head, a child of the model itself.
        int8: whose linear layers `--weights=int8` rounds; what the others hold loses more by it.
        positions: `mrope` has three rows of positions, `rope` one.
        bidirectional_spans: the tokens of one picture see each other in both directions.
        embed_levels: levels beside the main embedding (DeepStack).
        image_processors: values of `image_processor_type` that mean the geometry implemented here.
        parse: a model of this family from its files; raises ModelConfigError.
    """

    module: str
    model_class: str
    encoder_children: tuple[str, ...]
    lm_children: tuple[str, ...]
    head: str
    int8: frozenset[Int8Part]
    positions: Literal["rope", "mrope"]
    bidirectional_spans: bool
    embed_levels: int
    image_processors: tuple[str, ...]
    parse: Callable[[FamilySpec, Files], Family]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One model's facts, as far as they are known without its weights.

    Attributes:
        model_type: of `config.json`.
        spec: what all models of the family share.
        processor: how pictures are prepared and counted.
        image_token_id: the placeholder, as often as a picture has tokens.
        marker_token_id: what a chat template writes where a picture stands.
        picture_text: what that becomes, in order: text, or ids of control tokens. One of them is
            `image_token_id`, which `expand` repeats.
        vocab_size: ids below it have an embedding.
        hidden_size: of the language model.
        max_position_embeddings: tokens that it can tell apart by place.
    """

    model_type: str
    spec: FamilySpec
    processor: Processor
    image_token_id: int
    marker_token_id: int
    picture_text: tuple[int | str, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int

    @property
    def num_position_rows(self) -> int:
        """Rows of `positions`: 3 with M-RoPE, else 1."""
        return 3 if self.spec.positions == "mrope" else 1

    def geometry(self, height: int, width: int, *, max_pixels: int = 0) -> Geometry:
        """Size, grid and tokens of a picture, from its oriented size.

        Args:
            height: in pixels, after the EXIF orientation.
            width: likewise.
            max_pixels: the request's own cap (see `max_pixels_of`), 0 for none.

        Raises:
            InvalidRequestError: a side is 0, or the model cannot take so narrow a picture.
        """
        return self.processor.capped(max_pixels).geometry(height, width)

    def max_pixels_of(self, detail: Detail) -> int:
        """The pixel cap that OpenAI's `detail` asks for; 0 where it is the model's own.

        | detail                     | budget in pixels                                        |
        |----------------------------|---------------------------------------------------------|
        | `auto`, `high`, `original` | the model's own                                         |
        | `low`                      | 512 * 512, or a quarter of the model's own if less      |

        `original` keeps every pixel that the model can take; nothing goes beyond its own maximum.
        A family with one size for all pictures has no lower detail.
        """
        return self.processor.low_detail_pixels(LOW_DETAIL_PIXELS) if detail == "low" else 0

    def expand(
        self, token_ids: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Replace the k-th image placeholder by `counts[k]` of them.

        Returns:
            The expanded tokens, and for each picture the index of its first placeholder.

        Raises:
            InvalidRequestError: the prompt has more or fewer placeholders than there are pictures.
        """
        places = [i for i, token in enumerate(token_ids) if token == self.image_token_id]
        if len(places) != len(counts):
            raise InvalidRequestError(
                f"the prompt has {len(places)} image placeholders for {len(counts)} pictures",
                param="messages",
            )
        expanded: list[int] = []
        offsets: list[int] = []
        start = 0
        for place, count in zip(places, counts, strict=True):
            expanded += token_ids[start:place]
            offsets.append(len(expanded))
            expanded += [self.image_token_id] * count
            start = place + 1
        expanded += token_ids[start:]
        return expanded, offsets

    def positions(
        self, token_ids: Sequence[int], items: Sequence[ImageItem]
    ) -> tuple[np.ndarray, int]:
        """Positions of a sequence's tokens, and of those that will follow.

        Args:
            token_ids: T tokens, placeholders expanded; the prompt and any delivered tokens.
            items: the pictures, in order.

        Returns:
            `[P, T]` int64, P = `num_position_rows`; and delta: token i >= T stands at i + delta.

        Raises:
            InvalidRequestError: an item overlaps, lies outside, or is unlike its grid or tokens; or
                a token has no embedding.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        position_rules.check_items(
            ids,
            items,
            image_token_id=self.image_token_id,
            vocab_size=self.vocab_size,
            num_tokens_of=self.processor.num_tokens,
        )
        if self.spec.positions == "rope":
            return position_rules.rope(len(ids))
        return position_rules.mrope(len(ids), items, merge_size=self.processor.merge_size)
