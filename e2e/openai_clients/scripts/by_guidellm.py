"""GuideLLM's benchmark: streamed requests with synthetic texts and images, two at once.

Its counts are those of the metrics of the server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from calls import MODEL, URL, call

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 12, 8
TEXT = f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_OUTPUT_TOKENS}"
IMAGE = "kind=synthetic_image,width=112,height=112"
NUM_VISUAL_TOKENS = 16
LETTER = 71
"""The token `a` of the model."""


def _run(api: str, *data: str) -> Any:
    """The metrics in the report of a run.

    Each answer is a letter again and again: GuideLLM sees no first token in one without text.
    """
    report = Path(tempfile.mkdtemp(dir=Path.cwd())) / "report.json"
    subprocess.run(
        [
            str(Path(sys.executable).with_name("guidellm")), "run",
            f"--backend=kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL},"
            f"request_format={api},extras.body.logit_bias.{LETTER}=100",
            f"--tokenizer=kind=huggingface_auto,model={os.environ['MODEL_DIR']}",
            "--profile=kind=concurrent,streams=2",
            f"--constraint=kind=max_requests,count={NUM_REQUESTS}",
            *(f"--data={each}" for each in data),
            f"--output=kind=json,path={report}", "--disable-console-interactive",
        ],
        check=True, stdout=sys.stderr,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return benchmark["metrics"]


def _metrics() -> dict[str, float]:
    with urllib.request.urlopen(os.environ["METRICS_URL"], timeout=60) as answer:
        text = answer.read().decode()
    return {
        name: float(value)
        for name, value in re.findall(r"^(triptych_\S+) (\S+)$", text, re.MULTILINE)
    }


def _check(api: str, *data: str, modality: str) -> tuple[Any, dict[str, float]]:
    """Run, and compare; return GuideLLM's metrics, and by how much those of the server grew."""
    before = _metrics()
    found = _run(api, *data)
    grown = {name: value - before.get(name, 0) for name, value in _metrics().items()}

    totals = found["request_totals"]
    assert (totals["successful"], totals["total"]) == (NUM_REQUESTS, NUM_REQUESTS), totals
    assert grown['triptych_requests_total{outcome="ok"}'] == NUM_REQUESTS
    num_output = found["output_token_count"]["successful"]["total_sum"]
    assert (
        num_output == NUM_REQUESTS * NUM_OUTPUT_TOKENS == grown["triptych_output_tokens_total"]
    ), (num_output, grown["triptych_output_tokens_total"])

    # the gateway's time is a part of the client's
    ttft = found["time_to_first_token_ms"]["successful"]
    labels = f'{{modality="{modality}"}}'
    assert ttft["count"] == NUM_REQUESTS == grown[f"triptych_ttft_seconds_count{labels}"], ttft
    assert ttft["total_sum"] >= 1000 * grown[f"triptych_ttft_seconds_sum{labels}"] > 0, ttft
    return found, grown


@call("run, /v1/chat/completions with texts and images")
def _chat() -> None:
    found, grown = _check("/v1/chat/completions", TEXT, IMAGE, modality="image")
    num_visual = found["image"]["tokens"]["input"]["successful"]["total_sum"]
    assert num_visual == NUM_REQUESTS * NUM_VISUAL_TOKENS == grown["triptych_visual_tokens_total"]
    assert grown["triptych_images_total"] == NUM_REQUESTS


@call("run, /v1/completions")
def _completions() -> None:
    _check("/v1/completions", TEXT, modality="text")


@call("run, /v1/responses with texts and images")
def _responses() -> None:
    _check("/v1/responses", TEXT, IMAGE, modality="image")
