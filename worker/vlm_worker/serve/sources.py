"""Provides a model's files: from a directory, or downloaded from a hub into a cache.

huggingface_hub's own variables, HF_ENDPOINT and HF_TOKEN, set the hub's address and token.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.settings import ModelSource

logger = logging.getLogger(__name__)

GATEWAY_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
PATTERNS = (*GATEWAY_PATTERNS, "*.safetensors")


def fetch_model(
    source: ModelSource, progress: Callable[[str], None], *, patterns: Sequence[str] = PATTERNS
) -> Path:
    """Download the files that are missing; returns the model's directory. Blocking.

    Raises:
        ModelConfigError: no such directory or repository exists, or the hub is not reachable.
    """
    repository = source.repository
    if repository is None:
        path = Path(source.uri)
        if not (path / "config.json").exists():
            problem = "has no config.json" if path.is_dir() else "is no directory"
            raise ModelConfigError(
                f"--model: {path} {problem}; name the folder of a model, or hf://ORG/NAME"
            )
        return path
    progress(f"downloading {repository}")
    return _download(repository, source, progress, patterns)


def _download(
    repository: str,
    source: ModelSource,
    progress: Callable[[str], None],
    patterns: Sequence[str],
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            repository,
            revision=source.revision or None,
            cache_dir=source.cache,
            allow_patterns=list(patterns),
            tqdm_class=_bar(repository, progress),
        )
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise ModelConfigError(
            f"--model: {source.uri} at revision {source.revision or 'main'}: the hub says "
            f"{status}; check name, revision and credentials"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelConfigError(
            f"--model: {source.uri} is not in the cache and cannot be downloaded: {error}"
        ) from error
    return Path(path)


def _bar(repository: str, progress: Callable[[str], None]) -> Any:
    """A progress bar class that calls `progress` instead of drawing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Reporting(tqdm):  # type: ignore[misc]
        """Reports the state of the download."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # an argument of the hub, unknown to tqdm
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.total:
                done = f"{self.n:,.0f} of {self.total:,.0f} {self.unit.strip()}"
                progress(f"downloading {repository}: {done}")
            return drawn

    return Reporting
