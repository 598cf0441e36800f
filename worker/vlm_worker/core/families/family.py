"""The interface of a model family: its facts, image geometry, prompt expansion and positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from vlm_worker.core import positions as position_rules
from vlm_worker.core.image_geometry import Geometry, Processor
from vlm_worker.core.model_files import ConfigFields
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import ImageItem

LOW_DETAIL_PIXELS = 512 * 512

Detail = Literal["auto", "low", "high", "original"]
Int8Part = Literal["encoder", "layers", "head"]


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """The parsed files of a model; `processor` is empty without a `processor_config.json`."""

    config: ConfigFields
    image_processor: ConfigFields
    processor: ConfigFields


@dataclasses.dataclass(frozen=True, slots=True)
class FamilySpec:
    """The facts that all models of a `model_type` share.

    Attributes:
        module: the transformers module to import.
        model_class: its class that contains the vision tower and the language model.
        encoder_children: children of `model.model` that only the stage `encoder` needs.
        lm_children: children of `model.model` that only the stages `prefill` and `decode` need.
        head: name of the language model's head, a child of the model itself.
        int8: parts whose linear layers `--weights=int8` rounds; the others lose more accuracy.
        positions: `mrope` has three rows of positions, `rope` one.
        bidirectional_spans: whether the tokens of one image attend to each other both ways.
        embed_levels: embedding levels in addition to the main one (DeepStack).
        image_processors: supported values of `image_processor_type`.
        parse: builds a Family from a model's files; raises ModelConfigError.
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
    """The facts of one model that are known without its weights.

    Attributes:
        model_type: from `config.json`.
        spec: the facts that all models of the family share.
        processor: preprocessing and token counts of images.
        image_token_id: the placeholder; an expanded prompt has one per visual token.
        marker_token_id: the token that a chat template writes for an image.
        image_text: the replacement of the marker, in order: text, or ids of control tokens. One of
            them is `image_token_id`, which `expand` repeats.
        vocab_size: ids below it have an embedding.
        hidden_size: of the language model.
        max_position_embeddings: the longest sequence of the language model, in tokens.
    """

    model_type: str
    spec: FamilySpec
    processor: Processor
    image_token_id: int
    marker_token_id: int
    image_text: tuple[int | str, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int

    @property
    def num_position_rows(self) -> int:
        """Rows of `positions`: 3 with M-RoPE, else 1."""
        return 3 if self.spec.positions == "mrope" else 1

    def geometry(self, height: int, width: int, *, max_pixels: int = 0) -> Geometry:
        """Size, grid and tokens of an image, from its oriented size.

        Args:
            height: in pixels, after the EXIF orientation.
            width: in pixels, after the EXIF orientation.
            max_pixels: the request's cap (see `max_pixels_of`), 0 for none.

        Raises:
            InvalidRequestError: a side is 0, or the image is too narrow for the model.
        """
        return self.processor.capped(max_pixels).geometry(height, width)

    def max_pixels_of(self, detail: Detail) -> int:
        """The pixel cap for OpenAI's `detail`; 0 if it is the model's own.

        | detail                     | budget in pixels                                        |
        |----------------------------|---------------------------------------------------------|
        | `auto`, `high`, `original` | the model's own                                         |
        | `low`                      | 512 * 512, or a quarter of the model's own if less      |

        `original` is resized, too, if it exceeds the model's maximum. A family with one size for
        all images has no lower detail.
        """
        return self.processor.low_detail_pixels(LOW_DETAIL_PIXELS) if detail == "low" else 0

    def expand(
        self, token_ids: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Replace the k-th image placeholder by `counts[k]` placeholders.

        Returns:
            The expanded tokens, and for each image the index of its first placeholder.

        Raises:
            InvalidRequestError: the number of placeholders is not the number of images.
        """
        places = [i for i, token in enumerate(token_ids) if token == self.image_token_id]
        if len(places) != len(counts):
            raise InvalidRequestError(
                f"the prompt has {len(places)} image placeholders for {len(counts)} images",
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
        """Positions of a sequence's tokens, and the delta of later tokens.

        Args:
            token_ids: T tokens with expanded placeholders: the prompt and any delivered tokens.
            items: the images, in order.

        Returns:
            `[P, T]` int64, P = `num_position_rows`; and delta: token i >= T has position i + delta.

        Raises:
            InvalidRequestError: an item overlaps another, exceeds the tokens, or does not match its
                grid or its placeholders; or a token has no embedding.
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
