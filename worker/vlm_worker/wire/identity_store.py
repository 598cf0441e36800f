"""Reads the identity of this process from a directory, and reads it again if it changes.

ca.crt, tls.crt, tls.key ─▶ a handshake with itself ─▶ Credentials ─▶ new handshakes
                             └ any problem: the last ones stay; log line and counter

A handshake in memory uses the pair as peers do: key, chain and usage are checked without a parser.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from vlm_worker.metrics import COUNTER, GAUGE, Metric
from vlm_worker.types import Role
from vlm_worker.wire.identity import Certificate, IdentityError, ServiceIdentity

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
DATA_PROTOCOL: Final = "triptych-data/1"
"""The ALPN name of data connections: a port of gRPC is never taken for a data port."""
FILES: Final = ("ca.crt", "tls.crt", "tls.key")
MAX_HANDSHAKE_STEPS: Final = 10
_NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME: `Certificate.problem` decides about the time, with a better text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """The bytes of the three files."""

    ca: bytes
    certificate: bytes
    key: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """One pair that was usable when it was read. `generation` counts the pairs of the process."""

    generation: int
    files: Files
    certificate: Certificate
    client: ssl.SSLContext
    data_client: ssl.SSLContext
    data_server: ssl.SSLContext

    @property
    def identity(self) -> ServiceIdentity:
        return self.certificate.identity

    @property
    def channel(self) -> grpc.ChannelCredentials:
        files = self.files
        return grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)

    @property
    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        files = self.files
        pairs = [(files.key, files.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, files.ca)


class IdentityStore:
    """The credentials of one process; `reload` is their only writer.

    Raises:
        IdentityError: the directory holds no usable pair for `role`, at start.
    """

    def __init__(
        self, directory: Path, role: Role, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._role = role
        self._clock = clock
        self._seen: Files | None = None
        self._problem = ""
        self.num_reloads = Counter({"applied": 0, "rejected": 0})
        try:
            self.now = self._load(read_files(directory), generation=1)
        except IdentityError as error:
            raise IdentityError(f"--identity-dir={directory}: {error}") from None

    def reload(self) -> None:
        """Use the files if they changed. If they are not usable, the last pair stays."""
        try:
            files = read_files(self._directory)
            if files == self._seen:
                return
            self.now = self._load(files, generation=self.now.generation + 1)
        except IdentityError as error:
            if str(error) != self._problem:
                self.num_reloads["rejected"] += 1
                self._problem = str(error)
                logger.warning("the last identity stays", extra={"reason": self._problem})
            return
        self._problem = ""
        self.num_reloads["applied"] += 1
        logger.info("identity applied", extra={"serial": self.now.certificate.serial})

    async def watch(self) -> None:
        """Reload every `POLL_SECONDS`. Never returns."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.reload()

    def _load(self, files: Files, *, generation: int) -> Credentials:
        certificate = _examine(self._directory, files)
        contexts = [
            client_context(self._directory, files),
            _context(ssl.PROTOCOL_TLS_CLIENT, self._directory, files, DATA_PROTOCOL),
            _context(ssl.PROTOCOL_TLS_SERVER, self._directory, files, DATA_PROTOCOL),
        ]
        if problem := certificate.problem(role=self._role, now=self._clock()):
            raise IdentityError(problem)
        if read_files(self._directory) != files:
            raise IdentityError("the files changed while they were read: they are read again")
        self._seen = files
        return Credentials(generation, files, certificate, *contexts)


IDENTITY_METRICS: Final[tuple[Metric[IdentityStore], ...]] = (
    Metric("triptych_identity_expiry_seconds", GAUGE, "When the certificate in use expires.",
           lambda store: store.now.certificate.not_after),
    Metric("triptych_identity_reloads_total", COUNTER, "Changes of the identity's files.",
           lambda store: store.num_reloads, label="result"),
)  # fmt: skip


def read_files(directory: Path) -> Files:
    """Raises IdentityError with the file that cannot be read."""
    contents = []
    for name in FILES:
        try:
            contents.append((directory / name).read_bytes())
        except OSError as error:
            raise IdentityError(
                f"{name}: {error.strerror or error}; mount a kubernetes.io/tls Secret with ca.crt"
            ) from None
    return Files(*contents)


def client_context(directory: Path, files: Files) -> ssl.SSLContext:
    """TLS 1.3 with both certificates. The caller compares identities; hosts are IP addresses."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, directory, files)


def _context(
    protocol: int, directory: Path, files: Files, application: str = "h2"
) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([application])
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection does a whole handshake, so each peer is checked
    try:
        context.load_verify_locations(cadata=files.ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise IdentityError(f"ca.crt holds no PEM certificate: {error}") from None
    try:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key", lambda: "")
    except (ssl.SSLError, OSError) as error:
        raise IdentityError(
            f"tls.crt and tls.key are no pair of a certificate and its key: {error}"
        ) from None
    return context


def _examine(directory: Path, files: Files) -> Certificate:
    """Do a handshake with itself in memory; returns the certificate."""
    contexts = [
        client_context(directory, files),
        _context(ssl.PROTOCOL_TLS_SERVER, directory, files),
    ]
    for context in contexts:
        context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [contexts[0].wrap_bio(back, there), contexts[1].wrap_bio(there, back, server_side=True)]
    try:
        for _ in range(MAX_HANDSHAKE_STEPS):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLError as error:
        raise IdentityError(f"tls.crt is not accepted by its own ca.crt: {error}") from None
    return Certificate.of_peer(ends[0].getpeercert())
