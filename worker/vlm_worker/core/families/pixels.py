"""What all image processors have in common: the fields of resizing and normalising."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlm_worker.core.families.family import FamilySpec
from vlm_worker.core.model_files import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Normalisation:
    """From bytes to what the tower was trained with."""

    resample: int
    rescale_factor: float
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def fields(self) -> dict[str, Any]:
        """As arguments of a `Processor`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def parse(
        cls,
        fields: Fields,
        spec: FamilySpec,
        *,
        resample: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ) -> Normalisation:
        """Of an image processor's file.

        Args:
            fields: the file.
            spec: for the types of processor that the family knows.
            resample: what transformers has where the file is silent.
            mean: likewise.
            std: likewise.

        Raises:
            ModelConfigError: another type, or a value that is not built.
        """
        kind = fields.text("image_processor_type")
        if kind not in spec.image_processors:
            known = ", ".join(spec.image_processors)
            raise fields.error(
                "image_processor_type", f"is {kind!r}; built for this family: {known}"
            )
        for name in ("do_resize", "do_rescale", "do_normalize"):
            fields.must_be(name, True)
        normal = cls(
            resample=fields.count("resample", resample, least=0),
            rescale_factor=fields.number("rescale_factor", 1 / 255),
            image_mean=fields.channels("image_mean", mean),
            image_std=fields.channels("image_std", std),
        )
        if normal.resample > 5:
            raise fields.error("resample", f"is {normal.resample}; Pillow knows 0 to 5")
        if 0.0 in normal.image_std:
            raise fields.error("image_std", "has a zero")
        return normal


def must_equal(vision: Fields, name: str, value: int, *, default: int) -> None:
    """Raise unless a field of the vision tower is what the image processor has."""
    found = vision.count(name, default)
    if found != value:
        raise vision.error(name, f"is {found}, but the image processor's is {value}")
