"""tools/release.sh with programs that record their arguments, and the workflow that runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from helm import binary

ROOT = Path(__file__).parents[2]
COPIED = ("helm/triptych", "install.yaml", "pyproject.toml", "tools/release.sh")
REGISTRY = "registry.example.com/me"

PROGRAM = """#!{python}
import hashlib, json, os, pathlib, sys
arguments = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if "--metadata-file" in arguments:  # as buildx writes it
    digest = hashlib.sha256(arguments[arguments.index("-t") + 1].encode()).hexdigest()
    path = pathlib.Path(arguments[arguments.index("--metadata-file") + 1])
    path.write_text(json.dumps({{"containerimage.digest": "sha256:" + digest}}, indent=2))
if arguments[:2] == ["helm", "package"]:
    os.execv({helm!r}, arguments)
if arguments[:2] == ["helm", "push"]:  # as helm prints it
    print("Pushed:", arguments[3] + "/triptych:0.1.0", file=sys.stderr)
    print("Digest: sha256:" + "c" * 64, file=sys.stderr)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for command in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"),
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("docker", "cosign", "helm"):
        path = programs / name
        path.write_text(PROGRAM.format(python=sys.executable, helm=str(binary())))
        path.chmod(0o755)
    return folder


def release(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    programs = checkout.with_name("programs")
    outer = dict(os.environ)  # noqa: TID251 - git and python are found by it
    outer.pop("GITHUB_REF_NAME", None)
    return subprocess.run(
        ["tools/release.sh", REGISTRY, str(checkout.with_name("out"))],
        cwd=checkout,
        env={
            **outer,
            "PATH": f"{programs}:{outer['PATH']}",
            "CALLS": str(programs / "calls"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def calls(checkout: Path) -> list[list[str]]:
    path = checkout.with_name("programs") / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_image_and_the_chart_are_pushed_and_signed_by_digest(checkout: Path):
    done = release(checkout, GITHUB_REF_NAME="v0.1.0")
    assert done.returncode == 0, done.stderr
    made = calls(checkout)
    builds = {call[call.index("-t") + 1]: call for call in made if call[0] == "docker"}
    assert {name.removeprefix(f"{REGISTRY}/triptych/") for name in builds} == {
        "operator:0.1.0",
        "gateway:0.1.0",
        "worker-cpu:0.1.0",
        "worker:0.1.0",
    }
    for name, call in builds.items():
        assert {"--push", "--sbom=true", "--provenance=mode=max", "VERSION=0.1.0"} <= {*call}
        both = call[call.index("--platform") + 1] == "linux/amd64,linux/arm64"
        assert both == (not name.endswith("/worker:0.1.0"))
    signed = [call[-1] for call in made if call[:2] == ["cosign", "sign"]]
    assert len(signed) == len({*signed}) == 5
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", name) for name in signed)
    assert signed[-1] == f"{REGISTRY}/charts/triptych@sha256:{'c' * 64}"


def test_the_chart_and_install_yaml_of_a_release_name_its_images(checkout: Path):
    assert release(checkout).returncode == 0
    out = checkout.with_name("out")
    with tarfile.open(out / "triptych-0.1.0.tgz") as chart:
        values = chart.extractfile("triptych/values.yaml")
        assert values is not None
        read = yaml.safe_load(values)
    registries = [read[part]["image"]["registry"] for part in ("workers", "gateways")]
    assert [read["image"]["registry"], *registries] == [REGISTRY, REGISTRY, ""]
    installed = (out / "install.yaml").read_text()
    names = set(
        re.findall(rf"{re.escape(REGISTRY)}/triptych/(\w+)@sha256:[0-9a-f]{{64}}", installed)
    )
    assert names == {"operator", "gateway", "worker"}
    assert "localhost/triptych" not in installed


def test_a_checkout_with_changes_is_refused_before_anything_is_built(checkout: Path):
    (checkout / "install.yaml").write_text("")
    refused = release(checkout)
    assert refused.returncode == 1
    assert "commit or remove them" in refused.stdout
    assert not calls(checkout)


def test_a_tag_of_another_version_is_refused(checkout: Path):
    refused = release(checkout, GITHUB_REF_NAME="v9.9.9")
    assert (refused.returncode, calls(checkout)) == (1, [])
    assert "the tag is v9.9.9 and pyproject.toml has version 0.1.0" in refused.stdout


def test_a_chart_of_another_version_is_refused(checkout: Path):
    chart = checkout / "helm/triptych/Chart.yaml"
    chart.write_text(chart.read_text().replace("appVersion: 0.1.0", "appVersion: 0.2.0"))
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "x"],
        cwd=checkout,
        check=True,
    )
    refused = release(checkout)
    assert (refused.returncode, calls(checkout)) == (1, [])
    assert "appVersion is not 0.1.0" in refused.stdout


def test_workflows_pin_each_action_by_commit_and_run_scripts_that_exist():
    found = list((ROOT / ".github/workflows").glob("*.yaml"))
    assert found
    for path in found:
        text = path.read_text()
        uses = re.findall(r"uses: (\S+)(.*)", text)
        assert all(re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", action) for action, _ in uses), path
        assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", version) for _, version in uses), path
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {}, "each job asks for what it needs"
        for script in re.findall(r"\btools/[\w./-]+", text):
            assert os.access(ROOT / script.rstrip(")."), os.X_OK), script
