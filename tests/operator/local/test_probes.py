"""A question that cannot be asked is a failed one, not the end of asking."""

from typing import Any, cast

import pytest

from vlm_local.agent.probes import Prober


@pytest.mark.parametrize("kind", ["tcpSocket", "httpGet", "grpc"])
async def test_a_port_that_the_pod_does_not_name_is_a_failure_that_names_it(kind: str):
    prober = Prober("127.0.0.1", {"http": 80}, cast("Any", None), cast("Any", None))
    answer = await prober.ask({kind: {"port": "htpp"}})
    assert not answer.healthy
    assert "'htpp'" in answer.message
