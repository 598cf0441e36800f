"""The fields of resizing and normalisation that all image processors share."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlm_worker.core.families.family import FamilySpec
from vlm_worker.core.model_files import ConfigFields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Normalisation:
    """The parameters that map bytes to the values that the vision tower reads."""

    resample: int
    rescale_factor: float
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields as keyword arguments of a `Processor`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def parse(
        cls,
        fields: ConfigFields,
        spec: FamilySpec,
        *,
        resample: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ) -> Normalisation:
        """Parse the file of an image processor.

        Args:
            fields: the file.
            spec: names the processor types of the family.
            resample: transformers' default.
            mean: transformers' default, per channel.
            std: transformers' default, per channel.

        Raises:
            ModelConfigError: the type or a value is not supported.
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


def must_equal(vision: ConfigFields, name: str, value: int, *, default: int) -> None:
    """Raise ModelConfigError unless a field of the vision tower equals the processor's `value`."""
    found = vision.count(name, default)
    if found != value:
        raise vision.error(name, f"is {found}, but the image processor's is {value}")
