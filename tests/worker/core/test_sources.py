"""Which addresses a worker fetches from: those where a worker of its service may be."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.sources import Sources
from vlm_worker.errors import GoneError, IncompatibleError

POD = Sources("m", "c1", pod_ip="10.1.2.3", grpc_port=9000)
POD6 = Sources("m", "c1", pod_ip="fd00::3", grpc_port=9000)
LOCAL = Sources("m", "c1", pod_ip="127.3.4.5", grpc_port=9000)
ALONE = Sources("m", "c1")
BOOT = b"b" * 16


def test_pods_of_the_service_are_fetched_from() -> None:
    POD.check_address("10.9.9.9:9000")
    POD.check_address("[fd00::9]:9000")
    POD6.check_address("[fd00::9]:9000")
    LOCAL.check_address("127.3.4.6:9000")
    for address in ("127.0.0.1:41234", "[::1]:41234", "worker-0.workers:9000", "10.9.9.9:7"):
        ALONE.check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254:9000",  # a cloud's metadata
        "[fe80::1]:9000",
        "[::ffff:169.254.169.254]:9000",
        "0.0.0.0:9000",
        "[::]:9000",
        "224.0.0.1:9000",
    ],
)
def test_what_no_worker_has_is_refused_everywhere(address: str) -> None:
    for sources in (POD, POD6, LOCAL, ALONE):
        with pytest.raises(IncompatibleError, match="is not used"):
            sources.check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:9000", "[::1]:9000", "[::ffff:127.0.0.1]:9000", "localhost:9000",
        "metadata.google.internal:80", "10.9.9.9:443", "10.9.9.9:90000", "10.9.9.9:", "10.9.9.9",
        "2130706433:9000", "unix:/run/x.sock", "dns:///10.9.9.9:9000", "", ":9000",
    ],
)  # fmt: skip
def test_a_pod_fetches_from_pods_alone(address: str) -> None:
    for sources in (POD, POD6):
        with pytest.raises(IncompatibleError, match="is not used"):
            sources.check_address(address)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_a_pod_fetches_from_the_port_of_workers_alone(
    found: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    host = f"[{found}]" if found.version == 6 else str(found)
    try:
        POD.check_address(f"{host}:{port}")
    except IncompatibleError:
        return
    assert port == 9000
    assert not any((found.is_loopback, found.is_link_local, found.is_multicast))


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"model": "other"}, IncompatibleError),
        ({"compat": "c2"}, IncompatibleError),
        ({"compat": ""}, IncompatibleError),
        ({"boot_id": b"c" * 16}, GoneError),
        ({}, None),
    ],
)
def test_a_peer_must_be_a_worker_of_the_service(
    said: dict[str, object], error: type[Exception] | None
) -> None:
    hello = {"model": "m", "compat": "c1", "boot_id": BOOT, **said}
    if error is None:
        POD.check_hello("a:9000", wanted=BOOT, **hello)  # type: ignore[arg-type]
        return
    with pytest.raises(error):
        POD.check_hello("a:9000", wanted=BOOT, **hello)  # type: ignore[arg-type]
