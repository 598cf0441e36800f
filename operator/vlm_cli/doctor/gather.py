"""Reads a cluster for the checks; refusals are recorded, not raised."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable

import aiohttp

from vlm_cli.access import Access, gateway_pods
from vlm_cli.doctor.facts import GLOBAL, LOCAL, Facts, Finding, Installation, Level, Right
from vlm_cli.doctor.installed import installations
from vlm_cli.doctor.rights import OF_CLUSTER, OF_NAMESPACES, OF_USERS, of_lease
from vlm_cli.forward import forward
from vlm_cli.output import CliError
from vlm_operator import names
from vlm_operator.cluster import (
    DEPLOYMENT,
    LEASE,
    POD,
    REVIEW,
    ROLE,
    SELF_REVIEW,
    VLM_SERVICE,
    Kind,
    Manifest,
)
from vlm_operator.errors import ClusterError, UnavailableError

_AT_ONCE = 8  # limit of concurrent requests
_OPERATORS = {names.LABEL_APP_NAME: "triptych-operator"}
_GATEWAY_SECONDS = 5.0


async def gather(access: Access, namespace: str | None, *, now: float, probe: bool) -> Facts:
    """Read the facts for the checks, of services in one namespace or in all.

    Raises:
        UnavailableError: the API server does not answer.
    """
    reader = _Reader(access)
    facts = Facts(now=now, version=await access.cluster.version())
    await asyncio.gather(
        reader.read(DEPLOYMENT, None, _OPERATORS),
        *(reader.read(kind, None) for kind in GLOBAL),
        *(reader.read(kind, namespace, _LABELS.get(kind)) for kind in LOCAL),
    )
    facts = dataclasses.replace(facts, objects=reader.objects, unread=reader.unread)
    found = installations(facts)
    for space in sorted({item.namespace for item in found}):
        await reader.read(LEASE, space)
    mine = await reader.allowed(OF_USERS, namespace or "")
    rights, unasked = await _operators(reader, found)
    return dataclasses.replace(
        facts,
        mine=mine,
        operators=rights,
        unasked=unasked,
        gateway=await _gateway(access, facts) if probe else None,
    )


_LABELS = {key: {names.LABEL_APP_NAME: names.APP_NAME} for key in (POD, ROLE)}


class _Reader:
    """Sends requests to the API server, at most `_AT_ONCE` at a time."""

    def __init__(self, access: Access) -> None:
        self._cluster = access.cluster
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self.objects: dict[Kind, list[Manifest]] = {}
        self.unread: dict[Kind, str] = {}

    async def read(
        self, kind: Kind, namespace: str | None, labels: dict[str, str] | None = None
    ) -> None:
        """Add the objects of a kind to `objects`, or the refusal to `unread`.

        Raises:
            UnavailableError: the API server is unreachable.
        """
        try:
            async with self._turn:
                found = await self._cluster.list(kind, namespace, labels)
        except ClusterError as error:
            if error.status == 0:
                raise  # unreachable: no check is possible
            self.unread[kind] = "not installed" if error.status == 404 else error.message
        else:
            self.objects.setdefault(kind, []).extend(found)

    async def allowed(
        self, rights: Iterable[Right], namespace: str, *, account: tuple[str, str] | None = None
    ) -> dict[Right, bool]:
        """Review each permission of the user, or of a ServiceAccount (namespace, name).

        Raises:
            ClusterError: the user may not create the review.
        """
        asked = list(rights)
        answers = await asyncio.gather(*(self._may(item, namespace, account) for item in asked))
        return dict(zip(asked, answers, strict=True))

    async def _may(self, right: Right, namespace: str, account: tuple[str, str] | None) -> bool:
        resource, _, subresource = right.resource.partition("/")
        attributes = {
            "namespace": namespace,
            "verb": right.verb,
            "group": right.group,
            "resource": resource,
            "subresource": subresource,
            "name": right.name,
        }
        kind = SELF_REVIEW if account is None else REVIEW
        spec: Manifest = {"resourceAttributes": attributes}
        if account is not None:
            spec |= _subject(*account)
        manifest = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {}, "spec": spec}
        async with self._turn:
            answer = await self._cluster.create(manifest)
        return bool(answer["status"]["allowed"])


def _subject(namespace: str, name: str) -> Manifest:
    accounts = "system:serviceaccounts"
    return {
        "user": f"system:serviceaccount:{namespace}:{name}",
        "groups": [accounts, f"{accounts}:{namespace}", "system:authenticated"],
    }


async def _operators(
    reader: _Reader, found: Iterable[Installation]
) -> tuple[dict[tuple[str, str], dict[Right, bool]], str]:
    """Return each operator's permissions by its name and namespace, or why they are unknown."""
    rights: dict[tuple[str, str], dict[Right, bool]] = {}
    try:
        for item in found:
            account = (item.namespace, item.account)
            places = dict.fromkeys(item.watched or ("",), OF_NAMESPACES)
            asked = itertools.chain(places.items(), [("", OF_CLUSTER)])
            asked = itertools.chain(asked, [(item.namespace, of_lease(item.lease))])
            for space, wanted in asked:
                answers = await reader.allowed(wanted, space, account=account)
                rights.setdefault((item.name, space), {}).update(answers)
    except UnavailableError:
        raise
    except ClusterError as error:
        return {}, error.message
    return rights, ""


async def _gateway(access: Access, facts: Facts) -> Finding:
    """Fetch the metrics of one ready gateway through the API server; returns the finding."""
    for service in facts.all(VLM_SERVICE):
        meta = service["metadata"]
        here = dataclasses.replace(access, namespace=meta["namespace"])
        pods = await gateway_pods(here, meta["name"])
        if not pods:
            continue
        pod = pods[0]["metadata"]["name"]
        try:
            size = await _metrics(here, pod)
        except (CliError, aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"the metrics of {meta['namespace']}/{pod} do not come: {error}"
            return Finding(
                "metrics", Level.FAIL, message, "is port-forward allowed, and the pod up?"
            )
        message = f"gateway {meta['namespace']}/{pod} gives {size} lines of metrics"
        return Finding("metrics", Level.OK, message)
    return Finding("metrics", Level.WARN, "no gateway is ready to be asked for its metrics")


async def _metrics(access: Access, pod: str) -> int:
    """Return the number of samples of /metrics.

    Raises:
        CliError: port-forward is refused or fails.
        aiohttp.ClientError, TimeoutError: the request fails or has an error status.
    """
    timeout = aiohttp.ClientTimeout(total=_GATEWAY_SECONDS)
    async with (
        forward(access, pod=pod, port=names.PORT_GATEWAY_ADMIN) as url,
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.get(f"{url}/metrics") as answer,
    ):
        text = await answer.text()
    return sum(1 for line in text.splitlines() if line and not line.startswith("#"))
