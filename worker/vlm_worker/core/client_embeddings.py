"""Embeddings that clients send: a safetensors file of one tensor, its checks, its cache key. Pure.

    length of the header (uint64) | header (JSON) | rows, [n, (1 + L) * D]       all little-endian

    {"embeds": {"dtype": "BF16", "shape": [n, (1 + L) * D], "data_offsets": [0, N]},
     "__metadata__": {"grid_thw": "[1, 4, 6]"}}                                  may be absent

The name of the tensor has no effect. Nothing is unpickled, and no torch is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any, Final, TypeGuard

import numpy as np

from vlm_worker.core.image_geometry import Grid, Processor, TilesProcessor
from vlm_worker.types import ITEMSIZE, EmbedLayout

MAX_HEADER_BYTES: Final = (1 << 16) - 1
"""One tensor's header has about a hundred bytes."""
KEY_TAG: Final = b"triptych/client-embedding/1"
GRID_FIELD: Final = "grid_thw"
_PATCHES: Final = "[1, height, width] in patches"
_MAX_SIDE: Final = (1 << 16) - 1
_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_EXPONENTS: Final = {
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
    "float32": ("<u4", 0x7F80_0000),
}
"""Unsigned numbers of the elements, and the bits that are all set in infinities and NaN only."""
_PICKLES: Final = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of what `torch.save` and `pickle` write."""


class ClientEmbeddingError(ValueError):
    """The file or its grid cannot be used. The message is fit for a client."""


@dataclasses.dataclass(frozen=True, slots=True)
class GivenTensor:
    """The tensor of a file, from its header.

    Attributes:
        dtype: as in an `EmbedLayout`.
        shape: rows, and elements of a row.
        start: of its bytes in the file; they end with the file.
        grid_thw: of the metadata; None without it.
    """

    dtype: str
    shape: tuple[int, int]
    start: int
    grid_thw: Grid | None


def read_header(data: bytes | bytearray) -> GivenTensor:
    """Read the header of a whole file.

    Raises:
        ClientEmbeddingError: the file is not safetensors, has not one tensor of two dimensions, or
            has more or fewer bytes than its header says.
    """
    start, fields = _fields(data)
    names = [name for name in fields if name != _METADATA]
    if len(names) != 1:
        raise ClientEmbeddingError(f"it has {len(names)} tensors; send one tensor for each image")
    entry = fields[names[0]]
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ClientEmbeddingError(
            f"the dtype of its tensor is not one of {', '.join(_DTYPES)}; convert the tensor"
        )
    if not _are_counts(shape, 2):
        raise ClientEmbeddingError(
            "its tensor has not two dimensions; send [visual tokens, elements of a row]"
        )
    num_bytes = shape[0] * shape[1] * ITEMSIZE[_DTYPES[dtype]]
    if entry.get("data_offsets") != [0, num_bytes] or len(data) - start != num_bytes:
        raise ClientEmbeddingError(
            f"its tensor needs {num_bytes} bytes behind the header, and it has "
            f"{len(data) - start}; send the whole file"
        )
    return GivenTensor(_DTYPES[dtype], (shape[0], shape[1]), start, _grid_of(fields))


def _fields(data: bytes | bytearray) -> tuple[int, dict[str, Any]]:
    """The start of the payload, and the header."""
    problem = ClientEmbeddingError("it is not a safetensors file; write one with safetensors")
    if bytes(data[:4]).startswith(_PICKLES):  # a file with a header of 640 bytes begins alike
        problem = ClientEmbeddingError(
            "it is a pickle, as torch.save writes, which can run code; write the tensor with "
            "safetensors.torch.save"
        )
    if len(data) < _LENGTH.size:
        raise problem
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    if length > MAX_HEADER_BYTES or start > len(data):
        raise problem
    try:
        fields = json.loads(bytes(data[_LENGTH.size : start]))
    except (ValueError, RecursionError) as error:
        raise problem from error
    if not isinstance(fields, dict):
        raise problem
    return start, fields


def _grid_of(fields: dict[str, Any]) -> Grid | None:
    """The patch grid in a header's metadata, whose values are texts."""
    metadata = fields.get(_METADATA)
    text = metadata.get(GRID_FIELD) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        return None
    try:
        return parse_grid(json.loads(text[:64]))
    except (ValueError, RecursionError) as error:
        raise ClientEmbeddingError(
            f"'{GRID_FIELD}' of its metadata must be a text as '[1, 4, 6]'"
        ) from error


