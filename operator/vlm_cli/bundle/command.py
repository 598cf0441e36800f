"""`vlm bundle`: writes what is collected of a service into one archive."""

from __future__ import annotations

import datetime
import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Annotated

import typer

from vlm_cli import flags
from vlm_cli.access import find_service, open_cluster
from vlm_cli.bundle.collect import Bundle, collect
from vlm_cli.output import CliError, console, notes


async def bundle(
    name: flags.Service,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Default: NAME-TIME.tar.gz."),
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="Last lines of each log.")] = 2000,
    namespace: flags.Namespace = None,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Write an archive for a bug report: objects, logs, statistics; no secrets and no prompts.

    Raises:
        CliError: there is no such service, the cluster does not answer, or the file cannot be
            written.
    """
    now = datetime.datetime.now(datetime.UTC)
    path = output or Path(f"vlm-bundle-{name}-{now:%Y%m%dT%H%M%SZ}.tar.gz")
    async with open_cluster(kubeconfig, namespace, context) as access:
        service = await find_service(access, name)
        notes().print(f"reading {access.namespace}/{name}", markup=False)
        found = await collect(access, service, lines=lines)
    title = f"vlm bundle of {access.namespace}/{name} at {now:%Y-%m-%dT%H:%M:%SZ}"
    content = archive(found, folder=f"vlm-bundle-{name}", title=title)
    try:
        _write(path, content)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from error
    failed = f", {len(found.failures)} not collected: see manifest.txt" if found.failures else ""
    console().print(f"{path}: {len(found.files)} files{failed}", markup=False)


def archive(found: Bundle, *, folder: str, title: str) -> bytes:
    """Return a tar.gz with the files sorted by path; equal files give equal bytes."""
    packed = io.BytesIO()
    texts = {**found.files, "manifest.txt": found.manifest(title)}
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path, text in sorted(texts.items()):
            data = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{path}")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Write a file that only the user can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
