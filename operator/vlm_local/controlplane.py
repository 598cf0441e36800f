"""Runs a Kubernetes control plane as four processes, which end with their parent.

etcd ◀─ kube-apiserver ◀─ kube-controller-manager, kube-scheduler
           │ audit.log: every request with its user          (Node, RBAC; Pod Security on)
           └ kubeconfig: the administrator
"""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from . import build, flags, pki
from .client import Access, ApiError, Client
from .errors import PortTakenError, StartError
from .settings import LocalSettings
from .subprocesses import Child, spawn
from .waiting import until

READY_SECONDS = 60
STOP_SECONDS = 5
ATTEMPTS = 3
CRD_TRIES = 50
WAIT_FOR_CRDS = ("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")


def await_crds(kubectl: Callable[..., object], *, failure: type[Exception]) -> None:
    """Wait until every CRD is established.

    `kubectl wait` fails at once for a CRD without conditions, so it is retried.

    Args:
        kubectl: runs kubectl with these arguments.
        failure: what `kubectl` raises, and this function if a CRD is not established in time.
    """
    for _ in range(CRD_TRIES - 1):
        with contextlib.suppress(failure):
            kubectl(*WAIT_FOR_CRDS)
            return
    kubectl(*WAIT_FOR_CRDS)


class ControlPlane:
    """One cluster without nodes; an async context manager, or `start` and `stop`.

    Args:
        settings: None means those of the environment.
        folder: folder (mode 0700) for keys, data and logs; None means one that `stop` removes.
        port: port of the API server; 0 means any free port.
        address: address of the API server; not loopback if pods have network namespaces.
        services: addresses of Services: a range, or one of each family, separated by a comma.
        progress: gets one line about each step.
    """

    def __init__(
        self,
        *,
        settings: LocalSettings | None = None,
        folder: Path | None = None,
        port: int = 0,
        address: str = flags.LOOPBACK,
        services: str = flags.SERVICES,
        progress: build.Progress = lambda _: None,
    ) -> None:
        self._settings = settings or LocalSettings.read()
        self._permanent_folder = folder
        self._progress = progress
        self._children: list[Child] = []
        self._address = address
        self._services = services
        self._requested_port = port
        self._port = 0
        self._access: Access | None = None
        self.folder = Path()
        self.binaries: Mapping[str, Path] = {}

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def access(self) -> Access:
        """The administrator's credentials, once the control plane is started."""
        assert self._access is not None
        return self._access

    @property
    def audit_log(self) -> Path:
        """One JSON line per request: user, verb, objectRef, responseStatus."""
        return self.folder / "audit.log"

    def audited(self, *, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the requests in the audit log from byte `since`, and the offset after them.

        An incomplete last line is not read.
        """
        with self.audit_log.open("rb") as log:
            log.seek(since)
            text = log.read()
        end = text.rfind(b"\n") + 1
        return [json.loads(line) for line in text[:end].splitlines()], since + end

    @property
    def server(self) -> str:
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"https://{host}:{self._port}"

    def client(self) -> Client:
        """Return a client of the administrator: `async with cp.client() as api`."""
        return Client(self.access)

    def authority(self) -> pki.Authority:
        """Return the cluster's CA, which also signs the nodes' certificates."""
        return pki.Authority(self.folder / "pki", self._settings.environment)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator.

        Raises:
            subprocess.CalledProcessError: kubectl failed and `check` is true; see `stderr`.
        """
        command = [str(self.binaries["kubectl"]), f"--kubeconfig={self.kubeconfig}", *arguments]
        env = {**self._settings.environment, "HOME": str(self.folder)}
        return subprocess.run(  # noqa: S603
            command, input=stdin, capture_output=True, text=True, env=env, check=check
        )

    def await_crds(self) -> None:
        """See the function `await_crds`."""
        await_crds(self.kubectl, failure=subprocess.CalledProcessError)

    async def __aenter__(self) -> "ControlPlane":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    async def start(self) -> None:
        """Start the four processes and return when the API answers and its controllers run.

        Raises:
            LocalError: a program is missing, a build or a process failed, or the port is in use.
        """
        self.binaries = build.find_binaries(self._settings, progress=self._progress)
        self.folder = self._permanent_folder or Path(tempfile.mkdtemp(prefix="triptych-"))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        start = time.monotonic()
        try:
            await self._start_on_free_ports()
        except BaseException:
            self.stop()
            raise
        elapsed = time.monotonic() - start
        self._progress(f"control plane {build.KUBERNETES_VERSION}: ready after {elapsed:.1f} s")

    def stop(self) -> None:
        """Stop the processes in reverse order; remove the folder if it is temporary."""
        self._stop_processes()
        if self._permanent_folder is None and self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _stop_processes(self) -> None:
        for child in reversed(self._children):
            child.stop(grace_seconds=STOP_SECONDS if child.name == "etcd" else 1)
        self._children.clear()

    async def _start_on_free_ports(self) -> None:
        """Start the processes; if a port is in use by then, retry with other ports."""
        if self._requested_port:
            _require_free(self._address, self._requested_port)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._start_processes()
            except StartError as error:
                if attempt == ATTEMPTS or "address already in use" not in str(error):
                    raise
                self._stop_processes()
                shutil.rmtree(self.folder / "etcd")
            else:
                return

    async def _start_processes(self) -> None:
        etcd_port, peer_port, free_port = free_ports(3)
        self._port = self._requested_port or free_port
        authority = self.authority()
        identities = flags.issue(authority, self._address, self._services)
        etcd = f"http://127.0.0.1:{etcd_port}"
        self._spawn("etcd", flags.etcd(self.folder, etcd, f"http://127.0.0.1:{peer_port}"))
        (self.folder / "audit.yaml").write_text(json.dumps(flags.AUDIT_POLICY))
        self._spawn(
            "kube-apiserver",
            flags.apiserver(
                self.folder, etcd, self._address, self._port, identities, self._services
            ),
        )
        for user, file in flags.USERS.items():
            pair = identities.clients[user]
            access = Access(
                self.server,
                authority.certificate,
                pair.certificate.read_text(),
                pair.key.read_text(),
            )
            if access.write(self.folder / file) == self.kubeconfig:
                self._access = access
        await self._wait_until_ready()
        self._spawn(
            "kube-controller-manager",
            flags.controller_manager(self.folder, self._address, identities),
        )
        self._spawn("kube-scheduler", flags.scheduler(self.folder))
        await self._wait_for_service_account()

    def _spawn(self, name: str, arguments: list[str]) -> None:
        self._children.append(
            spawn(
                name,
                [self.binaries[name], *arguments],
                log=self.folder / f"{name}.log",
                environment=self._settings.environment,
            )
        )

    async def _wait_until_ready(self) -> None:
        async with self.client() as api:
            await self._until(lambda: api.text("/readyz"), "the API server to be ready")

    async def _wait_for_service_account(self) -> None:
        """Wait for the default ServiceAccount: pods need it, and it shows that controllers run."""
        async with self.client() as api:
            path = "/api/v1/namespaces/default/serviceaccounts/default"
            await self._until(lambda: api.get(path), "the controllers to run")

    async def _until(self, ask: Callable[[], Awaitable[object]], awaited: str) -> None:
        problem = "no answer"

        async def answered() -> bool:
            nonlocal problem
            for child in self._children:
                child.require_running()
            try:
                await ask()
            except (ApiError, OSError) as error:
                problem = str(error)
                return False
            return True

        try:
            await until(answered, seconds=READY_SECONDS, awaited=awaited)
        except TimeoutError as error:
            raise StartError(f"{error} ({problem})", f"The logs are in {self.folder}.") from error


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _require_free(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise PortTakenError(
                f"Port {port} on {address} is taken.",
                f"Choose another, or see who has it: ss -ltnp 'sport = :{port}'",
            ) from error