def parse_grid(value: Any) -> Grid:
    """A patch grid (time, height, width). Raises ClientEmbeddingError."""
    if not _are_counts(value, 3) or max(value) > _MAX_SIDE or min(value) < 1:
        raise ClientEmbeddingError(
            "it must be an array of three numbers: patches in time, height and width of the image, "
            "before merging"
        )
    return value[0], value[1], value[2]


def _are_counts(value: Any, length: int) -> TypeGuard[list[int]]:
    """Whether a value is an array of `length` numbers that may be dimensions."""
    if not isinstance(value, list) or len(value) != length:
        return False
    return all(type(one) is int and 0 <= one < 1 << 32 for one in value)


def num_tokens_of(grid: Grid, processor: Processor) -> int:
    """Visual tokens of the image with a patch grid.

    Raises:
        ClientEmbeddingError: no still image of this model has the grid.
    """
    is_tiled = isinstance(processor, TilesProcessor)
    num_tokens = processor.num_tokens(grid)
    is_still = is_tiled or grid[0] == 1
    if num_tokens is None or not is_still or num_tokens > processor.max_tokens:
        axes = "[tiles, height, width], in patches of a tile" if is_tiled else _PATCHES
        raise ClientEmbeddingError(
            f"no image of this model has the grid {list(grid)}; send that of its image processor, "
            f"{axes}, with at most {processor.max_tokens} visual tokens"
        )
    return num_tokens


def check_tensor(tensor: GivenTensor, layout: EmbedLayout, *, grid: Grid, num_tokens: int) -> None:
    """Raise ClientEmbeddingError if a tensor has not the rows of `layout`, one per token."""
    if tensor.dtype != layout.dtype:
        raise ClientEmbeddingError(
            f"its dtype is {_NAMES[tensor.dtype]}; this service computes embeddings in "
            f"{_NAMES[layout.dtype]}: convert the tensor"
        )
    expected = num_tokens, layout.row_elements
    if tensor.shape != expected:
        raise ClientEmbeddingError(
            f"its shape is {list(tensor.shape)}; an image of the grid {list(grid)} has "
            f"{num_tokens} visual tokens of {layout.row_elements} elements: send {list(expected)}"
        )


def can_check(layout: EmbedLayout) -> bool:
    """Whether tensors of this layout can be checked: its dtype is known here."""
    return layout.dtype in _EXPONENTS


def first_not_finite(piece: memoryview, dtype: str) -> int | None:
    """The index of the first element that is infinite or NaN; None if all are finite.

    `piece` has whole elements, little-endian.
    """
    kind, exponent = _EXPONENTS[dtype]
    bad = (np.frombuffer(piece, kind) & exponent) == exponent
    return int(bad.argmax()) if bad.any() else None


def embedding_key(rows: memoryview, layout: EmbedLayout, *, grid: Grid, salt: bytes) -> bytes:
    """The 32-byte cache key of a client's embedding, for one tenant's salt.

    SHA-256 over a tag, the fingerprint of the layout, the grid and the salt, each behind its
    length, and the rows. No image has such a key.
    """
    hasher = hashlib.sha256()
    for part in (KEY_TAG, layout.fingerprint, struct.pack("<3I", *grid), salt):
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(part)
    hasher.update(rows)
    return hasher.digest()
