"""`vlm-worker fetch` tells how far it is, and downloads as well if nobody can ask."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.serve.hub import LARGE, MODEL, Hub
from worker.serve.test_fetch import NUM_BYTES, start

from vlm_worker.serve.fetch_progress import FetchProgress, served


@pytest.mark.parametrize(("bind", "host"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1")])
def test_the_progress_is_served_at_one_path(bind: str, host: str) -> None:
    if ":" in bind and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    progress = FetchProgress(total_bytes=10)
    with served(progress, bind, 0, "uid") as port:
        progress.downloaded(5, 10)
        with urllib.request.urlopen(f"http://{host}:{port}/progress") as answer:
            found = json.loads(answer.read())
        assert (found["num_bytes"], found["total_bytes"], found["pod_uid"]) == (5, 10, "uid")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{host}:{port}/stats")


def test_a_port_that_is_taken_is_no_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        served(FetchProgress(), "127.0.0.1", taken.getsockname()[1], "") as port,
    ):
        assert port == 0
    with served(FetchProgress(), "127.0.0.1", None, "") as port:
        assert port == 0


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 1000), st.integers(1, 1000))
def test_no_count_exceeds_the_total_or_is_negative(
    counts: list[int], missing: int, total: int
) -> None:
    now = iter(range(1000))
    progress = FetchProgress(lambda: float(next(now)), total_bytes=total)
    for count in sorted(counts):
        progress.downloaded(min(count, missing), missing)
        assert 0 <= progress.num_bytes <= total
        left = progress.seconds_left()
        assert left is None or left >= 0


async def test_a_fetch_tells_the_bytes_that_it_has(hub: Hub, tmp_path: Path) -> None:
    hub.stalls = True
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await start(hub, tmp_path, more=(f"--http-port={port}",))
    small = NUM_BYTES - (MODEL / LARGE).stat().st_size
    found: dict[str, int] = {}
    async with asyncio.timeout(90), aiohttp.ClientSession() as session:
        await hub.stalled.wait()
        while found.get("num_bytes") != small:
            await asyncio.sleep(0.05)
            async with session.get(f"http://127.0.0.1:{port}/progress") as answer:
                found = await answer.json()
        assert found["total_bytes"] == NUM_BYTES
        hub.resume.set()
        _, errors = await process.communicate()
    assert process.returncode == 0, errors


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True):
            return True
    except (OSError, ValueError):
        return False
