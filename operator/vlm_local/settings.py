"""Settings that the local cluster reads from its environment, once."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from .errors import StartError


@dataclasses.dataclass(frozen=True)
class LocalSettings:
    """Folders and environment of this machine.

    Attributes:
        cache: folder of built control planes: `$XDG_CACHE_HOME/triptych` or `~/.cache/triptych`.
        assets: `$KUBEBUILDER_ASSETS`, a folder with binaries; or None.
        environment: of the processes that we start.
    """

    cache: Path
    assets: Path | None
    environment: Mapping[str, str]

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> "LocalSettings":
        env = dict(os.environ if environment is None else environment)  # noqa: TID251
        cache = Path(env.get("XDG_CACHE_HOME") or _home(env) / ".cache")
        assets = env.get("KUBEBUILDER_ASSETS")
        return cls(cache / "triptych", Path(assets) if assets else None, env)


def _home(environment: Mapping[str, str]) -> Path:
    try:
        return Path(environment.get("HOME") or Path.home())
    except RuntimeError:
        raise StartError(
            f"HOME is not set, and the user database has no entry of uid {os.getuid()}.",
            "Set HOME or XDG_CACHE_HOME.",
        ) from None
