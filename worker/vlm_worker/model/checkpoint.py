"""Checks the files of a model directory before loading: only safetensors, and no code.

config.json ─┬─ auto_map? not run          *.safetensors ─▶ names, shapes, types, revision
             └─ model_type ─▶ Family       *.bin, *.pt    ─▶ refused
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vlm_worker.core.families import Family, load_family
from vlm_worker.core.model_files import ModelConfigError, check_no_pointer, read_json

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER_BYTES = 100 << 20  # the format's own bound
_ITEM_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I64": 64, "I32": 32, "I8": 8, "U8": 8}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SAMPLED_BYTES = 1 << 20
_NUM_SAMPLES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, from the header of its file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BITS.get(self.dtype, 8) // 8


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a model directory, without the weights."""

    path: Path
    config: Mapping[str, Any]
    family: Family
    tensors: Mapping[str, TensorInfo]

    @property
    def dtype(self) -> str:
        """The meaning of `auto`: the dtype in `config.json`, else that of most weight bytes."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if isinstance(named, str) and named in _DTYPES.values():
            return named
        num_bytes = dict.fromkeys(_DTYPES, 0)
        for tensor in self.tensors.values():
            if tensor.dtype in num_bytes:
                num_bytes[tensor.dtype] += tensor.num_bytes
        return _DTYPES[max(num_bytes, key=num_bytes.__getitem__)]

    def check_unread(self, names: Collection[str], *, unloaded: Collection[str]) -> None:
        """Refuse a model with code of its own, of which transformers' class leaves out weights.

        `names` are tensors without a place in that class; those of `unloaded` modules are no sign
        of another model. Without `auto_map`, they are remains of training.

        Raises:
            ModelConfigError: the code in the directory computes more than this class.
        """
        prefixes = tuple(f"{name}." for name in unloaded)
        foreign = sorted(name for name in names if not name.startswith(prefixes))
        if "auto_map" in self.config and foreign:
            raise ModelConfigError(
                f"{self.path / 'config.json'}: auto_map names code that is never run, and "
                f"transformers' own model of {self.family.model_type!r} does not use {foreign[0]} "
                f"(one of {len(foreign)} tensors); use a checkpoint without code of its own"
            )

    def revision(self) -> str:
        """A hash of the content, 16 hex digits, for models without a revision.

        Two directories with equal configuration and weights have equal revisions. To stay fast for
        large models, it reads only the headers and at most about 64 samples of 1 MiB per file; a
        file of up to 64 MiB is read as a whole.
        """
        digest = hashlib.sha256(b"triptych-revision-1")
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted({tensor.file for tensor in self.tensors.values()}):
            size = file.stat().st_size
            digest.update(f"{file.name}/{size}/".encode())
            stride = max(_SAMPLED_BYTES, size // _NUM_SAMPLES)
            with file.open("rb") as stream:
                digest.update(stream.read(8 + _header_size(file, stream.read(8))))
                for offset in range(0, size, stride):
                    stream.seek(offset)
                    digest.update(stream.read(_SAMPLED_BYTES))
        return digest.hexdigest()[:16]


def open_checkpoint(model_dir: str | Path) -> Checkpoint:
    """Read a model directory without its weights.

    Raises:
        ModelConfigError: a file is missing, malformed or refused; the message names path and fix.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise ModelConfigError(f"{path}: no such directory; --model names a directory with a model")
    config = read_json(path / "config.json")
    family = load_family(path)
    if "auto_map" in config:
        logger.warning(
            "auto_map names code that comes with the model; it is never run",
            extra={"model": str(path), "model_type": family.model_type},
        )
    return Checkpoint(path, config, family, _read_tensors(path))


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in _weight_files(path):
        for name, entry in _read_header(file).items():
            tensors[name] = TensorInfo(str(entry["dtype"]), tuple(entry["shape"]), file)
    return tensors


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, Mapping) or not names:
            raise ModelConfigError(f"{index}: weight_map must map tensors to files")
        files = [path / str(name) for name in sorted(set(names.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    for file in files:
        if file.parent != path or not file.is_file():
            raise ModelConfigError(f"{file}: missing; {_INDEX} names it. Copy the model again")
    if files:
        return files
    pickled = sorted(file for pattern in _PICKLED for file in path.glob(pattern))
    if pickled:
        raise ModelConfigError(
            f"{pickled[0]}: weights in pickle are never loaded, they can run code; "
            "convert them with save_pretrained(..., safe_serialization=True)"
        )
    raise ModelConfigError(f"{path}: no *.safetensors; copy the model's weights there")


def _read_header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file; raises ModelConfigError if the file is truncated."""
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            check_no_pointer(file, prefix)
            size = _header_size(file, prefix)
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        end = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ModelConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ModelConfigError(f"{file}: no safetensors header; copy the file again") from error
    if file.stat().st_size < end:
        raise ModelConfigError(
            f"{file}: cut off at {file.stat().st_size} of {end} bytes; copy the file again"
        )
    return dict(header)


def _header_size(file: Path, prefix: bytes) -> int:
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= size <= _MAX_HEADER_BYTES:
        raise ModelConfigError(f"{file}: no safetensors header; copy the file again")
    return size
