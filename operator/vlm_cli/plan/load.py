"""The load that a user gives: requests per second, images, tokens, goals. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.fields import Fields, PlanError
from vlm_cli.plan.images import ImageCount

_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
MAX_IMAGES = 64  # limits.imagesPerRequest allows no more


@dataclasses.dataclass(frozen=True)
class Load:
    """What arrives, and what answers should achieve.

    Attributes:
        rate: requests per second.
        images: width and height in pixels of each image of a request with images.
        image_share: share of the requests that have these images.
        prompt_tokens: text tokens of a prompt, the template's included.
        output_tokens: tokens of an answer.
        ttft_ms, itl_ms: goals at the 95th percentile; None for no goal.
    """

    rate: float
    images: tuple[tuple[int, int], ...]
    image_share: float
    low_detail: bool
    prompt_tokens: int
    output_tokens: int
    ttft_ms: int | None
    itl_ms: int | None

    @property
    def share(self) -> float:
        """Share of requests with an image."""
        return self.image_share if self.images else 0.0

    def counts(self, facts: ModelFacts) -> tuple[ImageCount, ...]:
        """Return what the model sees of each image."""
        return tuple(
            facts.sizing.count(width, height, low_detail=self.low_detail)
            for width, height in self.images
        )

    def visual_tokens(self, facts: ModelFacts) -> int:
        """Return the visual tokens of a request with images."""
        return sum(count.num_tokens for count in self.counts(facts))

    def visual_share(self, facts: ModelFacts) -> float:
        """Return the share of the tokens of all requests that are visual."""
        visual = self.share * self.visual_tokens(facts)
        return visual / (self.prompt_tokens + visual + self.output_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `from_dict` reads."""
        return {
            "requestsPerSecond": self.rate,
            "images": [f"{width}x{height}" for width, height in self.images],
            "imageShare": self.image_share,
            "detail": "low" if self.low_detail else "auto",
            "promptTokens": self.prompt_tokens,
            "outputTokens": self.output_tokens,
            "ttftMilliseconds": self.ttft_ms,
            "itlMilliseconds": self.itl_ms,
        }

    @classmethod
    def from_dict(cls, where: str, values: Mapping[str, Any]) -> Load:
        """Read what `to_dict` returned; raises PlanError if a field is missing or wrong."""
        fields = Fields(where, values)
        return cls(
            rate=fields.number("requestsPerSecond"),
            images=tuple(parse_size(str(text), where) for text in fields.items("images")),
            image_share=fields.number("imageShare", 1.0),
            low_detail=fields.text("detail", "auto") == "low",
            prompt_tokens=fields.count("promptTokens"),
            output_tokens=fields.count("outputTokens"),
            ttft_ms=fields.count("ttftMilliseconds") if "ttftMilliseconds" in fields else None,
            itl_ms=fields.count("itlMilliseconds") if "itlMilliseconds" in fields else None,
        )

    def check(self, facts: ModelFacts) -> None:
        """Raise PlanError if no worker would accept such requests."""
        if not 0 < self.rate < math.inf:
            raise PlanError("--rate: must be above 0 requests per second")
        if not 0 <= self.image_share <= 1:
            raise PlanError(f"--image-share: is {self.image_share}; it must be between 0 and 1")
        if len(self.images) > MAX_IMAGES:
            raise PlanError(
                f"--image: {len(self.images)} images; a request has at most {MAX_IMAGES}"
            )
        num_tokens = self.prompt_tokens + self.visual_tokens(facts) + self.output_tokens
        if num_tokens > facts.max_model_len:
            raise PlanError(
                f"a request has {num_tokens} tokens ({self.prompt_tokens} text, "
                f"{self.visual_tokens(facts)} visual, {self.output_tokens} output); "
                f"max_position_embeddings of {facts.path} is {facts.max_model_len}: "
                "use smaller images, --detail=low or fewer tokens"
            )


def parse_size(text: str, where: str = "--image") -> tuple[int, int]:
    """Return width and height of `WIDTHxHEIGHT`; raises PlanError if the text is another."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise PlanError(f"{where}: {text!r} is no size; write WIDTHxHEIGHT in pixels, as 1280x720")
    return int(found[1]), int(found[2])
