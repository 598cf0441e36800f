"""An applied VLMService does not differ from its manifest after the operator has reconciled it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.live import Live
from support.world import body, external, pool
from vlm_operator import names

pytestmark = pytest.mark.cluster

SERVER_SIDE = ("--server-side", "--field-manager=argocd-controller", "--force-conflicts")


@pytest.mark.parametrize("options", [(), SERVER_SIDE], ids=["client-side", "server-side"])
def test_kubectl_diff_is_empty_after_a_reconcile(live: Live, options: tuple[str, ...]):
    name = f"diff-{'server' if options else 'client'}"
    variant = {"name": "any", "placement": {}, "resources": {"requests": {"cpu": "0.5"}}}
    pools = {"encoder": pool(2, variants=[variant]), "decode": external(1, 4)}
    manifest: dict[str, Any] = body({"stopped": False}, name=name, **pools)
    manifest["metadata"]["namespace"] = "live"
    text = json.dumps(manifest)
    live.kubectl("apply", *options, "-f", "-", stdin=text)
    live.until(lambda: len(live.items("pods", name)) == 4, seconds=5)
    live.kubectl("-n", "live", "scale", "vlmp", f"{name}-decode", "--replicas=2")
    live.until(lambda: len(live.items("pods", name)) == 5, seconds=5)
    live.until(lambda: live.condition(name, "Ready").get("observedGeneration") == 1, seconds=5)
    found = live.get("vlm", name)
    assert found["metadata"]["finalizers"] == [names.FINALIZER]  # the operator has written to it
    assert live.kubectl("diff", *options, "-f", "-", stdin=text) == ""
    # a difference is found
    manifest["spec"]["paused"] = True
    answer = live.plane.kubectl(
        "diff", *options, "-f", "-", stdin=json.dumps(manifest), check=False
    )
    assert answer.returncode == 1
    assert "+  paused: true" in answer.stdout
