"""Reads a cluster for the checks; refusals are recorded, not raised."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable

import aiohttp

from vlm_cli.access import Access, gateway_pods
from vlm_cli.doctor.facts import (
    ENDPOINT_SLICE,
    GLOBAL,
    LOCAL,
    Facts,
    Finding,
    Installation,
    Level,
    Right,
)
from vlm_cli.doctor.installed import installations
from vlm_cli.doctor.rights import OF_CLUSTER, OF_NAMESPACES, OF_USERS, of_lease
from vlm_cli.forward import forward
from vlm_cli.output import CliError
from vlm_operator import names
from vlm_operator.cluster import (
    DEPLOYMENT,
    LEASE,
    NETWORK_POLICY,
    POD,
    REVIEW,
    ROLE,
    SELF_REVIEW,
    VLM_SERVICE,
    Kind,
    Manifest,
)
from vlm_operator.errors import ClusterError, UnavailableError

_MAX_CONCURRENT = 8  # limit of concurrent requests
_OPERATORS = {names.LABEL_APP_NAME: "triptych-operator"}
_API_SERVER = {"kubernetes.io/service-name": "kubernetes"}  # in namespace default
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
        reader.read(ENDPOINT_SLICE, "default", _API_SERVER),
        *(reader.read(kind, None) for kind in GLOBAL),
        *(reader.read(kind, namespace, _LABELS.get(kind)) for kind in LOCAL),
    )
    facts = dataclasses.replace(facts, objects=reader.objects, unreadable=reader.unreadable)
    operators = installations(facts)
    for lease_namespace in sorted({item.namespace for item in operators}):
        await reader.read(LEASE, lease_namespace)
    user_rights = await reader.allowed(OF_USERS, namespace or "")
    operator_rights, problem = await _operator_rights(reader, operators)
    return dataclasses.replace(
        facts,
        user_rights=user_rights,
        operators=operator_rights,
        review_problem=problem,
        gateway=await _gateway(access, facts) if probe else None,
    )


_LABELS = {key: {names.LABEL_APP_NAME: names.APP_NAME} for key in (POD, ROLE, NETWORK_POLICY)}


class _Reader:
    """Sends requests to the API server, at most `_MAX_CONCURRENT` at a time."""

    def __init__(self, access: Access) -> None:
        self._cluster = access.cluster
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self.objects: dict[Kind, list[Manifest]] = {}
        self.unreadable: dict[Kind, str] = {}

    async def read(
        self, kind: Kind, namespace: str | None, labels: dict[str, str] | None = None
    ) -> None:
        """Add the objects of a kind to `objects`, or the refusal to `unreadable`.

        Raises:
            UnavailableError: the API server is unreachable.
        """
        try:
            async with self._slots:
                found = await self._cluster.list(kind, namespace, labels)
        except ClusterError as error:
            if error.status == 0:
                raise  # unreachable: no check is possible
            self.unreadable[kind] = "not installed" if error.status == 404 else error.message
        else:
            self.objects.setdefault(kind, []).extend(found)

    async def allowed(
        self, rights: Iterable[Right], namespace: str, *, account: tuple[str, str] | None = None
    ) -> dict[Right, bool]:
        """Review each permission of the user, or of a ServiceAccount (namespace, name).

        Raises:
            ClusterError: the user may not create the review.
        """
        rights = list(rights)
        answers = await asyncio.gather(*(self._may(item, namespace, account) for item in rights))
        return dict(zip(rights, answers, strict=True))

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
        async with self._slots:
            answer = await self._cluster.create(manifest)
        return bool(answer["status"]["allowed"])


def _subject(namespace: str, name: str) -> Manifest:
    accounts = "system:serviceaccounts"
    return {
        "user": f"system:serviceaccount:{namespace}:{name}",
        "groups": [accounts, f"{accounts}:{namespace}", "system:authenticated"],
    }


async def _operator_rights(
    reader: _Reader, operators: Iterable[Installation]
) -> tuple[dict[tuple[str, str], dict[Right, bool]], str]:
    """Return each operator's permissions by its name and namespace, or why they are unknown."""
    rights: dict[tuple[str, str], dict[Right, bool]] = {}
    try:
        for item in operators:
            account = (item.namespace, item.account)
            needed = [
                *((namespace, OF_NAMESPACES) for namespace in item.watched or ("",)),
                ("", OF_CLUSTER),
                (item.namespace, of_lease(item.lease)),
            ]
            for namespace, wanted in needed:
                answers = await reader.allowed(wanted, namespace, account=account)
                rights.setdefault((item.name, namespace), {}).update(answers)
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
            message = f"the metrics of {meta['namespace']}/{pod} cannot be fetched: {error}"
            return Finding(
                "metrics", Level.FAIL, message, "is port-forward allowed, and the pod up?"
            )
        message = f"gateway {meta['namespace']}/{pod} serves {size} lines of metrics"
        return Finding("metrics", Level.OK, message)
    return Finding("metrics", Level.WARN, "no gateway is ready, so no metrics were fetched")


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
