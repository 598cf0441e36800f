"""The file of `vlm-worker calibrate`: one scale for the inputs of each int8 linear layer. Pure.

    {"version": 1, "model": REVISION, "processor": HASH, "percentile": 99.99, "margin": 1.0,
     "images": 64, "sha256": HASH OF ALL OTHER FIELDS,
     "parts": {"encoder": {"model.visual.blocks.0.qkv":
         {"scale": 0.031, "zero": 128, "inputs": 1280, "calls": 64, "values": 1280000}}}}

A layer's inputs become codes from 0 to 255:  x ~ scale (c - zero). Values beyond them are clipped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from vlm_worker.core.image_geometry import Processor
from vlm_worker.core.model_files import ConfigFields, ModelConfigError, read_json
from vlm_worker.weights import PARTS, Part

VERSION: Final = 1
SYMMETRIC_ZERO: Final = 128
MAX_ZERO: Final = 255
LEAST_SCALE: Final = 1e-30


@dataclasses.dataclass(frozen=True, slots=True)
class LayerScale:
    """The scale of one layer, or of layers with the same input.

    Attributes:
        zero: the code of 0; 128 if codes are of either sign.
        inputs: of the layer.
        calls: of the layer while it was calibrated.
        values: that were counted in these calls.
    """

    scale: float
    zero: int
    inputs: int
    calls: int
    values: int


Layers = Mapping[str, LayerScale]
"""By the layer's name in the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationScales:
    """The scales of a model's parts.

    Attributes:
        model: revision of the checkpoint (`Checkpoint.revision`).
        processor: see `processor_hash`.
        percentile: of the absolute values, that the largest code stands for.
        margin: factor of that value.
        images: that were read.
        parts: layers by part.
    """

    model: str
    processor: str
    percentile: float
    margin: float
    images: int
    parts: Mapping[Part, Layers]

    @property
    def sha256(self) -> str:
        """The identity of the scales, 64 hex digits; files with equal contents have the same."""
        return _hash(self._fields())

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({**self._fields(), "sha256": self.sha256}, indent=1) + "\n"

    def _fields(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleFile:
    """Scales, and the file that they were read from."""

    path: Path
    scales: ActivationScales

    def check_model(self, *, model: str, processor: str) -> None:
        """Raise ModelConfigError if the scales are of another model or processor."""
        for name, of_file, own in (
            ("model", self.scales.model, model),
            ("processor", self.scales.processor, processor),
        ):
            if of_file != own:
                raise ModelConfigError(
                    f"--activation-scales={self.path}: is of {name} {of_file}, and this is {name} "
                    f"{own}; run `vlm-worker calibrate` on this model"
                )

    def check_parts(self, rounded: Iterable[Part]) -> None:
        """Raise ModelConfigError if no part in `rounded`, those in int8, has scales."""
        parts = sorted(rounded)
        if not parts:
            raise ModelConfigError(
                f"--activation-scales={self.path}: no part of the model is in int8; set --weights, "
                "or remove --activation-scales"
            )
        if not self.scales.parts.keys() & set(parts):
            raise ModelConfigError(
                f"--activation-scales={self.path}: has scales of {', '.join(self.scales.parts)} "
                f"alone, and --weights rounds {', '.join(parts)}; run `vlm-worker calibrate` with "
                f"--parts={','.join(parts)}, or remove --activation-scales"
            )

    def scale_of(self, part: Part, name: str, *, inputs: int) -> LayerScale | None:
        """The scale of a layer that is rounded; None if its part has none, so that it is dynamic.

        Raises:
            ModelConfigError: the part has scales, but not of this layer.
        """
        layers = self.scales.parts.get(part)
        if layers is None:
            return None
        found = layers.get(name)
        if found is None or found.inputs != inputs:
            have = "none" if found is None else f"one of {found.inputs} inputs"
            raise ModelConfigError(
                f"--activation-scales={self.path}: parts.{part}: has {have} for {name} of {inputs} "
                "inputs; this version of Triptych has other layers: run `vlm-worker calibrate` "
                "with it"
            )
        return found


def processor_hash(processor: Processor) -> str:
    """A hash of the parameters of preprocessing, 16 hex digits."""
    return _hash({"kind": processor.kind, **dataclasses.asdict(processor)})[:16]


def read_scales(path: Path, *, sha256: str = "") -> ScaleFile:
    """Read a file of scales.

    Raises:
        ModelConfigError: it cannot be read, is damaged, or is not the one with this `sha256`.
    """
    fields = read_json(path)
    try:
        scales = _parse(ConfigFields(str(path), fields))
    except ModelConfigError as error:
        raise ModelConfigError(f"--activation-scales: {error}") from None
    if scales.sha256 != fields.get("sha256"):
        raise ModelConfigError(
            f"--activation-scales={path}: sha256 is {fields.get('sha256')!r}, and that of the "
            f"other fields is {scales.sha256}; the file was changed: run `vlm-worker calibrate`"
        )
    if sha256 and sha256 != scales.sha256:
        raise ModelConfigError(
            f"--activation-scales={path}: its sha256 is {scales.sha256}, not {sha256} as "
            "--activation-scales-hash says; give both of the same file"
        )
    return ScaleFile(path, scales)


def _parse(fields: ConfigFields) -> ActivationScales:
    version = fields.count("version")
    if version != VERSION:
        raise fields.error("version", f"must be {VERSION}, not {version}")
    parts: dict[Part, Layers] = {}
    of_parts = fields.child("parts")
    for part in PARTS:
        if part in of_parts:
            layers = of_parts.child(part)
            parts[part] = {name: _layer(layers.child(name)) for name in layers}
    if not parts:
        raise fields.error("parts", f"must have at least one of {', '.join(PARTS)}")
    return ActivationScales(
        model=fields.text("model"),
        processor=fields.text("processor"),
        percentile=fields.number("percentile"),
        margin=fields.number("margin"),
        images=fields.count("images"),
        parts=parts,
    )


def _layer(fields: ConfigFields) -> LayerScale:
    scale, zero = fields.number("scale"), fields.count("zero", least=0)
    if not LEAST_SCALE <= scale < float("inf"):
        raise fields.error("scale", f"must be a positive number, not {scale}")
    if zero > MAX_ZERO:
        raise fields.error("zero", f"must be at most {MAX_ZERO}, not {zero}")
    counts = (fields.count(name) for name in ("inputs", "calls", "values"))
    return LayerScale(scale, zero, *counts)


def _hash(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
