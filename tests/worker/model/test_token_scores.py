"""Scores of visual tokens are the attention that their patches receive in transformers' tower."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worker.checkpoints import make_checkpoint
from worker.identity.families import random_questions
from worker.identity.questions import SHAPES
from worker.identity.reference import load_reference
from worker.model.gpu.compiling import images as square_images

from vlm_kernels.native_layers import has_layers
from vlm_worker.core.families import load_family
from vlm_worker.errors import EngineError
from vlm_worker.model import vision_blocks
from vlm_worker.model.linear import can_pack
from vlm_worker.model.loader import load_model
from vlm_worker.model.vision import Embedding, ImageEncoder
from vlm_worker.model.vision_blocks import TokenScorer, VisionBlock
from vlm_worker.types import PreparedImage, Stage

CPU = torch.device("cpu")
WITH_SCORES = ("qwen2_5_vl", "qwen2_vl")

needs_bfloat16 = pytest.mark.skipif(
    not can_pack(torch.bfloat16, CPU), reason="this CPU has no fast bfloat16"
)


@pytest.fixture(scope="module", params=WITH_SCORES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("scores") / request.param, request.param)


def encoder_of(model_dir: Path, dtype: str = "float32", **options: Any) -> ImageEncoder:
    loaded = load_model(model_dir, [Stage.ENCODER], dtype=dtype, **options)
    return ImageEncoder(loaded.model, loaded.family.processor, device=CPU)


def images_of(model_dir: Path) -> list[PreparedImage]:
    """Four images of different sizes, whose windows are cut by their edges."""
    asked = random_questions(model_dir, load_family(model_dir), count=12, seed=0)
    found = {image.image_key: image for one in asked for image in one.prepared_images}
    assert len({image.grid_thw for image in found.values()}) == len(found) == 4
    return list(found.values())


def encoded(
    encoder: ImageEncoder, images: Sequence[PreparedImage], *, scored: bool
) -> list[Embedding]:
    embeddings = encoder.encode(images, scored=scored)
    return [one for one in embeddings if isinstance(one, Embedding)]


def scores(encoder: ImageEncoder, images: Sequence[PreparedImage]) -> list[torch.Tensor]:
    made = [one.rankings.scores for one in encoded(encoder, images, scored=True)]
    found = [one for one in made if one is not None]
    assert len(found) == len(images)
    return found


def blocks_of(encoder: ImageEncoder) -> list[VisionBlock]:
    return [one for one in encoder._model.modules() if isinstance(one, VisionBlock)]


def transformers_scores(
    model_dir: Path, images: Sequence[PreparedImage], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """By the weights of transformers' plain attention, in the order of its own output."""
    model = load_reference(model_dir)
    model.set_attn_implementation("eager")
    tower = model.model.visual
    whole = getattr(tower, "fullatt_block_indexes", [len(tower.blocks) - 1])
    scored = tower.blocks[whole[-1]].attn
    module = importlib.import_module(load_family(model_dir).spec.module)
    attend = module.eager_attention_forward
    received: list[torch.Tensor] = []

    def recorded(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output, weights = attend(attention, *args, **kwargs)
        if attention is scored:
            received.append(weights[0].mean((0, 1)))
        return output, weights

    monkeypatch.setattr(module, "eager_attention_forward", recorded)
    merged: list[torch.Tensor] = []
    hook = tower.merger.register_forward_hook(lambda _module, _args, rows: merged.append(rows))
    found = []
    with torch.inference_mode():
        for image in images:
            received.clear()
            merged.clear()
            values = torch.frombuffer(bytearray(image.patches), dtype=torch.float32)
            rows = model.model.get_image_features(
                values.view(image.num_tokens * 4, -1), torch.tensor([image.grid_thw])
            ).pooler_output[0]
            is_same = (rows[:, None] == merged[0][None]).all(-1)
            assert (is_same.sum(1) == 1).all(), "rows that occur twice have no order"
            cells = torch.cat(received).view(-1, 4).sum(1)
            found.append(cells[is_same.int().argmax(1)])
    hook.remove()
    return found


def test_scores_are_the_attention_that_transformers_tower_gives(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = images_of(model_dir)
    want = transformers_scores(model_dir, images, monkeypatch)
    got = scores(encoder_of(model_dir), images)
    for image, one, exact in zip(images, got, want, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == (image.num_tokens,)
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-6)
        assert one.std() > 0.01 * one.mean(), "equal scores would fit in any order"


@needs_bfloat16
@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"packed_weights": False}], ids=str)
def test_scores_in_bfloat16_are_near_those_in_float32(
    model_dir: Path, options: dict[str, Any]
) -> None:
    images = images_of(model_dir)
    exact = torch.cat(scores(encoder_of(model_dir), images))
    got = torch.cat(scores(encoder_of(model_dir, "bfloat16", **options), images))
    assert (got - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_the_tokens_of_an_image_share_one(model_dir: Path, dtype: str) -> None:
    for one in scores(encoder_of(model_dir, dtype), images_of(model_dir)):
        assert (one > 0).all()
        assert one.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")
def test_an_image_has_the_same_scores_beside_others_as_alone(model_dir: Path) -> None:
    encoder, images = encoder_of(model_dir, "bfloat16"), images_of(model_dir)
    alone = [scores(encoder, [image])[0] for image in images]
    for order in itertools.islice(itertools.permutations(range(len(images)), 3), 8):
        together = scores(encoder, [images[i] for i in order])
        for i, one in zip(order, together, strict=True):
            assert torch.equal(one, alone[i])


@pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_blocks_in_one_call_have_the_scores_of_blocks_one_by_one(
    model_dir: Path, weights: str
) -> None:
    encoder, images = encoder_of(model_dir, "bfloat16", weights=weights), images_of(model_dir)
    together = encoded(encoder, images, scored=True)
    for block in blocks_of(encoder):
        block.native, block.is_joined = None, False
    for one, other in zip(together, encoded(encoder, images, scored=True), strict=True):
        assert one.rankings.scores is not None
        assert other.rankings.scores is not None
        assert torch.equal(one.rankings.scores, other.rankings.scores)
        assert torch.equal(one.rows, other.rows)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_asking_for_scores_changes_no_row(model_dir: Path, dtype: str) -> None:
    encoder, images = encoder_of(model_dir, dtype), images_of(model_dir)
    before = encoded(encoder, images, scored=False)
    scored = encoded(encoder, images, scored=True)
    after = encoded(encoder, images, scored=False)
    for one, other, last in zip(before, scored, after, strict=True):
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(one.rows, last.rows)
        assert one.rankings.scores is None
        assert last.rankings.scores is None


@needs_bfloat16
def test_without_scores_a_call_computes_nothing_for_them(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, images = encoder_of(model_dir, "bfloat16"), images_of(model_dir)
    scores(encoder, images)
    calls: list[str] = []
    for name in ("received", "_heads_of"):
        method = getattr(VisionBlock, name)
        monkeypatch.setattr(
            VisionBlock, name, lambda *a, f=method, n=name, **k: calls.append(n) or f(*a, **k)
        )
    encoded(encoder, images, scored=False)
    assert "received" not in calls
    assert not has_layers() or not calls, "blocks that were split are not one call again"
    scores(encoder, images)
    assert calls.count("received") == 1


@pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")
def test_a_scored_call_that_fails_leaves_the_tower_as_it_was(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, images = encoder_of(model_dir, "bfloat16"), images_of(model_dir)
    blocks = blocks_of(encoder)
    before = [(block.native, block.is_joined) for block in blocks]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(vision_blocks, "received_attention", fail)
        results = encoder.encode(images, scored=True)
    assert all(isinstance(one, EngineError) for one in results)
    assert [(block.native, block.is_joined) for block in blocks] == before
    assert not any(block._forward_pre_hooks for block in blocks)


def test_an_image_whose_scores_are_not_finite_is_an_error_and_no_other_is(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, images = encoder_of(model_dir), images_of(model_dir)
    made = vision_blocks.received_attention

    def spoiled(*args: Any, **options: Any) -> torch.Tensor:
        received = made(*args, **options)
        received[: images[0].num_tokens * 4] = float("nan")
        return received

    monkeypatch.setattr(vision_blocks, "received_attention", spoiled)
    first, *others = encoder.encode(images, scored=True)
    assert isinstance(first, EngineError)
    assert "not finite" in str(first)
    assert all(isinstance(one, Embedding) for one in others)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_a_tower_without_such_a_block_refuses_to_score(name: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / name, name)
    encoder = encoder_of(model_dir)
    images = random_questions(model_dir, load_family(model_dir), count=2, seed=0)[1].prepared_images
    assert encoded(encoder, images, scored=False)[0].rankings.scores is None
    with pytest.raises(EngineError, match="no scores of visual tokens"):
        encoder.encode(images, scored=True)


def test_the_scored_block_is_the_last_over_whole_images() -> None:
    encoder = encoder_of(SHAPES)
    scorer = TokenScorer.of(encoder._model)
    assert scorer is not None
    tower = encoder._model.model.visual
    assert scorer._number == tower.fullatt_block_indexes[-1] == 3
    tower.fullatt_block_indexes = [1]
    images = square_images(load_family(SHAPES), (112, 168))
    first = scores(encoder, images)
    encoder = encoder_of(SHAPES)
    assert not torch.equal(torch.cat(scores(encoder, images)), torch.cat(first))
    tower.fullatt_block_indexes = []
    assert TokenScorer.of(tower) is None
