"""Decides how many visual tokens each image of a request gets, and by which policy. Pure.

    detail of the part ─▶ `visual` of the request ─▶ the tenant's ─▶ the service's policy
        low, high,           off, low, medium,         as `visual`     Detail: nothing more
        original             high, auto                                Auto: the question's class

The first of them that says something decides. While the encoders are overloaded (`BrownOut`), an
image gets the low tier if these say nothing, or `auto`.

The result depends on the header of an image, the texts of the request and the settings alone, so it
is known before an image is sent, and each retry has the same.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Final, Literal, assert_never

import msgspec

from vlm_worker.annotations import MAX_PIXELS
from vlm_worker.core.families import Family
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Message, Visual
from vlm_worker.gateway.question_class import QuestionClass, classify
from vlm_worker.reduction import POOL_BLOCKS, Method, Reduction

Policy = Literal["Off", "Detail", "Auto"]
TierMethod = Literal["None", "Diverse", "Zip", "Merge", "Pool", "ArrCoc", "ArrCocPyramid"]

CLASS_METHODS: Final = {
    QuestionClass.ATTRIBUTE: Method.ZIP,
    QuestionClass.LOCATE: Method.ZIP,
    QuestionClass.READ: Method.DIVERSE,
}
"""What Auto does with an image, by class of the question; `bench/visual_tokens.py` measures it."""
CLASSES_OF_LESS_PIXELS: Final = frozenset({QuestionClass.COUNT, QuestionClass.CELL})
"""Counting needs every cell, but few pixels. All other classes get the whole image."""


OnContextExceeded = Literal["Refuse", "ReduceOldest", "DropOldest"]

TIERS: Final = ("native", "low", "medium", "oldest", *(one.value for one in QuestionClass))
"""Every value of `Choice.tier`."""


class Tier(msgspec.Struct, frozen=True):
    """How a tier reduces an image: fewer pixels before the encoder, fewer tokens after it."""

    method: TierMethod = "Diverse"
    keep_percent: int = 25
    max_pixels: int | None = None

    @property
    def reduction(self) -> Reduction | None:
        if self.method == "None":
            return None
        return Reduction(Method(self.method.lower()), self.keep_percent * 10)


class TenantVisual(msgspec.Struct, frozen=True):
    """A tenant's default for requests without `visual`, and its own limit; None: the service's."""

    visual: Visual | None = None
    max_tokens_per_request: int | None = None


class VisualLimits(msgspec.Struct, frozen=True):
    """`model.limits.visual` of a VLMService, in gateway.json."""

    policy: Policy = "Off"
    low: Tier = Tier()
    medium: Tier = Tier(keep_percent=50)
    classifier: Literal["Learned", "Words"] = "Learned"
    brown_out_seconds: float | None = None
    on_context_exceeded: OnContextExceeded = "Refuse"
    max_tokens_per_request: int | None = None
    tenants: dict[str, TenantVisual] = {}

    def max_tokens_of(self, tenant: str) -> int | None:
        """The limit on visual tokens of one request."""
        own = self.tenants.get(tenant, TenantVisual()).max_tokens_per_request
        return self.max_tokens_per_request if own is None else own


class Why(enum.StrEnum):
    """What decided on an image."""

    OFF = "off"
    DETAIL = "detail"
    REQUEST = "request"
    TENANT = "tenant"
    CLASS = "class"
    DEFAULT = "default"
    LOAD = "load"
    CONTEXT = "context"
    FAMILY = "family"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The decision on one image; `max_pixels` 0 is the model's maximum, no `reduction` all tokens.

    `tier` is `native`, `low`, `medium`, the class of the question, or `oldest` (`overflow`).
    """

    max_pixels: int = 0
    reduction: Reduction | None = None
    tier: str = "native"
    why: Why = Why.DEFAULT


