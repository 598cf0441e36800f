"""Finds the API for requests: the address in --url, or a gateway pod of a service."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import aiohttp

from vlm_cli.access import condition, find_service, gateway_pods, is_ready, open_cluster
from vlm_cli.forward import forward
from vlm_cli.output import CliError, notes
from vlm_operator import names
from vlm_operator.cluster import Manifest


@dataclasses.dataclass(frozen=True)
class Options:
    """Flags that name the target; `name` or `url` is required, the others are optional."""

    name: str | None
    url: str | None
    namespace: str | None
    kubeconfig: str | None
    api_key: str | None
    model: str | None
    context: str | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """An OpenAI API.

    Attributes:
        url: base URL without `/v1`.
        model: the model's name.
        headers: of each request.
        verify: whether the certificate of an https URL is checked.
    """

    url: str
    model: str
    headers: dict[str, str]
    verify: bool = True


@contextlib.asynccontextmanager
async def open_target(options: Options) -> AsyncIterator[Target]:
    """Find the gateway, and keep a port-forward to it while the block runs.

    If the service is not Ready, print a warning.

    Raises:
        CliError: no service is named, it has no ready gateway pod, or the API does not answer.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    if options.url is not None:
        url = options.url.rstrip("/").removesuffix("/v1")
        yield Target(url, options.model or await _served_model(url, headers), headers)
        return
    if options.name is None:
        raise CliError("no service is named", "give its name, or an address with --url")
    async with open_cluster(options.kubeconfig, options.namespace, options.context) as access:
        service = await find_service(access, options.name)
        pods = await gateway_pods(access, options.name)
        if not pods:
            raise CliError(*_blocked(service))
        pod = pods[0]["metadata"]["name"]
        model = options.model or service["spec"]["model"].get("servedName") or options.name
        if not is_ready(service):
            notes().print(f"warning: {_blocked(service)[0]}", markup=False, style="yellow")
        tls = bool(service["spec"].get("gateway", {}).get("tls", {}).get("secretRef"))
        async with forward(access, pod=pod, port=names.PORT_GATEWAY) as local:
            url = local.replace("http://", "https://", 1) if tls else local
            # The API server connects to this very pod, whose certificate names the Service.
            yield Target(url, model, headers, verify=not tls)


def _blocked(service: Manifest) -> tuple[str, str]:
    """Return why a service does not answer, from its conditions, and a remedy."""
    name = service["metadata"]["name"]
    for kind in ("Accepted", "Stalled", "Ready"):
        found = condition(service, kind)
        if found is not None and found["status"] == ("True" if kind == "Stalled" else "False"):
            problem = f"{name} is not ready: {found.get('reason', '')}: {found.get('message', '')}"
            return problem, f"vlm status {name}"
    if condition(service, "Ready") is None:
        return (
            f"{name} has no status yet",
            "is the operator running? kubectl get pods -n " + names.OPERATOR_NAMESPACE,
        )
    return f"{name} has no gateway pod that is ready", f"vlm status {name}"


async def _served_model(url: str, headers: dict[str, str]) -> str:
    """Return the name of the first model that `/v1/models` lists."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{url}/v1/models") as answer,
        ):
            if answer.status == 401:
                raise CliError(f"{url} asks for a key", "pass --api-key or set VLM_API_KEY")
            answer.raise_for_status()
            body = await answer.json(content_type=None)
            return str(body["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CliError(
            f"{url} does not answer: {error or type(error).__name__}", "is the address right?"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CliError(
            f"{url}/v1/models is not a list of models", "is it an OpenAI API?"
        ) from error
