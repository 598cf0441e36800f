"""The Dockerfiles: lint, build context, locks, packages, labels and user."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from cpu_lock import cpu_lock

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("operator/Dockerfile", "worker/Dockerfile")
STAGES = {  # where an image's packages are installed, and which
    ("operator/Dockerfile", "build"): {"vlm_operator"},
    ("worker/Dockerfile", "build-gateway"): {"vlm_worker"},
    ("worker/Dockerfile", "build-cpu"): {"vlm_worker", "vlm_kernels"},
    ("worker/Dockerfile", "build-cuda"): {"vlm_worker", "vlm_kernels"},
}
FINAL = {"operator/Dockerfile": {""}, "worker/Dockerfile": {"gateway", "worker-cpu", "worker"}}


def stages(name: str) -> dict[str, str]:
    """The instructions of each stage of a Dockerfile, by its name."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    found = re.findall(
        r"^FROM (\S+)(?: AS (\S+))?\n(.*?)(?=^FROM |\Z)", text, re.DOTALL | re.MULTILINE
    )
    return {stage: f"FROM {base}\n{body}" for base, stage, body in found}


def copied(instructions: str) -> list[list[str]]:
    lines = instructions.splitlines()
    return [line.split()[1:] for line in lines if line.startswith("COPY ") and "--from" not in line]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_passes_hadolint(name: str):
    command = [Path(sys.executable).with_name("hadolint"), ROOT / name]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_build_context_has_what_images_copy_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    needed: set[str] = set()
    for name in DOCKERFILES:
        for instructions in stages(name).values():
            for *sources, _ in copied(instructions):
                needed.update(sources)
    assert needed == kept
    assert all((ROOT / path).exists() for path in kept)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_stage_is_built_on_one_base_named_by_digest(name: str):
    text = (ROOT / name).read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.11-[\w-]+@sha256:[0-9a-f]{64}", base)
    bases = {body.split()[1] for body in stages(name).values()}
    assert bases - stages(name).keys() == {"$BASE"}
    others = {(ROOT / other).read_text().count(base) for other in DOCKERFILES}
    assert others == {1}


@pytest.mark.parametrize("lock", ["gateway", "operator", "worker-cpu"])
def test_no_image_but_that_of_cuda_has_cuda(lock: str):
    names = locked(lock).keys()
    assert not [name for name in names if re.match(r"(nvidia|cuda)-|triton$", name)]
    assert ("torch" in names) == (lock == "worker-cpu")


def test_all_images_have_the_same_versions_but_of_torch():
    cuda, cpu = locked("worker-cuda"), locked("worker-cpu")
    differ = {name for name in cpu if cpu[name] != cuda[name]}
    assert differ == {"torch"}
    assert cpu["torch"] == cuda["torch"] + "+cpu"
    assert locked("gateway").items() <= cuda.items()
    written = (ROOT / "requirements/worker-cpu.txt").read_text()
    sources = [ROOT / f"requirements/worker-{name}" for name in ("cuda.txt", "cpu.in")]
    assert written == cpu_lock(*(source.read_text() for source in sources))


def test_a_lock_of_another_torch_is_refused():
    with pytest.raises(ValueError, match=r"torch differs: torch==9.9.9 and torch==1.0\+cpu"):
        cpu_lock("torch==9.9.9 \\\n    --hash=sha256:00\n", "torch==1.0+cpu \\\n    --hash=x\n")


def locked(lock: str) -> dict[str, str]:
    """Version of each package of a lock."""
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_an_image_has_only_the_packages_that_it_runs(name: str, stage: str, tmp_path: Path):
    for *sources, target in copied(stages(name)[stage]):
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
    assert {part for part in parts if not part.endswith(".dist-info")} == STAGES[name, stage]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_labels_with_version_and_licence(name: str):
    text = (ROOT / name).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=(\S+)", text)
    keys = [key for key, _ in labels]
    assert {*keys} == {"title", "description", "licenses", "version", "revision"}
    assert keys.count("title") == keys.count("description") == len(FINAL[name])
    assert dict(labels)["licenses"].strip('"') == project["license"]
    assert f"ARG VERSION={project['version']} " in text


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_numeric_user_that_is_not_root(name: str):
    for stage in FINAL[name]:
        users = re.findall(r"^USER (.*)$", stages(name)[stage], re.MULTILINE)
        assert users == ["65532:65532"]
