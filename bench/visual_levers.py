"""What a lever changes between an image and the visual tokens that the decoder reads.

    off       the whole image                                   what all others are compared with
    pixels    the image resized to a share of its pixels        the baseline of every reduction
    pool, merge, diverse, zip, arrcoc                           `vlm_worker.reduction` by share
    arrcocpyramid                                               windows encoded at three scales
    auto      what the gateway's policy `Auto` chooses by the class of the question, as it finds it
    kv        the whole image, KV cache in int8
    weights   the whole image, encoded with int8 weights of tower and merger; `calibrated`: with
              scales of activations from other questions, instead of one for each row
    modality  the whole image, KV cache in int8 of both modalities or of one, or vision in 4 bits
    parts     the whole image, encoded and decoded with types by part, as of `--weights`

The worker's own code does all of it: processor, vision tower, reduction, decoder. Visual tokens of
one image are encoded once, and all exact reductions read the same embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import int8_accuracy
import numpy as np
import torch
from teacher import Forced, forced, shape_of
from visual_questions import KINDS, SEED, Question, draw, token_ids

from vlm_worker.core.activation_scales import ActivationScales, processor_hash
from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.relevance import allocate
from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.visual import Choice, VisualLimits, VisualPolicy
from vlm_worker.media.patches import PLAIN_CUTTER, model_pixels
from vlm_worker.media.texture import pixel_relevance
from vlm_worker.model.calibrate import Calibrator, load_unpacked
from vlm_worker.reduction import Method, Reduction
from vlm_worker.types import KIVI_GROUP, ImageItem, PreparedImage
from vlm_worker.weights import PARTS

KEY: Final = bytes(32)
CELL: Final = 28
"""Pixels of a visual token of `shapes` and the Qwen families in each direction."""
ENCODED_TOGETHER: Final = 32
OF_EACH_KIND: Final = 5
"""Images of each kind of question that scales are calibrated with."""
CALIBRATION_SEED: Final = SEED + 1000
CALIBRATION_TOKENS: Final = 1024
MODALITY_BLOCK: Final = 16
"""Tokens of a narrow block; an image of `shapes` has 36 to 100."""
SCORED: Final = Reduction(Method.ZIP, 500)
"""Asks the encoder for attention scores, without which ZIP cannot rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A lever at one of its values.

    Attributes:
        lever: one of `LEVERS`.
        value: what tables call it: the share of pixels or tokens, or a type.
        permille: that share; 1000 for the whole image, and for `auto`.
    """

    lever: str
    value: str
    permille: int = 1000

    @property
    def name(self) -> str:
        return f"{self.lever} {self.value}".strip()


def _shares(lever: str, *permille: int) -> tuple[Setting, ...]:
    return tuple(Setting(lever, f"1/{round(1000 / one)}", one) for one in permille)


OFF: Final = Setting("off", "")
ALWAYS: Final = ("off", "pixels")
"""Levers that are measured beside every other one."""
LEVERS: Final[Mapping[str, tuple[Setting, ...]]] = {
    "off": (OFF,),
    "pixels": _shares("pixels", 500, 250),
    "pool": _shares("pool", 500, 250),
    "merge": _shares("merge", 500, 250),
    "diverse": _shares("diverse", 500, 250, 125),
    "zip": _shares("zip", 500, 250, 125),
    "arrcoc": _shares("arrcoc", 500, 250, 125),
    "arrcocpyramid": _shares("arrcocpyramid", 500, 250, 125),
    "auto": (Setting("auto", "Learned"), Setting("auto", "Words")),
    "kv": (Setting("kv", "int8"),),
    "weights": (Setting("weights", "int8 encoder"),),
}
CALIBRATED: Final = "calibrated"
UNRECORDED: Final[Mapping[str, tuple[Setting, ...]]] = {
    "modality": tuple(
        Setting("modality", value) for value in ("int8", "vision=int8", "text=int8", "vision=kivi4")
    ),
    "weights": (Setting("weights", CALIBRATED),),
    "parts": (
        Setting("parts", "encoder=int8"),
        Setting("parts", "encoder=int8,layers=int8"),
        Setting("parts", f"encoder=int8,layers=int8 {CALIBRATED}"),
    ),
}
"""Settings that are measured only if their lever is named, and have no place in the record."""


NOT_RECORDED: Final = frozenset({"arrcocpyramid"})
"""Levers that `results/visual_tokens.jsonl` lacks."""


def chosen(levers: Sequence[str]) -> list[Setting]:
    """The settings of these levers behind `off` and the baseline; all levers if none is named.

    `arrcoc` includes its approximate form. Raises KeyError for an unknown lever.
    """
    both = ("arrcocpyramid",) if "arrcoc" in levers else ()
    names = dict.fromkeys((*ALWAYS, *(levers or LEVERS), *both))
    found = [setting for name in names for setting in LEVERS.get(name, ())]
    found += [setting for name in (*levers, *both) for setting in UNRECORDED.get(name, ())]
    if unknown := set(names) - {*LEVERS, *UNRECORDED}:
        raise KeyError(*unknown)
    return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Seen:
    """A question with its encoded image.

    Attributes:
        image: as prepared for the encoder.
        embedding: of the whole image (`model.vision.Embedding`).
    """

    question: Question
    image: PreparedImage
    embedding: Any


class Worker:
    """The runners of `shapes`, each built at its first use."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._by_weights: dict[str, Any] = {}
        self._by_kv: dict[str, Any] = {}

    @functools.cached_property
    def runner(self) -> Any:
        """As it is served: the checkpoint's dtype."""
        return self._built({})

    @functools.cached_property
    def int8_kv(self) -> Any:
        return self._built({"kv_dtype": "int8"})

    def with_weights(self, weights: str) -> Any:
        """The runner with these `--weights`; behind a space `CALIBRATED`, if they are."""
        if weights not in self._by_weights:
            types, _, calibrated = weights.partition(" ")
            build = self._with_scales if calibrated else self._built
            self._by_weights[weights] = build({"weights": types})
        return self._by_weights[weights]

    def _with_scales(self, options: dict[str, Any]) -> Any:
        """The runner that reads calibrated scales from a file."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "scales.json"
            path.write_text(self._scales.to_json())
            return self._built({**options, "activation_scales": path})

    @functools.cached_property
    def _scales(self) -> ActivationScales:
        """Scales of all parts, as `vlm-worker calibrate` makes them."""
        drawn = [one for kind in KINDS for one in draw(kind, OF_EACH_KIND, seed=CALIBRATION_SEED)]
        loaded = load_unpacked(
            int8_accuracy.ROOT / "examples/shapes/model", num_threads=self._threads
        )
        calibrator = Calibrator(loaded, parts=PARTS, max_tokens=CALIBRATION_TOKENS)
        for question in drawn:
            image = self._prepared(question, math.prod(question.rgb.shape[:2]))
            ids, first = token_ids(question, image.cells)
            prompt = ids[: len(ids) + 1 - len(question.answer)]
            calibrator.read(tuple(prompt), image, first)
        return ActivationScales(
            model=loaded.checkpoint.revision(),
            processor=processor_hash(loaded.family.processor),
            percentile=99.99,
            margin=1.0,
            images=len(drawn),
            parts=calibrator.scales(percentile=99.99, margin=1.0),
        )

    def with_kv(self, kv_dtype: str) -> Any:
        """The runner with this `--kv-dtype`, and blocks that are small beside an image."""
        if kv_dtype not in self._by_kv:
            size = KIVI_GROUP if kv_dtype == "vision=kivi4" else MODALITY_BLOCK
            options = {"kv_dtype": kv_dtype, "block_size": size}
            self._by_kv[kv_dtype] = self._built(options)
        return self._by_kv[kv_dtype]

    def kv_bytes(self, setting: Setting, seen: Sequence[Seen]) -> float:
        """Mean KV bytes of a prompt and its answer, in whole blocks."""
        layout = self.decoder(setting).kv_layout
        kinds = BlockKinds.of_layout(layout)
        blocks = [
            shape_of(one, kinds).num_blocks(len(one.token_ids))
            for one in self.sequences(setting, seen)
        ]
        return layout.block_bytes * sum(blocks) / len(blocks)

    def _built(self, options: dict[str, Any]) -> Any:
        return int8_accuracy.runner_of({"dtype": "auto", "num_threads": self._threads, **options})

    def decoder(self, setting: Setting) -> Any:
        """The runner that decodes with this setting."""
        if setting.lever == "parts":
            return self.with_weights(setting.value)
        if setting.lever == "modality":
            return self.with_kv(setting.value)
        return self.int8_kv if setting.lever == "kv" else self.runner

    def see(self, questions: Sequence[Question], *, permille: int = 1000) -> list[Seen]:
        """Prepare and encode the images at a share of their pixels."""
        caps = [one.rgb.shape[0] * one.rgb.shape[1] * permille // 1000 for one in questions]
        images = [self._prepared(*one) for one in zip(questions, caps, strict=True)]
        return self._encoded(self.runner, questions, images)

    def sequences(self, setting: Setting, seen: Sequence[Seen]) -> list[Forced]:
        """What the decoder reads with this setting."""
        questions = [one.question for one in seen]
        match setting.lever:
            case "off" | "kv" | "modality":
                return [self._whole(one) for one in seen]
            case "pixels":
                return [self._whole(one) for one in self.see(questions, permille=setting.permille)]
            case "auto":
                return [self._chosen(one, choice_of(setting, one.question, self)) for one in seen]
            case "weights" | "parts":
                images = [one.image for one in seen]
                weights = setting.value if setting.lever == "parts" else "int8"
                if setting.value == CALIBRATED:
                    weights = f"int8 {CALIBRATED}"
                encoded = self._encoded(self.with_weights(weights), questions, images)
                return [self._whole(one) for one in encoded]
            case "arrcocpyramid":
                reduction = Reduction(Method.ARRCOC_PYRAMID, setting.permille)
                images = [dataclasses.replace(one.image, reduction=reduction) for one in seen]
                encoded = self._encoded(self.runner, questions, images)
                return [self._placed(one, one.embedding) for one in encoded]
            case lever:
                reduction = Reduction(Method(lever), setting.permille)
                return [self._reduced(one, reduction) for one in seen]

    def _prepared(self, question: Question, max_pixels: int) -> PreparedImage:
        processor = self.runner.family.processor.capped(max_pixels)
        geometry = processor.geometry(*question.rgb.shape[:2])
        pixels = model_pixels(question.rgb, processor, geometry)
        patches = PLAIN_CUTTER.cut(pixels, processor, geometry)
        known = KEY, geometry.grid_thw, geometry.num_tokens
        image = PreparedImage(*known, patches.data, SCORED)
        relevance = pixel_relevance(pixels, image.cells)
        return dataclasses.replace(image, relevance=relevance.tobytes())

    def _encoded(
        self, runner: Any, questions: Sequence[Question], images: Sequence[PreparedImage]
    ) -> list[Seen]:
        embeddings: list[Any] = []
        for first in range(0, len(images), ENCODED_TOGETHER):
            embeddings += runner.encode(images[first : first + ENCODED_TOGETHER])
        errors = [one for one in embeddings if isinstance(one, Exception)]
        if errors:
            raise errors[0]
        return [Seen(*one) for one in zip(questions, images, embeddings, strict=True)]

    def _whole(self, seen: Seen) -> Forced:
        return self._forced(seen, np.arange(seen.image.num_tokens), seen.embedding.rows)

    def _chosen(self, seen: Seen, choice: Choice) -> Forced:
        if choice.max_pixels:
            image = self._prepared(seen.question, choice.max_pixels)
            (seen,) = self._encoded(self.runner, [seen.question], [image])
        return self._reduced(seen, choice.reduction) if choice.reduction else self._whole(seen)

    def _reduced(self, seen: Seen, reduction: Reduction) -> Forced:
        image = dataclasses.replace(seen.image, reduction=reduction)
        reduced = self.runner.reduce_embedding(seen.embedding, image)
        if reduced is None:
            raise ValueError(f"the embedding lacks what {reduction.method} needs")
        return self._placed(seen, reduced)

    def _placed(self, seen: Seen, reduced: Any) -> Forced:
        places = reduced.places.astype(np.int64)
        kept = places[:, 0] * seen.image.cells[1] + places[:, 1]
        return self._forced(seen, kept, reduced.rows)

    def _forced(self, seen: Seen, kept: np.ndarray, rows: torch.Tensor) -> Forced:
        image = seen.image
        ids, first = token_ids(seen.question, image.cells)
        item = ImageItem(KEY, first, image.num_tokens, image.grid_thw)
        num_answer = len(seen.question.answer)
        return forced(self.runner.family, ids, item, kept, rows, num_answer=num_answer)


def texture_milliseconds(side: int, *, repeats: int = 20) -> float:
    """Median time in which the pixels of a square image of noise get their relevance and groups."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    cells = side // CELL, side // CELL
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        allocate(pixel_relevance(pixels, cells), cells[0] * cells[1] // 4)
        took.append(time.perf_counter() - start)
    return 1000 * statistics.median(took)


def choice_of(setting: Setting, question: Question, worker: Worker) -> Choice:
    """The gateway's decision on the image of a request without `detail` and `visual`."""
    limits = VisualLimits(policy="Auto", classifier=setting.value)  # type: ignore[arg-type]
    message = Message("user", (TextPart(question.text),))
    policy = VisualPolicy(limits, worker.runner.family, tenant="", visual=None, messages=[message])
    return policy.of(ImagePart("", "auto", ""))
