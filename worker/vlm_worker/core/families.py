"""What differs between model families: one table for gateway, media, engine and model. No torch.

    config.json ──┐                      ┌─▶ gateway   tokens of a picture, from its header alone
                  ├─ load_family(DIR) ──▶│   media     target size and patches
    processor ────┘     a Family         ├─▶ engine    positions
                                         └─▶ model     names of the modules of each half

A new family is an entry in `FAMILIES` and, where geometry or positions differ, a function beside
those of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlm_worker.core import positions as position_rules
from vlm_worker.core.geometry import Geometry, Processor, picture_geometry
from vlm_worker.core.model_files import Fields, ModelConfigError, read_json
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import ImageItem

LOW_DETAIL_PIXELS = 512 * 512

Detail = Literal["auto", "low", "high", "original"]


@dataclasses.dataclass(frozen=True, slots=True)
class FamilySpec:
    """What code knows about a `model_type`.

    Attributes:
        module: the one transformers module to import.
        model_class: the class in it that holds both halves.
        encoder_children: children of `model.model` that only the stage `encoder` needs.
        lm_children: children of `model.model` that only the stages `prefill` and `decode` need.
        head: the language model's head, a child of the model itself.
        positions: `mrope` has three rows of positions, `rope` one.
        bidirectional_spans: the tokens of one picture see each other in both directions.
        embed_levels: levels beside the main embedding (DeepStack).
        image_processors: values of `image_processor_type` that mean the geometry implemented here.
    """

    module: str
    model_class: str
    encoder_children: tuple[str, ...]
    lm_children: tuple[str, ...]
    head: str
    positions: Literal["rope", "mrope"]
    bidirectional_spans: bool
    embed_levels: int
    image_processors: tuple[str, ...]


_QWEN = FamilySpec(
    module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    encoder_children=("visual",),
    lm_children=("language_model",),
    head="lm_head",
    positions="mrope",
    bidirectional_spans=False,
    embed_levels=0,
    image_processors=(
        "Qwen2VLImageProcessor",
        "Qwen2VLImageProcessorFast",
        "Qwen2VLImageProcessorPil",
    ),
)

FAMILIES: Mapping[str, FamilySpec] = {
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": dataclasses.replace(
        _QWEN,
        module="transformers.models.qwen2_vl.modeling_qwen2_vl",
        model_class="Qwen2VLForConditionalGeneration",
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One model's facts, as far as they are known without its weights."""

    model_type: str
    spec: FamilySpec
    processor: Processor
    image_token_id: int
    video_token_id: int
    vision_start_id: int
    vision_end_id: int
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
            InvalidRequestError: a side is 0, or one is more than 200 times the other.
        """
        return picture_geometry(height, width, self.processor.capped(max_pixels))

    def max_pixels_of(self, detail: Detail) -> int:
        """The pixel cap that OpenAI's `detail` asks for; 0 where it is the model's own.

        | detail                     | budget in pixels                                        |
        |----------------------------|---------------------------------------------------------|
        | `auto`, `high`, `original` | the model's own `max_pixels`                            |
        | `low`                      | 512 * 512, or a quarter of the model's own if less      |

        `original` keeps every pixel that the model can take; nothing goes beyond its own maximum.
        """
        if detail != "low":
            return 0
        low = min(LOW_DETAIL_PIXELS, self.processor.max_pixels // 4)
        return max(self.processor.min_pixels, low)

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
            InvalidRequestError: an item overlaps, lies outside, or is unlike its grid or tokens.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        merge_size = self.processor.merge_size
        position_rules.check_items(
            ids, items, image_token_id=self.image_token_id, merge_size=merge_size
        )
        if self.spec.positions == "rope":
            return position_rules.rope(len(ids))
        return position_rules.mrope(len(ids), items, merge_size=merge_size)


def load_family(model_dir: str | Path) -> Family:
    """Read a model directory's `config.json` and its image processor's file.

    As in transformers, `image_processor` in `processor_config.json` goes before
    `preprocessor_config.json`.

    Raises:
        ModelConfigError: a file is missing or malformed, a field has a value that is not built, or
            the files disagree.
    """
    root = Path(model_dir)
    config = read_json(root / "config.json")
    combined = root / "processor_config.json"
    processor = read_json(combined).get("image_processor") if combined.exists() else None
    if processor is None:
        processor = read_json(root / "preprocessor_config.json")
    return parse_family(config, processor)


def parse_family(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Family:
    """The family of two parsed files; raises ModelConfigError as `load_family` does."""
    fields = Fields("config.json", config)
    model_type = fields.text("model_type")
    spec = FAMILIES.get(model_type)
    if spec is None:
        known = ", ".join(sorted(FAMILIES))
        raise fields.error("model_type", f"is {model_type!r}; the families that are built: {known}")
    text = fields.child("text_config") if "text_config" in fields else fields
    parsed = _parse_processor(Fields("image processor", processor), spec)
    _check_vision(fields.child("vision_config"), parsed)
    vocab_size = text.count("vocab_size")
    return Family(
        model_type=model_type,
        spec=spec,
        processor=parsed,
        image_token_id=fields.count("image_token_id", least=0),
        video_token_id=fields.count("video_token_id", least=0),
        vision_start_id=fields.count("vision_start_token_id", least=0),
        vision_end_id=fields.count("vision_end_token_id", least=0),
        vocab_size=vocab_size,
        hidden_size=text.count("hidden_size"),
        max_position_embeddings=text.count("max_position_embeddings"),
    )


# What transformers' Qwen2VLImageProcessor has where its file is silent.
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _parse_processor(fields: Fields, spec: FamilySpec) -> Processor:
    kind = fields.text("image_processor_type")
    if kind not in spec.image_processors:
        built = ", ".join(spec.image_processors)
        raise fields.error("image_processor_type", f"is {kind!r}; built for this family: {built}")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        fields.must_be(name, True)
    size = fields.child("size")
    processor = Processor(
        patch_size=fields.count("patch_size", 14),
        merge_size=fields.count("merge_size", 2),
        temporal_patch_size=fields.count("temporal_patch_size", 2),
        min_pixels=fields.count("min_pixels", size.count("shortest_edge", 56 * 56)),
        max_pixels=fields.count("max_pixels", size.count("longest_edge", 28 * 28 * 1280)),
        resample=fields.count("resample", 3, least=0),
        rescale_factor=fields.number("rescale_factor", 1 / 255),
        image_mean=fields.channels("image_mean", _CLIP_MEAN),
        image_std=fields.channels("image_std", _CLIP_STD),
    )
    if processor.max_pixels < processor.min_pixels:
        raise fields.error("size", "has longest_edge (max_pixels) below shortest_edge (min_pixels)")
    if processor.resample > 5:
        raise fields.error("resample", f"is {processor.resample}; Pillow knows 0 to 5")
    if 0.0 in processor.image_std:
        raise fields.error("image_std", "has a zero")
    return processor


def _check_vision(vision: Fields, processor: Processor) -> None:
    for name, value, default in (
        ("patch_size", processor.patch_size, 14),
        ("spatial_merge_size", processor.merge_size, 2),
        ("temporal_patch_size", processor.temporal_patch_size, 2),
    ):
        if vision.count(name, default) != value:
            raise vision.error(
                name, f"is {vision.count(name, default)}, but the image processor's is {value}"
            )


__all__ = [
    "FAMILIES",
    "Detail",
    "Family",
    "FamilySpec",
    "Geometry",
    "ModelConfigError",
    "Processor",
    "load_family",
    "parse_family",
]
