"""The benchmark of GPU kernels runs as one command, without a GPU too."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

RUN = Path(__file__).parents[3] / "bench" / "gpu" / "run.py"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A module of the benchmark, as its command imports it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(RUN.parent))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if Path(path).parent == RUN.parent:
            del sys.modules[name]


def test_a_smoke_run_measures_every_case() -> None:
    done = subprocess.run(
        [sys.executable, RUN, "--smoke"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["device"] == "interpreter"
    assert set(lines[1]["limits"]) == {"read", "copy", "flops"}
    assert set(lines[-1]["reached"]) == {"G3", "G6"}, "of shapes so small no other goal speaks"
    lines = lines[:-1]
    cases = {line["case"].split("/")[0] for line in lines[2:]}
    assert cases == {
        "decode", "prefill", "vision", "add_rms_norm", "silu_mul", "rope_store_kv", "weights",
        "moves", "step", "encoder", "tune",
    }  # fmt: skip
    assert all(us > 0 for line in lines[2:] for us in line["microseconds"].values())


def test_what_is_missing_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("nothing is missing: there is a GPU")
    done = subprocess.run([sys.executable, RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "torch finds no GPU; --smoke runs tiny shapes without one\n"


def test_a_case_that_fails_is_a_line_and_the_others_go_on(load: Callable[[str], Any]) -> None:
    def fail() -> dict[str, Any]:
        raise AssertionError("what a compiler may raise, too")

    def cases(_bench: Any) -> Iterator[Callable[[], dict[str, Any]]]:
        yield fail
        yield lambda: {"case": "whole"}
        raise OSError("no more of these")

    found = list(load("run").measured("decode", cases, None))
    assert [line["case"] for line in found] == ["decode, number 0", "whole", "decode, number 2"]
    assert "AssertionError" in found[0]["error"]
    assert "no more of these" in found[2]["error"]


def test_figures_of_some_cases_stand_beside_those_of_all(load: Callable[[str], Any]) -> None:
    run = load("run")
    assert run.results_of([]).name == "gpu.jsonl"
    assert run.results_of(["decode", "rows"]).name == "gpu-decode-rows.jsonl"


def test_a_goal_is_reached_by_all_lines_that_are_about_it(load: Callable[[str], Any]) -> None:
    lines = [{}, {"goals": {"G1": True, "G2": True}}, {"goals": {"G1": False}}]
    assert load("run").reached(lines) == {"G1": False, "G2": True}


def test_a_shape_of_several_models_is_won_by_what_takes_least_in_all(
    load: Callable[[str], Any],
) -> None:
    small, large, huge = '{"TILE_N": 32}', '{"TILE_N": 64}', '{"TILE_N": 128}'
    found = {
        ("paged_attention", "d128/m16"): [
            {small: 1.0, large: 1.5, huge: 1.2},
            {small: 400.0, large: 100.0},  # the third does not fit
        ]
    }
    assert load("tune").winners(found) == {"paged_attention": {"d128/m16": {"TILE_N": 64}}}


def test_reading_is_probed_without_a_copy(load: Callable[[str], Any]) -> None:
    timing = load("timing")
    bench = timing.Bench(torch.device("cpu"), torch.float32, 1, True, timing.Limits(1, 1, 1))
    with torch.profiler.profile() as found:
        bench.probe()
    names = {event.key for event in found.key_averages()}
    assert "aten::sum" in names
    assert "aten::_to_copy" not in names, "more is read and written than is counted"
