"""An embedding from a file of the disk tier reduces to the bits of the embedding in memory."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from worker.checkpoints import make_checkpoint
from worker.identity.families import random_questions

from vlm_worker.core.embedding_file import StoredEmbedding, pack, unpack
from vlm_worker.core.families import load_family
from vlm_worker.errors import CorruptTransferError
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.runner import ModelRunner
from vlm_worker.model.vision import Embedding
from vlm_worker.reduction import Method, Reduction
from vlm_worker.types import PreparedImage, Stage

REDUCTIONS = [Reduction(method, permille) for method, permille in itertools.product(
    (Method.ZIP, Method.DIVERSE, Method.MERGE, Method.POOL), (500, 250)
)]  # fmt: skip


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, list[PreparedImage]]:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("stored") / "model", "qwen2_5_vl")
    settings = RunnerSettings(path, (Stage.ENCODER,), block_size=16, dtype=request.param)
    asked = random_questions(path, load_family(path), count=12, seed=0)
    found = {image.image_key: image for one in asked for image in one.prepared_images}
    return build_runner(settings), list(found.values())


def through_a_file(runner: ModelRunner, image: PreparedImage, embedding: Embedding) -> Embedding:
    layout, num_tokens = runner.embed_layout, image.num_tokens
    rows, scores = runner.export_embedding(embedding), runner.export_scores(embedding)
    data = b"".join(pack(StoredEmbedding(image.image_key, num_tokens, rows, scores), layout))
    read = unpack(memoryview(data), layout, image_key=image.image_key, num_tokens=num_tokens)
    return runner.with_scores(runner.import_embedding(read.rows, num_tokens), read.scores)


def encode(runner: ModelRunner, image: PreparedImage, reduction: Reduction | None) -> Embedding:
    (embedding,) = runner.encode([dataclasses.replace(image, reduction=reduction)])
    assert isinstance(embedding, Embedding)
    return embedding


def test_every_reduction_of_a_stored_embedding_has_the_same_bits(
    runner: tuple[ModelRunner, list[PreparedImage]],
) -> None:
    model, images = runner
    for image in images:
        embedding = encode(model, image, Reduction(Method.ZIP, 500))
        stored = through_a_file(model, image, embedding)
        assert bytes(model.export_embedding(stored)) == bytes(model.export_embedding(embedding))
        for reduction in REDUCTIONS:
            asked = dataclasses.replace(image, reduction=reduction)
            first = model.reduce_embedding(embedding, asked)
            again = model.reduce_embedding(stored, asked)
            assert first is not None
            assert again is not None
            assert bytes(model.export_embedding(first)) == bytes(model.export_embedding(again))


def test_an_embedding_without_scores_is_stored_without_them(
    runner: tuple[ModelRunner, list[PreparedImage]],
) -> None:
    model, images = runner
    stored = through_a_file(model, images[0], encode(model, images[0], None))
    assert model.export_scores(stored).nbytes == 0
    zipped, diverse = (
        dataclasses.replace(images[0], reduction=Reduction(method, 500))
        for method in (Method.ZIP, Method.DIVERSE)
    )
    assert model.reduce_embedding(stored, zipped) is None
    assert model.reduce_embedding(stored, diverse) is not None


def test_arrcoc_of_a_stored_embedding_needs_the_relevance_of_the_image(
    runner: tuple[ModelRunner, list[PreparedImage]],
) -> None:
    model, images = runner
    generator = np.random.default_rng(0)
    for image in images:
        relevance = generator.integers(0, 1 << 16, image.cells, np.uint16).tobytes()
        bare = dataclasses.replace(image, reduction=Reduction(Method.ARRCOC, 500), relevance=b"")
        asked = dataclasses.replace(bare, relevance=relevance)
        embedding = encode(model, image, None)
        first = model.reduce_embedding(embedding, asked)
        stored = through_a_file(model, image, embedding)
        assert model.reduce_embedding(stored, bare) is None
        again = model.reduce_embedding(stored, asked)
        assert first is not None
        assert again is not None
        assert bytes(model.export_embedding(first)) == bytes(model.export_embedding(again))


def test_scores_of_another_number_or_without_values_are_refused(
    runner: tuple[ModelRunner, list[PreparedImage]],
) -> None:
    model, images = runner
    embedding = encode(model, images[0], None)
    for scores in (b"\0" * 4, b"\0\0\xc0\x7f" * images[0].num_tokens):  # one; NaN
        with pytest.raises(CorruptTransferError):
            model.with_scores(embedding, memoryview(scores))
