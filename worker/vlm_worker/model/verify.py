"""Shows at start that an unlisted family computes what transformers computes, or refuses it.

    noise as rows of images ─┬─▶ transformers' model, eager ──────────────┐
                             └─▶ packed chunks over KV blocks, per mask ──┴─▶ the mask that is equal
    noise as pixels ─┬─▶ generate() ──────────────────────────────────────┐
                     └─▶ encoder, packed chunks under this mask ──────────┴─▶ equal

The second part needs all stages. Windows are a few tokens long meanwhile, so that probes exceed
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from vlm_worker.attends import Attends
from vlm_worker.core.families import Family, Geometry
from vlm_worker.core.image_geometry import DynamicProcessor
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.probe import (
    NUM_ANSWER,
    Probe,
    Verification,
    make_probe,
    make_probes,
    num_blocks,
    steps,
)
from vlm_worker.model.generic import (
    TYPE_IDS,
    GenericEncoder,
    GenericModel,
    encoder_inputs,
    plain_attention,
)
from vlm_worker.model.loader import LoadedModel
from vlm_worker.model.memory import make_kv_layout
from vlm_worker.model.runner import ModelRunner
from vlm_worker.model.vision import Embedding
from vlm_worker.types import KVLayout, PreparedImage

logger = logging.getLogger(__name__)

BLOCK_SIZE: Final = 4
CHUNK: Final = 7
WHOLE: Final = 1 << 20
WINDOW: Final = 5
LIMITS: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest difference of equal logits, by the type of the computation."""
WHOLE_FACTOR: Final = 4
"""In 16 bits, an answer to an image may differ by this factor more: rows of images are larger."""
MARGIN: Final = 10
"""In 16 bits, logits of all other masks differ by this factor more."""
SIDES: Final = (1, 32, 64, 128, 256, 512)
MIN_ROWS: Final = 6
PREFIX_TYPES: Final = frozenset({"paligemma"})
"""Model types whose processor marks the prompt, not its images, in `token_type_ids`."""


def verified(loaded: LoadedModel) -> LoadedModel:
    """The model with the mask that it was found to have.

    Raises:
        ModelConfigError: nothing that can be served is equal to transformers.
    """
    started = time.perf_counter()
    try:
        with torch.inference_mode(), _narrow_windows(loaded.model):
            found = _verify(loaded) if loaded.has_lm else None
            if found is None:
                _encode_noise(loaded)
                return loaded
    except ModelConfigError:
        raise
    except Exception as error:  # transformers may raise anything of a model that does not fit
        raise _refusal(loaded, f"fails: {type(error).__name__}: {_line(error)}") from error
    found = dataclasses.replace(found, seconds=time.perf_counter() - started)
    logger.info(
        "model verified",
        extra={
            "model_type": loaded.family.model_type,
            "attends": found.attends.value,
            "difference": found.difference,
            "seconds": round(found.seconds, 3),
        },
    )
    return with_mask(loaded, found)


def with_mask(loaded: LoadedModel, found: Verification) -> LoadedModel:
    """The model whose family attends as found."""
    spec = dataclasses.replace(loaded.family.spec, attends=found.attends)
    family = dataclasses.replace(loaded.family, spec=spec)
    checkpoint = dataclasses.replace(loaded.checkpoint, family=family)
    return dataclasses.replace(loaded, checkpoint=checkpoint, verification=found)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _refusal(loaded: LoadedModel, problem: str) -> ModelConfigError:
    return ModelConfigError(
        f"{loaded.checkpoint.path / 'config.json'}: model_type is {loaded.family.model_type!r}, "
        f"whose verification at start {problem}. It is not served; use a model of a type in "
        "docs/families.md"
    )


