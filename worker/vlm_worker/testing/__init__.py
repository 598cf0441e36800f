"""A model without a model: what it says is a checksum of what it reads. And what idle means.

`ChecksumRunner` implements `engine.runner.Runner`; `answer_alone` is the same model, bare.
"""

from vlm_worker.testing.arithmetic import (
    IMAGE_TOKEN,
    UNWRITTEN,
    VOCABULARY,
    answer_alone,
    embed,
    folded_positions,
    make_image,
    next_token,
    plain_positions,
    slot_values,
    token_logprobs,
    told,
)
from vlm_worker.testing.idle import (
    Accountable,
    assert_idle,
)
from vlm_worker.testing.runner import (
    ChecksumRunner,
    Faults,
)

__all__ = [
    "IMAGE_TOKEN",
    "UNWRITTEN",
    "VOCABULARY",
    "Accountable",
    "ChecksumRunner",
    "Faults",
    "answer_alone",
    "assert_idle",
    "embed",
    "folded_positions",
    "make_image",
    "next_token",
    "plain_positions",
    "slot_values",
    "token_logprobs",
    "told",
]
