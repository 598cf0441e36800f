"""Embeddings of clients: what is read is what was written, and all else is one error."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.stack import MODEL
from worker.tensor_files import NAMES, tensor_file, with_header

from vlm_worker.core.client_embeddings import (
    ClientEmbeddingError,
    GivenTensor,
    check_tensor,
    embedding_key,
    first_not_finite,
    num_tokens_of,
    parse_grid,
    read_header,
)
from vlm_worker.core.families import load_family
from vlm_worker.core.image_geometry import Grid, TilesProcessor
from vlm_worker.types import ITEMSIZE, EmbedLayout

LAYOUT = EmbedLayout("revision", hidden_size=3, num_levels=1, dtype="bfloat16")
GRID = (1, 4, 6)
PROCESSOR = load_family(MODEL).processor
ROWS = bytes(range(6 * LAYOUT.row_bytes))
WHOLE = tensor_file(ROWS, "bfloat16", (6, 6), grid="[1, 4, 6]")


@given(
    st.integers(0, 9), st.integers(0, 9), st.sampled_from(sorted(NAMES)), st.booleans(), st.data()
)
def test_a_file_survives_the_round_trip(
    num_rows: int, width: int, dtype: str, has_grid: bool, data: st.DataObject
) -> None:
    size = num_rows * width * ITEMSIZE[dtype]
    rows = data.draw(st.binary(min_size=size, max_size=size))
    file = tensor_file(rows, dtype, (num_rows, width), grid="[1,4,6]" if has_grid else None)
    tensor = read_header(file)
    assert (tensor.dtype, tensor.shape) == (dtype, (num_rows, width))
    assert tensor.grid_thw == (GRID if has_grid else None)
    assert file[tensor.start :] == rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_safetensors_writes_is_read(dtype: str) -> None:
    values = torch.arange(12, dtype=getattr(torch, dtype)).reshape(2, 6)
    file = safetensors.torch.save({"anything": values}, {"grid_thw": "[1, 2, 4]"})
    tensor = read_header(file)
    assert tensor == GivenTensor(dtype, (2, 6), tensor.start, (1, 2, 4))
    assert file[tensor.start :] == values.view(torch.uint8).numpy().tobytes()


def test_every_truncated_or_longer_file_is_an_error() -> None:
    for wrong in (*(WHOLE[:end] for end in range(len(WHOLE))), WHOLE + b"\0"):
        with pytest.raises(ClientEmbeddingError):
            read_header(wrong)


def test_every_changed_byte_of_a_header_is_read_or_an_error() -> None:
    start = read_header(WHOLE).start
    for place, value in itertools.product(range(start), (0, 1, 34, 91, 125, 128, 255)):
        wrong = bytearray(WHOLE)
        wrong[place] = value
        try:
            tensor = read_header(wrong)
        except ClientEmbeddingError:
            continue
        size = tensor.shape[0] * tensor.shape[1] * ITEMSIZE[tensor.dtype]
        assert tensor.start + size == len(wrong)


ENTRY = {"dtype": "BF16", "shape": [6, 6], "data_offsets": [0, 72]}


def file_of(fields: Any, rows: bytes = ROWS) -> bytes:
    return with_header(json.dumps(fields).encode(), rows)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"", "not a safetensors"),
        (b"\x80\x02}q\x00.", "torch.save"),
        (b"PK\x03\x04" + bytes(100), "torch.save"),
        (with_header(b"[" * 60_000, b""), "not a safetensors"),
        (with_header(b'{"a":' * 12_000, b""), "not a safetensors"),
        (with_header(b"{" + b" " * 70_000 + b"}", b""), "not a safetensors"),
        (with_header(b"\xff\xfe", b""), "not a safetensors"),
        (with_header(b"1" * 5000, b""), "not a safetensors"),
        (file_of([]), "not a safetensors"),
        (file_of({}), "0 tensors"),
        (file_of({"__metadata__": {}}), "0 tensors"),
        (file_of({"a": ENTRY, "b": ENTRY}), "2 tensors"),
        (file_of({"a": 5}), "dtype"),
        (file_of({"a": {**ENTRY, "dtype": "I64"}}), "dtype"),
        (file_of({"a": {**ENTRY, "dtype": ["BF16"]}}), "dtype"),
        (file_of({"a": {**ENTRY, "shape": [36]}}), "two dimensions"),
        (file_of({"a": {**ENTRY, "shape": [1, 6, 6]}}), "two dimensions"),
        (file_of({"a": {**ENTRY, "shape": [-6, -6]}}), "two dimensions"),
        (file_of({"a": {**ENTRY, "shape": [6, True]}}), "two dimensions"),
        (file_of({"a": {**ENTRY, "shape": [6, 6.0]}}), "two dimensions"),
        (file_of({"a": {**ENTRY, "shape": "66"}}), "two dimensions"),
        (file_of({"a": {**ENTRY, "data_offsets": [1, 73]}}), "72 bytes"),
        (file_of({"a": {**ENTRY, "data_offsets": None}}), "72 bytes"),
        (file_of({"a": {**ENTRY, "shape": [2**31, 2**31]}}), "behind the header"),
        (file_of({"a": ENTRY}, ROWS[:-1]), "it has 71"),
        (file_of({"a": ENTRY, "__metadata__": {"grid_thw": "[1, 4]"}}), "grid_thw"),
        (file_of({"a": ENTRY, "__metadata__": {"grid_thw": "[" * 64}}), "grid_thw"),
        (file_of({"a": ENTRY, "__metadata__": {"grid_thw": "x"}}), "grid_thw"),
    ],
)
def test_each_error_says_what_is_wrong(file: bytes, said: str) -> None:
    with pytest.raises(ClientEmbeddingError, match=said):
        read_header(file)


def test_a_header_whose_length_begins_as_a_pickle_is_read() -> None:
    header = json.dumps({"a": ENTRY}).encode().ljust(0x0280)
    assert read_header(with_header(header, ROWS)).shape == (6, 6)


def test_metadata_without_a_grid_has_none() -> None:
    for metadata in (None, 5, {}, {"grid_thw": 5}, {"format": "pt"}):
        assert read_header(file_of({"a": ENTRY, "__metadata__": metadata})).grid_thw is None


@pytest.mark.parametrize(
    "value",
    [None, "1,4,6", [1, 4], [1, 4, 6, 1], [1, 4, 0], [1, 4, -6], [1, 4, 6.0], [1, 4, True],
     [[1, 4, 6]], [1, 4, 1 << 16], [1, 4, "6"]],
)  # fmt: skip
def test_a_grid_is_three_numbers(value: Any) -> None:
    assert parse_grid([1, 4, 6]) == GRID
    with pytest.raises(ClientEmbeddingError, match="three numbers"):
        parse_grid(value)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_the_grid_of_every_image_has_its_tokens(height: int, width: int) -> None:
    if max(height, width) > 100 * min(height, width):
        return
    geometry = PROCESSOR.geometry(height, width)
    assert num_tokens_of(geometry.grid_thw, PROCESSOR) == geometry.num_tokens


def test_a_grid_that_no_still_image_has_is_refused() -> None:
    for grid in ((1, 3, 4), (2, 4, 6), (1, 4, 65_534), (1, 1, 1)):
        with pytest.raises(ClientEmbeddingError, match="no image of this model"):
            num_tokens_of(grid, PROCESSOR)


TILES = TilesProcessor(
    patch_size=14,
    merge_size=2,
    resample=3,
    rescale_factor=1 / 255,
    image_mean=(0.5,) * 3,
    image_std=(0.5,) * 3,
    side=56,
    max_tiles=6,
)


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_grid_of_a_tiled_image_has_its_tokens(height: int, width: int) -> None:
    geometry = TILES.geometry(height, width)
    assert num_tokens_of(geometry.grid_thw, TILES) == geometry.num_tokens


@pytest.mark.parametrize("grid", [(2, 4, 4), (8, 4, 4), (3, 4, 6), (1, 2, 4)])
def test_a_grid_that_no_tiled_image_has_is_refused(grid: Grid) -> None:
    with pytest.raises(ClientEmbeddingError, match=r"processor, \[tiles, height, width\]"):
        num_tokens_of(grid, TILES)


def test_a_tensor_must_have_the_layout_and_a_row_per_token() -> None:
    good = GivenTensor("bfloat16", (6, 6), 8, None)
    check_tensor(good, LAYOUT, grid=GRID, num_tokens=6)
    with pytest.raises(ClientEmbeddingError, match=r"F16; .* BF16: convert"):
        check_tensor(dataclasses.replace(good, dtype="float16"), LAYOUT, grid=GRID, num_tokens=6)
    for shape in ((5, 6), (6, 3), (6, 7), (36, 1)):
        with pytest.raises(ClientEmbeddingError, match=r"6 elements: send \[6, 6\]"):
            check_tensor(dataclasses.replace(good, shape=shape), LAYOUT, grid=GRID, num_tokens=6)


@given(st.binary(max_size=64), st.sampled_from(["float16", "float32"]))
def test_finiteness_is_that_of_numpy(data: bytes, dtype: str) -> None:
    data = data[: len(data) // 4 * 4]
    finite = np.isfinite(np.frombuffer(data, dtype))
    expected = None if finite.all() else int((~finite).argmax())
    assert first_not_finite(memoryview(data), dtype) == expected


@given(st.binary(max_size=64))
def test_finiteness_of_bfloat16_is_that_of_torch(data: bytes) -> None:
    data = data[: len(data) // 2 * 2]
    numbers = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
    finite = np.isfinite(numbers.view(np.float32))
    expected = None if finite.all() else int((~finite).argmax())
    assert first_not_finite(memoryview(data), "bfloat16") == expected


def key(**changes: Any) -> bytes:
    parts: dict[str, Any] = {"rows": memoryview(ROWS), "layout": LAYOUT}
    parts |= {"grid": GRID, "salt": b"s" * 32, **changes}
    return embedding_key(parts.pop("rows"), parts.pop("layout"), **parts)


def test_a_key_is_of_layout_grid_salt_and_rows() -> None:
    others = [
        key(),
        key(rows=memoryview(ROWS[:-1] + b"x")),
        key(grid=(1, 6, 4)),
        key(salt=b"t" * 32),
        key(salt=b""),
        *(
            key(layout=dataclasses.replace(LAYOUT, **change))  # type: ignore[arg-type]
            for change in (
                {"model_revision": "other"},
                {"hidden_size": 6, "num_levels": 0},
                {"dtype": "float16"},
            )
        ),
    ]
    assert len({*others}) == len(others)
    assert {len(one) for one in others} == {32}
    assert key() == others[0]


def test_no_part_of_a_key_moves_into_the_next() -> None:
    moved = memoryview(b"s" + ROWS)
    assert key(salt=b"ss") != key(salt=b"s", rows=moved)
