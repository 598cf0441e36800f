"""`vlm-worker COMMAND`: parses settings from argv, then imports and runs the command's module."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from vlm_worker.errors import WorkerError
from vlm_worker.serve.process import (
    exit_with_parent,
    keep_compiled,
    log_as_json,
    log_as_text,
    only_tls_13,
    set_malloc_thresholds,
)
from vlm_worker.settings import (
    CalibrateSettings,
    FetchSettings,
    GatewaySettings,
    ServeSettings,
    Settings,
    WorkerSettings,
    parse,
)

NEEDS_USER = 3
"""Exit code of `fetch` if another attempt would fail alike. argparse uses 2."""


def main() -> None:
    """Run one command and exit with its code; a failed start prints one line with the reason."""
    # The kernel does not deliver SIGTERM to PID 1 without a handler. Until the command installs its
    # own, a deleted pod would otherwise run until its grace period ends.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    environ = os.environ  # noqa: TID251  only this module reads it
    settings = parse(sys.argv[1:], environ)
    # With shared cores, torch threads that spin take cores from the threads that they wait for: a
    # step takes twenty times as long. OpenMP reads this variable when torch is imported.
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(settings, WorkerSettings | GatewaySettings) and settings.identity_dir:
        only_tls_13(environ)
    set_malloc_thresholds(environ)
    keep_compiled(environ)
    if isinstance(settings, ServeSettings | CalibrateSettings):
        log_as_text()
    else:
        log_as_json()
    try:
        sys.exit(_run(settings))
    except (WorkerError, OSError, ValueError) as error:
        sys.exit(f"vlm-worker: {error}")


def _fetch(settings: FetchSettings) -> int:
    """Fetch a model. A Job tells the codes apart: 1 may pass, 3 needs a user."""
    from vlm_worker.core.model_files import ModelConfigError, ModelUnavailableError
    from vlm_worker.serve.fetch import run_fetch

    # a Job counts code 0 as success
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        return run_fetch(settings)
    except ModelUnavailableError:
        raise
    except ModelConfigError as error:
        sys.stderr.write(f"vlm-worker: {error}\n")
        return NEEDS_USER


def _run(settings: Settings) -> int:
    if isinstance(settings, FetchSettings):
        return _fetch(settings)
    if isinstance(settings, CalibrateSettings):
        from vlm_worker.serve.calibrate import run_calibrate

        return run_calibrate(settings)
    if not isinstance(settings, ServeSettings) and settings.parent is not None:
        exit_with_parent(settings.parent)
    if isinstance(settings, WorkerSettings):
        from vlm_worker.serve.worker import run_worker

        return asyncio.run(run_worker(settings))
    if isinstance(settings, GatewaySettings):
        from vlm_worker.serve.gateway import run_gateway

        return asyncio.run(run_gateway(settings))
    if settings.split:
        from vlm_worker.serve.split import run_split

        return asyncio.run(run_split(settings))
    from vlm_worker.serve.local import run_local

    return asyncio.run(run_local(settings))


if __name__ == "__main__":
    main()
