"""The Dockerfiles: build context, packages, labels and user."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("operator/Dockerfile", "worker/Dockerfile")
PACKAGES = {
    "operator/Dockerfile": {"vlm_operator"},
    "worker/Dockerfile": {"vlm_worker", "vlm_kernels"},
}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_build_context_has_what_an_image_copies_and_nothing_else(name: str):
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied: set[str] = set()
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            copied |= set(line.split()[1:-1])
    assert copied <= kept
    assert all((ROOT / path).exists() for path in kept)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_only_the_packages_that_it_runs(name: str, tmp_path: Path):
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, target = line.split()[1:]
            for source in map(ROOT.joinpath, sources):
                if source.is_dir():
                    hidden = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(source, tmp_path / target, ignore=hidden)
                else:
                    path = tmp_path / target / source.name if target == "./" else tmp_path / target
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, path)
    build = [sys.executable, "-c", "import hatchling.build as b; print(b.build_wheel('.'))"]
    made = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / made.stdout.split()[-1]) as wheel:
        parts = {entry.partition("/")[0] for entry in wheel.namelist()}
    assert {part for part in parts if not part.endswith(".dist-info")} == PACKAGES[name]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_labels_with_version_and_licence(name: str):
    text = (ROOT / name).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=(\S+)", text)
    assert {key for key, _ in labels} >= {"title", "description", "licenses", "version", "revision"}
    assert dict(labels)["licenses"].strip('"') == project["license"]
    assert f"ARG VERSION={project['version']} " in text


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_numeric_user_that_is_not_root(name: str):
    users = re.findall(r"^USER (.*)$", (ROOT / name).read_text(), re.MULTILINE)
    assert users == ["65532:65532"]
