"""Downloads a repository from a Hugging Face hub; says for each failure who must do what. Blocking.

huggingface_hub's own variables set address, token, proxy and CA: HF_ENDPOINT, HF_TOKEN,
HTTPS_PROXY, SSL_CERT_FILE.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from vlm_worker.core.model_files import ModelConfigError, ModelUnavailableError
from vlm_worker.settings import ModelSource

TOKEN: Final = "HF_TOKEN; in a VLMService, model.credentialsSecretRef"  # noqa: S105  no token
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it. `sha256` is that of a large file; others have a Git blob id."""

    path: str
    size: int
    blob_id: str
    sha256: str | None

    def matches(self, path: Path) -> bool:
        """Whether a file has the size and the hash that the hub lists."""
        expected = self.sha256 or self.blob_id
        return path.stat().st_size == self.size and self._digest(path) == expected

    def _digest(self, path: Path) -> str:
        """SHA-256 of a large file; of others Git's id (SHA-1 of a header and the file).

        https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        """
        if self.sha256 is not None:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: digest).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class HubIndex:
    """The files of a repository at a commit that match the patterns."""

    source: ModelSource
    patterns: tuple[str, ...]
    commit: str
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def download(
        self, progress: Callable[[str], None], *, into: Path, count: Callable[[float, float], None]
    ) -> None:
        """Download the files that are missing into `into`; see `download`."""
        download(self.source, progress, patterns=self.patterns, into=into, count=count)


def read_index(source: ModelSource, patterns: Sequence[str]) -> HubIndex:
    """List the files of `source.repository` at its revision.

    Raises:
        ModelConfigError: the hub does not list them; the message says who must do what.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    repository, api = source.repository, HfApi()
    assert repository is not None
    try:
        commit = source.revision
        if not _COMMIT.fullmatch(commit):
            commit = api.repo_info(repository, revision=commit or None).sha or ""
        listed = api.list_repo_tree(repository, recursive=True, revision=commit)
        files = [item for item in listed if isinstance(item, RepoFile)]
    except _failures() as error:
        raise hub_error(error, source) from error
    wanted = [item for item in files if any(fnmatch(item.path, one) for one in patterns)]
    return HubIndex(
        source,
        tuple(patterns),
        commit,
        tuple(
            HubFile(item.path, item.size, item.blob_id, item.lfs.sha256 if item.lfs else None)
            for item in wanted
        ),
    )


def download(
    source: ModelSource,
    progress: Callable[[str], None],
    *,
    patterns: Sequence[str],
    into: Path | None = None,
    count: Callable[[float, float], None] = lambda _done, _total: None,
) -> Path:
    """Download the files that are missing into `into`; without it, into the cache.

    `progress` gets texts, `count` the bytes that are downloaded and those of all missing files.

    Raises:
        ModelConfigError: they cannot be downloaded; the message says who must do what.
    """
    from huggingface_hub import snapshot_download

    repository = source.repository
    assert repository is not None
    options: dict[str, Any] = {
        "revision": source.revision or None,
        "cache_dir": source.cache,
        "local_dir": into,
        "allow_patterns": list(patterns),
    }
    try:
        missing = snapshot_download(repository, dry_run=True, **options)
        total = sum(file.file_size for file in missing if file.will_download)
        bar = _bar(repository, total, progress, count)
        path = snapshot_download(repository, tqdm_class=bar, **options)
    except _failures() as error:
        raise hub_error(error, source) from error
    return Path(path)


def _failures() -> tuple[type[Exception], ...]:
    """The errors of the hub, of its HTTP client, and of files."""
    from huggingface_hub.errors import HfHubHTTPError

    client = next(one for one in HfHubHTTPError.__mro__ if one.__name__ == "HTTPError")
    return (client, OSError)


def hub_error(error: BaseException, source: ModelSource) -> ModelConfigError:
    """Return the error with its cause, and after "; " who must do what."""
    at = f" at revision {source.revision}" if source.revision else ""
    cause, fix = _explain(error, source)
    kind = ModelUnavailableError if _may_pass(error) else ModelConfigError
    return kind(f"--model: {source.uri}{at}: {cause}; {fix}")


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed although nobody changes anything."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 0
        return status in (0, 408, 429) or status >= 500
    return not any(
        isinstance(one, ssl.SSLError)
        or "CERTIFICATE_VERIFY" in str(one)
        or (isinstance(one, OSError) and one.errno in _NO_SPACE)
        for one in _chain(error)
    )


def _explain(error: BaseException, source: ModelSource) -> tuple[str, str]:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            "the model is gated",
            f"accept its licence on the hub, and give a token of that account ({TOKEN})",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision", "set the revision to one of its commits"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the hub has no such repository, or does not show it to this token",
            f"correct the name, or give a token that may read it ({TOKEN})",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(error.response.status_code if error.response is not None else 0)
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in _NO_SPACE:
            where = source.cache or "the directory of models"
            return f"no space is left in {where}", "use a larger volume or claim"
    if any(
        isinstance(one, ssl.SSLError) or "CERTIFICATE_VERIFY" in str(one) for one in _chain(error)
    ):
        return (
            "the certificate of the hub is not trusted",
            "set SSL_CERT_FILE to a file with the CA that signed it",
        )
    first = str(error).partition("\n")[0]
    if any(type(one).__name__ == "ProxyError" for one in _chain(error)):
        return f"the proxy refuses the connection: {first}", "correct HTTPS_PROXY"
    return (
        f"it is not in the cache and cannot be downloaded: {first}",
        "check HF_ENDPOINT, HTTPS_PROXY, DNS, and network.modelSources of the chart",
    )


def _explain_status(status: int) -> tuple[str, str]:
    if status in (401, 403):
        return f"the hub answers {status}", f"give a token that may read the model ({TOKEN})"
    if status == 429:
        return "the hub answers 429, too many requests", f"wait, or give a token ({TOKEN})"
    if status >= 500:
        return f"the hub answers {status}", "wait until the hub works again: the pod tries again"
    return f"the hub answers {status or 'nothing'}", "check name, revision and HF_ENDPOINT"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that caused it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def progress_text(done: float, total: float, *, seconds: float) -> str:
    """Describe `done` of `total` bytes after some seconds: share, size, rate and time left."""
    text = f"{100 * done / total:.0f} % of {_size(total)}"
    rate = done / seconds if seconds > 0 else 0.0
    if rate <= 0:
        return text
    return f"{text} at {_size(rate)}/s, {(total - done) / rate:.0f} s left"


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _bar(
    repository: str,
    num_bytes: int,
    progress: Callable[[str], None],
    count: Callable[[float, float], None],
) -> Any:
    """A progress bar class that calls `progress` and `count` instead of drawing.

    Of the hub's bars it reports the one that counts bytes on disk. Its own total grows with each
    file that begins, so `num_bytes` replaces it.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Reporting(tqdm):  # type: ignore[misc]
        """Reports the state of the download."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # an argument of the hub, unknown to tqdm
            received = kwargs.get("desc") == "Downloading bytes"  # the other counts bytes on disk
            self.reports = kwargs.get("unit") == "B" and not received
            self.began = time.monotonic()
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if num_bytes and self.reports:
                seconds = time.monotonic() - self.began
                text = progress_text(min(self.n, num_bytes), num_bytes, seconds=seconds)
                progress(f"downloading {repository}: {text}")
                count(min(self.n, num_bytes), num_bytes)
            return drawn

    return Reporting
