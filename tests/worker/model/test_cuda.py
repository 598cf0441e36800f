"""The same steps on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from worker.identity.law import Law
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.reference import MAX_TOKENS, shapes_reference
from worker.identity.stepper import Stepper

from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.loader import load_model
from vlm_worker.types import Stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.mark.parametrize("max_graph_seqs", [0, 64], ids=["launched", "graphs"])
def test_answers_on_a_gpu_are_those_of_transformers_on_a_cpu(max_graph_seqs: int) -> None:
    settings = RunnerSettings(
        SHAPES, tuple(Stage), dtype="float32", block_size=16, kv_memory_bytes=256 << 20,
        max_graph_seqs=max_graph_seqs,
    )  # fmt: skip
    runner = build_runner(dataclasses.replace(settings, device="cuda"))
    assert (runner.graphs is not None) == (max_graph_seqs > 0), "decode was not captured"
    law = Law(shapes_reference()[:64])
    while law.pending:
        stepper = Stepper(runner)
        asked = [stepper.start(q, d, max_tokens=MAX_TOKENS) for q, d in law.pending]
        before = [len(d) for _, d in law.pending]
        stepper.generate(asked, max_tokens=MAX_TOKENS, chunk=50, eos=2)
        law.record([s.answer[n:] for s, n in zip(asked, before, strict=True)])
    law.check()


def test_no_more_weights_are_reported_than_there_are() -> None:
    moved: list[tuple[int, int]] = []

    def report(step: str, done: int, total: int) -> None:
        if step == "moving weights to cuda":
            moved.append((done, total))

    load_model(SHAPES, tuple(Stage), device="cuda", progress=report)  # its head is shared
    assert moved == sorted(moved)
    assert moved[-1][1] / 2 < moved[-1][0] <= moved[-1][1]


def test_memory_of_graphs_is_kept_from_the_cache() -> None:
    settings = RunnerSettings(SHAPES, (Stage.DECODE,), device="cuda", kv_memory_percent=10)
    plain, graphs = (
        build_runner(dataclasses.replace(settings, max_graph_seqs=count)).num_blocks
        for count in (0, 16)
    )
    assert 0 < graphs < plain


def test_images_beside_steps_answer_as_images_in_turn() -> None:
    settings = RunnerSettings(
        SHAPES, tuple(Stage), dtype="float32", block_size=16, kv_memory_bytes=64 << 20,
        device="cuda", max_graph_seqs=4,
    )  # fmt: skip
    runner = build_runner(settings)
    text = Question("text", (), tuple(range(10, 34)), (), ())
    asked = [q for q in questions(per_task=1) if q.prepared_images]
    answers: list[list[list[int]]] = []
    for is_beside in (False, True):
        stepper = Stepper(runner)
        decoding = stepper.start(text, (), max_tokens=40)
        stepper.generate([decoding], max_tokens=1, chunk=64, eos=None)
        told = []
        for question in asked:
            future = runner.encode_async(lambda q=question: runner.encode(q.prepared_images))
            assert future is not None, "both halves are here, on one stream"
            embeddings = future.result() if not is_beside else None
            count = len(decoding.answer) + 2
            stepper.generate([decoding], max_tokens=count, chunk=64, eos=None)
            rows = future.result() if embeddings is None else embeddings
            one = stepper.start(question, (), max_tokens=4, embeddings=rows)
            stepper.generate([one], max_tokens=4, chunk=64, eos=None)
            told.append(one.answer)
        answers.append([decoding.answer, *told])
    assert answers[0] == answers[1]


def test_blocks_move_between_a_gpu_and_a_cpu() -> None:
    settings = RunnerSettings(SHAPES, (Stage.DECODE,), kv_memory_bytes=64 << 20)
    cpu, gpu = build_runner(settings), build_runner(dataclasses.replace(settings, device="cuda"))
    assert gpu.kv_layout == cpu.kv_layout
    assert cpu.kv_layout is not None
    size = cpu.kv_layout.block_bytes
    data = torch.randint(0, 100, (3 * size,), dtype=torch.uint8).numpy().tobytes()
    cpu.import_blocks([5, 1, 9], memoryview(data))
    gpu.import_blocks([2, 3, 7], cpu.export_blocks([5, 1, 9]))
    assert gpu.export_blocks([2, 3, 7]) == data
