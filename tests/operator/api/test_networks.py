"""What `allowedNetworks` takes is a network for the gateway, and every usual form is taken."""

from __future__ import annotations

import ipaddress
import re

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vlm_operator import api
from vlm_operator.api.gateway import _CIDR, Media
from vlm_operator.errors import SpecError

IMPOSSIBLE = (
    "10.0.0.0/33", "300.1.2.3/8", "10.0.0/8", "010.0.0.0/8", "10.0.0.0.0/8", "10.0.0.0/", "/8",
    "10.0.0.1", "::/129", ":::/8", "1::2::3/64", "1:2:3:4:5:6:7/64", "1:2:3:4:5:6:7:8:9/64",
    "1:2:3:4:5:6::7:8/64", "12345::/16", "fe80::1%eth0/64", "10.0.0.0/255.0.0.0", "g::/8", ":1/8",
    "10.0.0.0/8\n",
)  # fmt: skip


def takes(text: str) -> bool:
    try:
        Media(allowed_networks=[text])
    except pydantic.ValidationError:
        return False
    return True


def is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_an_impossible_network_is_refused(text: str) -> None:
    assert not takes(text)


def test_a_stored_service_with_an_impossible_network_names_its_field() -> None:
    spec = {
        "model": {"uri": "pvc://shapes"},
        "pools": {"decode": {"scaling": {"mode": "Manual", "replicas": 1}}},
        "gateway": {"media": {"allowedNetworks": ["10.0.0.0/8", "10.0.0.0/33"]}},
    }
    metadata = {"name": "demo", "namespace": "default", "uid": "u-1", "generation": 3}
    with pytest.raises(SpecError) as refused:
        api.parse({"metadata": metadata, "spec": spec})
    assert "spec.gateway.media.allowedNetworks[1]" in str(refused.value)
    assert "as 10.20.0.0/16" in str(refused.value)


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_every_ipv4_network_is_taken(address: ipaddress.IPv4Address, bits: int) -> None:
    """With host bits, too: the gateway and NetworkPolicies ignore them."""
    assert takes(f"{address}/{bits}")


@given(st.ip_addresses(v=6), st.integers(0, 128), st.sampled_from(("short", "long", "upper")))
def test_every_ipv6_network_is_taken(address: ipaddress.IPv6Address, bits: int, form: str) -> None:
    written = {"short": str(address), "long": address.exploded, "upper": str(address).upper()}
    if "." not in written[form]:  # Python 3.13 writes mapped addresses with dots
        assert takes(f"{written[form]}/{bits}")


groups = st.lists(st.sampled_from(("", "0", "1", "fF", "abcd", "12345", "255", "256")), max_size=10)


@given(groups, st.sampled_from(":."), st.sampled_from(("0", "8", "32", "33", "128", "129", "")))
@example(["", "", ""], ":", "0")
def test_what_is_taken_is_a_network(parts: list[str], mark: str, bits: str) -> None:
    text = f"{mark.join(parts)}/{bits}"
    assert takes(text) == is_network(text)
    assert takes(text) == bool(re.search(_CIDR, text))