def _verify(loaded: LoadedModel) -> Verification:
    model, family = loaded.generic, loaded.family
    assert model is not None
    avoid = _special_ids(loaded.checkpoint.config)
    probes = make_probes(family, avoid=avoid)
    noise = [[_noise(loaded, item.num_tokens) for item in probe.items] for probe in probes]
    wanted = [
        _reference(loaded, model, probe, rows) for probe, rows in zip(probes, noise, strict=True)
    ]
    found: dict[Attends, float] = {}
    limit = LIMITS[loaded.dtype]
    for attends in _masks(loaded):
        has_match = min(found.values(), default=math.inf) < limit
        chunk = WHOLE if has_match else CHUNK  # fewer steps for masks that are to differ
        got = _paged(loaded, probes, noise, attends, chunk=chunk)
        found[attends] = difference(got, wanted)
        if loaded.dtype is torch.float32 and found[attends] < limit:
            break
    best = min(found, key=found.__getitem__)
    others = {mask: value for mask, value in found.items() if mask is not best}
    if not found[best] < limit or any(value < MARGIN * found[best] for value in others.values()):
        tried = ", ".join(f"{mask.value} {value:.1e}" for mask, value in found.items())
        raise _refusal(
            loaded, f"finds no mask that is equal to transformers' (limit {limit:.0e}): {tried}"
        )
    verification = Verification(best, found[best])
    if loaded.has_encoder:
        whole = _whole_difference(with_mask(loaded, verification), avoid)
        bound = limit if loaded.dtype is torch.float32 else WHOLE_FACTOR * limit
        if not whole < bound:
            raise _refusal(
                loaded,
                f"answers a prompt with an image otherwise than generate(): {whole:.1e} (limit "
                f"{bound:.0e})",
            )
        verification = dataclasses.replace(
            verification, difference=max(whole, verification.difference)
        )
    return verification


def _masks(loaded: LoadedModel) -> Iterator[Attends]:
    """The masks to try, in order; IMAGES_SLIDING only if it differs from CAUSAL and IMAGES."""
    windows = {window for _, window in _window_attributes(loaded.model)}
    is_mixed = len(windows) > 1
    yield Attends.CAUSAL
    if is_mixed:
        yield Attends.IMAGES_SLIDING
    yield Attends.IMAGES
    yield Attends.PREFIX


