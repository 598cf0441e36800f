"""Probes of a container: sends them, counts the answers, reports a crossed threshold.

Success is HTTP 200…399, gRPC health SERVING, exec exit code 0, or TCP accepted.
"""

import asyncio
import dataclasses
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import grpc.aio

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
RunInside = Callable[[Sequence[str]], Awaitable[tuple[int, bytes]]]


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The interval of a probe, and the number of answers that change a verdict."""

    initial_delay_seconds: float = 0
    period_seconds: float = 10
    timeout_seconds: float = 1
    num_successes: int = 1
    num_failures: int = 3

    @classmethod
    def of(cls, probe: Mapping[str, Any]) -> "Thresholds":
        return cls(
            initial_delay_seconds=probe.get("initialDelaySeconds", 0),
            period_seconds=probe.get("periodSeconds", 10),
            timeout_seconds=probe.get("timeoutSeconds", 1),
            num_successes=probe.get("successThreshold", 1),
            num_failures=probe.get("failureThreshold", 3),
        )


@dataclasses.dataclass
class Tally:
    """Counts equal answers in a row; the verdict is None until a threshold is crossed."""

    thresholds: Thresholds
    verdict: bool | None = None
    _last: bool | None = None
    _in_a_row: int = 0

    def count(self, answer: bool) -> bool | None:
        """Count one answer; return the verdict."""
        self._in_a_row = self._in_a_row + 1 if answer == self._last else 1
        self._last = answer
        needed = self.thresholds.num_successes if answer else self.thresholds.num_failures
        if self._in_a_row >= needed:
            self.verdict = answer
        return self.verdict


@dataclasses.dataclass(frozen=True)
class Answer:
    healthy: bool
    message: str = ""


class UnknownPortError(Exception):
    """A probe names a port that no container of its pod has."""


class Prober:
    """Sends the probes of one container."""

    def __init__(
        self,
        pod_ip: str,
        ports: Mapping[str, int],
        run_inside: RunInside,
        http: aiohttp.ClientSession,
    ) -> None:
        self._ip = pod_ip
        self._ports = ports
        self._run_inside = run_inside
        self._http = http

    async def ask(self, probe: Mapping[str, Any]) -> Answer:
        """Send one probe, within its timeout."""
        timeout = Thresholds.of(probe).timeout_seconds
        try:
            async with asyncio.timeout(timeout):
                if "httpGet" in probe:
                    return await self.http_get(probe["httpGet"])
                if "grpc" in probe:
                    return await self._grpc(probe["grpc"])
                if "exec" in probe:
                    return await self._exec(probe["exec"])
                return await self._tcp(probe["tcpSocket"])
        except TimeoutError:
            return Answer(False, f"no answer within {timeout:g} s")
        except (aiohttp.ClientError, OSError, UnknownPortError) as error:
            return Answer(False, str(error) or type(error).__name__)

    async def http_get(self, action: Mapping[str, Any]) -> Answer:
        """Send a GET request; lifecycle hooks use it, too."""
        host, port = action.get("host") or self._ip, self._port(action["port"])
        scheme = action.get("scheme", "HTTP").lower()
        headers = {"User-Agent": "kube-probe/1.34", "Accept": "*/*"}
        headers |= {one["name"]: one["value"] for one in action.get("httpHeaders") or []}
        path = action.get("path", "/")
        url = f"{scheme}://{host}:{port}/{path.lstrip('/')}"
        async with self._http.get(
            url, headers=headers, ssl=_UNVERIFIED, allow_redirects=False
        ) as answer:
            healthy = 200 <= answer.status < 400
            return Answer(healthy, f"HTTP probe failed with statuscode: {answer.status}")

    async def _grpc(self, action: Mapping[str, Any]) -> Answer:
        service = action.get("service", "").encode()
        request = b"\x0a" + bytes([len(service)]) + service if service else b""
        async with grpc.aio.insecure_channel(f"{self._ip}:{self._port(action['port'])}") as channel:
            check = channel.unary_unary(HEALTH_CHECK)
            try:
                response = await check(request)
            except grpc.aio.AioRpcError as error:
                return Answer(False, f"{error.code().name}: {error.details()}")
        return Answer(response == SERVING, f"service unhealthy (responded with {response!r})")

    async def _exec(self, action: Mapping[str, Any]) -> Answer:
        code, output = await self._run_inside(action["command"])
        return Answer(code == 0, output.decode(errors="replace")[-1024:] or f"exit code {code}")

    async def _tcp(self, action: Mapping[str, Any]) -> Answer:
        _, writer = await asyncio.open_connection(
            action.get("host") or self._ip, self._port(action["port"])
        )
        writer.close()
        return Answer(True)

    def _port(self, port: int | str) -> int:
        if isinstance(port, int) or port.isdecimal():
            return int(port)
        if port not in self._ports:
            raise UnknownPortError(f"no container of the pod has a port named {port!r}")
        return self._ports[port]


async def watch(
    prober: Prober, probe: Mapping[str, Any], on_verdict: Callable[[bool | None, Answer], None]
) -> None:
    """Probe until cancelled; call `on_verdict` with each verdict and its answer."""
    thresholds = Thresholds.of(probe)
    tally = Tally(thresholds)
    await asyncio.sleep(thresholds.initial_delay_seconds)
    while True:
        answer = await prober.ask(probe)
        on_verdict(tally.count(answer.healthy), answer)
        await asyncio.sleep(thresholds.period_seconds)


async def first_verdict(prober: Prober, probe: Mapping[str, Any], *, wanted: bool | None) -> bool:
    """Probe until the verdict is `wanted`, or until there is one if that is None; return it."""
    verdicts: asyncio.Queue[bool] = asyncio.Queue()

    def on_verdict(verdict: bool | None, _: Answer) -> None:
        if verdict is not None and wanted in (None, verdict):
            verdicts.put_nowait(verdict)

    watching = asyncio.create_task(watch(prober, probe, on_verdict))
    try:
        return await verdicts.get()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def ports_of(containers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the named ports of containers."""
    return {
        port["name"]: port["containerPort"]
        for container in containers
        for port in container.get("ports") or []
        if "name" in port
    }


def _unverified() -> ssl.SSLContext:
    """Return a TLS context that checks no certificate, as a kubelet's probes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


_UNVERIFIED = _unverified()
