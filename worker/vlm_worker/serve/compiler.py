"""How torch's compiler works in a worker: what it makes is kept, and no process stays behind."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path


def keep_compiled(environ: MutableMapping[str, str]) -> None:
    """Tell torch, before it is imported; what stands there already stays.

    Its own place is /tmp, which a new container of a pod finds empty, as it would `~/.cache`, but
    for a volume. It would compile in as many processes as there are CPUs, and keep them.
    """
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache"
    environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(home) / "triptych" / "compiled"))
    environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
