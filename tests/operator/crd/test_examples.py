"""Every manifest that we show is one that the API server takes."""

import pathlib
import re
from typing import Any

import pytest
import yaml

from vlm_cli.plan.command import plan
from vlm_local.controlplane import ControlPlane

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).parents[3]
CASES = sorted({path.parent for path in (ROOT / "examples").glob("*/*.yaml")})
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
# kinds of CRDs that are not ours
FOREIGN = ("argoproj.io/", "cert-manager.io/", "toolkit.fluxcd.io/", "gateway.networking.k8s.io/")
FENCE = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def manifests(text: str) -> list[dict[str, Any]]:
    """Return the documents that are whole Kubernetes objects; a page may also show a fragment."""
    found = [item for item in yaml.safe_load_all(text) if isinstance(item, dict)]
    whole = [item for item in found if {"apiVersion", "kind", "metadata"} <= set(item)]
    return [item for item in whole if not any(one in item["apiVersion"] for one in FOREIGN)]


SHOWN = [
    pytest.param(item, id=f"{path.relative_to(ROOT)}:{item['kind']}/{item['metadata']['name']}")
    for path in [*(ROOT / "examples").rglob("*.yaml"), *PAGES]
    if path.parent.name != "testdata"  # with the status of an object
    for block in ([path.read_text()] if path.suffix == ".yaml" else FENCE.findall(path.read_text()))
    for item in manifests(block)
]


def test_there_is_something_to_check() -> None:
    assert len(SHOWN) >= 6


@pytest.mark.parametrize("manifest", SHOWN)
def test_the_api_server_takes_it(manifest: dict[str, Any], api_server: ControlPlane) -> None:
    answer = api_server.kubectl(
        "create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(manifest), check=False
    )
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_each_example_says_what_when_what_to_expect_and_how_to_clean_up(
    folder: pathlib.Path,
) -> None:
    page = (folder / "README.md").read_text()
    for part in ("**What.**", "**When.**", "**Expected.**", "**Clean up.**"):
        assert part in page
    for manifest in folder.glob("*.yaml"):
        (service,) = manifests(manifest.read_text())
        assert service["metadata"]["name"] in page


@pytest.mark.parametrize("rate", [0.5, 4.0])
async def test_the_api_server_takes_what_a_plan_writes(
    rate: float, api_server: ControlPlane, tmp_path: pathlib.Path
) -> None:
    path, examples = tmp_path / "service.yaml", ROOT / "examples" / "plan"
    await plan(
        examples / "qwen2.5-vl-7b",
        nodes=[examples],
        rate=rate,
        image=["1280x720"] * 5,
        ttft_ms=5000,
        itl_ms=60,
        uri="hf://org/name",
        revision="main",
        kv_dtype="int8",
        weights="int8",
        write=path,
    )
    answer = api_server.kubectl("create", "--dry-run=server", "-f", str(path), check=False)
    assert answer.returncode == 0, answer.stderr
