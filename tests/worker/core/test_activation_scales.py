"""The file of scales: read back as written, and refused if it is another's or was changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.activation_scales import (
    ActivationScales,
    LayerScale,
    processor_hash,
    read_scales,
)
from vlm_worker.core.families import load_family
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.weights import PARTS

SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "model"
SCALES = ActivationScales(
    model="0123456789abcdef",
    processor="fedcba9876543210",
    percentile=99.99,
    margin=1.0,
    images=3,
    parts={"encoder": {"a.qkv": LayerScale(0.5, 128, 8, 3, 96)}},
)
LAYERS = st.dictionaries(
    st.text("abc.0", min_size=1),
    st.builds(
        LayerScale,
        scale=st.floats(1e-20, 1e20),
        zero=st.integers(0, 255),
        inputs=st.integers(1, 1 << 16),
        calls=st.integers(1, 1 << 20),
        values=st.integers(1, 1 << 40),
    ),
    min_size=1,
    max_size=3,
)


def write(directory: Path, scales: ActivationScales, **changed: Any) -> Path:
    path = directory / "scales.json"
    path.write_text(json.dumps(json.loads(scales.to_json()) | changed))
    return path


@given(parts=st.dictionaries(st.sampled_from(PARTS), LAYERS, min_size=1), margin=st.floats(0.1, 9))
def test_a_file_is_read_as_it_was_written(
    parts: Any, margin: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scales = dataclasses.replace(SCALES, parts=parts, margin=margin)
    path = write(tmp_path_factory.mktemp("scales"), scales)
    found = read_scales(path, sha256=scales.sha256)
    assert (found.path, found.scales) == (path, scales)


def test_the_order_and_the_space_in_a_file_do_not_matter(tmp_path: Path) -> None:
    fields = json.loads(SCALES.to_json())
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(dict(reversed(fields.items())), indent=7) + "\n\n")
    assert read_scales(path, sha256=SCALES.sha256).scales == SCALES


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"version": 2}, "version must be 1, not 2"),
        ({"parts": {}}, "parts must have at least one of encoder, merger, layers, head"),
        ({"parts": {"tower": {}}}, "parts must have at least one of"),
        ({"model": 7}, "model must be a string"),
        ({"images": 0}, "images must be an integer of at least 1"),
        ({"margin": 2.0}, "the file was changed"),
        ({"sha256": ""}, "the file was changed"),
    ],
)
def test_a_file_that_is_damaged_is_refused(
    changed: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelConfigError, match=f"--activation-scales.*scales.json.*{problem}"):
        read_scales(write(tmp_path, SCALES, **changed))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"scale": 0}, "scale must be a positive number"),
        ({"scale": float("nan")}, "scale must be a positive number"),
        ({"scale": float("inf")}, "scale must be a positive number"),
        ({"zero": 256}, "zero must be at most 255"),
        ({"zero": -1}, "zero must be an integer of at least 0"),
        ({"inputs": "8"}, "inputs must be an integer"),
    ],
)
def test_a_layer_that_is_damaged_is_named(
    changed: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    layer = dataclasses.asdict(SCALES.parts["encoder"]["a.qkv"]) | changed
    with pytest.raises(ModelConfigError, match=rf"parts: encoder: a\.qkv: {problem}"):
        read_scales(write(tmp_path, SCALES, parts={"encoder": {"a.qkv": layer}}))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"none\.json: cannot be read"):
        read_scales(tmp_path / "none.json")


def test_another_file_than_the_promised_one_is_refused_with_both_hashes(tmp_path: Path) -> None:
    path, other = write(tmp_path, SCALES), "a" * 64
    with pytest.raises(ModelConfigError, match=f"{SCALES.sha256}, not {other}"):
        read_scales(path, sha256=other)


@pytest.mark.parametrize(("name", "own"), [("model", "m" * 16), ("processor", "p" * 16)])
def test_the_scales_of_another_model_or_processor_are_refused_with_both_hashes(
    name: str, own: str, tmp_path: Path
) -> None:
    found = read_scales(write(tmp_path, SCALES))
    ours = {"model": SCALES.model, "processor": SCALES.processor}
    found.check_model(**ours)
    message = f"is of {name} {ours[name]}, and this is {name} {own}; run `vlm-worker calibrate`"
    with pytest.raises(ModelConfigError, match=message):
        found.check_model(**(ours | {name: own}))


def test_a_layer_is_found_by_part_name_and_size(tmp_path: Path) -> None:
    found = read_scales(write(tmp_path, SCALES))
    layer = SCALES.parts["encoder"]["a.qkv"]
    assert found.scale_of("encoder", "a.qkv", inputs=8) == layer
    assert found.scale_of("layers", "a.qkv", inputs=8) is None, "this part stays dynamic"
    for name, inputs in (("b.qkv", 8), ("a.qkv", 9)):
        with pytest.raises(ModelConfigError, match=rf"for {name} of {inputs} inputs"):
            found.scale_of("encoder", name, inputs=inputs)


def test_scales_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    found = read_scales(write(tmp_path, SCALES))
    found.check_parts({"encoder", "head"})
    with pytest.raises(ModelConfigError, match="no part of the model is in int8"):
        found.check_parts(())
    with pytest.raises(ModelConfigError, match=r"scales of encoder alone.*--parts=head,layers"):
        found.check_parts({"layers", "head"})


def test_every_parameter_of_preprocessing_is_in_the_hash() -> None:
    processor = load_family(SHAPES).processor
    for field in dataclasses.fields(processor):
        value = getattr(processor, field.name)
        other = (value[0] + 1, *value[1:]) if isinstance(value, tuple) else value + 1
        changed = dataclasses.replace(processor, **{field.name: other})
        assert processor_hash(changed) != processor_hash(processor), field.name
