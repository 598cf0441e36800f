"""The interface of a model family: its facts, image geometry, prompt expansion and positions.

M-RoPE gives each token three positions (time, height, width), as in Qwen2.5-VL:

text  text  | image, 2x3 tokens           | text
t: 0   1    | 2  2  2  2  2  2              | 5
h: 0   1    | 2  2  2  3  3  3              | 5      text continues after the longer side
w: 0   1    | 2  3  4  2  3  4              | 5
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from vlm_worker.attends import Attends
from vlm_worker.core.image_geometry import Geometry, Grid, Processor
from vlm_worker.core.model_files import ConfigFields
from vlm_worker.errors import InvalidRequestError
from vlm_worker.reduction import WINDOW, Reduction, num_kept
from vlm_worker.types import ImageItem
from vlm_worker.weights import Part

LOW_DETAIL_PIXELS = 512 * 512

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

Detail = Literal["auto", "low", "high", "original"]


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
        merger: path below `model.model`, of an encoder child or a module in one.
        head: name of the language model's head, a child of the model itself.
        int8: parts whose linear layers `--weights` may round; the others lose more accuracy.
        positions: `mrope` has three rows of positions, `rope` one.
        attends: which later tokens a token sees.
        image_processors: supported values of `image_processor_type`.
        parse: builds a Family from a model's files; raises ModelConfigError.
    """

    module: str
    model_class: str
    encoder_children: tuple[str, ...]
    lm_children: tuple[str, ...]
    merger: str
    head: str
    int8: frozenset[Part]
    positions: Literal["rope", "mrope"]
    attends: Attends
    image_processors: tuple[str, ...]
    parse: Callable[[FamilySpec, Files], Family]

    @property
    def is_listed(self) -> bool:
        """Whether it has modules of its own here; else `families.generic` made it."""
        return bool(self.module)


@dataclasses.dataclass(frozen=True, slots=True)
class ControlToken:
    """A control token whose id only the tokenizer has."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """The facts of one model that are known without its weights.

    Attributes:
        image_token_id: the placeholder; an expanded prompt has one per visual token.
        marker_token_id: the token that a chat template writes for an image.
        image_text: the replacement of the marker, in order: text, or control tokens. One of
            them is `image_token_id`, which `expand` repeats.
        vocab_size: ids below it have an embedding.
        max_position_embeddings: the longest sequence of the language model, in tokens.
        num_levels: rows of each visual token beside the main one, which later layers add.
        window_cells: visual tokens of a window of the vision tower in each direction; 0 if it has
            no windows.
    """

    model_type: str
    spec: FamilySpec
    processor: Processor
    image_token_id: int
    marker_token_id: int
    image_text: tuple[int | str | ControlToken, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    num_levels: int = 0
    window_cells: int = 0

    @property
    def num_position_rows(self) -> int:
        """Rows of `positions`: 3 with M-RoPE, else 1."""
        return 3 if self.spec.positions == "mrope" else 1

    def geometry(self, height: int, width: int, *, max_pixels: int = 0) -> Geometry:
        """As `Processor.geometry`, with the request's cap (see `max_pixels_of`), 0 for none."""
        return self.processor.capped(max_pixels).geometry(height, width)

    def max_pixels_of(self, detail: Detail) -> int:
        """The pixel cap for OpenAI's `detail`; 0 is the model's own (docs/openai.md).

        `low` is 512 * 512, or a quarter of the model's own if less.
        """
        return self.processor.low_detail_pixels(LOW_DETAIL_PIXELS) if detail == "low" else 0

    def num_tokens(self, grid_thw: Grid, reduction: Reduction | None) -> int | None:
        """Visual tokens that a prompt gets of an image; None if the grid is no patch grid.

        Raises:
            InvalidRequestError: this family's visual tokens cannot be reduced, or those of this
                grid.
        """
        num_tokens = self.processor.num_tokens(grid_thw)
        if reduction is None or num_tokens is None:
            return num_tokens
        self.check_reducible(reduction)
        return num_kept(reduction, grid_thw, num_tokens)

    @property
    def is_reducible(self) -> bool:
        """Whether a prompt may have fewer visual tokens than the encoder makes.

        A kept token keeps its row and column, which only M-RoPE has.
        """
        spec = self.spec
        return spec.is_listed and spec.positions == "mrope" and spec.attends is Attends.CAUSAL

    def check_reducible(self, reduction: Reduction) -> None:
        """Raise InvalidRequestError if visual tokens of this model cannot be reduced so."""
        if not self.is_reducible:
            raise InvalidRequestError(
                f"visual tokens of {self.model_type} cannot be reduced: its positions have no rows "
                "and columns",
                param="visual",
            )
        if reduction.method.is_approximate and self.window_cells not in (0, WINDOW):
            raise InvalidRequestError(
                f"{reduction.method} needs a vision tower with windows of {WINDOW}x{WINDOW} visual "
                f"tokens, or without any; those of this model are {self.window_cells}x"
                f"{self.window_cells}: choose another method",
                param="visual",
            )

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

        The T tokens are the prompt, with expanded placeholders, and any delivered tokens.

        Returns:
            `[P, T]` int64, P = `num_position_rows`; and delta: token i >= T has position i + delta.

        Raises:
            InvalidRequestError: an item overlaps another, exceeds the tokens, or does not match its
                grid or its placeholders; or a token has no embedding.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        self._check(ids, items)
        return self.positions_of(len(ids), items)

    def positions_of(self, num_tokens: int, items: Sequence[ImageItem]) -> tuple[np.ndarray, int]:
        """As `positions`, of items that are known to match their tokens."""
        if self.spec.positions == "rope":
            return np.arange(num_tokens, dtype=np.int64)[None], 0
        return _mrope(num_tokens, items, merge_size=self.processor.merge_size)

    def _check(self, token_ids: np.ndarray, items: Sequence[ImageItem]) -> None:
        """Items must be sorted, disjoint, within the tokens, and cover only placeholders.

        Any other token needs a row of the embedding table: its id must be below `vocab_size`.
        """
        end = 0
        has_row = token_ids < self.vocab_size
        for number, item in enumerate(items):
            name = f"items[{number}]"
            num_tokens = self.num_tokens(item.grid_thw, item.reduction)
            if num_tokens is None:
                raise InvalidRequestError(f"{name}.grid_thw {item.grid_thw} is no patch grid")
            if item.num_tokens != num_tokens:
                raise InvalidRequestError(
                    f"{name}.num_tokens is {item.num_tokens}, its grid {item.grid_thw} has "
                    f"{num_tokens}"
                )
            if item.offset < end or item.end > len(token_ids):
                raise InvalidRequestError(
                    f"{name} covers tokens {item.offset} to {item.end}; "
                    f"free are {end} to {len(token_ids)}"
                )
            if not (token_ids[item.offset : item.end] == self.image_token_id).all():
                raise InvalidRequestError(
                    f"{name} covers tokens {item.offset} to {item.end}, "
                    "which are not all image placeholders"
                )
            has_row[item.offset : item.end] = True
            end = item.end
        if not has_row.all():
            index = int(has_row.argmin())
            raise InvalidRequestError(
                f"token_ids[{index}] is {token_ids[index]}; the model has embeddings for ids below "
                f"{self.vocab_size}",
                param="token_ids",
            )


