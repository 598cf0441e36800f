"""Model families: what differs between models, for gateway, media, engine and model. No torch.

    config.json ──┐                      ┌─▶ gateway   tokens of an image, from its header alone
                  ├─ load_family(DIR) ──▶│   media     target size and patches
    processor ────┘     a Family         ├─▶ engine    positions, whether images stay whole
                                         └─▶ model     names of the modules of each half

Some model types without a line in `FAMILIES` are unlisted families (`families.generic`).

To add a family, add a module with its `FamilySpec` and a line in `FAMILIES`. If its geometry or
positions differ, add a `Processor` to `image_geometry` or a function beside `Family.positions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_worker.core.families import gemma3, llava, qwen_vl
from vlm_worker.core.families.family import ControlToken, Detail, Family, FamilySpec, Files
from vlm_worker.core.families.generic import MODEL_TYPES, parse_unlisted
from vlm_worker.core.image_geometry import Geometry, Processor
from vlm_worker.core.model_files import ConfigFields, ModelConfigError, read_json

FAMILIES: Mapping[str, FamilySpec] = {
    "gemma3": gemma3.SPEC,
    "llava": llava.SPEC,
    "qwen2_5_vl": qwen_vl.QWEN2_5_VL,
    "qwen2_vl": qwen_vl.QWEN2_VL,
}


_HINTS = {"internvl_chat": "use the repository whose name ends in -HF, or another model"}


def load_family(model_dir: str | Path) -> Family:
    """Read `config.json` and the processor's files of a model directory.

    As in transformers, `image_processor` in `processor_config.json` has precedence over
    `preprocessor_config.json`.

    Raises:
        ModelConfigError: a file is missing or malformed, a field has an unsupported value, or the
            files disagree.
    """
    root = Path(model_dir)
    config = read_json(root / "config.json")
    combined = root / "processor_config.json"
    processor = read_json(combined) if combined.exists() else {}
    image_processor = processor.get("image_processor")
    if image_processor is None:
        image_processor = read_json(root / "preprocessor_config.json")
    elif not isinstance(image_processor, Mapping):
        raise ConfigFields(str(combined), processor).error("image_processor", "must be an object")
    return parse_family(config, image_processor, processor)


def parse_family(
    config: Mapping[str, Any],
    image_processor: Mapping[str, Any],
    processor: Mapping[str, Any] | None = None,
) -> Family:
    """Build a Family from parsed files; raises ModelConfigError as `load_family` does."""
    files = Files(
        config=ConfigFields("config.json", config),
        image_processor=ConfigFields("image processor", image_processor),
        processor=ConfigFields("processor_config.json", processor or {}),
    )
    model_type = files.config.text("model_type")
    spec = FAMILIES.get(model_type)
    if spec is None and model_type not in MODEL_TYPES:
        types = ", ".join(sorted({*FAMILIES, *MODEL_TYPES}))
        fix = _HINTS.get(model_type, "use a model")
        raise files.config.error(
            "model_type",
            f"is {model_type!r}, which is not served; {fix} of one of these types: {types} "
            "(docs/families.md lists models and limits)",
        )
    _check_not_quantized(files.config)
    if spec is None:
        return parse_unlisted(files)
    return spec.parse(spec, files)


def _check_not_quantized(config: ConfigFields) -> None:
    """Raise ModelConfigError if a quantization library wrote the weights (AWQ, GPTQ, FP8, ...)."""
    for part in (config, config.child("text_config")):
        for name in ("quantization_config", "compression_config"):
            if name not in part:
                continue
            fields = part.child(name)
            method = fields.text("quant_method", "unknown")
            raise fields.error(
                "quant_method",
                f"is {method!r}; quantized checkpoints are not served. Use the model's checkpoint "
                "in bfloat16 or float32; --weights=int8 rounds it at start",
            )


__all__ = [
    "FAMILIES",
    "ControlToken",
    "Detail",
    "Family",
    "FamilySpec",
    "Geometry",
    "ModelConfigError",
    "Processor",
    "load_family",
    "parse_family",
]
