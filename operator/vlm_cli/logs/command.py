"""`vlm logs`: reads the logs of a service's pods, merges them, and follows them."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from vlm_cli import flags
from vlm_cli.access import Access, find_service, open_cluster
from vlm_cli.logs.lines import Line, LogLevel, Selection, parse_duration, parse_line
from vlm_cli.output import CliError, notes
from vlm_operator import names
from vlm_operator.cluster import POD, Manifest, timestamp
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.names import Role

_MAX_CONCURRENT = 8
_RELIST_SECONDS = 2.0
_BATCH_SECONDS = 0.3  # new lines of several pods are ordered within such batches
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


async def logs(
    name: flags.Service,
    role: Annotated[Role | None, typer.Option(help="Only pods of this role.")] = None,
    pod: Annotated[str | None, typer.Option(metavar="POD", help="Only this pod.")] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only lines with this id: the gateway's or X-Request-Id."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only newer lines: 45s, 10m, 1h30m.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for new lines.")] = False,
    level: Annotated[
        LogLevel | None, typer.Option(help="Only lines of this level or above, or without level.")
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", help="Logs of containers before their last restart.")
    ] = False,
    namespace: flags.Namespace = None,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Print the logs of all pods of a service in order of time.

    Raises:
        typer.BadParameter: a value of a flag is invalid.
        CliError: the service has no such pod, or the cluster does not answer.
    """
    if follow and previous:
        raise typer.BadParameter("--previous cannot be followed")
    begin = _begin(since)
    async with open_cluster(kubeconfig, namespace, context) as access:
        reader = _Reader(access, name, role=role, pod=pod, previous=previous)
        sources = await reader.sources()
        if not sources:
            await find_service(access, name)
            which = pod or (f"{role} pod" if role else "pod")
            raise CliError(f"{name} has no {which}", f"vlm status {name}")
        selection = Selection(request, level)
        lines = await reader.read(sources, since=begin)
        _print(selection.select(lines))
        if follow:
            newest = {line.source: line.at for line in lines}
            await _follow(reader, selection, newest=newest, since=begin)


@dataclasses.dataclass(frozen=True)
class Source:
    """One container of a pod."""

    pod: str
    container: str
    label: str


class _Reader:
    """Reads the logs of the containers of a service's pods."""

    def __init__(
        self, access: Access, name: str, *, role: Role | None, pod: str | None, previous: bool
    ) -> None:
        self._access = access
        self._labels = {names.LABEL_SERVICE: name} | (
            {names.LABEL_ROLE: role.value} if role else {}
        )
        self._pod = pod
        self._previous = previous
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def sources(self) -> list[Source]:
        """Return the containers whose logs are read, by name of their pod."""
        listed = await self._access.cluster.list(POD, self._access.namespace, self._labels)
        pods = sorted(listed, key=lambda item: str(item["metadata"]["name"]))
        return [
            source
            for item in pods
            if self._pod in (None, item["metadata"]["name"])
            for source in sources_of(item)
        ]

    async def read(self, sources: Iterable[Source], *, since: str | None) -> list[Line]:
        """Return the present lines of all sources; print a note for each that has no log."""
        found = await asyncio.gather(*(self._read(source, since) for source in sources))
        return [line for lines in found for line in lines]

    async def _read(self, source: Source, since: str | None) -> list[Line]:
        lines: list[Line] = []
        try:
            async with self._slots:
                stream = self._access.cluster.log(
                    self._access.namespace,
                    source.pod,
                    source.container,
                    previous=self._previous,
                    since=since,
                )
                async for raw in stream:
                    last = lines[-1].at if lines else 0.0
                    lines.append(parse_line(raw, source=source.label, last=last))
        except UnavailableError as error:
            if error.status == 0 and not lines:
                raise
            notes().print(f"{source.label}: {error.message}", markup=False)
        except ClusterError as error:
            notes().print(f"{source.label}: {error.message}", markup=False)
        return lines

    async def follow(
        self,
        source: Source,
        lines: asyncio.Queue[Line],
        *,
        newest: dict[str, float],
        since: str | None,
    ) -> None:
        """Put lines that are newer than those of `newest` into `lines`, until the container ends.

        `newest` has the time of the newest line by label of its source; this source's is updated.
        """
        last = newest.get(source.label)
        begin = since if last is None else timestamp(last)
        try:
            stream = self._access.cluster.log(
                self._access.namespace, source.pod, source.container, follow=True, since=begin
            )
            async for raw in stream:
                line = parse_line(raw, source=source.label, last=newest.get(source.label, 0.0))
                if last is None or line.at > last:
                    newest[source.label] = line.at
                    lines.put_nowait(line)
        except ClusterError:
            return  # it does not run yet, or was deleted: the next list decides


def sources_of(pod: Manifest) -> list[Source]:
    """Return the containers of a pod; the label has the container if there are several."""
    name = str(pod["metadata"]["name"])
    containers = [str(item["name"]) for item in pod["spec"].get("containers", [])]
    return [
        Source(name, container, name if len(containers) == 1 else f"{name}/{container}")
        for container in containers
    ]


async def _follow(
    reader: _Reader, selection: Selection, *, newest: dict[str, float], since: str | None
) -> None:
    """Print new lines until Ctrl-C, also those of new pods and restarted containers."""
    lines: asyncio.Queue[Line] = asyncio.Queue()
    listing = asyncio.create_task(_open_streams(reader, lines, newest=newest, since=since))
    try:
        while True:
            batch = [await lines.get()]
            await asyncio.sleep(_BATCH_SECONDS)
            while not lines.empty():
                batch.append(lines.get_nowait())
            _print(selection.select(batch))
    finally:
        listing.cancel()
        await asyncio.gather(listing, return_exceptions=True)


async def _open_streams(
    reader: _Reader, lines: asyncio.Queue[Line], *, newest: dict[str, float], since: str | None
) -> None:
    """Keep one stream open per container of the present pods."""
    async with asyncio.TaskGroup() as streams:
        tasks: dict[Source, asyncio.Task[None]] = {}
        while True:
            try:
                sources = await reader.sources()
            except ClusterError:
                sources = []  # the open streams continue
            for source in sources:
                if source not in tasks or tasks[source].done():
                    work = reader.follow(source, lines, newest=newest, since=since)
                    tasks[source] = streams.create_task(work)
            await asyncio.sleep(_RELIST_SECONDS)


def _begin(since: str | None) -> str | None:
    """Return the Kubernetes timestamp of the oldest line.

    Raises:
        typer.BadParameter: `since` is no duration.
    """
    if since is None:
        return None
    try:
        age = parse_duration(since)
    except ValueError as error:
        raise typer.BadParameter(f"--since: {error}") from None
    return timestamp((datetime.datetime.now(datetime.UTC) - age).timestamp())


def _print(lines: Sequence[Line]) -> None:
    for line in lines:
        colour = _COLOURS[sum(line.source.encode()) % len(_COLOURS)]
        typer.echo(f"{typer.style(line.source, fg=colour)}  {line.text}")
