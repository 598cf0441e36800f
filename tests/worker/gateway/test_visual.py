"""How many visual tokens an image gets: by detail, request, tenant and service, in this order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from worker.gateway.image_files import data_url, png
from worker.gateway.stack import MODEL

from vlm_worker.core.families import load_family
from vlm_worker.gateway import question_class
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Message, Visual
from vlm_worker.gateway.config import Config, ConfigWatcher, Limits
from vlm_worker.gateway.images import RequestImage, read_images
from vlm_worker.gateway.question_class import Classified
from vlm_worker.gateway.turns import at_once
from vlm_worker.gateway.visual import (
    BEGIN_SECONDS,
    END_SECONDS,
    BrownOut,
    Choice,
    TenantVisual,
    Tier,
    TierMethod,
    VisualLimits,
    VisualPolicy,
    Why,
    check_visual_tokens,
    problem_of,
)
from vlm_worker.reduction import Method, Reduction

FAMILY = load_family(MODEL)
LOW, MEDIUM = Reduction(Method.DIVERSE, 250), Reduction(Method.DIVERSE, 500)


def choice(
    detail: str = "auto",
    visual: Visual | None = None,
    *,
    text: str = "",
    tenant: str = "",
    browned_out: bool = False,
    **limits: Any,
) -> Choice:
    part = ImagePart("", detail, "messages[0].content[1].image_url")  # type: ignore[arg-type]
    messages = [Message("user", (TextPart(text), part))] if text else []
    policy = VisualPolicy(
        VisualLimits(**limits),
        FAMILY,
        tenant=tenant,
        visual=visual,
        messages=messages,
        browned_out=browned_out,
    )
    return policy.of(part)


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
def test_a_service_without_a_policy_decides_by_detail_alone_as_before(detail: Any) -> None:
    found = choice(detail)
    assert (found.max_pixels, found.reduction) == (FAMILY.max_pixels_of(detail), None)


@pytest.mark.parametrize(
    ("detail", "visual", "reduction", "why"),
    [
        ("auto", None, None, Why.DEFAULT),
        ("low", None, LOW, Why.DETAIL),
        ("low", "high", LOW, Why.DETAIL),
        ("high", None, None, Why.DETAIL),
        ("high", "low", None, Why.DETAIL),
        ("original", None, None, Why.DETAIL),
        ("original", "off", None, Why.DETAIL),
        ("auto", "low", LOW, Why.REQUEST),
        ("auto", "medium", MEDIUM, Why.REQUEST),
        ("auto", "high", None, Why.REQUEST),
        ("auto", "off", None, Why.REQUEST),
    ],
)
def test_the_detail_of_an_image_precedes_the_request(
    detail: str, visual: Any, reduction: Reduction | None, why: Why
) -> None:
    found = choice(detail, visual, policy="Detail")
    assert (found.reduction, found.why, found.max_pixels) == (reduction, why, 0)


def test_the_request_precedes_its_tenant_and_the_tenant_the_service() -> None:
    tenants = {"a": TenantVisual(visual="medium"), "b": TenantVisual(visual="off")}
    given: dict[str, Any] = {"policy": "Auto", "tenants": tenants, "text": "What colour is it?"}
    assert choice(tenant="a", visual="low", **given).reduction == LOW
    assert choice(tenant="a", **given).reduction == MEDIUM
    assert choice(tenant="b", **given) == Choice(why=Why.TENANT)
    assert choice(tenant="c", **given).why is Why.CLASS


def test_a_tier_may_have_fewer_pixels_fewer_tokens_or_both() -> None:
    tier = Tier(method="None", max_pixels=50_176)
    assert choice("low", policy="Detail", low=tier) == Choice(50_176, None, "low", Why.DETAIL)
    tier = Tier(method="Pool", keep_percent=50, max_pixels=50_176)
    found = choice("low", policy="Detail", low=tier)
    assert found == Choice(50_176, Reduction(Method.POOL, 500), "low", Why.DETAIL)


@pytest.mark.parametrize("name", get_args(TierMethod))
def test_a_tier_may_have_each_method(name: TierMethod) -> None:
    reduction = Tier(name, 50).reduction
    assert reduction == (None if name == "None" else Reduction(Method(name.lower()), 500))


def test_every_method_has_a_name_in_tiers() -> None:
    assert set(Method) == {Method(name.lower()) for name in get_args(TierMethod) if name != "None"}


@pytest.mark.parametrize(
    ("text", "reduction", "less_pixels"),
    [
        ("What color is the car?", Reduction(Method.ZIP, 250), False),
        ("What does the sign say? Read the text.", Reduction(Method.DIVERSE, 250), False),
        ("How many circles are there?", None, True),
        ("", None, False),
        ("Erzähl mir etwas.", None, False),
    ],
)
def test_auto_decides_by_the_class_of_the_question(
    text: str, reduction: Reduction | None, *, less_pixels: bool
) -> None:
    found = choice(text=text, policy="Auto")
    assert found.reduction == reduction
    assert found.max_pixels == (FAMILY.max_pixels_of("low") if less_pixels else 0)
    assert found.why is Why.CLASS
    assert choice(text=text, policy="Detail", visual="auto").reduction == reduction


def test_the_question_is_classified_once_for_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's 32 long turns take up to 0.3 s, on the event loop."""
    calls: list[Sequence[str]] = []

    def classify(texts: Sequence[str], **how: Any) -> Classified:
        calls.append(texts)
        return question_class.classify(texts, **how)

    monkeypatch.setattr("vlm_worker.gateway.visual.classify", classify)
    part = ImagePart("", "auto", "")
    message = Message("user", (TextPart("Where is it?"), part, part))
    limits = VisualLimits(policy="Auto")
    policy = VisualPolicy(limits, FAMILY, tenant="", visual=None, messages=[message])
    assert not calls
    assert policy.of(part) == policy.of(part)
    assert calls == [["Where is it?"]]


