"""`vlm rollout-plan` and `vlm render`: the operator's own decisions, printed without a cluster."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.world import body, pool
from vlm_cli.offline import render
from vlm_cli.output import CliError, Format
from vlm_cli.rollout_plan import rollout_plan

EXAMPLES = sorted(
    {
        path.parent
        for path in Path(__file__).parents[3].glob("examples/*/*.yaml")
        if "kind: VLMService\n" in path.read_text()
    }
)
FLOAT = {"model": {"uri": "pvc://shapes", "dtype": "Float32"}}


@pytest.fixture
def write(tmp_path: Path):
    def written(name: str, manifest: Any) -> Path:
        found = copy.deepcopy(manifest)
        if isinstance(found, dict):
            found["metadata"].pop("namespace", None)
        path = tmp_path / name
        path.write_text(found if isinstance(found, str) else json.dumps(found))
        return path

    return written


async def steps(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    await rollout_plan(old=old, new=new, output=Format.JSON)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


async def test_the_steps_of_another_compat_keep_surge_and_availability(write, capsys):
    pools = {"prefill": pool(2), "decode": pool(4, rollout={"maxSurge": 2})}
    rows = await steps(write("old", body(**pools)), write("new", body(FLOAT, **pools)), capsys)
    for row in rows:
        for role, size, surge in (("prefill", 2, 1), ("decode", 4, 2)):
            counts = row["roles"][role]
            assert size <= counts["old"] + counts["new"] <= size + surge or counts["old"] == size
    assert rows[0]["waitsFor"].startswith("step 1 of 2: 2 decode pods of revision ")
    assert rows[-1]["waitsFor"] == ""
    assert rows[-1]["roles"]["decode"] == {"old": 0, "new": 4}
    assert rows[-1]["roles"]["gateway"] == {"old": 0, "new": 1}


async def test_a_pool_that_leaves_goes_when_its_receiver_is_ready(write, capsys):
    rows = await steps(
        write("old", body(encoder=pool(2), decode=pool())),
        write("new", body(decode=pool())),
        capsys,
    )
    sizes = [
        (row["roles"].get("encoder", {"old": 0})["old"], row["roles"]["decode"]["new"])
        for row in rows
    ]
    assert sizes[0] == (2, 1)
    assert rows[0]["waitsFor"].startswith("1 decode pod of revision ")
    assert sizes[-1] == (0, 1)


async def test_another_revision_waits_for_its_download_first(write, capsys):
    def cached(revision: str) -> dict[str, Any]:
        cache = {"claim": {"size": "1Gi"}}
        model = {"uri": "hf://org/name", "revision": revision * 40, "cache": cache}
        return body({"model": model}, decode=pool(2))

    rows = await steps(write("old", cached("a")), write("new", cached("b")), capsys)
    assert rows[0]["roles"]["decode"] == {"old": 2, "new": 0}
    assert rows[0]["waitsFor"].startswith("waits for the model, which Job demo-model-")
    assert rows[1]["roles"]["decode"] == {"old": 2, "new": 1}
    assert rows[-1]["roles"]["decode"] == {"old": 0, "new": 2}
    assert rows[-1]["waitsFor"] == ""


def _old(row: dict[str, Any], role: str) -> int:
    return int(row["roles"].get(role, {"old": 0})["old"])


async def test_a_table_says_what_each_step_waits_for(write, capsys):
    path = write("same", body())
    await rollout_plan(old=path, new=path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "#", "ENCODER", "PREFILL", "DECODE", "GATEWAY", "WAITS", "FOR",
    ]  # fmt: skip
    assert lines[1].split() == ["1", "1", "1", "1", "1", "nothing:", "done"]
    assert len(lines) == 2


async def test_a_table_tells_old_pods_from_new_ones_where_a_role_moves(write, capsys):
    old, new = write("old", body(encoder=pool(), decode=pool(2))), write("new", body())
    await rollout_plan(old=old, new=new)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "# ENCODER PREFILL DECODE GATEWAY WAITS FOR"
    assert lines[1].startswith("1 1 1 2 old 1 "), lines[1]
    assert lines[-1].startswith(f"{len(lines) - 1} 1 1 1 new 1 nothing"), lines[-1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
async def test_every_example_renders_to_objects_without_an_owner(path: Path, capsys):
    await render(path, worker_image="worker:1", namespace="here")
    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    kinds = {item["kind"] for item in objects}
    assert {"Deployment", "Service", "NetworkPolicy", "ServiceAccount", "VLMPool"} <= kinds
    assert {item["metadata"]["namespace"] for item in objects} == {"here"}
    assert not any("ownerReferences" in item["metadata"] for item in objects)
    assert all("replicas" in i["spec"] for i in objects if i["kind"] == "VLMPool")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: ConfigMap\nmetadata: {name: a}\n", "there is no VLMService in "),
        ("a: [", "is not YAML"),
        ("kind: VLMService\n", "an object has no metadata.name"),
        (
            "kind: VLMService\nmetadata: {name: a}\nspec: {model: {uri: 'pvc://a'}}\n",
            "spec.pools: ",
        ),
    ],
)
async def test_a_file_that_cannot_be_rendered_says_why(write, text: str, said: str):
    with pytest.raises(CliError) as refused:
        await render(write("bad", text))
    assert said in refused.value.problem


async def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(CliError) as refused:
        await render(tmp_path / "none.yaml")
    assert "none.yaml cannot be read: No such file" in refused.value.problem
