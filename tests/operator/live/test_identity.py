"""Certificates on a real control plane, with the chart's rights and policies, without workers."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography import x509

from support.live import Live, install
from support.world import body, pool
from vlm_local.controlplane import ControlPlane

pytestmark = pytest.mark.cluster

ROLES = ("decode", "gateway")


@pytest.fixture(scope="module")
def live(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """An operator that takes full turns often, for the namespace `live`."""
    folder = tmp_path_factory.mktemp("identity")
    install(control_plane, folder)
    control_plane.kubectl("create", "namespace", "live")
    found = Live(
        control_plane,
        folder,
        "--namespace=live",
        "--resync-seconds=3",
        "--identity-check-seconds=3",
    )
    found.start()
    yield found
    control_plane.kubectl("-n", "live", "delete", "vlm", "--all", "--timeout=60s")
    assert found.stop() == 0
    control_plane.kubectl("delete", "namespace", "live", "--ignore-not-found")


def service(name: str, mode: str = "OperatorCA") -> dict[str, Any]:
    manifest = body({"identity": {"mode": mode}}, name=name, decode=pool())
    manifest["metadata"] = {"name": name, "namespace": "live"}
    return manifest


def serials(live: Live, name: str) -> dict[str, str]:
    found = {}
    for item in live.items("secrets", name):
        pem = base64.b64decode(item["data"]["tls.crt"])
        found[item["metadata"]["name"]] = f"{x509.load_pem_x509_certificate(pem).serial_number:x}"
    return found


def test_secrets_are_issued_repaired_and_never_read(live: Live):
    live.apply(service("certified"))
    names = {f"certified-{role}-identity" for role in ROLES}
    live.until(lambda: set(serials(live, "certified")) == names, seconds=3)
    live.until(
        lambda: live.condition("certified", "CertificatesReady").get("reason") == "Issued",
        seconds=3,
    )
    first = serials(live, "certified")
    stored = {item["secret"]: item for item in live.get("vlm", "certified")["status"]["identity"]}
    assert {name: item["serial"] for name, item in stored.items()} == first
    for name, item in stored.items():
        meta = live.get("secret", name)["metadata"]
        assert meta["resourceVersion"] == item["secretVersion"]
    ca = live.get("secret", "triptych-operator-ca", "triptych-system")
    assert len(ca["data"]) == 2

    # a deletion and an edit are repaired within --identity-check-seconds
    live.kubectl("-n", "live", "delete", "secret", "certified-decode-identity")
    edit = json.dumps({"data": {"tls.crt": base64.b64encode(b"x").decode()}})
    live.kubectl("-n", "live", "patch", "secret", "certified-gateway-identity", "-p", edit)
    live.until(lambda: "certified-decode-identity" in serials_or_none(live), seconds=5)
    live.until(lambda: not set(first.values()) & set(serials_or_none(live).values()), seconds=5)
    assert set(serials(live, "certified")) == names
    read = [call for call in live.calls("get", "list", "watch") if call[1] == "secrets"]
    assert {name for _, _, name in read} <= {"triptych-operator-ca"}

    # another process finds the CA and the certificates, and renews the one that is due
    before = serials(live, "certified")
    live.stop()
    expired = [{"op": "replace", "path": f"/status/identity/{ROLES.index('decode')}/notAfter",
                "value": "2020-01-01T00:00:00Z"}]  # fmt: skip
    live.kubectl(
        "-n", "live", "patch", "vlm", "certified", "--subresource=status", "--type=json",
        "-p", json.dumps(expired),
    )  # fmt: skip
    live.start()
    generation = service("certified")
    generation["spec"]["gateway"] = {"replicas": 2}
    live.apply(generation)
    live.until(lambda: live.get("vlm", "certified")["status"]["observedGeneration"] == 2, seconds=5)
    live.until(
        lambda: (
            serials(live, "certified")["certified-decode-identity"]
            != before["certified-decode-identity"]
        ),
        seconds=5,
    )
    after, kept = serials(live, "certified"), "certified-gateway-identity"
    assert after[kept] == before[kept]
    assert live.get("secret", "triptych-operator-ca", "triptych-system")["data"] == ca["data"]


def serials_or_none(live: Live) -> dict[str, str]:
    """Serials of the test's Secrets; empty while one of them is damaged."""
    try:
        return serials(live, "certified")
    except ValueError:
        return {}


def test_a_secret_of_somebody_else_is_named_in_a_condition(live: Live):
    live.kubectl(
        "-n", "live", "create", "secret", "generic", "taken-decode-identity", "--from-literal=a=b"
    )
    live.apply(service("taken"))
    live.until(
        lambda: live.condition("taken", "CertificatesReady").get("reason") == "IssuingFailed",
        seconds=3,
    )
    assert "taken-decode-identity" in live.condition("taken", "CertificatesReady")["message"]
    assert set(live.get("secret", "taken-decode-identity")["data"]) == {"a"}


def test_cert_manager_that_is_not_installed_is_named_in_a_condition(live: Live):
    manifest = service("managed", "CertManager")
    manifest["spec"]["identity"]["issuerRef"] = {"name": "internal"}
    live.apply(manifest)
    live.until(
        lambda: "install it" in live.condition("managed", "CertificatesReady").get("message", ""),
        seconds=3,
    )
