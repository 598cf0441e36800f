"""`vlm top`: reads /stats of all pods in turn, and prints a table after each read."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from vlm_cli import flags
from vlm_cli.access import Access, find_service, open_cluster
from vlm_cli.output import CliError, console, plain_table
from vlm_cli.pod_http import PodReader, PodReadError
from vlm_cli.top.rows import PodReading, Row, Snapshot, TtftLevel, read_stats, rows
from vlm_operator import names
from vlm_operator.cluster import POD, VLM_SERVICE, Manifest
from vlm_operator.observe import pod_states
from vlm_operator.state import PodState

_COLUMNS = (
    *("NAME", "ROLE", "VARIANT", "NODE", "READY", "INFLIGHT", "QUEUE", "KV"),
    *("TOK/S", "IMG/S", "TTFT-P95", "ENC-HIT"),
)
_NUMBERS = ("INFLIGHT", "QUEUE", "KV", "TOK/S", "IMG/S", "TTFT-P95", "ENC-HIT")


async def top(
    name: flags.ServiceName = None,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two reads; rates are over it.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, print one table, end.")] = False,
    namespace: flags.Namespace = None,
    everywhere: flags.AllNamespaces = False,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Show the load of services and of their pods, live.

    Raises:
        CliError: there is no such service, or the cluster does not answer.
    """
    async with (
        open_cluster(kubeconfig, namespace, context) as access,
        contextlib.AsyncExitStack() as stack,
    ):
        reader = _Reader(access, name, everywhere=everywhere, stack=stack)
        before = await reader.snapshot()
        if once or not console().is_terminal:
            await asyncio.sleep(interval)
            after = await reader.snapshot()
            console().print(table(rows(before, after), everywhere=everywhere))
            return
        with Live(console=console(), auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(interval)
                after = await reader.snapshot()
                live.update(table(rows(before, after), everywhere=everywhere), refresh=True)
                before = after


def table(found: Sequence[Row], *, everywhere: bool = False) -> Table:
    """Format rows; a pod without numbers has its reason in the last column."""
    has_problem = any(row.problem for row in found)
    shown = plain_table(
        *(("NAMESPACE",) if everywhere else ()),
        *_COLUMNS,
        *(("PROBLEM",) if has_problem else ()),
        numbers=_NUMBERS,
    )
    for row in found:
        cells = [
            f"  {row.pod}" if row.pod else row.service,
            row.role or "-",
            row.variant or "-",
            row.node or "-",
            row.ready,
            _whole(row.inflight),
            _queue(row),
            _kv(row),
            _rate(row.tokens_per_second),
            _rate(row.images_per_second),
            _ttft(row.ttft),
            "-" if row.cache_hit is None else f"{100 * row.cache_hit:.0f}%",
        ]
        space = [row.namespace] if everywhere else []
        problem = [row.problem.replace("[", r"\[")] if has_problem else []
        late = row.ttft is not None and row.ttft.ratio > 1
        style = "red" if row.problem else "yellow" if late else "" if row.pod else "bold"
        shown.add_row(*space, *cells, *problem, style=style)
    return shown


class _Reader:
    """Lists services and pods, and reads /stats of the pods, of one namespace or of all."""

    def __init__(
        self,
        access: Access,
        name: str | None,
        *,
        everywhere: bool,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self._access, self._name, self._everywhere = access, name, everywhere
        self._stack = stack
        self._readers: dict[str, PodReader] = {}

    async def snapshot(self) -> Snapshot:
        """Read everything once.

        Raises:
            CliError: there is no such service.
        """
        space = None if self._everywhere else self._access.namespace
        labels = {names.LABEL_APP_NAME: names.APP_NAME}
        if self._name is not None and not self._everywhere:
            services = [await find_service(self._access, self._name)]
            labels[names.LABEL_SERVICE] = self._name
        else:
            listed = await self._access.cluster.list(VLM_SERVICE, space)
            services = [item for item in listed if self._name in (None, item["metadata"]["name"])]
        if not services:
            where = "any namespace" if self._everywhere else f"namespace {space!r}"
            raise CliError(f"there is no VLMService in {where}", "look everywhere with -A")
        services.sort(key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"]))
        pods = await self._access.cluster.list(POD, space, labels)
        readings = [
            self._reading(item, pod)
            for item in pods
            for pod in pod_states([item])
            if not pod.finished
        ]
        return Snapshot(services, await asyncio.gather(*readings))

    async def _reading(self, item: Manifest, pod: PodState) -> PodReading:
        meta = item["metadata"]
        service = meta["labels"].get(names.LABEL_SERVICE, "")
        reading = PodReading(meta["namespace"], service, pod, None)
        if (item.get("status") or {}).get("phase") != "Running":
            problem = pod.blocked or "it does not run yet"
            return dataclasses.replace(reading, problem=problem)
        try:
            reader = await self._reader(meta["namespace"])
            body = await reader.get(pod.name, port=names.PORT_HTTP, path="/stats")
            stats = read_stats(json.loads(body), at=asyncio.get_running_loop().time())
        except PodReadError as error:
            return dataclasses.replace(reading, problem=pod.blocked or str(error))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return dataclasses.replace(reading, problem=f"/stats is not valid: {error!r}")
        return dataclasses.replace(reading, stats=stats)

    async def _reader(self, namespace: str) -> PodReader:
        if namespace not in self._readers:
            access = dataclasses.replace(self._access, namespace=namespace)
            reader = PodReader(access)
            self._readers[namespace] = reader
            await self._stack.enter_async_context(reader)
        return self._readers[namespace]


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _queue(row: Row) -> str:
    if row.queued is None:
        return "-"
    return f"{row.queued} ({row.queued_seconds or 0.0:.1f} s)"


def _kv(row: Row) -> str:
    if row.kv_used is None or not row.kv_capacity:
        return "-"
    share = 100 * row.kv_used / row.kv_capacity
    return f"{_thousands(row.kv_used)}/{_thousands(row.kv_capacity)} {share:.0f}%"


def _thousands(tokens: int) -> str:
    return str(tokens) if tokens < 10_000 else f"{tokens / 1000:.0f}k"


def _ttft(level: TtftLevel | None) -> str:
    if level is None:
        return "-"
    goal = "" if level.goal is None else f"/{1000 * level.goal:.0f}"
    value = "-" if level.seconds is None else f"{1000 * level.seconds:.0f}"
    return f"{value}{goal} ms"
