"""Many services at once on a real control plane: soon, quiet, small (bench/operator_scale.py)."""

import pytest

from support.scale import Load, quantile, running_services

pytestmark = pytest.mark.cluster

FIRST_WRITE_SECONDS = 1.0
MEMORY_BYTES = 250 * 2**20


@pytest.mark.full
async def test_ten_services_idle_without_a_write_and_changes_are_answered():
    # two full reads of each service fall into the idle time
    load = Load(services=10, pods_each=6, idle_seconds=6.0, resync_seconds=3.0)
    async with running_services(load) as found:
        got = await found.measure()
    assert got.idle_writes == []
    assert got.rss_bytes <= MEMORY_BYTES
    assert (got.lapses, got.transitions) == (0, 0)
    # how soon is measured where the machine is quiet; here each event has its answer
    assert len(got.first_write_seconds) == len(got.burst_seconds) == load.services


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_a_hundred_services_with_a_thousand_pods():
    load = Load(services=100, pods_each=10, idle_seconds=600.0)
    async with running_services(load) as found:
        got = await found.measure()
    assert got.idle_writes == []
    assert got.rss_bytes <= MEMORY_BYTES
    assert (got.lapses, got.transitions) == (0, 0)
    assert quantile(got.first_write_seconds, 0.99) <= FIRST_WRITE_SECONDS
