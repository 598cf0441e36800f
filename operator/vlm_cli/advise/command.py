"""`vlm advise`: reads /stats of a service's pods for some time, and prints the levers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import aiohttp
import typer

from vlm_cli import flags
from vlm_cli.access import Access, find_service, is_ready, open_cluster
from vlm_cli.advise.levers import Service, report
from vlm_cli.advise.profile import Snapshot, profile
from vlm_cli.forward import forward
from vlm_cli.output import CliError, Format, emit, notes
from vlm_cli.sections import show, to_data
from vlm_operator import names
from vlm_operator.api import quantity
from vlm_operator.cluster import POD, Manifest
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.scrape import parse_stats

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_MIN_ROUNDS = 2
_QUANTISED_KV = ("Int8", "FP8", "VisionInt8", "TextInt8", "VisionKivi4")


async def advise(
    name: Annotated[str, flags.service_argument("A VLMService with traffic.")],
    seconds: Annotated[float, typer.Option(min=1, help="Length of the measurement.")] = 60.0,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two reads.")] = 5.0,
    explain: Annotated[bool, typer.Option("--explain", help="Print formulas.")] = False,
    namespace: flags.Namespace = None,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
    output: flags.Output = Format.TABLE,
) -> None:
    """Measure a running service by its own counters, and say which change would help most.

    Raises:
        CliError: there is no such service, no pod is ready, or no pod answered twice.
    """
    async with open_cluster(kubeconfig, namespace, context) as access:
        manifest = await find_service(access, name)
        snapshots = await _snapshots(access, name, seconds=seconds, interval=interval)
    found = profile(snapshots)
    if not found.roles:
        raise CliError(f"no worker of {name} answered twice", f"vlm status {name}")
    sections = report(found, read_service(manifest))
    if output is Format.TABLE:
        show(sections, explain=explain)
    else:
        emit(to_data(sections, explain=explain), output)


def read_service(manifest: Manifest) -> Service:
    """Return what the advice needs of a VLMService; the price of a pod is its variants' mean."""
    spec, status = manifest["spec"], manifest.get("status") or {}
    pools, slo = spec.get("pools") or {}, spec.get("slo") or {}
    replicas: dict[Role, int] = {}
    price: dict[Role, float] = {}
    for role in POOL_ROLES:
        if role.value not in pools:
            continue
        state = (status.get("pools") or {}).get(role.value) or {}
        replicas[role] = int(state.get("replicas", 0))
        costs = [
            (float(quantity.parse(str(variant["costPerHour"]))), int(variant.get("replicas", 0)))
            for variant in state.get("variants") or []
            if "costPerHour" in variant
        ]
        if pods := sum(count for _, count in costs):
            price[role] = sum(cost for cost, _ in costs) / pods
    arguments = [
        str(argument)
        for pool in pools.values()
        for argument in (pool.get("engine") or {}).get("extraArgs") or []
    ]
    return Service(
        name=manifest["metadata"]["name"],
        replicas=replicas,
        price=price,
        has_int8_kv=spec["model"].get("kvCacheDtype") in _QUANTISED_KV,
        has_rounded_weights=_rounds_layers(spec["model"], arguments),
        ttft_goal=_seconds(slo, "ttftP95Milliseconds"),
        itl_goal=_seconds(slo, "itlP95Milliseconds"),
    )


def _seconds(slo: Mapping[str, Any], name: str) -> float | None:
    return slo[name] / 1000 if slo.get(name) is not None else None


async def _snapshots(
    access: Access, name: str, *, seconds: float, interval: float
) -> list[Snapshot]:
    """Read /stats of all ready pods at the start, at each interval, and at the end."""
    pods = [
        pod["metadata"]["name"]
        for pod in await access.cluster.list(POD, access.namespace, {names.LABEL_SERVICE: name})
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
    ]
    if not pods:
        raise CliError(f"no pod of {name} is ready", f"vlm status {name}")
    rounds = max(_MIN_ROUNDS, round(seconds / interval) + 1)
    notes().print(f"reading {len(pods)} pods for {seconds:.0f} s", markup=False)
    found: list[Snapshot] = []
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=_TIMEOUT))
        urls = {
            pod: await stack.enter_async_context(forward(access, pod=pod, port=names.PORT_HTTP))
            for pod in pods
        }
        clock = asyncio.get_running_loop().time
        begin = clock()
        for number in range(rounds):
            await asyncio.sleep(max(0.0, begin + number * seconds / (rounds - 1) - clock()))
            reads = (_read(session, pod, url, clock()) for pod, url in urls.items())
            found += [one for one in await asyncio.gather(*reads) if one is not None]
    return found


async def _read(session: aiohttp.ClientSession, pod: str, url: str, at: float) -> Snapshot | None:
    """Return the /stats of a pod; None if it does not answer, as after its end."""
    try:
        async with session.get(f"{url}/stats") as answer:
            answer.raise_for_status()
            value = await answer.json(content_type=None)
        counters = {key: int(count) for key, count in value["counters"].items()}
        return Snapshot(pod, at, parse_stats(value), counters)
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(f"/stats of pod {pod} is not valid: {error!r}") from error


def _rounds_layers(model: Mapping[str, Any], arguments: Iterable[str]) -> bool:
    """Whether the layers of the language model, which a step reads, are rounded in some pool."""
    given = [text.removeprefix("--weights=") for text in arguments if text.startswith("--weights=")]
    by_argument = any(text.startswith("int") or "layers=int" in text for text in given)
    return by_argument or (model.get("weights") or {}).get("layers", "Auto") != "Auto"
