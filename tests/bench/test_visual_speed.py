"""What fewer visual tokens save: prompts, the hit rate of a cache, a run, and its tables."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import random_vlm
import table
import visual_report
import visual_speed
from mixed_trace import mixed_trace
from own_engine import OwnEngine
from sides import Call
from visual_speed import LEVERS, Lever, hit_rate, image_of, levers, prompt_of, pyramid

WHOLE = 4  # tokens of the images of this test, of 56 x 56 pixels


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnEngine]:
    """A tenth of the model."""
    made = OwnEngine(
        random_vlm.make_model(tmp_path_factory.mktemp("model"), random_vlm.SMALL), threads=1
    )
    yield made
    made.close()


def short_trace(number: int) -> list[Call]:
    """The mixed trace with answers of two tokens."""
    return [dataclasses.replace(call, num_output=2) for call in mixed_trace(number)]


def test_a_prompt_has_as_many_placeholders_as_its_lever_keeps() -> None:
    counts = {
        name: prompt_of(image_of(lever, 1)).token_ids.count(random_vlm.IMAGE_TOKEN)
        for name, lever in LEVERS.items()
    }
    assert counts == {name: 256 if name == "off" else 64 for name in LEVERS}
    prompt = prompt_of(image_of(LEVERS["off"], 1))
    assert prompt.token_ids[prompt.offset] == random_vlm.IMAGE_TOKEN
    assert prompt.token_ids[prompt.offset - 1] == random_vlm.VISION_START


def test_smaller_embeddings_have_more_hits_and_a_cache_that_holds_all_misses_each_once() -> None:
    rates = [hit_rate(64, num_bytes) for num_bytes in (1 << 10, 1 << 18, 1 << 22)]
    assert sorted(rates, reverse=True) == rates
    assert len(set(rates)) == len(rates)
    assert rates[0] >= 1 - visual_speed.TRACE_IMAGES / visual_speed.TRACE_LOOKUPS
    assert hit_rate(64, visual_speed.CACHE_BYTES + 1) == 0


def test_a_run_has_a_line_per_lever_and_per_resolution(
    engine: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        name: Lever(side=28 if name == "pixels 1/4" else 56, reduction=lever.reduction)
        for name, lever in LEVERS.items()
    }
    monkeypatch.setattr(visual_speed, "LEVERS", small)
    monkeypatch.setattr(visual_speed, "SIDES", (28, 56))
    monkeypatch.setattr(visual_speed, "TRACE_LEVERS", ("off", "zip 1/4"))
    monkeypatch.setattr(visual_speed, "mixed_trace", short_trace)
    lines = [*levers(engine, 1, threads=1), *pyramid(engine, 1)]
    off, *others = (one for one in lines if one["bench"] == "visual_speed")
    assert {one["prompt_tokens"] - off["prompt_tokens"] for one in others} == {1 - WHOLE}
    assert off["ratio"] == dict.fromkeys((*visual_report.CASES, visual_speed.TOWER), 1.0)
    num_seen = 2 * len(visual_speed.TRACE_LEVERS) * visual_speed.NUM_REQUESTS // 2
    assert engine.stats.encoder_cache.hits >= len(LEVERS) + num_seen
    shown = table.markdown(visual_report.speed(lines)), visual_report.resolutions(lines)
    assert "zip 1/4" in shown[0]
    assert [row[0] for row in shown[1]] == ["side", "28", "56"]


def test_goals_have_verdicts() -> None:
    fields = {"bench": "visual_speed", "prompt_tokens": 1, "ms": {}}
    lines = [
        {**fields, "lever": "off", "kv_bytes": 100, "ratio": dict.fromkeys(visual_report.CASES, 1)},
        {**fields, "lever": "zip 1/4", "kv_bytes": 40, "ratio": {"new": 0.8, "seen": 0.6}},
    ]
    verdicts = {row[0]: row[4] for row in visual_report.speed_goals(lines)[1:]}
    assert verdicts["zip 1/4 / off: TTFT, new image"] == "met"
    assert verdicts["zip 1/4 / off: TTFT, cached image"] == "not met"
    assert verdicts["zip 1/4 / off: KV bytes of a prompt"] == "met"
    assert verdicts["zip 1/4 / off: trace, new images"] == "not measured"
