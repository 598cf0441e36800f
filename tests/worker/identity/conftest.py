"""Models and reference answers, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worker.identity.questions import Question
from worker.identity.random_model import MIN_LOGITS_STD, make_random_model, random_reference
from worker.identity.reference import Answer, shapes_reference

Pairs = tuple[tuple[Question, Answer], ...]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests of other packages run beside these; a second thread gains little on tiny models."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shapes_pairs() -> Pairs:
    """A hundred held-out questions with transformers' answers."""
    return shapes_reference(count=100)


@pytest.fixture(scope="session")
def all_shapes_pairs() -> Pairs:
    """At least 200 of them, for long forms."""
    pairs = shapes_reference()
    assert len(pairs) >= 200
    return pairs


@pytest.fixture(scope="session")
def random_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A servable model with random weights."""
    return make_random_model(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture(scope="session")
def random_pairs(random_model_dir: Path) -> Pairs:
    """64-token continuations by random weights."""
    pairs = random_reference(random_model_dir, 16)
    assert min(answer.logits.std() for _, answer in pairs) >= MIN_LOGITS_STD
    assert {len(answer.token_ids) for _, answer in pairs} == {64}
    distinct = len({token for _, answer in pairs for token in answer.token_ids})
    assert distinct > 100, "continuations that repeat a few tokens show little"
    return pairs
