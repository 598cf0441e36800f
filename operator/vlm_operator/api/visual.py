"""The policy of visual tokens: `spec.model.limits.visual`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from vlm_operator.api.base import Model, Rule, field
from vlm_operator.api.enums import (
    OnContextExceeded,
    QuestionClassifier,
    TierMethod,
    VisualDefault,
    VisualPolicy,
)

Tenant = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
KeepPercent = Annotated[int, Field(ge=1, le=100)]
MaxVisualTokens = Annotated[int, Field(ge=1, le=2**21)]


class VisualTier(Model):
    """How a tier reduces an image: fewer pixels before the encoder, fewer tokens after it."""

    method: TierMethod = field(
        TierMethod.DIVERSE,
        "Which visual tokens are kept; docs/visual-tokens.md compares them. None keeps all. "
        "ArrCocPyramid is approximate.",
        example="Zip",
    )
    keep_percent: KeepPercent | None = field(
        None,
        "Visual tokens that are kept, in percent.",
        example=50,
        unset="25 in tier low, 50 in tier medium",
    )
    max_pixels: int | None = field(
        None,
        "Pixels that the encoder sees, at most.",
        example=200704,
        unset="the model's own maximum",
        ge=1,
        le=2**40,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="pool-blocks",
            holds="!has(self.method) || self.method != 'Pool' || "
            "(has(self.keepPercent) && self.keepPercent in [25, 50])",
            message="method Pool averages blocks of 2 or 4 tokens: set keepPercent to 50 or 25",
            at=".keepPercent",
        ),
    )


class TenantVisual(Model):
    """The visual tokens of one tenant, whose name is that of its key."""

    name: Tenant = field(..., "Name of the tenant's key.", example="team-a")
    visual: VisualDefault | None = field(
        None,
        "Default of the request field `visual`.",
        example="Low",
        unset="the policy of the service",
    )
    max_tokens_per_request: MaxVisualTokens | None = field(
        None,
        "Visual tokens of one request, at most.",
        example=2048,
        unset="that of the service",
    )


class Visual(Model):
    """How many visual tokens images get. A change takes effect within seconds."""

    policy: VisualPolicy = field(
        VisualPolicy.OFF,
        "Off reduces nothing. Detail reduces what a request asks for, by `detail` or `visual`. "
        "Auto also decides by the class of the question.",
        example="Detail",
    )
    low: VisualTier = field(VisualTier(), "Tier of `detail: low` and `visual: low`.")
    medium: VisualTier = field(VisualTier(), "Tier of `visual: medium`.")
    classifier: QuestionClassifier = field(
        QuestionClassifier.LEARNED,
        "How Auto finds the class of a question: by learned weights, or by lists of words.",
        example="Words",
    )
    brown_out_seconds: int | None = field(
        None,
        "Queued work of the least loaded encoder pod, in seconds, above which images of "
        "`detail: auto` get tier low.",
        example=5,
        unset="load lowers no image",
        ge=1,
        le=600,
    )
    on_context_exceeded: OnContextExceeded = field(
        OnContextExceeded.REFUSE,
        "What happens to a request with images that exceeds the context. ReduceOldest keeps an "
        "eighth of the visual tokens of the oldest images; DropOldest leaves images of earlier "
        "messages out.",
        example="ReduceOldest",
    )
    max_tokens_per_request: MaxVisualTokens | None = field(
        None,
        "Visual tokens of one request, at most; more is refused with a 400.",
        example=4096,
        unset="no limit but the context",
    )
    tenants: list[TenantVisual] = field(
        [], "Other defaults and limits of single tenants.", keys="name", max_length=64
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="brown-out-pixels",
            holds="!has(self.brownOutSeconds) || (has(self.low) && has(self.low.maxPixels))",
            message="a brown-out relieves encoders by fewer pixels alone: set low.maxPixels",
            at=".brownOutSeconds",
        ),
    )
