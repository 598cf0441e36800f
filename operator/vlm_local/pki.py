"""Issues the certificates of one local cluster: a CA, servers and clients.

Kubernetes reads the identity from the subject: CN is the user, O the groups. The openssl program
generates the keys (ECDSA P-256) in a folder of mode 0700.
"""

import dataclasses
import ipaddress
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import StartError, ToolMissingError

VALID_DAYS = 365


@dataclasses.dataclass(frozen=True)
class Pair:
    """A certificate and its private key, PEM files."""

    certificate: Path
    key: Path


class Authority:
    """The cluster's CA in `folder`; created at first use, then read from there."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._openssl = find_openssl(environment)
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ca = Pair(folder / "ca.crt", folder / "ca.key")
        if not self.ca.certificate.exists():
            self._run(*_REQUEST, "-x509", "-days", str(VALID_DAYS), "-subj", "/CN=triptych-local")

    @property
    def certificate(self) -> str:
        """The CA's certificate as PEM."""
        return self.ca.certificate.read_text()

    def issue(
        self, user: str, *, groups: Sequence[str] = (), addresses: Sequence[str] = ()
    ) -> Pair:
        """Return a certificate for `user`, valid as a client, and as a server on `addresses`.

        Args:
            user: the common name, such as `system:node:gpu-compute`.
            groups: Kubernetes groups, such as `system:nodes`.
            addresses: IPs and host names of the server.
        """
        stem = user.replace(":", "-").replace("/", "-")
        pair = Pair(self.folder / f"{stem}.crt", self.folder / f"{stem}.key")
        request, extensions = self.folder / f"{stem}.csr", self.folder / f"{stem}.ext"
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        names = ",".join(f"{'IP' if _is_ip(name) else 'DNS'}:{name}" for name in addresses)
        lines = [
            "extendedKeyUsage=clientAuth,serverAuth",
            *([f"subjectAltName={names}"] * bool(names)),
        ]
        extensions.write_text("\n".join(lines))
        self._run(*_request(pair.key, request), "-subj", subject)
        self._run(
            *("x509", "-req", "-days", str(VALID_DAYS), "-in", request, "-out", pair.certificate),
            *("-CA", self.ca.certificate, "-CAkey", self.ca.key, "-CAcreateserial"),
            *("-extfile", extensions),
        )
        return pair

    def signing_key(self) -> Pair:
        """Return the key that signs ServiceAccount tokens, and its public half."""
        pair = Pair(self.folder / "sa.pub", self.folder / "sa.key")
        self._run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", pair.key)
        self._run("ec", "-in", pair.key, "-pubout", "-out", pair.certificate)
        return pair

    def _run(self, *arguments: str | Path) -> None:
        answer = subprocess.run(  # noqa: S603
            [self._openssl, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            output = answer.stderr.strip()
            remedy = "OpenSSL ≥ 1.1.1 is needed."
            raise StartError(f"openssl {arguments[0]} failed: {output}", remedy)


def find_openssl(environment: Mapping[str, str]) -> str:
    """Return the path of the openssl program.

    Raises:
        ToolMissingError: openssl is not on PATH.
    """
    openssl = shutil.which("openssl", path=environment.get("PATH"))
    if openssl is None:
        raise ToolMissingError(
            "openssl is needed for the local cluster's certificates.",
            "Install it: apt install openssl, dnf install openssl, or apk add openssl.",
        )
    return openssl


def _request(key: Path | str, out: Path | str) -> list[str | Path]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    return ["req", "-new", *curve, "-keyout", key, "-out", out]


_REQUEST = _request("ca.key", "ca.crt")


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
