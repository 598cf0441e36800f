"""Estimates the seconds that a request occupies its pods, from the requests that ended. Pure.

    seconds = prompt tokens · seconds per prompt token + min(max_tokens, mean answer) · seconds per
              output token

The estimates only order requests of tenants (`fair_queue`), so their ratios matter.
"""

from __future__ import annotations

from typing import Final

SMOOTHING: Final = 0.05
"""Weight of the last request in each mean: about the last twenty count."""


class WorkEstimate:
    """Running means over ended requests. Until the first one, constants of a small pod."""

    def __init__(self) -> None:
        self.prompt_token_seconds = 0.001
        self.output_token_seconds = 0.02
        self.num_output_tokens = 256.0

    def seconds(self, num_prompt_tokens: int, max_tokens: int) -> float:
        """Return the seconds of work of a request; `max_tokens` bounds its answer."""
        num_output_tokens = min(max_tokens, self.num_output_tokens)
        return (
            num_prompt_tokens * self.prompt_token_seconds
            + num_output_tokens * self.output_token_seconds
        )

    def ended(
        self,
        num_prompt_tokens: int,
        num_output_tokens: int,
        *,
        prompt_seconds: float,
        output_seconds: float,
    ) -> None:
        """Record a request with one choice: the seconds of its images and prompt, and its answer.

        `output_seconds` are those after the first token.
        """
        self.num_output_tokens += SMOOTHING * (num_output_tokens - self.num_output_tokens)
        if num_prompt_tokens:
            per_token = prompt_seconds / num_prompt_tokens
            self.prompt_token_seconds += SMOOTHING * (per_token - self.prompt_token_seconds)
        if num_output_tokens > 1:
            per_token = output_seconds / (num_output_tokens - 1)
            self.output_token_seconds += SMOOTHING * (per_token - self.output_token_seconds)
