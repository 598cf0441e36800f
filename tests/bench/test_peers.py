"""Peers are driven at their best recorded settings; what one is built from names its folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "bench"
sys.path += [str(BENCH), str(BENCH / "peers")]

import environments  # noqa: E402


def peers_run() -> ModuleType:
    """`bench/peers/run.py`, which shares its name with `bench/run.py`."""
    spec = importlib.util.spec_from_file_location("peers_run", BENCH / "peers" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
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


def test_without_a_sweep_or_with_one_of_other_settings_the_defaults_are_used() -> None:
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
