"""TLS of the OpenAI API: a certificate and a key from a mounted Secret, reloaded when they change.

A connection keeps the certificate of its handshake. The files are those of a `kubernetes.io/tls`
Secret, as cert-manager writes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from pathlib import Path
from typing import Final

RELOAD_SECONDS: Final = 5.0
_CERTIFICATE, _KEY = "tls.crt", "tls.key"

logger = logging.getLogger(__name__)


class Certificate:
    """The TLS context of a server; `watch` keeps it up to date.

    Raises:
        ValueError: a file is missing or the pair cannot be used; the message names `--tls-dir`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digest = b""
        self._last_problem = ""
        self.context = _context()
        try:
            self._load()
        except (OSError, ValueError) as error:
            raise ValueError(f"--tls-dir={folder}: {_reason(error)}") from None

    async def watch(self) -> None:
        """Reload every `RELOAD_SECONDS`. Never returns."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Use a changed pair for new connections. If it cannot be used, the last one stays."""
        try:
            self._load()
            problem = ""
        except (OSError, ValueError) as error:
            problem = _reason(error)
        if problem and problem != self._last_problem:
            logger.warning("the last good certificate stays", extra={"reason": problem})
        self._last_problem = problem

    def _load(self) -> None:
        certificate, key = (self._folder / name for name in (_CERTIFICATE, _KEY))
        digest = hashlib.sha256(certificate.read_bytes() + b"\0" + key.read_bytes()).digest()
        if digest == self._digest:
            return
        # in a context of its own first: a pair that does not match would break the one in use
        for context in (_context(), self.context):
            context.load_cert_chain(certificate, key, password=_no_password)
        if self._digest:
            logger.info("certificate applied", extra={"sha256": digest.hex()})
        self._digest = digest


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    raise ValueError(f"{_KEY} is encrypted: store the key without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):  # an OSError, but about the contents
        return f"{_CERTIFICATE} and {_KEY} are no certificate with its key in PEM: {error.reason}"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}; mount a Secret of type kubernetes.io/tls"
    return str(error)
