"""EleutherAI's lm-evaluation-harness: answers of chats and completions, and log-likelihoods.

Its tasks are written here, because those that it ships load data sets from a hub.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import requests
from calls import ANSWER, IMAGE, MODEL, QUESTION, URL, call
from lm_eval.tasks import TaskManager
from PIL import Image
from transformers import AutoTokenizer

os.environ["OPENAI_API_KEY"] = "none"
WORK = Path(tempfile.mkdtemp(dir=Path.cwd()))
MODEL_DIR = os.environ["MODEL_DIR"]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
SUMS = [{"question": f"What is {a} + 1?", "answer": str(a + 1)} for a in (1, 2, 3)]
IMAGES = [{"question": QUESTION, "image": str(IMAGE), "answer": ANSWER}] * 2
TEXTS = [{"text": f"The {shape} is red.\nIs it red? yes"} for shape in ("circle", "square")]


def _task(name: str, documents: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    data = WORK / f"{name}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **fields,
    }


def _generated(name: str, documents: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    options = {"max_gen_toks": 8, "until": ["\n"], "temperature": 0}
    return _task(
        name, documents, output_type="generate_until", doc_to_text="{{question}}",
        doc_to_target="{{answer}}", generation_kwargs=options,
        metric_list=[{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
        **fields,
    )  # fmt: skip


def _evaluate(
    kind: str, endpoint: str, task: dict[str, Any], *, tokenized: bool = True, **options: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics of the task, and its samples."""
    given: dict[str, Any] = {
        "model": MODEL, "base_url": f"{URL}/{endpoint}", "num_concurrent": 2, "max_length": 400,
        "max_retries": 1,
    }  # fmt: skip
    if tokenized:
        given |= {"tokenizer_backend": "huggingface", "tokenizer": MODEL_DIR}
    found = lm_eval.simple_evaluate(
        model=kind, model_args=given, tasks=[task], bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False), **options,
    )  # fmt: skip
    assert found is not None
    return found["results"][task["task"]], found["samples"][task["task"]]


def _by_chat(task: dict[str, Any]) -> None:
    metrics, samples = _evaluate(
        "local-chat-completions", "chat/completions", task, tokenized=False,
        apply_chat_template=True,
    )  # fmt: skip
    assert metrics["exact_match,none"] == 1, samples


@call("local-chat-completions, generate_until")
def _chat() -> None:
    _by_chat(_generated("sums", SUMS))


@call("local-chat-completions, generate_until with images")
def _images() -> None:
    _by_chat(
        _generated("images", IMAGES, doc_to_image=lambda document: [Image.open(document["image"])])
    )


@call("local-completions, generate_until")
def _completions() -> None:
    metrics, samples = _evaluate(
        "local-completions", "completions", _generated("sums", SUMS), apply_chat_template=True
    )
    assert metrics["exact_match,none"] == 1, samples


def _log_likelihood(context: list[int], text: list[int]) -> float:
    """That of a text after a context, by a request without lm-eval."""
    answer = requests.post(
        f"{URL}/completions",
        json={
            "model": MODEL, "prompt": [*context, *text], "echo": True, "logprobs": 0,
            "max_tokens": 0,
        },
        timeout=60,
    ).json()  # fmt: skip
    values: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return sum(values[len(context) :])


@call("local-completions, multiple_choice")
def _choices() -> None:
    task = _task(
        "choices", SUMS, output_type="multiple_choice", doc_to_text="{{question}}",
        doc_to_choice=["2", "3", "4"], doc_to_target="{{answer | int - 2}}",
        metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    metrics, samples = _evaluate("local-completions", "completions", task, apply_chat_template=True)
    assert metrics["acc,none"] == 1, samples
    for sample in samples:
        for (context, choice), (value, _) in zip(
            sample["arguments"], sample["filtered_resps"], strict=True
        ):
            # lm-eval counts white space at the end of a context as the choice's
            first = TOKENIZER(context.rstrip()).input_ids
            whole = TOKENIZER(context + choice).input_ids
            expected = _log_likelihood(first, whole[len(first) :])
            assert math.isclose(value, expected, rel_tol=1e-4), (value, expected)


@call("local-completions, loglikelihood_rolling")
def _rolling() -> None:
    task = _task(
        "texts", TEXTS, output_type="loglikelihood_rolling", doc_to_text="",
        doc_to_target="{{text}}", metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    metrics, samples = _evaluate("local-completions", "completions", task)
    first = [TOKENIZER.bos_token_id or TOKENIZER.eos_token_id]
    expected = [_log_likelihood(first, TOKENIZER(each["text"]).input_ids) for each in TEXTS]
    for sample, value in zip(samples, expected, strict=True):
        assert math.isclose(sample["filtered_resps"][0], value, rel_tol=1e-4), (sample, value)
    num_bytes = sum(len(each["text"].encode()) for each in TEXTS)
    bits = -sum(expected) / math.log(2) / num_bytes
    assert math.isclose(metrics["bits_per_byte,none"], bits, rel_tol=1e-4)
