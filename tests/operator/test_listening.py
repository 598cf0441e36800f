"""The operator's port answers over IPv4 and IPv6 with `--bind=::`, and at no other address."""

from __future__ import annotations

import subprocess
import sys

import aiohttp
import pytest
from confined import confined, refused

from vlm_operator.admin import admin, listen

CODE = """
import asyncio, sys
import aiohttp
from vlm_operator.admin import admin, listen
async def main():
    async with admin("::", 8080, problem=str, leading=bool), aiohttp.ClientSession() as session:
        for host in sys.argv[1:]:
            named = f"[{host}]" if ":" in host else host
            async with session.get(f"http://{named}:8080/healthz") as reply:
                assert reply.status == 200, host
asyncio.run(main())
"""
IPV4, IPV6 = "10.11.12.13", "fd00::13"


@pytest.mark.parametrize(
    ("addresses", "ipv6"),
    [((IPV4,), True), ((IPV6,), True), ((IPV4, IPV6), True), ((IPV4,), False)],
    ids=["IPv4 only", "IPv6 only", "dual stack", "a kernel without IPv6"],
)
def test_it_answers_at_each_address_of_its_pod(addresses: tuple[str, ...], ipv6: bool) -> None:
    if why := refused(addresses=addresses, ipv6=ipv6):
        pytest.skip(f"this machine makes no such pod: {why}")
    command = confined(sys.executable, "-c", CODE, *addresses, addresses=addresses, ipv6=ipv6)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_an_explicit_address_is_the_only_one_and_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: .* --bind"):
            async with admin("127.0.0.1", port, problem=str, leading=bool):
                pytest.fail("it listens")
    async with (
        admin("127.0.0.1", port, problem=str, leading=bool),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/readyz") as reply,
    ):
        assert await reply.text() == "standing by\n"
