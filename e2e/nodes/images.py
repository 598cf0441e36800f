"""Images without a daemon or a registry, in a store of containerd that nodes share.

    base.Containerfile ─▶ operator/Dockerfile, worker/Dockerfile ─▶ store    once per `_full_key`
    the checkout's wheel ─▶ one more layer on each node                      if only Python changed

The Dockerfiles are built as they are, with another base. If a Dockerfile, its requirements or the
kernels in C++ change, a new image is built, in 10 minutes or more. If other code changes, nodes get
it as a layer.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from nodes import binaries
from nodes.cluster import containerd_settings

from vlm_local.settings import LocalSettings
from vlm_local.subprocesses import spawn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE = "localhost/triptych-nodes/base:bookworm"
SITE = "opt/triptych/lib/python3.11/site-packages"
KERNELS = "kernels/vlm_kernels/cpu"  # compiled in the image
OURS = "localhost/triptych-nodes"
PROGRAMS = ("pause", "coredns")
Ctr = Callable[..., bytes]


class Image(NamedTuple):
    """How an image is built, and what of the checkout is in it."""

    dockerfile: str
    target: tuple[str, ...]
    lock: str
    packages: tuple[str, ...]
    compiled: tuple[str, ...] = ()


IMAGES = {
    "operator": Image("operator/Dockerfile", (), "operator.txt", ("operator/vlm_operator",)),
    "gateway": Image(
        "worker/Dockerfile", ("--target", "gateway"), "gateway.txt", ("worker/vlm_worker",)
    ),
    "worker": Image(
        "worker/Dockerfile",
        ("--target", "worker"),
        "worker-cuda.txt",
        ("worker/vlm_worker", "kernels/vlm_kernels"),
        (KERNELS,),
    ),
}
ROLES = tuple(IMAGES)


def name_of(role: str) -> str:
    """The image's name in install.yaml, which is the chart with its default values."""
    found = re.search(rf"[\w.]+/triptych/{role}:[\w.]+", (ROOT / "install.yaml").read_text())
    assert found, f"install.yaml names no image of the {role}"
    return found[0]


class Builder:
    """Builds what is missing in `folder`; call it as root, in a mount namespace of its own."""

    def __init__(self, folder: Path, *, programs: Path) -> None:
        self.folder = folder
        self._programs = programs
        storage = ("--root", folder / "storage", "--runroot", folder / "runroot")
        self._buildah = ("buildah", *map(str, storage), "--storage-driver", "overlay")

    @property
    def store(self) -> Path:
        """containerd's root with all images, once `make_store` has returned."""
        parts = [name_of(role) + _full_key(role) for role in ROLES] + [self._programs.name]
        return self.folder / f"store-{_digest([part.encode() for part in parts])}"

    def make_store(self) -> None:
        """Build images and fill the store, unless they are there."""
        if self.store.exists():
            return
        for old in self.folder.glob("store-*"):
            shutil.rmtree(old)
        self._make_base()
        images = {name_of(role): self._make_full(role) for role in ROLES}
        for program in PROGRAMS:
            images[f"{OURS}/{program}:1"] = self._make_program(program)
        with tempfile.TemporaryDirectory(prefix="filling-", dir=self.folder) as temporary:
            self._fill(Path(temporary), images)
            codes = {role: self._built(role).read_text() for role in ROLES}
            (Path(temporary) / "store/codes.json").write_text(json.dumps(codes))
            (Path(temporary) / "store").rename(self.store)

    def _make_base(self) -> None:
        if self._run("images", "--quiet", "--filter", f"reference={BASE}"):
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as context:
            with_ = "--include=ca-certificates,netbase,tzdata,python3,python3-venv,python3-pip"
            command = ["mmdebstrap", "--variant=minbase", with_, "bookworm", f"{context}/base.tar"]
            subprocess.run(command, check=True)
            shutil.copy("/etc/ssl/certs/ca-certificates.crt", context)
            self._bud(HERE / "base.Containerfile", BASE, context)

    def _make_full(self, role: str) -> str:
        image = f"{OURS}/{role}:{_full_key(role)}"
        if not self._built(role).exists():
            code = code_key()
            build = IMAGES[role]
            options = ("--build-arg", f"BASE={BASE}", *build.target)
            self._bud(ROOT / build.dockerfile, image, ROOT, *options)
            self._built(role).write_text(code)
        return image

    def _make_program(self, program: str) -> str:
        image = f"{OURS}/{program}:{self._programs.name}"
        with tempfile.TemporaryDirectory(dir=self.folder) as context:
            shutil.copy(self._programs / program, context)
            lines = ["FROM scratch", f"COPY {program} /", f'ENTRYPOINT ["/{program}"]']
            file = Path(context) / "Containerfile"
            file.write_text("\n".join(lines))
            self._bud(file, image, context)
        return image

    def _built(self, role: str) -> Path:
        """A file that records that the image is built, and from which code."""
        return self.folder / f"built-{role}-{_full_key(role)}"

    def _bud(self, file: Path, image: str, context: Path | str, *options: str) -> None:
        """Build on the layers of earlier builds; each RUN in a chroot, there is no daemon."""
        how = ("--layers", "--pull-never", "--isolation", "chroot", *options)
        command = [*self._buildah, "bud", *how, "-f", file, "-t", image, context]
        subprocess.run([*map(str, command)], check=True)

    def _run(self, *arguments: str) -> str:
        command = [*self._buildah, *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def _fill(self, folder: Path, images: dict[str, str]) -> None:
        """Run containerd on folder/store and import the images."""
        socket, settings = folder / "containerd.sock", folder / "containerd.toml"
        settings.write_text(containerd_settings(folder / "store", folder / "state", socket))
        command = ["containerd", "--config", settings, "--log-level", "warn"]
        log = self.folder / "containerd.log"
        child = spawn("containerd", command, log=log, environment={"PATH": os.defpath})
        try:
            while not socket.exists():
                child.require_running()
            for name, image in images.items():
                print(f"importing {name}", flush=True)
                self._import(socket, name, image)
        finally:
            child.stop(grace_seconds=30)

    def _import(self, socket: Path, name: str, image: str) -> None:
        """Through a pipe: the archive is as large as the image."""
        push = [*self._buildah, "push", "--quiet", image, f"docker-archive:/dev/stdout:{name}"]
        with subprocess.Popen(push, stdout=subprocess.PIPE) as pushing:
            command = ["ctr", "-a", str(socket), "-n", "k8s.io", "images", "import", "-"]
            imported = subprocess.run(command, stdin=pushing.stdout, check=False)
            if imported.returncode:
                pushing.kill()
        assert (pushing.returncode, imported.returncode) == (0, 0), f"{name} was not imported"


class Updates:
    """Brings images of `store` up to the checkout's code, on one node after another."""

    def __init__(self, store: Path) -> None:
        codes = json.loads((store / "codes.json").read_text())
        self.roles = [role for role in ROLES if codes[role] != code_key()]
        self._layers = _layers() if self.roles else {}

    def __call__(self, ctr: Ctr) -> None:
        """Do so through the containerd client of a node."""
        for role in self.roles:
            archive = _thin(name_of(role), self._layers[role], ctr)
            ctr("images", "import", "-", stdin=archive)


def _layers() -> dict[str, bytes]:
    """Return a layer by role, as a tar, with this checkout's packages in place of the image's."""
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*build, "--no-build-isolation", "-w", folder, ROOT], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            return {role: _layer(image.packages, files) for role, image in IMAGES.items()}


