"""Downloads a model from an S3 bucket; says for each failure who must do what. Blocking.

list ─▶ missing or changed objects ─▶ parts, if the ETag is as listed ─▶ NAME.DIGEST.partial ─▶ NAME

AWS_* variables set endpoint, region and credentials, as for AWS's own tools: keys, a web identity
(IRSA) or a pod identity. HTTPS_PROXY and SSL_CERT_FILE set proxy and CA.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vlm_worker.core.model_files import ModelConfigError, ModelUnavailableError
from vlm_worker.serve.hub import progress_text
from vlm_worker.settings import ModelSource

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Store

KEYS: Final = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; in a VLMService, model.credentialsSecretRef"
)
OURS: Final = ".triptych-"  # how names of our own files begin
OBJECTS: Final = f"{OURS}objects.json"  # ETags of the files of a directory
PART_BYTES: Final = 64 << 20  # of one request, so that a request that stalls ends at its timeout
_CHUNK_BYTES: Final = 1 << 20  # of one write
_TIMEOUT: Final = "120s"  # of a request with its body
_FILES_AT_ONCE: Final = 8
_ATTEMPTS: Final = 3  # of a part, while no byte arrives
_RETRIES: Final = 5  # of a request, with growing pauses
_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_METADATA: Final = "169.254.169.254"  # of the node, which obstore asks if nothing names keys
_URL: Final = re.compile(r"https?://\S+")
_RETRY_TIMEOUT: Final = datetime.timedelta(seconds=60)


@dataclasses.dataclass(frozen=True, slots=True)
class BucketFile:
    """An object as the bucket lists it; `path` is relative to the folder of the model."""

    path: str
    size: int
    etag: str

    def matches(self, path: Path) -> bool:
        """Whether a file has the object's size.

        An ETag is no hash of the content in general. The download compares it with that of each
        answer, so all parts are of one object.
        """
        return path.stat().st_size == self.size


@dataclasses.dataclass(frozen=True, slots=True)
class BucketIndex:
    """The objects of a folder that match the patterns. `commit` is a digest of their ETags."""

    source: ModelSource
    patterns: tuple[str, ...]
    commit: str
    files: tuple[BucketFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def download(
        self, progress: Callable[[str], None], *, into: Path, count: Callable[[float, float], None]
    ) -> None:
        """Download the objects that are missing or differ into `into`; continue interrupted files.

        `progress` gets texts, `count` the bytes that are downloaded and those of all missing files.

        Raises:
            ModelConfigError: an object cannot be downloaded, or the folder is another one since
                the index was read.
            OSError: a file cannot be written.
        """
        etags = _read_etags(into)
        missing = [file for file in self.files if not _is_present(file, into, etags)]
        meter = _Meter(self.source.uri, sum(file.size for file in missing), progress, count)
        _fetch_files(missing, self.source, into=into, etags=etags, meter=meter)
        for partial in into.rglob("*.partial"):  # of objects that have changed since
            partial.unlink()
        if read_index(self.source, self.patterns) != self:
            raise ModelUnavailableError(
                f"--model: {self.source.uri}: the folder changed during the download; run "
                "`vlm-worker fetch` again"
            )


def read_index(source: ModelSource, patterns: Sequence[str]) -> BucketIndex:
    """List the objects below `source.folder`.

    Raises:
        ModelConfigError: the bucket does not list them, or a key is no file name.
    """
    import obstore
    from obstore.exceptions import BaseError

    files = []
    try:
        for item in (one for page in obstore.list(_store(source)) for one in page):
            path = str(item["path"])
            if path.rpartition("/")[2].startswith(OURS):
                continue  # uploaded from a directory of `vlm-worker fetch`: records of that one
            if not any(fnmatch(path, pattern) for pattern in patterns):
                continue
            if any(part in ("", ".", "..") for part in path.split("/")):
                raise ModelConfigError(
                    f"--model: {source.uri}: the key {path!r} is no file name; rename the object"
                )
            if not item["e_tag"]:
                raise ModelConfigError(
                    f"--model: {source.uri}: the store gives {path!r} no ETag, so a change during "
                    "the download would be unnoticed; copy the model into a volume"
                )
            files.append(BucketFile(path, int(item["size"]), item["e_tag"]))
    except BaseError as error:
        raise bucket_error(error, source) from error
    files.sort(key=lambda file: file.path)
    commit = _digest([dataclasses.astuple(file) for file in files])
    return BucketIndex(source, tuple(patterns), commit, tuple(files))


class _Meter:
    """Counts the bytes of all files, from several threads."""

    def __init__(
        self,
        uri: str,
        total: int,
        progress: Callable[[str], None],
        count: Callable[[float, float], None],
    ) -> None:
        self.stopped = False  # another file failed
        self._uri = uri
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._progress = progress
        self._count = count
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if not self._total:
                return  # all missing files are empty
            seconds = time.monotonic() - self._began
            text = progress_text(self._done, self._total, seconds=seconds)
            self._progress(f"downloading {self._uri}: {text}")
            self._count(self._done, self._total)


def _fetch_files(
    files: Sequence[BucketFile],
    source: ModelSource,
    *,
    into: Path,
    etags: dict[str, str],
    meter: _Meter,
) -> None:
    """Fetch several files at once, and add each that is complete to `etags`, in memory and on disk.

    If one fails, the others end with their next chunk.
    """
    store, lock = _store(source), threading.Lock()

    def fetch(file: BucketFile) -> None:
        _fetch_file(store, file, source, into=into, meter=meter)
        with lock:
            etags[file.path] = file.etag
            _write_etags(into, etags)

    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        pending = [pool.submit(fetch, file) for file in files]
        try:
            for done in concurrent.futures.as_completed(pending):
                done.result()
        except BaseException:
            meter.stopped = True
            pool.shutdown(cancel_futures=True)
            raise


def _fetch_file(
    store: S3Store, file: BucketFile, source: ModelSource, *, into: Path, meter: _Meter
) -> None:
    from obstore.exceptions import BaseError

    path = into / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{_digest(file.etag)[:12]}.partial")
    with partial.open("ab") as stream:
        if stream.tell() > file.size:
            stream.truncate(0)
        done, failures = stream.tell(), 0
        meter.add(done)
        while done < file.size:
            began = done
            try:
                for chunk in _part(store, file, done):
                    if meter.stopped:
                        return
                    stream.write(chunk)
                    stream.flush()  # a run that is killed keeps what it has
                    done += len(chunk)
                    meter.add(len(chunk))
            except (BaseError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the file cannot be written; obstore's own errors have no number
                failures = 0 if done > began else failures + 1
                failed = bucket_error(error, source)
                if failures == _ATTEMPTS or not _may_continue(failed, error):
                    raise failed from error
            else:
                failures = 0
        os.fsync(stream.fileno())
    partial.replace(path)


def _part(store: S3Store, file: BucketFile, start: int) -> Iterator[bytes]:
    """Yield the next part of an object from byte `start`, never more bytes than asked for.

    Raises:
        obstore.exceptions.BaseError: the request failed, or the object has another ETag.
        ModelUnavailableError: the answer has another length.
    """
    import obstore

    end = min(file.size, start + PART_BYTES)
    options: GetOptions = {"range": (start, end), "if_match": file.etag}
    answer, left = obstore.get(store, file.path, options=options), end - start
    for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
        left -= len(chunk)
        if left < 0:
            break
        yield bytes(chunk)
    if left != 0:
        raise ModelUnavailableError(
            f"--model: {file.path}: the answer has another length than was asked for; run "
            "`vlm-worker fetch` again"
        )


def _store(source: ModelSource) -> S3Store:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    folder = source.folder
    assert folder is not None
    bucket, prefix = folder
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={"timeout": _TIMEOUT, "allow_http": True},  # the endpoint has the scheme
            retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIMEOUT},
        )
    except (BaseError, ValueError) as error:
        raise ModelConfigError(
            f"--model: {source.uri}: {error}; correct the AWS_* variables"
        ) from error


def _may_continue(failed: ModelConfigError, error: Exception) -> bool:
    from obstore.exceptions import PreconditionError

    return isinstance(failed, ModelUnavailableError) and not isinstance(error, PreconditionError)


def bucket_error(error: Exception, source: ModelSource) -> ModelConfigError:
    """Return the error with its cause, and after "; " who must do what."""
    cause, fix, passes = _explain(error)
    kind = ModelUnavailableError if passes else ModelConfigError
    return kind(f"--model: {source.uri}: {cause}; {fix}")


def _explain(error: Exception) -> tuple[str, str, bool]:
    """Return cause and fix, and whether another attempt may succeed if nobody changes anything."""
    from obstore import exceptions

    text = " ".join(str(error).split("\n\nDebug source:")[0].split())
    asked_metadata = f"http://{_METADATA}/" in text
    text = _URL.sub("the store", text)  # it has names of the user, which may look like a cause
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0  # the errors of a list have no types of their own
    if isinstance(error, exceptions.NotFoundError) or status == 404:
        return "there is no such bucket or object", "correct the uri or AWS_ENDPOINT_URL", False
    refused = (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError)
    if isinstance(error, refused) or status in (401, 403) or "ExpiredToken" in text:
        fix = f"give keys that may list and read the folder ({KEYS})"
        return "the bucket refuses these credentials", fix, False
    if isinstance(error, exceptions.PreconditionError):
        return "an object changed during the download", "run `vlm-worker fetch` again", True
    if asked_metadata or "credentials" in text.lower():
        return (
            "there are no credentials",
            f"give keys ({KEYS}), or a ServiceAccount with a role",
            False,
        )
    if "certificate" in text.lower():
        fix = "set SSL_CERT_FILE to a file with the CA that signed it"
        return "the certificate of the endpoint is not trusted", fix, False
    if "redirect" in text.lower() or status in (301, 307) or "HeaderMalformed" in text:
        return "the bucket is in another region", "set AWS_REGION to that of the bucket", False
    fix = "check AWS_ENDPOINT_URL, HTTPS_PROXY, DNS, and network.modelSources of the chart"
    return f"it cannot be read: {text[:300]}", fix, True


def _is_present(file: BucketFile, into: Path, etags: dict[str, str]) -> bool:
    path = into / file.path
    return etags.get(file.path) == file.etag and path.is_file() and file.matches(path)


def _read_etags(into: Path) -> dict[str, str]:
    try:
        found = json.loads((into / OBJECTS).read_text())
    except (OSError, ValueError):
        return {}  # each file is downloaded again
    return found if isinstance(found, dict) else {}


def _write_etags(into: Path, etags: dict[str, str]) -> None:
    partial = into / f"{OBJECTS}.partial"
    partial.write_text(json.dumps(etags, sort_keys=True))
    partial.replace(into / OBJECTS)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
