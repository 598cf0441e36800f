"""Layers that torch compiles around our kernels answer as they are written, and compile once."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from worker.checkpoints import make_checkpoint
from worker.model.gpu.compiling import answer, images, num_graphs, rows, runner_of, traced

from vlm_kernels import Activation
from vlm_worker.model.gpu.compiled import OPTIONS, compile_layers, freeze
from vlm_worker.model.gpu.layers import quantise_linears
from vlm_worker.model.layers import Mlp
from vlm_worker.model.linear import GatedLinear

CPU = torch.device("cpu")
ONE_SIZE = ("gemma3", "llava")  # of all images: one is a shape of its own
WARM = ((112,), (112, 56))
OTHERS = ((56, 84), (84, 112, 56))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("gemma3", marks=pytest.mark.full),
        pytest.param("llava", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", marks=pytest.mark.full),
        "qwen2_vl",
    ],
)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("compiled") / request.param, request.param)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def test_each_class_is_compiled_once_and_answers_the_same(model_dir: Path) -> None:
    runner = runner_of(model_dir, CPU)
    want, want_answer = rows(runner, (*WARM, *OTHERS)), answer(runner)
    parts = compile_layers(runner._model, traced)
    of_encoder = [part for part in parts if part.name != "Mlp"]
    assert len(of_encoder) == 2, "a layer of the tower, and what follows it"
    assert (len(parts) > 2) == (model_dir.name == "gemma3"), "the others' MLPs are fused"
    got = rows(runner, WARM)
    num_shapes = 2 if model_dir.name in ONE_SIZE else 1
    assert num_graphs() == num_shapes * len(of_encoder), "a graph for each layer, or each size"
    got += rows(runner, OTHERS)
    assert num_graphs() == num_shapes * len(of_encoder), "a size was compiled anew"
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one, exact, atol=1e-4, rtol=1e-4)
    assert answer(runner) == want_answer
    assert all(part.is_compiled for part in parts)


def test_scores_of_visual_tokens_compile_nothing(tmp_path: Path) -> None:
    runner = runner_of(make_checkpoint(tmp_path / "qwen2_vl", "qwen2_vl"), CPU)
    asked = images(runner.family, (112, 56))
    encode = torch.inference_mode()(runner._images.encode)
    want = encode(asked, scored=True)
    parts = compile_layers(runner._model, traced)
    rows(runner, WARM)
    num_compiled = num_graphs()
    got = encode(asked, scored=True)
    assert num_graphs() == num_compiled
    assert all(part.is_compiled for part in parts)
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one.rows, exact.rows, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.rankings.scores, exact.rankings.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.full)])
def test_rounded_layers_are_compiled_once_too(tmp_path: Path, weights: str) -> None:
    runner = runner_of(make_checkpoint(tmp_path / "qwen2_vl", "qwen2_vl"), CPU)
    packing = quantise_linears(runner._model, [runner._model.model.visual], weights=weights)
    assert packing.num_layers > 0
    want = rows(runner, (*WARM, *OTHERS))
    parts = compile_layers(runner._model, traced)
    got = rows(runner, (*WARM, *OTHERS))
    assert num_graphs() == len(parts) == 2
    for one, exact in zip(got, want, strict=True):
        torch.testing.assert_close(one, exact, atol=1e-4, rtol=1e-4)


def test_what_is_frozen_compiles_no_more_and_serves_other_threads(tmp_path: Path) -> None:
    runner = runner_of(make_checkpoint(tmp_path / "llava", "llava"), CPU)
    want = rows(runner, (*WARM, *OTHERS))
    calls: list[str] = []
    parts = compile_layers(runner._model, lambda f: traced(f, backend=counting(calls)))
    rows(runner, WARM[:1])
    freeze(parts)
    num_compiled, got = num_graphs(), []
    calls.clear()
    encoder = threading.Thread(target=lambda: got.extend(rows(runner, (*WARM, *OTHERS))))
    encoder.start()
    encoder.join()
    assert num_graphs() == num_compiled
    assert len(calls) == 3 + 1, "of one image alone: three layers of the tower, one projector"
    for one, exact in itertools.zip_longest(got, want):
        torch.testing.assert_close(one, exact, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_compiled_computes_as_it_is_written_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compiler(_: object) -> Callable[..., Any]:
        def fail(*_args: Any) -> Any:
            raise RuntimeError("no compiler here")

        return fail

    model, x = gated_mlps(torch.float32), torch.randn(3, 32)
    want = [layer(x) for layer in model]
    parts = compile_layers(model, compiler)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert all(torch.equal(layer(x), y) for layer, y in zip(model, want, strict=True))
    freeze(parts)
    assert all(torch.equal(layer(x), y) for layer, y in zip(model, want, strict=True))
    (record,) = caplog.records
    assert record.message == "Mlp is not compiled by torch: computed as it is written, slower"
    assert "no compiler here" in vars(record)["error"]
    assert not parts[0].is_compiled


def test_a_fault_of_frozen_layers_is_raised_to_the_caller() -> None:
    model = gated_mlps(torch.float32)
    parts = compile_layers(model, traced)
    model[0](torch.randn(3, 32))
    freeze(parts)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model[0](torch.randn(3, 31))
    assert parts[0].is_compiled


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="torch compiles for CPUs with g++ or clang++, and neither is installed",
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_fused_kernels_round_as_operations_apart() -> None:
    model, x = gated_mlps(torch.bfloat16), torch.linspace(-2, 2, 160).view(5, 32).bfloat16()
    want = model[0](x), model[1](x)
    few_seconds = {"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}
    options = {**OPTIONS, **few_seconds}
    parts = compile_layers(model, lambda f: traced(f, backend="inductor", options=options))
    got = model[0](x), model[1](x)
    assert parts[0].is_compiled
    assert num_graphs() == 1
    exact = gated_mlps(torch.float32)
    for ours, theirs, layer in zip(got, want, exact, strict=True):
        rounding = (theirs - layer(x.float())).abs().max()
        assert rounding > 0
        assert (ours - theirs).abs().max() <= rounding


def gated_mlps(dtype: torch.dtype) -> nn.ModuleList:
    """Two of Gemma's, which are not fused: the same for each type, up to rounding."""
    rng = torch.Generator().manual_seed(0)
    layers = nn.ModuleList()
    for _ in range(2):
        gate, up, down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        layers.append(Mlp(GatedLinear(gate, up, Activation.GELU), down, Activation.GELU))
    for weights in layers.parameters():
        weights.requires_grad_(False).normal_(0, 0.3, generator=rng)
    return layers.to(dtype)


def counting(calls: list[str]) -> Callable[..., Any]:
    """A compiler that changes nothing, and notes when what it compiled runs."""

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append("run")
            return graph(*args)

        return run

    return compiler