@pytest.mark.parametrize("visual", ["low", "medium", "auto"])
def test_a_service_that_reduces_none_refuses_a_request_for_fewer(visual: Any) -> None:
    with pytest.raises(ApiError, match=r"model\.limits\.visual\.policy") as caught:
        choice(visual=visual)
    assert caught.value.param == "visual"
    for harmless in ("off", "high"):
        assert choice(visual=harmless).reduction is None  # type: ignore[arg-type]


@pytest.mark.parametrize("visual", ["low", "medium"])
def test_original_detail_and_fewer_tokens_are_refused(visual: Any) -> None:
    with pytest.raises(ApiError, match="leave one of them out") as caught:
        choice("original", visual, policy="Detail")
    assert caught.value.param == "messages[0].content[1].image_url.detail"


def test_every_combination_is_decided_or_refused() -> None:
    policies = ("Off", "Detail", "Auto")
    details = ("auto", "low", "high", "original")
    for policy, detail, visual in itertools.product(policies, details, (None, *get_args(Visual))):
        given: dict[str, Any] = {"policy": policy, "text": "Where is it?"}
        fewer = visual in ("low", "medium", "auto")
        if (policy == "Off" and fewer) or (
            policy != "Off" and detail == "original" and visual in ("low", "medium")
        ):
            with pytest.raises(ApiError):
                choice(detail, visual, **given)
        else:
            assert choice(detail, visual, **given).reduction is None or policy != "Off"


def read(data: bytes, **given: Any) -> RequestImage:
    limits = VisualLimits(**given)
    policy = VisualPolicy(limits, FAMILY, tenant="", visual=None, messages=())
    part = ImagePart(data_url(data, "image/png"), "low", "here")
    config = Config(limits=Limits(visual=limits))
    (image,) = at_once(read_images([part], config, FAMILY, visual=policy))
    assert image is not None
    return image


def test_an_image_counts_the_tokens_that_are_kept() -> None:
    data = png(size=(448, 224))
    whole = read(data, policy="Detail", low=Tier(method="None"))
    kept = read(data, policy="Detail")
    assert whole.num_tokens == 16 * 8
    assert kept.num_tokens == 32
    assert kept.reduction == LOW


