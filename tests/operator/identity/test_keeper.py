"""Secrets and Certificates of a service in a cluster in memory, through the operator's turns."""

import asyncio
import base64
from typing import Any

import pytest
from cryptography import x509

from support.fakes import FakeCluster
from support.world import World, body
from vlm_operator.cluster import CERTIFICATE, DEPLOYMENT, EVENT, SECRET, VLM_SERVICE, Manifest
from vlm_operator.errors import ClusterError, IdentityError
from vlm_operator.identity.authority import Authority
from vlm_operator.metrics import IDENTITY_EXPIRY

HOUR = 3600.0
ROLES = ("decode", "encoder", "gateway", "prefill")
ISSUER = {"mode": "CertManager", "issuerRef": {"name": "internal", "kind": "ClusterIssuer"}}


def world(identity: Manifest | None = None) -> World:
    spec = {"identity": {"mode": "OperatorCA"} if identity is None else identity}
    found = World(body(spec))
    found.converge()
    return found


def secrets(found: World) -> dict[str, Manifest]:
    return {item["metadata"]["name"]: item for item in found.cluster.all(SECRET, "ns")}


def file(secret: Manifest, name: str) -> str:
    return base64.b64decode(secret["data"][name]).decode()


def serials(found: World) -> dict[str, str]:
    """Serial numbers of the certificates that are in the Secrets."""
    return {
        name: f"{x509.load_pem_x509_certificate(file(item, 'tls.crt').encode()).serial_number:x}"
        for name, item in secrets(found).items()
    }


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after.get(name)}


def test_each_role_has_a_secret_that_its_pods_mount():
    found = world()
    assert set(secrets(found)) == {f"demo-{role}-identity" for role in ROLES}
    for item in secrets(found).values():
        assert item["type"] == "kubernetes.io/tls"
        assert set(item["data"]) == {"ca.crt", "tls.crt", "tls.key"}
        assert item["metadata"]["ownerReferences"][0]["kind"] == "VLMService"
    for deployment in found.cluster.all(DEPLOYMENT):
        pod = deployment["spec"]["template"]["spec"]
        role = deployment["metadata"]["labels"]["triptych.dev/role"]
        volume = next(item for item in pod["volumes"] if item["name"] == "triptych-identity")
        assert volume["secret"]["secretName"] == f"demo-{role}-identity"
        assert "--identity-dir=/var/run/triptych/identity" in pod["containers"][0]["args"]
        assert "grpc" not in pod["containers"][0]["readinessProbe"]
    condition = found.condition("CertificatesReady")
    assert (condition["status"], condition["reason"]) == ("True", "Issued")
    assert "expires" in condition["message"]
    expiry = IDENTITY_EXPIRY.labels("ns", "demo", "decode")._value.get()
    assert expiry == pytest.approx(found.cluster.clock.now + 24 * HOUR, abs=120)


def test_without_identity_there_is_no_secret_and_no_condition():
    found = world({})
    assert not found.cluster.all(SECRET)
    assert "CertificatesReady" not in {item["type"] for item in found.status["conditions"]}


def test_certificates_are_renewed_at_two_thirds_and_not_before():
    found = world()
    before = serials(found)
    found.turn(seconds=15 * HOUR)
    assert serials(found) == before
    found.turn(seconds=HOUR)
    assert changed(before, serials(found)) == set(before)


def test_a_new_process_keeps_the_certificates():
    found = world()
    before, found.loop = serials(found), found.new_loop()
    found.converge()
    assert serials(found) == before


@pytest.mark.parametrize("fault", ["deleted", "edited"])
def test_a_deleted_or_edited_secret_is_repaired_at_the_next_check(fault: str):
    found = world()
    before, name = serials(found), "demo-decode-identity"

    def edit(item: Manifest) -> None:
        item["data"]["tls.crt"] = base64.b64encode(b"x").decode()

    if fault == "deleted":
        found.cluster.remove(SECRET, "ns", name)
    else:
        found.cluster.edit(SECRET, "ns", name, edit)
    found.turn(seconds=300.0)
    assert changed(before, serials(found)) == {name}


def test_a_secret_of_somebody_else_is_not_changed():
    found = World(body({"identity": {"mode": "OperatorCA"}}))
    theirs: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "demo-decode-identity", "namespace": "ns"},
        "type": "Opaque",
        "data": {"password": "eA=="},
    }
    found.cluster.hardware(theirs)
    found.converge()
    assert secrets(found)["demo-decode-identity"]["data"] == {"password": "eA=="}
    condition = found.condition("CertificatesReady")
    assert (condition["status"], condition["reason"]) == ("False", "IssuingFailed")
    assert "demo-decode-identity has no owner" in condition["message"].replace("Secret ", "")
    reasons = {item["reason"] for item in found.cluster.all(EVENT)}
    assert "CertificateFailed" in reasons
    found.cluster.remove(SECRET, "ns", "demo-decode-identity")
    found.turn(seconds=15.0)
    assert found.condition("CertificatesReady")["status"] == "True"


def test_an_expired_certificate_is_named_while_the_ca_is_unreadable():
    found = world()
    found.cluster.edit(
        SECRET,
        "triptych-system",
        "triptych-operator-ca",
        lambda item: item.update(data={"a.crt": "eA=="}),
    )
    found.turn(seconds=17 * HOUR)
    condition = found.condition("CertificatesReady")
    assert condition["reason"] == "IssuingFailed"
    assert "restore it, or delete it" in condition["message"]
    found.turn(seconds=8 * HOUR)
    assert found.condition("CertificatesReady")["reason"] == "Expired"


