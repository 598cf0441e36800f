"""What a request asks that a pod of an older version would ignore, and which pods do it. Pure."""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

from vlm_worker.types import EmbedLayout, Stage

UNCONSTRAINED: Final = "no decode pod that constrains answers is ready"
"""The reason of a request with a grammar if no pod, or only an older one, could decode it."""
NO_MINIMUM: Final = "no decode pod that obeys 'min_tokens' is ready"
UNSCORED: Final = "no pod that gives log-probabilities of prompts is ready"
NO_EMBEDDINGS: Final = "no pod that takes embeddings in place of images is ready"

TOLD: Final = {
    UNCONSTRAINED: "that constrains answers",
    NO_MINIMUM: "that obeys 'min_tokens'",
    UNSCORED: "that gives log-probabilities of prompts",
    NO_EMBEDDINGS: "that takes embeddings in place of images",
}
"""What a client is told of the missing pod, by the reason."""


class Able(Protocol):
    """What a pod does, by its Hello."""

    @property
    def stages(self) -> frozenset[Stage]: ...
    @property
    def grammars(self) -> bool:
        """It constrains answers to a grammar."""

    @property
    def min_tokens(self) -> bool:
        """It obeys `min_tokens`."""

    @property
    def prompt_logprobs(self) -> bool:
        """It gives log-probabilities of prompts."""

    @property
    def embed_layout(self) -> EmbedLayout | None:
        """The layout of the embeddings that it takes in place of images; None if it takes none."""


class Asking(Protocol):
    """What a request asks of the pods that compute it."""

    @property
    def constrained(self) -> bool:
        """The answer has a grammar."""

    @property
    def has_minimum(self) -> bool:
        """It has `min_tokens`."""

    @property
    def is_scored(self) -> bool:
        """It wants log-probabilities of its prompt, and has none yet."""

    @property
    def embed_layout(self) -> EmbedLayout | None:
        """The layout of its embeddings in place of images; None without one."""


def asks(request: Asking) -> bool:
    """Whether a pod could ignore a part of the request."""
    obeyed = request.constrained or request.has_minimum or request.is_scored
    return obeyed or request.embed_layout is not None


def able_stages(pod: Able, request: Asking) -> frozenset[Stage]:
    """Return the stages of a pod in which it ignores no part of the request."""
    stages = pod.stages if _obeys(pod, request) else pod.stages & {Stage.ENCODER}
    return stages if _takes_embeddings(pod, request) else stages - {Stage.ENCODER}


def have_same_rows(one: EmbedLayout, other: EmbedLayout) -> bool:
    """Whether layouts differ in the model's revision at most."""
    return dataclasses.replace(one, model_revision=other.model_revision) == other


def _takes_embeddings(pod: Able, request: Asking) -> bool:
    """Whether a pod reads the rows of the request as rows; an older one reads them as a file."""
    if request.embed_layout is None:
        return True
    return pod.embed_layout is not None and have_same_rows(pod.embed_layout, request.embed_layout)


def _obeys(pod: Able, request: Asking) -> bool:
    """Whether a pod ignores no sampling parameter of the request."""
    return (
        pod.grammars >= request.constrained
        and pod.min_tokens >= request.has_minimum
        and pod.prompt_logprobs >= request.is_scored
    )


def reason_of(request: Asking, stage: Stage, plain: str) -> str:
    """Why there is no pod for a stage: what the request asks of it, or `plain`."""
    if stage is Stage.ENCODER:
        return NO_EMBEDDINGS if request.embed_layout is not None else plain
    if request.constrained:
        return UNCONSTRAINED
    if request.has_minimum:
        return NO_MINIMUM
    return UNSCORED if request.is_scored else plain
