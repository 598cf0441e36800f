"""EleutherAI's lm-evaluation-harness: log-likelihoods of completions, and generated answers."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from calls import MODEL, URL, call
from lm_eval.tasks import TaskManager

os.environ["OPENAI_API_KEY"] = "none"
WORK = Path(tempfile.mkdtemp())
MODEL_DIR = os.environ["MODEL_DIR"]
DOCUMENTS = [{"question": f"{a} plus {b}?", "answer": str(a + b)} for a in (1, 2) for b in (1, 2)]
(WORK / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
TASK: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(WORK / "documents.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
TASKS: dict[str, dict[str, Any]] = {
    "sums_generated": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"max_gen_toks": 4, "until": ["\n"], "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "sums_chosen": {
        "output_type": "multiple_choice",
        "doc_to_choice": ["2", "3", "4"],
        "doc_to_target": "{{answer | int - 2}}",
        "metric_list": [{"metric": "acc"}],
    },
}
for name, task in TASKS.items():
    (WORK / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **TASK, **task}))


def _evaluate(kind: str, endpoint: str, task: str, **options: Any) -> dict[str, Any]:
    given = {
        "model": MODEL,
        "base_url": f"{URL}/{endpoint}",
        "tokenizer_backend": "huggingface",
        "tokenizer": MODEL_DIR,
        "num_concurrent": 2,
        "max_length": 400,
    }
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=given,
        tasks=[task],
        task_manager=TaskManager(include_path=str(WORK), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    assert found is not None
    samples: list[Any] = found["samples"][task]
    assert len(samples) == len(DOCUMENTS)
    metrics: dict[str, Any] = found["results"][task]
    return metrics


@call("local-chat-completions, generate_until")
def _chat() -> None:
    metrics = _evaluate(
        "local-chat-completions", "chat/completions", "sums_generated", apply_chat_template=True
    )
    assert metrics["exact_match,none"] >= 0.5


@call("local-completions, generate_until")
def _completions() -> None:
    _evaluate("local-completions", "completions", "sums_generated")


@call("local-completions, log-likelihoods")
def _likelihoods() -> None:
    metrics = _evaluate("local-completions", "completions", "sums_chosen")
    assert 0 <= metrics["acc,none"] <= 1
