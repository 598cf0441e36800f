"""Certificates as OpenSSL verifies them: names, usage, key, validity and chain."""

import pathlib
import socket
import ssl
import threading
import time

import pytest
from cryptography import x509

from vlm_operator.identity.certificates import Pair, issue, load, new_authority
from vlm_operator.names import Role

NOW = float(int(time.time()))
DAY = 24 * 3600.0


@pytest.fixture(scope="module")
def authority() -> Pair:
    return new_authority(seconds=365 * DAY, now=NOW)


def leaf(authority: Pair, role: Role = Role.DECODE, *, seconds: float = DAY) -> Pair:
    return issue(authority, namespace="ns", service="demo", role=role, seconds=seconds, now=NOW)


def context(folder: pathlib.Path, pair: Pair, bundle: str, *, server: bool) -> ssl.SSLContext:
    """A TLS 1.3 context that requires a certificate of the peer, strict about RFC 5280."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    found.verify_mode = ssl.CERT_REQUIRED
    found.verify_flags |= ssl.VERIFY_X509_STRICT
    name = folder / f"{'server' if server else 'client'}.pem"
    name.write_text(pair.certificate + pair.key)
    found.load_cert_chain(name)
    found.load_verify_locations(cadata=bundle)
    return found


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Return the URI of the client as the server sees it."""
    uris: list[str] = []
    left, right = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(left, server_side=True) as connection:
                peer = connection.getpeercert() or {}
                uris.extend(value for kind, value in peer["subjectAltName"] if kind == "URI")
                connection.sendall(b"x")
        except ssl.SSLError:
            left.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(right, server_hostname=name) as connection:
            connection.recv(1)
    finally:
        right.close()
        thread.join()
    return uris[0]


def test_roles_of_a_service_authenticate_each_other(authority: Pair, tmp_path: pathlib.Path):
    server = context(tmp_path, leaf(authority), authority.certificate, server=True)
    client = context(tmp_path, leaf(authority, Role.GATEWAY), authority.certificate, server=False)
    uri = handshake(server, client, "decode.demo.ns.triptych.internal")
    assert uri == "spiffe://triptych.dev/ns/ns/vlmservice/demo/gateway"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(server, client, "prefill.demo.ns.triptych.internal")


def test_a_certificate_of_another_ca_is_refused(authority: Pair, tmp_path: pathlib.Path):
    other = new_authority(seconds=DAY, now=NOW)
    server = context(tmp_path, leaf(other), authority.certificate, server=True)
    client = context(tmp_path, leaf(authority), authority.certificate, server=False)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "decode.demo.ns.triptych.internal")
    both = authority.certificate + other.certificate
    server = context(tmp_path, leaf(other), both, server=True)
    client = context(tmp_path, leaf(authority), both, server=False)
    assert handshake(server, client, "decode.demo.ns.triptych.internal")


def test_validity_starts_in_the_past_and_ends_with_the_ca(authority: Pair):
    found = leaf(authority, seconds=1000 * DAY).validity
    assert found.not_before == NOW - 300
    assert found.not_after == authority.validity.not_after


def test_a_ca_signs_no_other_ca_and_its_key_is_not_in_its_repr(authority: Pair):
    found = x509.load_pem_x509_certificate(authority.certificate.encode())
    limits = found.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)
    assert "PRIVATE" not in repr(authority)


def test_a_stored_pair_is_read_only_if_the_key_fits(authority: Pair):
    assert load(authority.certificate, authority.key) == authority
    with pytest.raises(ValueError, match="does not belong"):
        load(authority.certificate, leaf(authority).key)
    with pytest.raises(ValueError, match="PEM"):
        load("text", authority.key)
