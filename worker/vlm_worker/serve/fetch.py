"""Runs `vlm-worker fetch`: downloads a model into a directory that many pods then mount.

index ─▶ space? ─▶ record: incomplete ─▶ download ─▶ check sizes and hashes ─▶ record: complete

A run does not download files again that an earlier, interrupted run completed.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from vlm_worker.core.model_files import ModelConfigError, ModelUnavailableError
from vlm_worker.serve import bucket, hub
from vlm_worker.serve.bucket import BucketFile, BucketIndex
from vlm_worker.serve.fetch_progress import FetchProgress, served
from vlm_worker.serve.hub import HubFile, HubIndex
from vlm_worker.serve.sources import PATTERNS, ModelRecord, read_record, write_record
from vlm_worker.settings import FetchSettings, ModelSource

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0
SPARE_BYTES = 16 << 20  # metadata beside the files


def run_fetch(settings: FetchSettings, *, clock: Callable[[], float] = time.monotonic) -> int:
    """Fetch one model and return the exit code 0.

    Raises:
        ModelConfigError: it cannot be had, or the directory is another model's; with the fix.
    """
    source, into = settings.model, settings.into
    record = _record_of(source, into)
    if record is not None and record.complete:
        logger.info("complete already", extra={"directory": str(into), "bytes": record.num_bytes})
        return 0
    progress = FetchProgress(clock)
    with served(progress, settings.bind, settings.http_port, settings.pod_uid):
        return _fetch(source, into, progress, clock)


def _fetch(
    source: ModelSource, into: Path, progress: FetchProgress, clock: Callable[[], float]
) -> int:
    began = clock()
    read_index = hub.read_index if source.folder is None else bucket.read_index
    index: HubIndex | BucketIndex = read_index(source, PATTERNS)
    progress.total_bytes = index.num_bytes
    if not any(file.path == "config.json" for file in index.files):
        raise ModelConfigError(
            f"--model: {source.uri} has no config.json; name the repository or folder of a model"
        )
    try:
        into.mkdir(parents=True, exist_ok=True)
        _check_space(index, source, into)
        write_record(into, ModelRecord(source.uri, source.revision, complete=False))
    except OSError as error:
        raise _unwritable(error, source, into) from error
    report = _log_every(LOG_SECONDS, clock)
    try:
        index.download(report, into=into, count=progress.downloaded)
    except OSError as error:
        raise _unwritable(error, source, into) from error
    for file in index.files:
        check_file(file, into / file.path)
        progress.checked(file.size)
    try:
        write_record(into, ModelRecord(source.uri, source.revision, True, index.num_bytes))
    except OSError as error:
        raise _unwritable(error, source, into) from error
    logger.info(
        "complete",
        extra={
            "directory": str(into),
            "commit": index.commit,
            "bytes": index.num_bytes,
            "seconds": round(clock() - began, 1),
        },
    )
    return 0


def check_file(file: HubFile | BucketFile, path: Path) -> None:
    """Compare a file with its source; delete it if it differs.

    Raises:
        ModelUnavailableError: it is missing or differs; another run downloads it again.
    """
    present = path.is_file()
    if present and file.matches(path):
        return
    path.unlink(missing_ok=True)
    problem = "does not have the source's content" if present else "is missing"
    raise ModelUnavailableError(f"{path}: {problem}; run `vlm-worker fetch` again to download it")


def _record_of(source: ModelSource, into: Path) -> ModelRecord | None:
    """Return the record of `into`, which must not be of another model or revision."""
    record = read_record(into)
    if record is None or (record.uri, record.revision) == (source.uri, source.revision):
        return record
    raise ModelConfigError(
        f"--into: {into} is for {record.uri} at revision {record.revision}; name another directory "
        "for each model and revision"
    )


def _check_space(index: HubIndex | BucketIndex, source: ModelSource, into: Path) -> None:
    """Raise ModelConfigError if the volume lacks space for the files that are not there yet."""
    present = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
    needed = max(0, index.num_bytes - present) + SPARE_BYTES
    free = shutil.disk_usage(into).free
    if free < needed:
        raise ModelConfigError(
            f"--into: {into} has {free >> 20} MiB free, {source.uri} needs "
            f"{needed >> 20} MiB more; use a larger volume or claim"
        )


def _unwritable(error: OSError, source: ModelSource, into: Path) -> ModelConfigError:
    if isinstance(error, PermissionError) or error.filename is not None:
        return ModelConfigError(
            f"--into: {into} cannot be written: {error.strerror}; mount it writable, and let the "
            "pod's securityContext.fsGroup own it"
        )
    return hub.hub_error(error, source)


def _log_every(seconds: float, clock: Callable[[], float]) -> Callable[[str], None]:
    """A callback that logs the newest message, at most once in `seconds`."""
    last = -seconds

    def report(message: str) -> None:
        nonlocal last
        now = clock()
        if now - last >= seconds:
            last = now
            logger.info(message)

    return report
