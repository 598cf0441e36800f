"""Which requests an encoder answers whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.candidates import IMAGE, TEXT, D, E, P, decode, encoder, names, pod, prefill

from vlm_worker.abilities import NO_EMBEDDINGS, NO_MINIMUM, UNCONSTRAINED, UNSCORED
from vlm_worker.route import (
    LENDING_MARGIN_SECONDS,
    Candidate,
    Demand,
    NoRoute,
    Route,
    another_decode,
    choose,
    missing_stages,
)
from vlm_worker.types import EmbedLayout, Role, Stage


def lender(
    name: str = "e", stages: Iterable[Stage] = (E, P, D), max_lent: int = 2, **changes: object
) -> Candidate:
    return pod(name, Role.ENCODER, stages, max_lent=max_lent, **changes)


BUSY = {"work_queued_seconds": 1.0}


def test_an_idle_encoder_answers_text_whole_if_the_decode_pods_are_busy() -> None:
    for demand in (TEXT, dataclasses.replace(TEXT, needs_decode=False)):
        route = choose([lender(), prefill(**BUSY), decode()], demand)
        assert isinstance(route, Route)
        assert {pod.name for pod in route.pods} == {"e"}
        assert route.lent is not None
        assert "saves 1.000 s" in route.lent.reason
        assert not route.reserve


@pytest.mark.parametrize(
    ("waits", "lent"), [(0.0, False), (0.02, False), (0.021, True), (5.0, True)]
)
def test_a_request_is_lent_if_it_saves_more_than_the_margin(waits: float, lent: bool) -> None:
    pods = [lender(), prefill(), decode(work_queued_seconds=waits)]
    route = choose(pods, TEXT)
    assert isinstance(route, Route)
    assert (route.lent is not None) is lent


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([prefill(), decode(kv_free_tokens=0)], id="decode pods without free KV"),
        pytest.param([prefill()], id="no decode pod"),
    ],
)
def test_text_that_would_be_held_is_lent(pods: list[Candidate]) -> None:
    route = choose([lender(), *pods], TEXT)
    assert isinstance(route, Route)
    assert route.lent is not None
    assert "no decode pod takes it now" in route.lent.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"num_images": 1},
        {"num_lent": 2},
        {"accepting": False},
        {"ready": False},
        {"kv_free_tokens": 99},
        {"lent_queued_seconds": 0.985},
        {"stages": frozenset({E})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_encoder_that_has_no_room_or_images_gets_no_text(changes: dict[str, object]) -> None:
    assert names(choose([lender(**changes), prefill(**BUSY), decode()], TEXT)) == (None, "p", "d")


@pytest.mark.parametrize(
    ("known", "lent"),
    [({}, True), ({b"p": 50}, True), ({b"p": 51}, False), ({b"p": 90, b"e": 40}, True)],
)
def test_a_short_wait_is_no_reason_to_compute_most_of_a_prompt_again(
    known: dict[bytes, int], lent: bool
) -> None:
    demand = dataclasses.replace(TEXT, cached_prefix=known)
    route = choose([lender(), prefill(work_queued_seconds=0.4), decode()], demand)
    assert isinstance(route, Route)
    assert (route.lent is not None) is lent


def test_text_that_would_be_held_is_lent_whatever_is_cached() -> None:
    demand = dataclasses.replace(TEXT, cached_prefix={b"p": 99})
    route = choose([lender(), prefill(), decode(kv_free_tokens=0)], demand)
    assert isinstance(route, Route)
    assert route.lent is not None


def test_of_two_lenders_the_one_with_the_prefix_gets_the_next_turn() -> None:
    demand = dataclasses.replace(TEXT, cached_prefix={b"f": 64})
    lenders = [lender("e"), lender("f", lent_queued_seconds=0.1)]
    assert names(choose([*lenders, prefill(**BUSY), decode()], demand)) == (None, "f", "f")


def test_lent_text_moves_no_image_from_its_home() -> None:
    for home in ("e", "f"):
        demand = dataclasses.replace(IMAGE, cached_images={home.encode(): 1}, num_image_tokens=1)
        loads = {"num_inflight": 8, "num_lent": 8, "lent_queued_seconds": 9.0}
        lenders = [
            lender(name, max_lent=8, **(loads if name == home else {})) for name in ("e", "f")
        ]
        assert names(choose([*lenders, prefill(), decode()], demand)) == (home, "p", "d")


def test_an_encoder_that_refused_a_request_is_not_asked_again() -> None:
    pods = [lender(), prefill(**BUSY), decode()]
    assert names(choose(pods, TEXT, failed=frozenset({b"e"}))) == (None, "p", "d")


def test_a_lender_never_decodes_what_another_pod_prefilled() -> None:
    pods = [lender(), prefill(), decode()]
    route = choose(pods, TEXT)
    assert isinstance(route, Route)
    assert another_decode(pods, TEXT, route, frozenset({b"d"})) is None


def test_lent_stages_do_not_make_a_service_ready() -> None:
    assert missing_stages([lender()], frozenset(Stage)) == [P, D]


pods_of_a_service = st.lists(
    st.builds(
        lambda at, shape, seconds, changes: shape(f"{at}", work_queued_seconds=seconds, **changes),
        st.integers(0, 99),
        st.sampled_from([lender, encoder, prefill, decode]),
        st.floats(0, 2),
        st.fixed_dictionaries(
            {},
            optional={
                "num_images": st.integers(0, 2),
                "num_lent": st.integers(0, 3),
                "num_inflight": st.integers(0, 9),
                "lent_queued_seconds": st.floats(0, 2),
                "accepting": st.booleans(),
                "ready": st.booleans(),
                "kv_free_tokens": st.sampled_from([0, 99, 100, 1000]),
                "layout_fingerprint": st.sampled_from([b"kv", b"other"]),
            },
        ),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.name,
)
demands = st.sampled_from([TEXT, IMAGE, dataclasses.replace(TEXT, needs_decode=False)])


def without_lending(candidate: Candidate) -> Candidate:
    """The same pod of a service that does not lend."""
    if candidate.max_lent == 0:
        return candidate
    return dataclasses.replace(
        candidate,
        stages=frozenset({E}),
        layout_fingerprint=b"",
        max_lent=0,
        num_inflight=max(0, candidate.num_inflight - candidate.num_lent),
        num_waiting=candidate.num_images,
    )


@given(pods_of_a_service, demands)
def test_only_text_is_lent_and_only_to_encoders_without_images(
    pods: list[Candidate], demand: Demand
) -> None:
    route = choose(pods, demand)
    if isinstance(route, NoRoute) or not any(pod.lends for pod in route.pods):
        return
    if demand.image_digest:
        assert not route.prefill.pod.lends
        assert route.decode is None or not route.decode.pod.lends
        return
    (chosen,) = set(route.pods)
    assert chosen.num_images == 0
    assert chosen.num_lent < chosen.max_lent
    assert chosen.accepting
    own = choose([without_lending(pod) for pod in pods], demand)
    if isinstance(own, Route) and all(pod.kv_free_tokens >= 100 for pod in own.pods):
        waits = sum({pod.name: pod.work_queued_seconds for pod in own.pods}.values())
        queued = chosen.work_queued_seconds + chosen.lent_queued_seconds
        assert waits - queued > LENDING_MARGIN_SECONDS


@given(pods_of_a_service, demands)
def test_what_is_not_lent_takes_the_route_of_a_service_that_does_not_lend(
    pods: list[Candidate], demand: Demand
) -> None:
    route, off = choose(pods, demand), choose([without_lending(pod) for pod in pods], demand)
    if isinstance(route, NoRoute):
        assert route == off
    elif route.lent is None:
        assert names(route) == names(off)


@given(pods_of_a_service, demands, st.integers(0, 9), st.integers(0, 9))
def test_the_counts_of_lending_change_no_route_while_no_pod_lends(
    pods: list[Candidate], demand: Demand, num_images: int, num_lent: int
) -> None:
    off = [dataclasses.replace(pod, max_lent=0) for pod in pods]
    counted = [dataclasses.replace(pod, num_images=num_images, num_lent=num_lent) for pod in off]
    one, other = choose(off, demand), choose(counted, demand)
    if isinstance(one, NoRoute):
        assert one == other
    else:
        assert names(one) == names(other)


CONSTRAINED = dataclasses.replace(TEXT, constrained=True)


def test_a_constrained_answer_goes_to_pods_that_know_grammars() -> None:
    """A pod of an older version would ignore the grammar, and answer freely."""
    old, new = [prefill("p0"), decode("d0")], [prefill("p1", grammars=True)]
    new.append(decode("d1", grammars=True, num_inflight=9, kv_free_tokens=200))
    assert names(choose([*old, *new], CONSTRAINED)) == (None, "p1", "d1")
    assert names(choose([*old, *new], TEXT)) != (None, "p1", "d1")
    route = choose([*old, *new], CONSTRAINED)
    assert isinstance(route, Route)
    assert another_decode([*old, *new], CONSTRAINED, route, frozenset({b"d1"})) is None


def test_a_service_of_older_pods_answers_no_constrained_request() -> None:
    pods = [encoder(), prefill(), decode(), lender("l")]
    assert choose(pods, CONSTRAINED) == NoRoute(Stage.DECODE, UNCONSTRAINED)
    one_token = dataclasses.replace(CONSTRAINED, needs_decode=False)
    assert isinstance(choose(pods, one_token), NoRoute)


def test_an_older_encoder_encodes_for_a_constrained_answer() -> None:
    demand = dataclasses.replace(IMAGE, constrained=True)
    pods = [lender(), prefill(grammars=True), decode(grammars=True)]
    assert names(choose(pods, demand)) == ("e", "p", "d")


def test_an_answer_with_min_tokens_goes_to_pods_that_obey_them() -> None:
    demand = dataclasses.replace(TEXT, has_minimum=True)
    old, new = [prefill("p0"), decode("d0")], [prefill("p1", min_tokens=True)]
    new.append(decode("d1", min_tokens=True, num_inflight=9, kv_free_tokens=200))
    assert names(choose([*old, *new], demand)) == (None, "p1", "d1")
    assert choose(old, demand) == NoRoute(Stage.DECODE, NO_MINIMUM)
    assert names(choose(old, TEXT)) == (None, "p0", "d0")


def test_a_prompt_to_score_goes_to_pods_that_give_log_probabilities() -> None:
    demand = dataclasses.replace(TEXT, is_scored=True)
    old, new = [prefill("p0"), decode("d0")], [prefill("p1", prompt_logprobs=True)]
    new.append(decode("d1", prompt_logprobs=True, num_inflight=9, kv_free_tokens=200))
    assert names(choose([*old, *new], demand)) == (None, "p1", "d1")
    assert choose(old, demand) == NoRoute(Stage.DECODE, UNSCORED)
    one_token = dataclasses.replace(demand, needs_decode=False)
    assert choose(old, one_token) == NoRoute(Stage.PREFILL, UNSCORED)
    assert names(choose(old, TEXT)) == (None, "p0", "d0")


@pytest.mark.parametrize("asks", ["constrained", "has_minimum", "is_scored"])
def test_a_stage_without_any_pod_lacks_a_pod_and_no_ability(asks: str) -> None:
    demand = dataclasses.replace(TEXT, **{asks: True})  # type: ignore[arg-type]
    able = {"grammars": True, "min_tokens": True, "prompt_logprobs": True}
    for pods in ([encoder(), prefill()], [encoder(), prefill(**able)], [decode(ready=False)]):
        assert choose(pods, demand) == choose(pods, TEXT)
    pods = [encoder(), decode(**able)]
    assert choose(pods, demand) == choose(pods, TEXT)
    one_token = dataclasses.replace(demand, needs_decode=False)
    plain = dataclasses.replace(TEXT, needs_decode=False)
    assert choose([encoder()], one_token) == choose([encoder()], plain)
    differs = prefill(**able, layout_fingerprint=b"another")
    assert choose([differs, *pods], demand) == choose([differs, *pods], TEXT)


def test_embeddings_without_any_encoder_lack_an_encoder_and_no_ability() -> None:
    layout = EmbedLayout("r", 8, 1, "bfloat16")
    demand = dataclasses.replace(IMAGE, embed_layout=layout, constrained=True)
    able = {"grammars": True}
    pods = [prefill(**able), decode(**able)]
    assert choose(pods, demand) == choose(pods, IMAGE)
    assert choose([encoder(), *pods], demand) == NoRoute(E, NO_EMBEDDINGS)
