"""Who has nothing to do writes nothing: idle services, the same manifest again, what was put right.

Of all services of the module: what one test leaves behind has nothing to do either.
"""

from typing import Any

import pytest
from operator_live import Live, pass_time
from operator_support import body, external, pool

pytestmark = pytest.mark.cluster

TICK_SECONDS = 5.0  # by which each service has had a turn, though nothing happens
AUTO = {"scaling": {"mode": "Auto", "minReplicas": 1, "maxReplicas": 4}}


def apply(live: Live, name: str, decode: dict[str, Any], *, pods: int) -> None:
    """A service with its pods, which find no node."""
    manifest = body({"slo": {"ttftP95Milliseconds": 2000}}, name=name, decode=decode)
    manifest["metadata"] = {"name": name, "namespace": "live"}
    live.apply(manifest)
    live.until(lambda: len(live.items("pods", name)) == pods, seconds=2)


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.full)])
def test_an_idle_operator_writes_nothing(live: Live, seconds: float):
    apply(live, "idle", pool(2), pods=3)
    apply(live, "follows", external(1, 4), pods=2)
    apply(live, "sizes", AUTO, pods=2)
    settled(live)
    writes_nothing(live, seconds=seconds)


def test_a_vlmpool_that_was_deleted_is_back_with_its_status(live: Live):
    apply(live, "righted", pool(2), pods=3)
    settled(live)
    # whether the watch tells of a write before its answer comes is chance: more than one try
    for _ in range(4):
        before = live.get("vlmp", "righted-decode")
        live.kubectl("-n", "live", "delete", "vlmp", "righted-decode")

        def back(before: dict[str, Any] = before) -> bool:
            return any(
                item["metadata"]["uid"] != before["metadata"]["uid"]
                and item.get("status") == before["status"]
                for item in live.items("vlmpools", "righted")
            )

        live.until(back, seconds=0.3 * TICK_SECONDS)  # and not only when the next turn is due
    settled(live)
    writes_nothing(live, seconds=TICK_SECONDS)


def test_applying_the_same_manifest_again_writes_nothing(live: Live):
    apply(live, "again", pool(), pods=2)
    settled(live)
    before = live.writes()
    live.kubectl("-n", "live", "annotate", "vlm", "again", "note=1")
    apply(live, "again", pool(), pods=2)
    writes_nothing(live, seconds=2)
    assert live.writes() == before


def settled(live: Live) -> None:
    """Wait until a tick, and a bit, passes without a write."""
    while True:
        before = len(live.writes())
        pass_time(TICK_SECONDS + 1)
        if len(live.writes()) == before:
            return


def writes_nothing(live: Live, *, seconds: float) -> None:
    before = live.writes()
    pass_time(seconds)
    assert live.writes()[len(before) :] == []
