"""Where a model is, and the commands that read one without serving it: fetch and calibrate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from vlm_worker.settings.kinds import PART_LIST
from vlm_worker.settings.options import PATH, PORT, REQUIRED, TEXT, at_least, group, number, option
from vlm_worker.weights import Part

HF_PREFIX: Final = "hf://"
S3_PREFIX: Final = "s3://"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of the model.

    `revision` of a directory is the publisher's name for it. Without `cache`, downloads go to
    huggingface_hub's own directory.
    """

    uri: str = option(
        "--model", TEXT, REQUIRED, "a directory, or hf://org/name; for fetch also s3://bucket/path"
    )
    revision: str = option("--model-revision", TEXT, "", "commit of an hf:// model")
    cache: Path | None = option("--model-cache", PATH, None, "where hf:// models are downloaded to")

    @property
    def repository(self) -> str | None:
        """`org/name` of an `hf://` source; None for a directory."""
        return self.uri.removeprefix(HF_PREFIX) if self.uri.startswith(HF_PREFIX) else None

    @property
    def folder(self) -> tuple[str, str] | None:
        """Bucket and prefix, without slashes at its ends, of an `s3://` source; else None."""
        if not self.uri.startswith(S3_PREFIX):
            return None
        bucket, _, prefix = self.uri.removeprefix(S3_PREFIX).partition("/")
        return bucket, prefix.strip("/")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FetchSettings:
    """A download of an `hf://` or `s3://` model into a directory that other processes then read."""

    model: ModelSource = group(ModelSource)
    into: Path = option("--into", PATH, REQUIRED, "directory of this model and revision alone")
    bind: str = option("--bind", TEXT, "127.0.0.1", "listen address of the progress")
    http_port: int | None = option("--http-port", PORT, None, "port of GET /progress")
    pod_uid: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateSettings:
    """A run that measures what the linear layers of a model multiply.

    Attributes:
        images: files, and folders of them.
        parts: empty for all that the family rounds.
        percentile: of the absolute values; larger ones are clipped.
    """

    model: ModelSource = group(ModelSource)
    images: tuple[Path, ...] = ()
    out: Path = option("--out", PATH, REQUIRED, "file of the scales", metavar="FILE")
    prompts: Path | None = option(
        "--prompts",
        PATH,
        None,
        "prompts, one per line; images take them in turn (Describe this image.)",
        metavar="FILE",
    )
    parts: tuple[Part, ...] = option(
        "--parts", PART_LIST, (), "such as encoder,merger; default: all that may be in int8"
    )
    percentile: float = option(
        "--percentile",
        number(float, 50.1, 100, "a percentage from 50.1 to 100"),
        99.99,
        "of the absolute values of a layer's inputs; larger ones are clipped",
    )
    margin: float = option(
        "--margin", number(float, 0.1, 100, "a factor from 0.1 to 100"), 1.0, "of that value"
    )
    num_threads: int = option("--threads", at_least(0), 0, "of the CPU; 0 is all of them")
