"""Peers run with their best recorded settings, and the name of a build contains its sources."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from vlm_worker.serve import local

BENCH = Path(__file__).parents[2] / "bench"
sys.path += [str(BENCH), str(BENCH / "peers")]

import by_triptych  # noqa: E402
import environments  # noqa: E402
import rest  # noqa: E402


def peers_run() -> ModuleType:
    """`bench/peers/run.py`, which shares its name with `bench/run.py`."""
    spec = importlib.util.spec_from_file_location("peers_run", BENCH / "peers" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its data classes look the module up
    spec.loader.exec_module(module)
    return module


def swept(engine: str, trace: float, **options: int) -> dict[str, object]:
    return {"bench": "peers-sweep", "engine": engine, "options": options, "trace_s": trace}


def test_the_settings_of_the_fastest_trace_are_used() -> None:
    lines = [
        swept("openvino", 9.0, max_num_batched_tokens=2048),
        swept("openvino", 8.0, max_num_batched_tokens=512),
        swept("vllm", 7.0, max_num_batched_tokens=1024),
    ]
    assert peers_run().best_options("openvino", lines) == {"max_num_batched_tokens": 512}


def test_without_a_sweep_of_these_settings_the_defaults_are_used() -> None:
    best = peers_run().best_options
    for name, engine in environments.ENGINES.items():
        assert best(name, []) == engine.defaults
    old = [swept("openvino", 1.0, max_num_batched_tokens=7)]
    assert best("openvino", old) == environments.ENGINES["openvino"].defaults


def test_a_sweep_tries_every_combination_once_and_the_defaults_first() -> None:
    engine = environments.Engine("x.py", "", options={"a": (1, 2), "b": (3, 4, 5)})
    choices = engine.choices()
    assert choices[0] == engine.defaults == {"a": 1, "b": 3}
    assert len({tuple(choice.items()) for choice in choices}) == len(choices) == 6
    assert environments.Engine("x.py", "").choices() == [{}]


def test_another_release_of_llama_cpp_is_another_build() -> None:
    assert environments.LLAMA_SDIST in environments.ENGINES["llama.cpp"].built_from


def test_the_next_engine_waits_until_the_previous_one_stops_computing() -> None:
    computed, pauses = iter([1.0, 1.05, 1.1, 1.1001, 9.0]), []
    spun = rest.await_rest(lambda: next(computed), pauses.append)
    assert spun == pytest.approx(0.1)
    assert pauses == [rest.WINDOW_SECONDS] * 3


def test_the_wait_for_an_engine_is_bounded() -> None:
    pauses: list[float] = []
    spun = rest.await_rest(lambda: float(len(pauses)), pauses.append)
    assert sum(pauses) == pytest.approx(rest.PATIENCE_SECONDS)
    assert spun == len(pauses)


def test_only_cpu_time_of_the_engines_processes_counts() -> None:
    compute = "sum(i * i for i in range(2_000_000)); print(flush=True); input()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {compute!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    ) as engine:  # fmt: skip
        assert engine.stdout is not None
        assert engine.stdout.readline()
        own = time.clock_gettime(~engine.pid << 3 | rest.SCHEDULED)
        assert rest.processor_seconds([engine.pid]) > own + 0.02
        assert rest.processor_seconds([]) == 0.0
        engine.communicate(b"\n")
    assert rest.processor_seconds([engine.pid]) == 0.0


async def test_our_requests_go_to_the_api_url_and_not_to_the_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = SimpleNamespace(candidates=lambda: ["worker"])
    gateway = SimpleNamespace(
        context=SimpleNamespace(registry=registry),
        url="http://127.0.0.1:1",
        admin_url="http://127.0.0.1:2",
    )
    settings = SimpleNamespace(gateway=SimpleNamespace(served_name="peer"))
    await local._announce(gateway, settings, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    found = [match[1] for match in map(by_triptych.SERVED.search, lines) if match]
    assert found == ["http://127.0.0.1:1/v1"]


def test_nothing_is_recorded_if_our_engine_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = peers_run()
    rounds = iter([run.Measured({"openvino": {}}, {"openvino": []})])
    monkeypatch.setattr(run, "_start", lambda *_: dict.fromkeys((run.OURS, "openvino")))
    monkeypatch.setattr(run, "_rounds", lambda *_: rounds)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "peers.jsonl")
    monkeypatch.setattr(sys, "argv", ["run.py", "openvino"])
    assert run.main() == 1
    assert not run.RESULTS.exists()
