"""Binaries are found, or built once and completely; a missing tool is reported with a remedy."""

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vlm_local import build
from vlm_local.errors import BuildError, ToolMissingError
from vlm_local.settings import LocalSettings

# A replacement of `go`: it has a version, prints packages to stderr, and writes binaries to -o.
GO = """#!/bin/sh
if [ "$1" = env ]; then echo {version}; exit 0; fi
echo "$*" >> {log}
{build}
while [ "$1" != -o ]; do shift; done
for name in server kube-apiserver kube-controller-manager kube-scheduler kubectl; do
  echo "k8s.io/$name" >&2
  echo "#!/bin/sh" > "$2$name"; chmod +x "$2$name"
done
"""
NO_NETWORK = (
    'echo "go: github.com/x/y@v1: dial tcp: lookup proxy.golang.org: no such host" >&2; exit 1'
)
MakeGo = Callable[..., LocalSettings]


@pytest.fixture
def make_go(tmp_path: Path) -> MakeGo:
    def make(version: str = "go1.24.0", build: str = "") -> LocalSettings:
        go = tmp_path / "bin" / "go"
        go.parent.mkdir(exist_ok=True)
        go.write_text(GO.format(version=version, build=build, log=tmp_path / "builds"))
        go.chmod(go.stat().st_mode | stat.S_IXUSR)
        return settings(tmp_path, path=f"{go.parent}:/usr/bin:/bin")

    return make


def settings(tmp_path: Path, *, path: str, assets: Path | None = None) -> LocalSettings:
    return LocalSettings(tmp_path / "cache", assets, {"PATH": path, "HOME": str(tmp_path)})


def builds(tmp_path: Path) -> int:
    log = tmp_path / "builds"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_build_is_made_once_and_then_found(tmp_path: Path, make_go: MakeGo):
    told: list[str] = []
    ours = make_go()
    first = build.find_binaries(ours, progress=told.append)
    assert set(first) == set(build.PACKAGES)
    assert all(path.is_file() for path in first.values())
    assert any("building" in line for line in told)
    assert build.find_binaries(ours, progress=told.append) == first
    assert builds(tmp_path) == 1


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda folder: (folder / "kubectl").unlink(), id="a binary is gone"),
        pytest.param(lambda folder: (folder / "etcd").write_text(""), id="a binary is cut short"),
        pytest.param(lambda folder: (folder / "manifest.json").unlink(), id="no manifest"),
        pytest.param(lambda folder: (folder / "kubectl").chmod(0o600), id="not executable"),
    ],
)
def test_a_half_built_cache_is_told_and_built_again(
    harm: Callable[[Path], None], tmp_path: Path, make_go: MakeGo
):
    ours = make_go()
    [folder] = {path.parent for path in build.find_binaries(ours, progress=print).values()}
    harm(folder)
    assert build.damage(folder) is not None
    told: list[str] = []
    build.find_binaries(ours, progress=told.append)
    assert build.damage(folder) is None
    assert any("building it again" in line for line in told)
    assert builds(tmp_path) == 2


def test_a_build_that_fails_leaves_nothing_that_looks_like_one(tmp_path: Path, make_go: MakeGo):
    with pytest.raises(BuildError, match="go build failed"):
        build.find_binaries(make_go(build='echo "no space left" >&2; exit 1'), progress=print)
    left = list((tmp_path / "cache" / "controlplane").iterdir())
    assert left == []


def test_without_go_it_says_how_to_get_it(tmp_path: Path):
    with pytest.raises(ToolMissingError, match=r"Go is needed.*\n.*go\.dev/dl.*KUBEBUILDER_ASSETS"):
        build.find_binaries(settings(tmp_path, path=str(tmp_path)), progress=print)


def test_an_old_go_is_refused_with_its_version(make_go: MakeGo):
    with pytest.raises(ToolMissingError, match=r"1\.24 or newer is needed; .* says go1\.21\.3"):
        build.find_binaries(make_go(version="go1.21.3"), progress=print)


def test_without_a_network_it_says_that_the_first_build_needs_one(make_go: MakeGo):
    with pytest.raises(BuildError, match=r"(?s)no such host.*first build needs the network"):
        build.find_binaries(make_go(build=NO_NETWORK), progress=print)


def test_binaries_of_kubebuilder_assets_are_taken_before_any_other(tmp_path: Path, make_go: MakeGo):
    ours = make_go()
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("etcd", "kube-apiserver", "kubectl"):
        (assets / name).touch(mode=0o755)
    with_assets = settings(tmp_path, path=ours.environment["PATH"], assets=assets)
    found = build.find_binaries(with_assets, progress=print)
    assert found["etcd"] == assets / "etcd"
    assert found["kube-scheduler"].parent != assets


def test_the_command_builds_or_says_why_it_cannot(tmp_path: Path, make_go: MakeGo):
    def build_from(ours: LocalSettings) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", build.__name__]
        env = {**ours.environment, "XDG_CACHE_HOME": str(ours.cache)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    without = build_from(settings(tmp_path, path=str(tmp_path)))
    assert without.returncode == 1
    assert "Go is needed" in without.stderr
    built = build_from(make_go())
    assert (built.returncode, builds(tmp_path)) == (0, 1), built.stderr
    assert "building, once" in built.stdout


def test_the_kubelets_of_real_nodes_are_of_the_control_planes_release():
    modules = [build.MODULE, Path(__file__).parents[3] / "e2e/nodes/go"]
    for module in modules:
        assert f"k8s.io/kubernetes {build.KUBERNETES_VERSION} " in (module / "go.mod").read_text()


def test_the_manifest_has_every_binarys_size(make_go: MakeGo):
    found = build.find_binaries(make_go(), progress=print)
    sizes = json.loads((found["etcd"].parent / "manifest.json").read_text())
    assert sizes == {name: path.stat().st_size for name, path in found.items()}
