"""Certificates of test services, issued by the openssl program, in directories as the kubelet's."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization


class Authority:
    """A CA of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.certificate, self._key = folder / "ca.crt", folder / "ca.key"
        self._num_issued = 0
        _request("-subj", "/CN=ca", "-keyout", self._key, "-out", self.certificate)

    def pair(self, role: str, *, service: str = "s", namespace: str = "n") -> Path:
        """A directory with `tls.crt`, `tls.key` and `ca.crt` of one identity."""
        self._num_issued += 1
        directory = self.folder / f"pair-{self._num_issued}"
        directory.mkdir()
        uri = f"spiffe://triptych.dev/ns/{namespace}/vlmservice/{service}/{role}"
        name = f"{role}.{service}.{namespace}.triptych.internal"
        _request(
            "-subj", "/O=triptych", "-CA", self.certificate, "-CAkey", self._key,
            "-addext", f"subjectAltName=URI:{uri},DNS:{name}",
            "-addext", "extendedKeyUsage=serverAuth,clientAuth",
            "-addext", "basicConstraints=critical,CA:FALSE",
            "-keyout", directory / "tls.key", "-out", directory / "tls.crt",
        )  # fmt: skip
        (directory / "ca.crt").write_bytes(self.certificate.read_bytes())
        return directory

    def expired(self, role: str) -> Path:
        """As `pair`; its certificate expired an hour ago."""
        directory = self.pair(role)
        file = directory / "tls.crt"
        valid = x509.load_pem_x509_certificate(file.read_bytes())
        now = datetime.datetime.now(datetime.UTC)
        old = (
            x509.CertificateBuilder(valid.issuer, valid.subject, valid.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=2))
            .not_valid_after(now - datetime.timedelta(hours=1))
        )
        for extension in valid.extensions:
            old = old.add_extension(extension.value, extension.critical)
        key = serialization.load_pem_private_key(self._key.read_bytes(), None)
        signed = old.sign(key, hashes.SHA256())  # type: ignore[arg-type]
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return directory


class Mount:
    """A mounted Secret: files are links through `..data`, which `update` replaces at once."""

    def __init__(self, path: Path, source: Path) -> None:
        path.mkdir()
        self.path = path
        self.update(source)
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (path / name).symlink_to(Path("..data") / name)

    def update(self, source: Path) -> None:
        link = self.path / "..data.new"
        link.symlink_to(source)
        link.replace(self.path / "..data")


def _request(*arguments: str | Path) -> None:
    command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    subprocess.run(
        [*command, "-nodes", "-days", "2", *map(str, arguments)], check=True, capture_output=True
    )
