"""A sampling parameter is declared in `SamplingParams`, and other code finds it there.

A new one edits the proto, `SamplingParams`, the kernel, its edits, its C++ and docs/openai.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlm_worker.types import PARAMETERS

ROOT = Path(__file__).parents[2]
TYPES = "worker/vlm_worker/types.py"
KERNELS = {
    "kernels/vlm_kernels/sampling.py",
    "kernels/vlm_kernels/sampling_edits.py",
}
# Which fields of a response are those of a chat: OpenAI's list for its own endpoint.
RESPONSES = "worker/vlm_worker/gateway/responses_api/fields.py"
NUM_OTHER_FILES = 3  # worker.proto, the C++ and docs/openai.md
# Other files that name a parameter, with the reason.
MEANINGS = {
    "temperature": {
        "worker/vlm_worker/core/step_inputs.py",  # a step without sampling is faster
        "worker/vlm_worker/gateway/sampling_defaults.py",  # `top_p` 0 is greedy
        "worker/vlm_worker/testing.py",  # the simulated model samples too
        "worker/vlm_worker/gateway/responses_api/writer.py",  # a response repeats it
    },
    "top_p": {
        "worker/vlm_worker/gateway/sampling_defaults.py",
        "worker/vlm_worker/gateway/responses_api/writer.py",
    },
    "seed": {
        "worker/vlm_worker/gateway/sampling_defaults.py",  # random if the client sends none
        "worker/vlm_worker/gateway/choices.py",  # each choice has its own seed
        "worker/vlm_worker/testing.py",
    },
    "min_tokens": {
        "worker/vlm_worker/core/persistent_batch.py",  # until when no token ends an answer
        "worker/vlm_worker/core/request_validation.py",  # at most `max_tokens`, no grammar
        "worker/vlm_worker/abilities.py",
        "worker/vlm_worker/gateway/api/completions.py",  # none without an answer
        "worker/vlm_worker/gateway/api/requests.py",  # the same, before a worker sees it
        "worker/vlm_worker/gateway/request_preparation.py",
        "worker/vlm_worker/gateway/sampling_defaults.py",
        "worker/vlm_worker/gateway/detokenization.py",  # no stop string ends it either
        "worker/vlm_worker/gateway/endpoint.py",
        "worker/vlm_worker/gateway/orchestrate/generation.py",  # which pods obey it
        "worker/vlm_worker/gateway/orchestrate/prepared_request.py",
        "worker/vlm_worker/gateway/pod_registry.py",
        "worker/vlm_worker/route.py",
        "worker/vlm_worker/server/components.py",
        "worker/vlm_worker/wire/messages.py",
    },
    "ignore_eos": {
        "worker/vlm_worker/core/persistent_batch.py",  # which tokens end an answer
        "worker/vlm_worker/core/request_validation.py",  # refused with a grammar
        "worker/vlm_worker/gateway/api/requests.py",  # the same, before a worker sees it
    },
}


def _naming(name: str) -> set[str]:
    """The Python files of the product that name a parameter."""
    used = re.compile(rf"""\.{name}\b|"{name}"|\b{name}(=|:)""")
    files = [*(ROOT / "worker").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    return {
        str(file.relative_to(ROOT))
        for file in files
        if file.parent.name != "pb" and used.search(file.read_text())
    }


@pytest.mark.parametrize("name", [field.name for field, _ in PARAMETERS])
def test_only_the_declaration_and_the_kernels_name_a_parameter(name: str) -> None:
    naming = _naming(name)
    assert naming - KERNELS - {TYPES, RESPONSES} == MEANINGS.get(name, set())
    assert len(naming & {*KERNELS, TYPES}) + NUM_OTHER_FILES <= 6