def test_turning_it_on_and_off_is_one_coordinated_rollout():
    found = world({})
    plain = {item["metadata"]["name"] for item in found.cluster.all(DEPLOYMENT)}
    compat = found.status["compatibilityHash"]
    found.apply(body({"identity": {"mode": "OperatorCA"}}))
    found.converge(turns=60)
    assert found.status["compatibilityHash"] != compat
    encrypted = {item["metadata"]["name"] for item in found.cluster.all(DEPLOYMENT)}
    assert not {name for name in plain & encrypted if "gateway" not in name}
    found.apply(body({"identity": {}}))  # live pods keep their issuer
    found.converge(turns=60)
    assert {item["metadata"]["name"] for item in found.cluster.all(DEPLOYMENT)} == encrypted
    found.apply(body({"identity": {"mode": "Off"}}))
    found.converge(turns=60)
    assert found.status["compatibilityHash"] == compat
    assert "identity" not in found.status


def test_the_operators_default_is_for_new_services_only():
    old = World(body())
    old.converge()
    before = old.cluster.all(DEPLOYMENT)
    old.loop = old.new_loop(options=type(old.options)(identity="OperatorCA"))
    old.converge()
    assert old.cluster.all(DEPLOYMENT) == before
    assert not old.cluster.all(SECRET)
    new = World(body(), identity="OperatorCA")
    new.converge()
    assert len(secrets(new)) == len(ROLES)


def test_cert_manager_is_asked_for_one_certificate_per_role():
    found = world(ISSUER)
    certificates = found.cluster.all(CERTIFICATE)
    assert len(certificates) == len(ROLES)
    assert not secrets(found)
    assert found.condition("CertificatesReady")["reason"] == "Pending"
    for item in certificates:
        spec, name = item["spec"], item["metadata"]["name"]
        role = item["metadata"]["labels"]["triptych.dev/role"]
        assert spec["secretName"] == name
        assert spec["issuerRef"] == {
            "name": "internal",
            "kind": "ClusterIssuer",
            "group": "cert-manager.io",
        }
        assert spec["uris"] == [f"spiffe://triptych.dev/ns/ns/vlmservice/demo/{role}"]
        assert spec["dnsNames"] == [f"{role}.demo.ns.triptych.internal"]
        stamp = found.cluster.clock.stamp()
        status = {
            "notBefore": stamp,
            "notAfter": "2099-01-01T00:00:00Z",
            "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
        }
        found.cluster.edit(CERTIFICATE, "ns", name, lambda one, s=status: one.update(status=s))
    found.turn(seconds=60.0)
    assert found.condition("CertificatesReady")["reason"] == "Issued"
    mounted = {
        next(
            v for v in d["spec"]["template"]["spec"]["volumes"] if v["name"] == "triptych-identity"
        )["secret"]["secretName"]
        for d in found.cluster.all(DEPLOYMENT)
    }
    assert mounted == {item["metadata"]["name"] for item in certificates}


class WithoutCertManager(FakeCluster):
    """The API server has no kind Certificate."""

    async def apply(self, manifest: Manifest, **options: Any) -> Manifest:
        if manifest["kind"] == "Certificate":
            raise ClusterError(404, "NotFound", "the server could not find the requested resource")
        return await super().apply(manifest, **options)


def test_a_cluster_without_cert_manager_is_a_condition():
    found = World(body({"identity": ISSUER}))
    bare = WithoutCertManager(found.cluster.clock)
    bare.hardware(body({"identity": ISSUER}))
    found.cluster = bare
    found.loop = found.new_loop()
    found.converge()
    assert (
        "the cluster has no cert-manager: install it"
        in found.condition("CertificatesReady")["message"]
    )
    assert len(bare.all(DEPLOYMENT)) == len(ROLES)
    assert len(bare.all(VLM_SERVICE)) == 1


NAME, SPACE = "triptych-operator-ca", "triptych-system"


def authority(cluster: FakeCluster) -> Authority:
    return Authority(cluster, namespace=SPACE, name=NAME)


def test_two_operators_use_one_ca():
    class Racing(FakeCluster):
        """Another operator creates its CA just before our create arrives."""

        async def create(self, manifest: Manifest) -> Manifest:
            if not self.all(SECRET):
                self.hardware((await rival_manifest()) | {})
            return await super().create(manifest)

    async def rival_manifest() -> Manifest:
        other = FakeCluster()
        await authority(other).signer(now=other.clock.now)
        return other.all(SECRET)[0]

    async def run() -> None:
        cluster = Racing()
        signer = await authority(cluster).signer(now=cluster.clock.now)
        [stored] = cluster.all(SECRET)
        assert f"{signer.pair.validity.serial}.crt" in stored["data"]
        again = await authority(cluster).signer(now=cluster.clock.now)
        assert again == signer

    asyncio.run(run())


def test_a_deleted_ca_secret_is_restored_from_memory():
    async def run() -> None:
        cluster = FakeCluster()
        ca = authority(cluster)
        first = await ca.signer(now=cluster.clock.now)
        cluster.remove(SECRET, SPACE, NAME)
        assert await ca.signer(now=cluster.clock.now + 400) == first
        assert await authority(cluster).signer(now=cluster.clock.now + 400) == first

    asyncio.run(run())


def test_a_damaged_ca_secret_is_not_overwritten():
    async def run() -> None:
        cluster = FakeCluster()
        await authority(cluster).signer(now=cluster.clock.now)
        cluster.edit(SECRET, SPACE, NAME, lambda item: item.update(data={"1.crt": "eA=="}))
        version = cluster.version
        with pytest.raises(IdentityError, match="restore it, or delete it"):
            await authority(cluster).signer(now=cluster.clock.now)
        assert cluster.version == version

    asyncio.run(run())
