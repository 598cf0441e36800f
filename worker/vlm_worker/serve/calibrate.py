"""`vlm-worker calibrate MODEL IMAGES --out FILE`: scales of what int8 layers multiply, from images.

images, prompts ─▶ headers and prompts checked ─▶ model loaded ─▶ one prompt per image ─▶ FILE
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from vlm_worker.core.activation_scales import ActivationScales, processor_hash
from vlm_worker.core.families import Family
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.conversation import Conversation
from vlm_worker.gateway.prompts import Prompt, PromptBuilder
from vlm_worker.media.image_header import ImageHeader, read_header
from vlm_worker.media.patches import make_patches
from vlm_worker.media.pixels import UndecodableError, decode_rgb
from vlm_worker.serve.sources import fetch_model
from vlm_worker.settings import CalibrateSettings
from vlm_worker.types import PreparedImage
from vlm_worker.weights import PARTS, Part

SUFFIXES: Final = (".gif", ".jpeg", ".jpg", ".png", ".webp")
DEFAULT_PROMPT: Final = "Describe this image."
NO_KEY: Final = bytes(32)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """An image, and the prompt that it is read with."""

    path: Path
    header: ImageHeader
    prompt: Prompt


def run_calibrate(settings: CalibrateSettings) -> int:
    """Calibrate one model and return the exit code 0.

    Raises:
        ModelConfigError: the model, an image, a prompt or the file cannot be used; with the fix.
    """
    model_dir = fetch_model(settings.model, say)
    with _Output(settings.out) as output:
        builder = PromptBuilder(model_dir)
        parts = chosen_parts(builder.family, settings.parts)
        prompts = read_prompts(settings.prompts) if settings.prompts else (DEFAULT_PROMPT,)
        files = image_files(settings.images)
        samples = [
            read_sample(path, prompts[number % len(prompts)], builder)
            for number, path in enumerate(files)
        ]
        scales = calibrate(model_dir, samples, parts, settings)
        output.write(scales.to_json())
    num_layers = sum(len(layers) for layers in scales.parts.values())
    sys.stdout.write(
        f"{settings.out}: scales of {num_layers} layers in {', '.join(scales.parts)}, from "
        f"{len(samples)} images; sha256 {scales.sha256}\n"
    )
    return 0


def say(message: str) -> None:
    """Print progress."""
    print(f"vlm-worker: {message}", file=sys.stderr, flush=True)  # noqa: T201


def chosen_parts(family: Family, wanted: Sequence[Part]) -> tuple[Part, ...]:
    """The parts to calibrate: those that the family rounds, or `wanted` of them.

    Raises:
        ModelConfigError: the family does not round one of them, or none at all.
    """
    if not family.spec.int8:
        raise ModelConfigError(f"{family.model_type}: no part of an unlisted family is rounded")
    for part in wanted:
        if part not in family.spec.int8:
            raise ModelConfigError(
                f"--parts: {family.model_type} rounds {', '.join(sorted(family.spec.int8))} "
                f"alone; remove {part}"
            )
    return tuple(part for part in PARTS if part in (wanted or family.spec.int8))


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file, without empty ones. Raises ModelConfigError if there are none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ModelConfigError(
            f"--prompts={path}: cannot be read: {reason}; name a text file with one prompt per line"
        ) from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ModelConfigError(f"--prompts={path}: is empty; write one prompt per line")
    return prompts


def image_files(given: Sequence[Path]) -> list[Path]:
    """The files among `given`, and the images in its folders, in the order of their names.

    Raises:
        ModelConfigError: a path does not exist, or there is no image.
    """
    found: list[Path] = []
    for path in given:
        if not path.exists():
            raise ModelConfigError(f"{path}: no such file; name images, or folders of images")
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [one for one in inside if not path.is_dir() or one.suffix.lower() in SUFFIXES]
    if not found:
        names = ", ".join(map(str, given))
        raise ModelConfigError(
            f"{names}: has no images; put files there that end in {', '.join(SUFFIXES)}, 50 or "
            "more that look like those of your requests"
        )
    return found


def read_sample(path: Path, prompt: str, builder: PromptBuilder) -> Sample:
    """Check an image's header, and build its prompt.

    Raises:
        ModelConfigError: the image or the prompt cannot be used.
    """
    try:
        header = read_header(path.read_bytes(), item=0)
        geometry = builder.family.geometry(header.height, header.width)
        parts = (ImagePart("", "auto", ""), TextPart(prompt))
        built = builder.chat(Conversation([Message("user", parts)]), [geometry.num_tokens])
    except OSError as error:
        raise ModelConfigError(
            f"{path}: cannot be read: {error.strerror}; make it readable, or remove it"
        ) from error
    except (InvalidImageError, InvalidRequestError) as error:
        raise ModelConfigError(f"{path}: {error}; convert it, or remove it") from error
    except ApiError as error:
        raise ModelConfigError(f"{path}: prompt {prompt!r}: {error}") from error
    longest = builder.family.max_position_embeddings
    if len(built.token_ids) > longest:
        raise ModelConfigError(
            f"{path}: its prompt has {len(built.token_ids)} tokens, the model's limit is "
            f"{longest}; make the image smaller, or remove it"
        )
    return Sample(path, header, built)


def calibrate(
    model_dir: Path, samples: Sequence[Sample], parts: Sequence[Part], settings: CalibrateSettings
) -> ActivationScales:
    """Run all samples through the model; raises ModelConfigError if one cannot be computed."""
    from vlm_worker.model.calibrate import Calibrator, load_unpacked

    say("loading the model")
    loaded = load_unpacked(model_dir, num_threads=settings.num_threads)
    most = max(len(sample.prompt.token_ids) for sample in samples)
    calibrator = Calibrator(loaded, parts=parts, max_tokens=most)
    for number, sample in enumerate(samples):
        say(f"image {number + 1} of {len(samples)}: {sample.path}")
        image = prepare(sample, loaded.family)
        try:
            calibrator.read(sample.prompt.token_ids, image, sample.prompt.offsets[0])
        except ModelConfigError as error:
            raise ModelConfigError(f"{sample.path}: {error}") from error
    return ActivationScales(
        model=loaded.checkpoint.revision(),
        processor=processor_hash(loaded.family.processor),
        percentile=settings.percentile,
        margin=settings.margin,
        images=len(samples),
        parts=calibrator.scales(percentile=settings.percentile, margin=settings.margin),
    )


def prepare(sample: Sample, family: Family) -> PreparedImage:
    """Decode an image into patches, here: these files are the deployer's own.

    Raises:
        ModelConfigError: it is damaged, or changed since its header was read.
    """
    try:
        rgb = decode_rgb(sample.path.read_bytes(), sample.header)
    except (OSError, UndecodableError) as error:
        raise ModelConfigError(
            f"{sample.path}: {error}; copy the file again, or remove it"
        ) from error
    geometry = family.geometry(sample.header.height, sample.header.width)
    patches: np.ndarray = make_patches(rgb, family.processor, geometry)
    return PreparedImage(NO_KEY, geometry.grid_thw, geometry.num_tokens, patches.data.cast("B"))


class _Output:
    """The file to write: opened before the model is loaded, and complete or absent.

    Raises:
        ModelConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if path.is_dir():
                raise IsADirectoryError(0, "it is a directory")
            self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115  closed by __exit__
                "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
            )
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> _Output:
        return self

    def write(self, text: str) -> None:
        """Replace the file."""
        try:
            with self._file as file:
                file.write(text)
            Path(self._file.name).chmod(0o644)
            Path(self._file.name).replace(self._path)
        except OSError as error:
            raise self._error(error) from error

    def __exit__(self, *_: object) -> None:
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)

    def _error(self, error: OSError) -> ModelConfigError:
        return ModelConfigError(
            f"--out={self._path}: cannot be written: {error.strerror}; name a file in a directory "
            "that this user may write"
        )
