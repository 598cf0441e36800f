"""What a request asks that a pod of an older version would ignore, and which pods do it. Pure."""

from __future__ import annotations

from typing import Final, Protocol

UNCONSTRAINED: Final = "no decode pod that constrains answers is ready"
"""The reason of a request with a grammar if no pod, or only an older one, could decode it."""
NO_MINIMUM: Final = "no decode pod that obeys 'min_tokens' is ready"
UNSCORED: Final = "no pod that gives log-probabilities of prompts is ready"

TOLD: Final = {
    UNCONSTRAINED: "that constrains answers",
    NO_MINIMUM: "that obeys 'min_tokens'",
    UNSCORED: "that gives log-probabilities of prompts",
}
"""What a client is told of the missing pod, by the reason."""


class Able(Protocol):
    """What a pod does, by its Hello."""

    @property
    def grammars(self) -> bool:
        """It constrains answers to a grammar."""

    @property
    def min_tokens(self) -> bool:
        """It obeys `min_tokens`."""

    @property
    def prompt_logprobs(self) -> bool:
        """It gives log-probabilities of prompts."""


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


def asks(request: Asking) -> bool:
    """Whether a pod could ignore a part of the request."""
    return request.constrained or request.has_minimum or request.is_scored


def obeys(pod: Able, request: Asking) -> bool:
    """Whether a pod ignores no part of the request."""
    return (
        pod.grammars >= request.constrained
        and pod.min_tokens >= request.has_minimum
        and pod.prompt_logprobs >= request.is_scored
    )


def reason_of(request: Asking, plain: str) -> str:
    """Why there is no pod: what the request asks, or `plain`."""
    if request.constrained:
        return UNCONSTRAINED
    if request.has_minimum:
        return NO_MINIMUM
    return UNSCORED if request.is_scored else plain