def test_a_request_has_a_limit_of_visual_tokens_and_a_tenant_its_own() -> None:
    tenants = {"small": TenantVisual(max_tokens_per_request=10)}
    limits = VisualLimits(max_tokens_per_request=100, tenants=tenants)
    check_visual_tokens(100, limits, tenant="other")
    check_visual_tokens(10, limits, tenant="small")
    for num_tokens, tenant in ((101, "other"), (11, "small")):
        with pytest.raises(ApiError, match="maxTokensPerRequest") as caught:
            check_visual_tokens(num_tokens, limits, tenant=tenant)
        assert caught.value.code == "too_many_visual_tokens"


@pytest.mark.parametrize(
    ("low", "problem"),
    [
        ('{"method": "Pool", "keep_percent": 30}', "Pool keeps 50 or 25 percent"),
        ('{"keep_percent": 0}', "not 1 to 100"),
        ('{"max_pixels": -5}', "low.max_pixels is -5, not 1 to"),
        ('{"max_pixels": 2199023255552}', "low.max_pixels is 2199023255552, not 1 to"),
        ('{"method": "Best"}', "Best"),
    ],
)
def test_a_tier_that_cannot_be_leaves_the_last_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, low: str, problem: str
) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"limits": {"visual": {"policy": "Detail"}}}')
    watcher = ConfigWatcher(path, None, images_per_request=4)
    path.write_text(f'{{"limits": {{"visual": {{"policy": "Auto", "low": {low}}}}}}}')
    watcher.reload()
    assert watcher.now.config.limits.visual.policy == "Detail"
    assert problem in caplog.records[-1].__dict__["reason"]


def test_a_brown_out_lowers_only_images_that_nobody_decided_on() -> None:
    tenants = {"a": TenantVisual(visual="high")}
    given: dict[str, Any] = {"policy": "Auto", "tenants": tenants, "browned_out": True}
    assert choice(**given) == Choice(0, LOW, "low", Why.LOAD)
    assert choice(visual="auto", **given).why is Why.LOAD
    assert choice("high", **given).why is Why.DETAIL
    assert choice(visual="medium", **given).reduction == MEDIUM
    assert choice(tenant="a", **given) == Choice(why=Why.TENANT)
    assert choice(**{**given, "policy": "Off"}).reduction is None


def observed(*loads: float | None, limit: float | None = 4.0) -> list[bool]:
    """Whether a brown-out is on after each second."""
    brown_out, found = BrownOut(), []
    for now, load in enumerate(loads):
        brown_out.observe(load, limit, now=float(now))
        found.append(brown_out.is_on)
    return found


def test_a_brown_out_begins_after_five_seconds_and_ends_after_thirty() -> None:
    begin, end = int(BEGIN_SECONDS), int(END_SECONDS)
    on = observed(*[5.0] * (begin + 1), *[1.0] * (end + 1))
    assert on == [False] * begin + [True] * (end + 1) + [False]


@pytest.mark.parametrize(
    "loads",
    [[5.0] * 5 + [4.0] + [5.0] * 5, [None] * 20, [4.0] * 20],
    ids=["a pause starts the count again", "no encoder", "at the limit"],
)
def test_a_short_burst_begins_no_brown_out(loads: list[float | None]) -> None:
    assert not any(observed(*loads))


def test_load_between_half_and_whole_limit_keeps_a_brown_out() -> None:
    assert observed(*[5.0] * 6, *[3.0] * 60)[-1]
    assert not any(observed(*[5.0] * 60, limit=None))


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"brown_out_seconds": -1}, "brown_out_seconds is -1, not above 0"),
        ({"max_tokens_per_request": 0}, "max_tokens_per_request is 0, not at least 1"),
        ({"tenants": {"a": TenantVisual(max_tokens_per_request=-1)}}, "is -1, not at least 1"),
    ],
)
def test_numbers_that_no_crd_would_allow_are_named(limits: Any, problem: str) -> None:
    assert problem in str(problem_of(VisualLimits(**limits)))
    assert problem_of(VisualLimits(brown_out_seconds=0.5, max_tokens_per_request=1)) is None
