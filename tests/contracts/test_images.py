"""The images' Dockerfiles: what they copy reaches the build, and what they say of themselves."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("operator/Dockerfile", "worker/Dockerfile")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_an_image_copies_is_in_the_build_context_and_nothing_else_is(name: str):
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
def test_an_image_says_what_it_is_of_which_version_and_licence(name: str):
    text = (ROOT / name).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=(\S+)", text)
    assert {key for key, _ in labels} >= {"title", "description", "licenses", "version", "revision"}
    assert dict(labels)["licenses"].strip('"') == project["license"]
    assert f"ARG VERSION={project['version']} " in text


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_number_that_is_not_root(name: str):
    users = re.findall(r"^USER (.*)$", (ROOT / name).read_text(), re.MULTILINE)
    assert users == ["65532:65532"]
