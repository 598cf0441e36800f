"""What `vlm render` prints is what a real API server takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.live import Live
from support.world import body, pool
from vlm_cli.offline import render
from vlm_cli.rollout_plan import rollout_plan

pytestmark = pytest.mark.cluster
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("example", ["quickstart", "external-scaling"])
async def test_kubectl_takes_what_is_rendered(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str], example: str
):
    await render(EXAMPLES / example, worker_image="worker:1", namespace="live")
    rendered = tmp_path / "objects.yaml"
    rendered.write_text(capsys.readouterr().out)
    said = live.kubectl("apply", "--dry-run=server", "-f", str(rendered))
    lines = said.splitlines()
    assert len(lines) > 10
    assert all(line.endswith("created (server dry run)") for line in lines)


async def test_a_rollout_is_shown_by_revision_with_what_it_waits_for(
    live: Live, capsys: pytest.CaptureFixture[str]
):
    def manifest(dtype: str) -> dict[str, Any]:
        model = {"model": {"uri": "pvc://shapes", "dtype": dtype}}
        return body(model, name="shown", decode=pool()) | {
            "metadata": {"name": "shown", "namespace": "live"}
        }

    live.apply(manifest("Auto"))
    live.until(lambda: len(live.items("deployments", "shown")) == 2, seconds=5)
    live.apply(manifest("Float32"))
    live.until(lambda: len(live.items("deployments", "shown")) == 3, seconds=5)
    live.until(
        # the last reason of the rollout, after Starting and Progressing
        lambda: live.condition("shown", "RolloutProgressing").get("reason") == "NoSpareCapacity",
        seconds=5,
    )
    capsys.readouterr()  # what waiting printed
    await rollout_plan("shown", namespace="live", kubeconfig=str(live.plane.kubeconfig))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ROLE", "VARIANT", "REVISION", "COMPAT", "READY", "NOTE"]
    assert [line.split()[0] for line in lines[1:4]] == ["decode", "decode", "gateway"]
    assert lines[4].startswith("NoSpareCapacity: step 1 of 1: 1 decode pod of revision ")
    assert "no nodes available" in lines[4]
