"""A machine lacks something: the demo reports it with a remedy, before anything starts."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from vlm_local import build
from vlm_local.settings import LocalSettings

ROOT = Path(__file__).parents[1]


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`vlm demo` to its end, with parts of the environment replaced."""
    return subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "from vlm_cli import main; main()",
            "demo",
            *arguments,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **environment},  # noqa: TID251
        timeout=60,
        check=False,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with openssl and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    openssl = shutil.which("openssl")
    assert openssl is not None
    (folder / "openssl").symlink_to(openssl)
    return folder


def test_a_taken_port_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = demo("--once", "--port", str(port), TMPDIR=str(tmp_path))
    assert ended.returncode == 1
    assert f"Port {port} on 127.0.0.1 is taken" in ended.stdout
    assert "--port" in ended.stdout
    assert not any(tmp_path.iterdir())


def test_without_go_it_says_where_to_get_it(tmp_path: Path, tools: Path):
    ended = demo("--once", PATH=str(tools), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert ended.returncode == 1
    assert "Go is needed to build the control plane" in ended.stdout
    assert "https://go.dev/dl" in ended.stdout


def test_without_openssl_it_says_how_to_install_it(tmp_path: Path):
    ended = demo("--once", PATH=str(tmp_path))
    assert ended.returncode == 1
    assert "openssl is needed" in ended.stdout
    assert "apt install openssl" in ended.stdout


def test_without_a_network_it_says_that_the_first_start_needs_one(tmp_path: Path):
    cut_off: Mapping[str, str] = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "GOMODCACHE": str(tmp_path / "modules"),
        "GOPROXY": "http://127.0.0.1:1",
        "GOFLAGS": "",
    }
    ended = demo("--once", **cut_off)
    assert ended.returncode == 1
    assert "could not be downloaded" in ended.stdout
    assert "The first build needs the network" in ended.stdout


def test_a_half_built_cache_is_said_so_and_built_again(tmp_path: Path, tools: Path):
    """With a Go that fails at once: what counts is that the damaged folder is not used."""
    ours = LocalSettings.read({"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)})
    half = ours.cache / "controlplane" / build.cache_key()
    half.mkdir(parents=True)
    (half / "kubectl").write_text("half a binary")
    go = tools / "go"
    go.write_text(
        '#!/bin/sh\n[ "$1" = env ] && echo go1.24.0 && exit 0\necho stopped >&2; exit 1\n'
    )
    go.chmod(0o755)
    path = f"{tools}:/usr/bin:/bin"
    ended = demo("--once", PATH=path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert ended.returncode == 1
    assert "has no readable manifest.json; building it again" in ended.stdout
    assert "go build failed" in ended.stdout
    assert not half.exists()


def test_an_image_that_is_not_there_is_said_so(tmp_path: Path):
    ended = demo("--once", "--image", str(tmp_path / "none.png"))
    assert ended.returncode == 1
    assert "cannot be read: No such file" in ended.stdout


def test_a_file_that_is_no_image_is_said_so_before_anything_starts():
    ended = demo("--once", "--image", __file__)
    assert ended.returncode == 1
    assert "is not a PNG, JPEG, WebP or GIF" in ended.stdout
    assert "control plane" not in ended.stdout
