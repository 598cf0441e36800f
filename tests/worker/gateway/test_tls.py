"""The API over HTTPS: what clients see, a renewed certificate, files that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import shutil
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from worker.gateway.stack import COLOCATED, gateway_settings, serving, stack

from vlm_worker.gateway.gateway_server import running
from vlm_worker.gateway.memory import CONNECTION_BYTES, TLS_BYTES, connection_bytes
from vlm_worker.gateway.tls import Certificate

ASK = {"model": "shapes", "prompt": "red", "max_tokens": 3}


def write(folder: Path, name: str, *, password: bytes | None = None) -> Path:
    """A self-signed certificate of 127.0.0.1 for `name`, as a Secret is mounted."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    hidden = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
    )
    return folder


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "tls.crt"))


async def test_a_request_and_a_stream_are_served_over_https(tmp_path: Path) -> None:
    folder = write(tmp_path / "tls", "one")
    async with stack(*COLOCATED, tls_dir=folder) as served:
        assert served.url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=served.url, verify=trusting(folder)) as client:
            answer = await client.post("/v1/completions", json=ASK, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 3
            body = {**ASK, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body, timeout=60) as stream:
                lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        async with httpx.AsyncClient() as client:
            stats = await client.get(f"{served.gateway.admin_url}/healthz")
            assert stats.status_code == 200, "the admin port has no TLS: probes and Prometheus"
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(served.url.replace("https://", "http://"))


async def test_a_renewed_certificate_is_used_and_open_connections_go_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "tls", "one")
    certificate = Certificate(folder)
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        served.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=certificate.context)
    async with server:
        port = server.sockets[0].getsockname()[1]

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
            context = ssl.create_default_context(cafile=str(folder / "tls.crt"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            ((_, name),) = writer.get_extra_info("peercert")["subject"][0]
            return reader, writer, name

        reader, writer, name = await connect()
        assert name == "one"
        write(folder, "two")
        certificate.reload()
        _, other, name = await connect()
        assert name == "two"
        other.close()
        writer.write(b"still here\n")
        assert await reader.readline() == b"still here\n"
        writer.close()
        await served.wait()


@pytest.mark.parametrize("broken", ["mismatch", "garbage", "missing"])
def test_a_pair_that_cannot_be_used_leaves_the_last_one(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "tls", "one")
    certificate = Certificate(folder)
    if broken == "mismatch":
        shutil.copy(write(tmp_path / "other", "two") / "tls.key", folder)
    elif broken == "garbage":
        (folder / "tls.crt").write_text("no certificate")
    else:
        (folder / "tls.crt").unlink()
    certificate.reload()
    certificate.reload()
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in warnings] == ["the last good certificate stays"]
    assert handshake(certificate.context) == "one"
    write(folder, "three")
    certificate.reload()
    assert handshake(certificate.context) == "three"


def handshake(context: ssl.SSLContext) -> str:
    """The name in the certificate that a server with this context shows."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return str(x509.load_der_x509_certificate(shown).subject.rdns[0].rfc4514_string())[3:]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"--tls-dir=.*tls\.crt: No such file.*kubernetes\.io/tls"),
        ({"tls.crt": "x", "tls.key": "y"}, r"--tls-dir=.*no certificate with its key in PEM"),
    ],
)
async def test_a_gateway_without_a_usable_pair_does_not_start(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        async with running(gateway_settings([], tls_dir=tmp_path)):
            pass


async def test_an_encrypted_key_is_refused_with_a_fix(tmp_path: Path) -> None:
    folder = write(tmp_path / "tls", "one", password=b"secret")
    with pytest.raises(ValueError, match="store the key without a password"):
        Certificate(folder)


async def test_no_version_below_1_2_is_accepted(tmp_path: Path) -> None:
    folder = write(tmp_path / "tls", "one")
    settings = gateway_settings([], tls_dir=folder)
    async with serving(settings) as gateway:
        host, port = gateway.url.removeprefix("https://").split(":")
        context = trusting(folder)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection(host, int(port), ssl=context)


def test_connections_with_tls_are_declared_with_their_buffers() -> None:
    assert connection_bytes(10, tls=True) == 10 * (CONNECTION_BYTES + TLS_BYTES)
    assert connection_bytes(10) == 10 * CONNECTION_BYTES