def difference(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The worst row's root mean square difference of logits `[T, V]` each, over their deviation."""
    deviation = max(float(logits.std()) for logits in wanted)
    worst = max(
        float((a - b).square().mean(dim=-1).sqrt().max()) for a, b in zip(got, wanted, strict=True)
    )
    return worst / deviation if math.isfinite(worst) and deviation > 0 else math.inf


def _noise(loaded: LoadedModel, num_tokens: int) -> Embedding:
    """Rows as an encoder could make them: as large as those of the embedding table."""
    family = loaded.family
    table = loaded.model.get_input_embeddings().weight
    rng = torch.Generator().manual_seed(num_tokens)
    rows = torch.randn(num_tokens, family.hidden_size * (1 + family.num_levels), generator=rng)
    scale = float(table[:1024].float().std()) or 1.0
    return Embedding((rows * scale).to(loaded.device, loaded.dtype))


def _reference(
    loaded: LoadedModel, model: GenericModel, probe: Probe, rows: Sequence[Embedding]
) -> torch.Tensor:
    """Transformers' own logits of all tokens, float32 `[T, V]`; it makes masks and positions."""
    ids = torch.tensor(probe.token_ids, device=loaded.device)
    joined = torch.cat([one.rows for one in rows]) if rows else None
    arguments = _own_arguments(loaded, model, probe)
    _forget_positions(loaded.model)
    with plain_attention(loaded.model):
        if joined is not None:
            model.try_boxes(ids, joined, **arguments)
            _forget_positions(loaded.model)
        logits = model.forward(ids, joined, **arguments)
    _forget_positions(loaded.model)
    return logits.float()


def _own_arguments(loaded: LoadedModel, model: GenericModel, probe: Probe) -> dict[str, Any]:
    """What the family's own processor returns beside ids and pixels."""
    ids = torch.tensor(probe.token_ids, device=loaded.device)[None]
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    if isinstance(loaded.family.processor, DynamicProcessor) and probe.items:
        arguments["image_grid_thw"] = torch.tensor(probe.grids, device=loaded.device)
    if model.takes("token_type_ids"):
        types = (ids == loaded.family.image_token_id).long()
        if loaded.family.model_type in PREFIX_TYPES:
            types = (torch.arange(ids.shape[1], device=ids.device) >= probe.num_prompt).long()[None]
        arguments["token_type_ids"] = types
    return arguments


def _paged(
    loaded: LoadedModel,
    probes: Sequence[Probe],
    embeddings: Sequence[Sequence[Embedding]],
    attends: Attends,
    *,
    chunk: int,
    first_sampled: int = 0,
) -> list[torch.Tensor]:
    """Logits of each probe's tokens from `first_sampled` on, float32, by steps over KV blocks."""
    assumed = with_mask(loaded, Verification(attends, 0.0))
    layout = _layout(loaded)
    runner = ModelRunner(assumed, "", kv_layout=layout, num_blocks=num_blocks(probes, BLOCK_SIZE))
    parts: list[list[torch.Tensor]] = [[] for _ in probes]
    for inputs, owners in steps(
        probes,
        embeddings,
        attends,
        block_size=BLOCK_SIZE,
        chunk=chunk,
        first_sampled=first_sampled,
    ):
        logits = runner.logits(inputs)
        for number in sorted(set(owners)):
            rows = [row for row, owner in enumerate(owners) if owner == number]
            parts[number].append(logits[rows])
    return [torch.cat(part) for part in parts]


def _layout(loaded: LoadedModel) -> KVLayout:
    text = loaded.model.config.get_text_config()
    try:
        return make_kv_layout(text, "", dtype=loaded.dtype, kv_dtype="auto", block_size=BLOCK_SIZE)
    except Exception as error:  # configs with values per layer raise their own kinds
        raise _refusal(
            loaded, "finds layers whose KV has several shapes, which is not built"
        ) from error


def _whole_difference(loaded: LoadedModel, avoid: Collection[int]) -> float:
    """The difference to `generate()` of an answer to a prompt with a small image."""
    model, family = loaded.generic, loaded.family
    assert model is not None
    image, embedding = _encode_noise(loaded)
    probe = make_probe(
        family,
        np.random.default_rng(1),
        counts=[image.num_tokens],
        grids=[image.grid_thw],
        avoid=avoid,
    )
    prompt = dataclasses.replace(probe, token_ids=probe.token_ids[: probe.num_prompt])
    tensors = encoder_inputs(family.processor, image)
    arguments = _own_arguments(loaded, model, prompt) | {
        name: value.to(loaded.device, loaded.dtype if value.is_floating_point() else None)
        for name, value in tensors.items()
    }
    ids = torch.tensor(prompt.token_ids, device=loaded.device)[None]
    for name in TYPE_IDS:
        if model.takes(name):
            arguments[name] = (ids == family.image_token_id).int()
    with plain_attention(loaded.model):
        output = loaded.model.generate(
            input_ids=ids,
            do_sample=False,
            max_new_tokens=NUM_ANSWER + 1,
            min_new_tokens=NUM_ANSWER + 1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **arguments,
        )
    _forget_positions(loaded.model)
    answer = output.sequences[0, ids.shape[1] : -1].cpu().numpy()
    told = dataclasses.replace(probe, token_ids=np.concatenate([prompt.token_ids, answer]))
    wanted = torch.cat(output.logits).float()
    got = _paged(
        loaded,
        [told],
        [[embedding]],
        family.spec.attends,
        chunk=WHOLE,
        first_sampled=probe.num_prompt - 1,
    )
    return difference(got, [wanted])


def _encode_noise(loaded: LoadedModel) -> tuple[PreparedImage, Embedding]:
    """A small image of noise, and its rows. Raises what the encoder raises."""
    family = loaded.family
    geometry = _small_geometry(family)
    size = math.prod(geometry.grid_thw) * family.processor.patch_dim
    values = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    image = PreparedImage(bytes(32), geometry.grid_thw, geometry.num_tokens, values.data)
    encoder = GenericEncoder(loaded.model, family, device=loaded.device)
    (embedding,) = encoder.encode([image])
    if isinstance(embedding, Exception):
        raise embedding
    return image, embedding


def _small_geometry(family: Family) -> Geometry:
    """The smallest image that is wide and has some rows, whose order thus matters."""
    for side in SIDES:
        geometry = family.geometry(side, 2 * side)
        if geometry.num_tokens >= MIN_ROWS:
            break
    return geometry


def _special_ids(config: Mapping[str, Any]) -> set[int]:
    """Ids of tokens that mean more than text, by the names of their fields."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _special_ids(value)
        elif name.endswith(("token_id", "token_index", "token_ids", "_id")):
            values = value if isinstance(value, list | tuple) else [value]
            found |= {one for one in values if isinstance(one, int)}
    return found


def _forget_positions(model: Any) -> None:
    """Drop the offset of positions that a model keeps from one call to the next."""
    for module in (model, model.base_model):
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None


def _window_attributes(model: Any) -> Iterator[tuple[Any, int | None]]:
    """Attention modules of the language model, and their windows."""
    for module in model.get_decoder().modules():
        if hasattr(module, "layer_idx") and hasattr(module, "config"):
            yield module, getattr(module, "sliding_window", None)


@contextlib.contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """Let windows be WINDOW tokens, in modules and in what transformers makes masks of."""
    owners = [model.config.get_text_config(), *(m for m, _ in _window_attributes(model))]
    before = [(owner, getattr(owner, "sliding_window", None)) for owner in owners]
    try:
        for owner, window in before:
            if window is not None:
                owner.sliding_window = WINDOW
        yield
    finally:
        for owner, window in before:
            if window is not None:
                owner.sliding_window = window
