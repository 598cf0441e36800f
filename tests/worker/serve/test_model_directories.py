"""A model directory that cannot be served ends the start in one line; never in a traceback."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_local.subprocesses import tied
from vlm_worker.core.families import load_family
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.serve.loading import eos_token_ids, load_vocabulary
from vlm_worker.testing import ChecksumRunner

MODEL = Path(__file__).parents[3] / "examples/shapes/model"
SMALL = tuple(file for file in sorted(MODEL.iterdir()) if file.suffix in {".json", ".jinja"})
JSON = tuple(file.name for file in SMALL if file.suffix == ".json")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n"
SECONDS = 120.0

WRONG = st.sampled_from(
    [None, True, 0, -1, 1.5, float("nan"), "", "x", [], [[]], {}, {"x": 1}, "0" * 400, 10**30]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small files, whose damages are taken back."""
    directory = tmp_path_factory.mktemp("model")
    for file in SMALL:
        shutil.copy(file, directory)
    return directory


def read_all(directory: Path) -> str | None:
    """What a gateway and a worker read before weights; the error that it ends with."""
    try:
        load_family(directory)
        eos_token_ids(directory)
        PromptBuilder(directory)
    except ModelConfigError as error:
        return str(error)
    return None


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field and item, objects and lists of few items included."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else ()
    for key, child in children:
        yield from paths_of(child, (*path, key))


FIELDS = {
    name: list(paths_of(json.loads((MODEL / name).read_bytes())))
    for name in JSON
    if name != "tokenizer.json"  # read by a library, whose errors are one class
}


def test_the_files_are_those_of_a_model_that_is_served(model: Path) -> None:
    assert read_all(model) is None


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_field_of_any_other_value_is_served_or_refused(model: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FIELDS)))
    path = data.draw(st.sampled_from(FIELDS[name]))
    fields = json.loads((MODEL / name).read_bytes())
    part = fields
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = data.draw(WRONG)
    (model / name).write_text(json.dumps(fields))
    try:
        error = read_all(model)
    finally:
        shutil.copy(MODEL / name, model)
    assert error is None or "\n" not in error


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 50_000, POINTER])
@pytest.mark.parametrize("name", [file.name for file in SMALL])
def test_a_file_of_any_other_content_is_named(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    try:
        error = read_all(model)
    finally:
        shutil.copy(MODEL / name, model)
    if name.endswith(".json") and name != "preprocessor_config.json":  # the combined one goes first
        assert error is not None
        assert name in error
        assert ("Git LFS pointer" in error) == (content == POINTER)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method is 'awq'"),
        ({"model_type": "molmo2"}, "model_type is 'molmo2', which is not served"),
        ({"text_config": {"vocab_size": "many"}}, "vocab_size must be an integer"),
    ],
)
@pytest.mark.parametrize("command", [("serve",), ("encoder", "--served-name=x", "--model")])
async def test_the_process_ends_with_1_and_one_line(
    tmp_path: Path, damage: dict[str, Any], message: str, command: tuple[str, ...]
) -> None:
    for file in MODEL.iterdir():
        shutil.copy(file, tmp_path)
    fields = json.loads((MODEL / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **damage}))
    ports = ["--port=0"] if command == ("serve",) else ["--grpc-port=0", "--http-port=0"]
    start = [sys.executable, "-m", "vlm_worker", *command, str(tmp_path), *ports]
    process = await asyncio.create_subprocess_exec(*tied(start), stderr=PIPE)
    async with asyncio.timeout(SECONDS):
        _, said = await process.communicate()
    assert process.returncode == 1, said.decode()
    assert "Traceback" not in said.decode()
    lines = [line for line in said.decode().splitlines() if not line.startswith("{")]
    assert len(lines) == 1 or command == ("serve",), lines
    assert message in lines[-1]


@pytest.mark.parametrize(
    ("tokenizer", "ids"), [(None, (10**6,)), (b"{}", (2,)), (POINTER, (2,)), (b"\xff", (2,))]
)
def test_a_tokenizer_that_grammars_cannot_read_ends_no_start(
    model: Path, tokenizer: bytes | None, ids: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The worker's Hello then says that it constrains no answer."""
    file = model / "tokenizer.json"
    whole = file.read_bytes()
    assert load_vocabulary(model, ChecksumRunner(), (2, 10**6)) is not None
    try:
        file.write_bytes(whole if tokenizer is None else tokenizer)
        assert load_vocabulary(model, ChecksumRunner(), ids) is None
    finally:
        file.write_bytes(whole)
    assert "answers cannot be constrained" in caplog.text