class VisualPolicy:
    """The decisions on the images of one request."""

    def __init__(
        self,
        limits: VisualLimits,
        family: Family,
        *,
        tenant: str,
        visual: Visual | None,
        messages: Sequence[Message],
        browned_out: bool = False,
    ) -> None:
        """`visual` is the field of the request, `browned_out` that of a BrownOut.

        Raises:
            ApiError: 400; the service or the model does not reduce, and the request asks for it.
        """
        self._limits, self._family = limits, family
        self._reducible = family.is_reducible
        if visual in ("low", "medium", "auto"):
            self._check_allowed(visual)
        self._asked, self._why = visual, Why.REQUEST
        if visual is None:
            self._asked, self._why = self._default(tenant)
        self._visual, self._browned_out = visual, browned_out
        self._messages = messages

    def of(self, part: ImagePart) -> Choice:
        """The decision on one image of the request.

        Raises:
            ApiError: 400; the image asks for every detail, and the request for fewer tokens.
        """
        low_pixels = self._family.max_pixels_of(part.detail)
        if self._limits.policy == "Off":
            tier = "low" if part.detail == "low" else "native"
            return Choice(low_pixels, tier=tier, why=Why.OFF)
        if part.detail == "original" and self._visual in ("low", "medium"):
            raise invalid(
                f"'detail': 'original' asks for the whole image, and 'visual': '{self._visual}' "
                "for fewer visual tokens: leave one of them out.",
                param=f"{part.path}.detail",
            )
        if not self._reducible:
            return Choice(low_pixels, tier="native", why=Why.FAMILY)
        if part.detail == "low":
            return self._tier("low", Why.DETAIL)
        if part.detail in ("high", "original"):
            return Choice(why=Why.DETAIL)
        if self._browned_out and self._asked in (None, "auto"):
            return self._tier("low", Why.LOAD)
        match self._asked:
            case None:
                return Choice()
            case "off" | "high":
                return Choice(why=self._why)
            case "low" | "medium":
                return self._tier(self._asked, self._why)
            case "auto":
                return self._of_class()
            case _:
                assert_never(self._asked)

    def _default(self, tenant: str) -> tuple[Visual | None, Why]:
        own = self._limits.tenants.get(tenant, TenantVisual()).visual
        if own is not None:
            return own, Why.TENANT
        return ("auto" if self._limits.policy == "Auto" else None), Why.DEFAULT

    def _tier(self, name: Literal["low", "medium"], why: Why) -> Choice:
        tier = self._limits.low if name == "low" else self._limits.medium
        return Choice(tier.max_pixels or 0, tier.reduction, name, why)

    @functools.cached_property
    def _class(self) -> QuestionClass:
        """The class of the question, which all images of a request share."""
        texts = [_text(message) for message in self._messages if message.role == "user"]
        return classify(texts, method=self._limits.classifier).question_class

    def _of_class(self) -> Choice:
        """What the class of the question needs, with the share of the low tier."""
        found = self._class
        if found in CLASSES_OF_LESS_PIXELS:
            return Choice(self._family.max_pixels_of("low"), None, found.value, Why.CLASS)
        method = CLASS_METHODS.get(found)
        if method is None:
            return Choice(tier=found.value, why=Why.CLASS)
        permille = self._limits.low.keep_percent * 10
        return Choice(0, Reduction(method, permille), found.value, Why.CLASS)

    def _check_allowed(self, visual: Visual) -> None:
        if self._limits.policy == "Off":
            raise invalid(
                f"'visual': '{visual}' asks for fewer visual tokens; this service reduces none. "
                "Its operator allows it: model.limits.visual.policy of a VLMService.",
                param="visual",
                code="unsupported_parameter",
            )
        if not self._reducible:
            raise invalid(
                f"'visual': '{visual}' asks for fewer visual tokens; those of this model's family, "
                f"{self._family.model_type}, cannot be reduced.",
                param="visual",
                code="unsupported_parameter",
            )


BEGIN_SECONDS: Final = 5.0
END_SECONDS: Final = 30.0


class BrownOut:
    """Whether images get the low tier because encoders are overloaded.

    It begins when the least loaded encoder pod has had more queued work than the limit for 5 s, and
    ends when it has had less than half of it for 30 s. So a burst that is gone after a second
    changes nothing, and the tier does not alternate.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._since: float | None = None

    def observe(self, queued_seconds: float | None, limit: float | None, *, now: float) -> None:
        """Record the queued work of the least loaded encoder pod, in seconds; None without one.

        `limit` is `brown_out_seconds`; None ends it at once.
        """
        if limit is None:
            self.is_on, self._since = False, None
            return
        queued = queued_seconds or 0.0
        changes = queued < limit / 2 if self.is_on else queued > limit
        if not changes:
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now - self._since >= (END_SECONDS if self.is_on else BEGIN_SECONDS):
            self.is_on, self._since = not self.is_on, None


def check_visual_tokens(num_tokens: int, limits: VisualLimits, *, tenant: str) -> None:
    """Raise ApiError (400) if the images of a request have too many visual tokens together."""
    maximum = limits.max_tokens_of(tenant)
    if maximum is not None and num_tokens > maximum:
        raise too_many_visual_tokens(num_tokens, maximum)


def too_many_visual_tokens(num_tokens: int, maximum: int) -> ApiError:
    return invalid(
        f"The images have {num_tokens} visual tokens; one request may have {maximum}: send fewer "
        "or smaller images. The service's operator sets the limit: "
        "model.limits.visual.maxTokensPerRequest of a VLMService.",
        param="messages",
        code="too_many_visual_tokens",
    )


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))


def problem_of(limits: VisualLimits) -> str | None:
    """Why these limits cannot apply, or None."""
    if limits.brown_out_seconds is not None and limits.brown_out_seconds <= 0:
        return f"limits.visual.brown_out_seconds is {limits.brown_out_seconds}, not above 0"
    tenants = limits.tenants.values()
    for limit in (limits.max_tokens_per_request, *(one.max_tokens_per_request for one in tenants)):
        if limit is not None and limit < 1:
            return f"limits.visual: max_tokens_per_request is {limit}, not at least 1"
    for name, tier in (("low", limits.low), ("medium", limits.medium)):
        if not 1 <= tier.keep_percent <= 100:
            return f"limits.visual.{name}.keep_percent is {tier.keep_percent}, not 1 to 100"
        if tier.max_pixels is not None and not 1 <= tier.max_pixels <= MAX_PIXELS:
            return f"limits.visual.{name}.max_pixels is {tier.max_pixels}, not 1 to {MAX_PIXELS}"
        if tier.method == "Pool" and tier.keep_percent * 10 not in POOL_BLOCKS:
            return f"limits.visual.{name}: Pool keeps 50 or 25 percent, not {tier.keep_percent}"
    return None
