"""A real Kubernetes control plane as four processes, ready in seconds, gone with its parent.

etcd ◀─ kube-apiserver ◀─ kube-controller-manager, kube-scheduler
           │ audit.log: every request with its user          (Node, RBAC; Pod Security on)
           └ kubeconfig: the administrator
"""

import asyncio
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from . import build, flags, pki
from .client import Access, ApiError, Client
from .errors import PortTakenError, StartError
from .settings import LocalSettings
from .spawn import Child, spawn
from .waiting import until

READY_SECONDS = 60
STOP_SECONDS = 5
ATTEMPTS = 3


CRD_TRIES = 50
WAIT_FOR_CRDS = ("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")


class ControlPlane:
    """One cluster without nodes; an async context manager, or `start` and `stop`.

    Its folder (mode 0700) holds keys, data and logs, and is removed at the end unless it was given.

    Args:
        settings: The environment's, if not given.
        folder: Where to keep everything; a temporary one if not given.
        port: Of the API server; 0 for any free one.
        address: Of the API server. One of this machine, if pods have network namespaces.
        progress: Told in a line what is being done.
    """

    def __init__(
        self,
        *,
        settings: LocalSettings | None = None,
        folder: Path | None = None,
        port: int = 0,
        address: str = flags.LOOPBACK,
        progress: build.Progress = lambda _: None,
    ) -> None:
        self._settings = settings or LocalSettings.read()
        self._given = folder
        self._progress = progress
        self._children: list[Child] = []
        self._address = address
        self._asked_port = port
        self._port = 0
        self.folder = Path()
        self.binaries: Mapping[str, Path] = {}

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON line per request: user, verb, objectRef, responseStatus."""
        return self.folder / "audit.log"

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://{self._address}:{self._port}"

    def client(self) -> Client:
        """Return a client of the administrator: `async with cp.client() as api`."""
        return Client(Access.read(self.kubeconfig))

    def authority(self) -> pki.Authority:
        """Return the cluster's CA, which vouches for nodes too."""
        return pki.Authority(self.folder / "pki", self._settings.environment)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator, as a user would type it.

        Raises:
            subprocess.CalledProcessError: It failed and `check` is true; `stderr` says why.
        """
        command = [str(self.binaries["kubectl"]), f"--kubeconfig={self.kubeconfig}", *arguments]
        env = {**self._settings.environment, "HOME": str(self.folder)}
        return subprocess.run(  # noqa: S603
            command, input=stdin, capture_output=True, text=True, env=env, check=check
        )

    def await_crds(self) -> None:
        """Wait until every CRD is established.

        `kubectl wait` fails at once for a CRD whose conditions are still null: it is asked again.

        Raises:
            subprocess.CalledProcessError: One is not established in time; `stderr` says why.
        """
        for _ in range(CRD_TRIES - 1):
            if self.kubectl(*WAIT_FOR_CRDS, check=False).returncode == 0:
                return
        self.kubectl(*WAIT_FOR_CRDS)

    async def __aenter__(self) -> "ControlPlane":
        """Start it."""
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop it."""
        await asyncio.to_thread(self.stop)

    async def start(self) -> None:
        """Start the four processes and return when the API answers and its controllers run.

        Raises:
            LocalError: A program is missing, a build or a process failed, the port is taken.
        """
        self.binaries = build.find_binaries(self._settings, progress=self._progress)
        self.folder = self._given or Path(tempfile.mkdtemp(prefix="triptych-"))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            await self._start_on_free_ports()
        except BaseException:
            self.stop()
            raise
        elapsed = time.monotonic() - started
        self._progress(f"control plane {build.KUBERNETES_VERSION}: ready after {elapsed:.1f} s")

    def stop(self) -> None:
        """End what was started, in reverse order, and remove the folder unless it was given."""
        self._stop_processes()
        if self._given is None and self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _stop_processes(self) -> None:
        for child in reversed(self._children):
            child.stop(grace_seconds=STOP_SECONDS if child.name == "etcd" else 1)
        self._children.clear()

    async def _start_on_free_ports(self) -> None:
        """Start; if another process took a port since we found it free, start on others."""
        if self._asked_port:
            _require_free(self._address, self._asked_port)
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
        self._port = self._asked_port or free_port
        authority = self.authority()
        identities = flags.issue(authority, self._address)
        etcd = f"http://127.0.0.1:{etcd_port}"
        self._spawn("etcd", flags.etcd(self.folder, etcd, f"http://127.0.0.1:{peer_port}"))
        (self.folder / "audit.yaml").write_text(json.dumps(flags.AUDIT_POLICY))
        self._spawn(
            "kube-apiserver",
            flags.apiserver(self.folder, etcd, self._address, self._port, identities),
        )
        for user, file in flags.USERS.items():
            pair = identities.clients[user]
            access = Access(
                self.server,
                authority.certificate,
                pair.certificate.read_text(),
                pair.key.read_text(),
            )
            access.write(self.folder / file)
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
        """The first thing a pod needs, and proof that the controllers are at work."""
        async with self.client() as api:
            path = "/api/v1/namespaces/default/serviceaccounts/default"
            await self._until(lambda: api.get(path), "the controllers to run")

    async def _until(self, ask: Callable[[], Awaitable[object]], awaited: str) -> None:
        refusal = "no answer"

        async def answered() -> bool:
            nonlocal refusal
            for child in self._children:
                child.require_running()
            try:
                await ask()
            except (ApiError, OSError) as error:
                refusal = str(error)
                return False
            return True

        try:
            await until(answered, seconds=READY_SECONDS, awaited=awaited)
        except TimeoutError as error:
            raise StartError(f"{error} ({refusal})", f"The logs are in {self.folder}.") from error


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _require_free(address: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise PortTakenError(
                f"Port {port} on {address} is taken.",
                f"Choose another, or see who has it: ss -ltnp 'sport = :{port}'",
            ) from error
