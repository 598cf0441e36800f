"""Provides a model's files: from a directory, or downloaded from a hub into a cache.

`vlm-worker fetch` keeps a record in the directory: what it is for, and whether it is complete.

fetch ─ complete: false ─▶ download ─▶ check ─ complete: true ─▶ workers load it
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from vlm_worker.core.model_files import ConfigFields, ModelConfigError, read_json
from vlm_worker.serve.hub import download
from vlm_worker.settings import ModelSource

GATEWAY_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
PATTERNS = (*GATEWAY_PATTERNS, "*.safetensors")
RECORD: Final = ".triptych-model.json"


def fetch_model(
    source: ModelSource, progress: Callable[[str], None], *, patterns: Sequence[str] = PATTERNS
) -> Path:
    """Download the files that are missing; returns the model's directory. Blocking.

    Raises:
        ModelConfigError: no such directory or repository exists, or the hub is not reachable. Or
            `vlm-worker fetch` has not completed the directory.
    """
    repository = source.repository
    if repository is None:
        path = Path(source.uri)
        check_complete(path)
        if not (path / "config.json").exists():
            problem = "has no config.json" if path.is_dir() else "is no directory"
            raise ModelConfigError(
                f"--model: {path} {problem}; name the folder of a model, or hf://ORG/NAME"
            )
        return path
    progress(f"downloading {repository}")
    return download(source, progress, patterns=patterns)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model of a directory. `num_bytes` is the size of its files, known once it is complete."""

    uri: str
    revision: str
    complete: bool
    num_bytes: int = 0


def read_record(directory: Path) -> ModelRecord | None:
    """Return the record of a directory; None if `vlm-worker fetch` has not written there.

    Raises:
        ModelConfigError: the record cannot be read.
    """
    path = directory / RECORD
    if not path.exists():
        return None
    values = read_json(path)
    fields = ConfigFields(str(path), values)
    return ModelRecord(
        uri=str(values.get("uri", "")),
        revision=str(values.get("revision", "")),
        complete=values.get("complete") is True,
        num_bytes=fields.count("num_bytes", least=0),
    )


def write_record(directory: Path, record: ModelRecord) -> None:
    """Replace the record atomically; it is on disk when this returns.

    Raises:
        OSError: the directory is not writable, or full.
    """
    partial = directory / f"{RECORD}.partial"
    with partial.open("w") as file:
        json.dump(dataclasses.asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / RECORD)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the name itself
    finally:
        os.close(descriptor)


def check_complete(directory: Path) -> None:
    """Raise ModelConfigError if a fetch into `directory` has begun and not ended."""
    record = read_record(directory)
    if record is not None and not record.complete:
        raise ModelConfigError(
            f"--model: {directory} has only a part of {record.uri}; wait until `vlm-worker fetch` "
            "has ended, or run it again"
        )