def _mrope(
    num_tokens: int, items: Sequence[ImageItem], *, merge_size: int
) -> tuple[np.ndarray, int]:
    """Positions of still images in text, equal to Qwen2.5-VL's `get_rope_index`.

    A reduced image has its first position in all rows: a step adds the places of its tokens, which
    are known when it is encoded. Text continues as after the whole image.

    Returns as `Family.positions`.
    """
    out = np.empty((3, num_tokens), dtype=np.int64)
    index = position = 0
    for item in items:
        text = item.offset - index
        out[:, index : item.offset] = np.arange(position, position + text)
        position += text
        t, h, w = item.grid_thw[0], item.grid_thw[1] // merge_size, item.grid_thw[2] // merge_size
        if item.reduction is None:
            out[:, item.offset : item.end] = np.indices((t, h, w)).reshape(3, -1) + position
        else:
            out[:, item.offset : item.end] = position
        position += max(h, w)
        index = item.end
    out[:, index:] = np.arange(position, position + num_tokens - index)
    return out, position - index


def pixel_fields(
    fields: ConfigFields,
    spec: FamilySpec,
    *,
    resample: int = 3,
    mean: tuple[float, float, float] = CLIP_MEAN,
    std: tuple[float, float, float] = CLIP_STD,
) -> dict[str, Any]:
    """The keyword arguments of resizing and normalisation that all processors have.

    `fields` is the file of an image processor; `resample`, `mean` and `std` are the
    defaults of transformers. Raises ModelConfigError if the type or a value is not supported.
    """
    kind = fields.text("image_processor_type")
    if kind not in spec.image_processors:
        types = ", ".join(spec.image_processors)
        raise fields.error("image_processor_type", f"is {kind!r}; built for this family: {types}")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        fields.must_be(name, True)
    filter_number = fields.count("resample", resample, least=0)
    if filter_number > 5:
        raise fields.error("resample", f"is {filter_number}; Pillow knows 0 to 5")
    image_std = fields.channels("image_std", std)
    if 0.0 in image_std:
        raise fields.error("image_std", "has a zero")
    return {
        "resample": filter_number,
        "rescale_factor": fields.number("rescale_factor", 1 / 255),
        "image_mean": fields.channels("image_mean", mean),
        "image_std": image_std,
    }


def must_equal(vision: ConfigFields, name: str, value: int, *, default: int) -> None:
    """Raise ModelConfigError unless a field of the vision tower equals the processor's `value`."""
    actual = vision.count(name, default)
    if actual != value:
        raise vision.error(name, f"is {actual}, but the image processor's is {value}")