def _layer(packages: Iterable[str], files: zipfile.ZipFile) -> bytes:
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w") as tar:
        for package in map(Path, packages):
            _add(tar, f"{SITE}/{package.name}/.wh..wh..opq", b"")  # hides what was there
            for name in files.namelist():
                if name.startswith(f"{package.name}/"):
                    _add(tar, f"{SITE}/{name}", files.read(name))
    return result.getvalue()


def _thin(name: str, changes: bytes, ctr: Ctr) -> bytes:
    """Return an archive with what is new: the image `name` of a containerd, and one layer more."""
    line = ctr("images", "ls", f"name=={name}").decode().splitlines()[1]
    manifest = json.loads(ctr("content", "get", line.split()[2]))
    config = json.loads(ctr("content", "get", manifest["config"]["digest"]))
    config["rootfs"]["diff_ids"].append(_sha256(changes))
    config["history"].append({"created_by": "e2e/nodes/images.py"})
    plain = manifest["layers"][0]["mediaType"].removesuffix(".gzip").removesuffix("+gzip")
    manifest["layers"].append(_descriptor(plain, changes))
    packed = json.dumps(config).encode()
    manifest["config"] = _descriptor(manifest["config"]["mediaType"], packed)
    whole = json.dumps(manifest).encode()
    top = _descriptor(manifest["mediaType"], whole)
    top["annotations"] = {"io.containerd.image.name": name}
    index = {"schemaVersion": 2, "manifests": [top]}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        for blob in (changes, packed, whole):
            _add(tar, f"blobs/{_sha256(blob).replace(':', '/')}", blob)
        _add(tar, "index.json", json.dumps(index).encode())
    return archive.getvalue()


def code_key() -> str:
    """Name the Python code of this checkout."""
    return _digest(
        _files(
            ROOT / "pyproject.toml",
            *(ROOT / package for image in IMAGES.values() for package in image.packages),
        )
    )


def _full_key(role: str) -> str:
    """Name what a whole build is needed for."""
    image = IMAGES[role]
    parts = [image.dockerfile, f"requirements/{image.lock}", *image.compiled]
    return _digest(_files(HERE / "base.Containerfile", *(ROOT / part for part in parts)))


def _files(*paths: Path) -> Iterable[bytes]:
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in inside:
            if file.is_file() and "__pycache__" not in file.parts:
                yield str(file.relative_to(ROOT)).encode()
                yield file.read_bytes()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:12]


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": _sha256(data), "size": len(data)}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = 0o644
    tar.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--full", action="store_true", help="build images of this code, whatever changed"
    )
    asked = parser.parse_args()
    settings = LocalSettings.read()
    found = binaries.find(settings, progress=lambda line: print(line, flush=True))
    builder = Builder(settings.cache / "nodes", programs=found)
    if asked.full:
        for path in builder.folder.glob("built-*"):
            path.unlink()
        shutil.rmtree(builder.store, ignore_errors=True)
    builder.make_store()
