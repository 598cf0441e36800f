"""Which pods serve a request."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.candidates import IMAGE, TEXT, D, E, P, decode, encoder, names, pod, prefill

from vlm_worker.abilities import NO_EMBEDDINGS
from vlm_worker.route import (
    AFFINITY_SLACK_REQUESTS,
    AFFINITY_SLACK_SECONDS,
    Candidate,
    Demand,
    NoRoute,
    Route,
    another_decode,
    choose,
    least_queued_seconds,
    missing_stages,
    rendezvous,
)
from vlm_worker.types import EmbedLayout, Role, Stage


@pytest.mark.parametrize(
    ("pods", "expected", "reserve"),
    [
        pytest.param([encoder(), prefill(), decode()], ("e", "p", "d"), True, id="E, P, D"),
        pytest.param([encoder(), decode(stages=(P, D))], ("e", "d", "d"), False, id="E, PD"),
        pytest.param([prefill(stages=(E, P)), decode()], ("p", "p", "d"), True, id="EP, D"),
        pytest.param([decode(stages=(E, P, D))], ("d", "d", "d"), False, id="EPD"),
        pytest.param(
            [encoder(accepting=False), prefill(stages=(E, P)), decode()],
            ("p", "p", "d"),
            True,
            id="a draining encoder gives way to prefill where it is loaded there",
        ),
        pytest.param(
            [encoder(), prefill(stages=(E, P)), decode()],
            ("e", "p", "d"),
            True,
            id="an encoder pool goes before a lent stage",
        ),
    ],
)
def test_a_stage_without_a_pool_runs_on_the_next_role(
    pods: list[Candidate], expected: tuple[str, ...], reserve: bool
) -> None:
    route = choose(pods, IMAGE)
    assert names(route) == expected
    assert isinstance(route, Route)
    assert route.reserve is reserve


LAYOUT = EmbedLayout("revision", hidden_size=4, num_levels=1, dtype="bfloat16")


@pytest.mark.parametrize(
    ("layout", "takes"),
    [
        (None, False),
        (LAYOUT, True),
        (dataclasses.replace(LAYOUT, model_revision="newer"), True),
        (dataclasses.replace(LAYOUT, hidden_size=8, num_levels=0), False),
        (dataclasses.replace(LAYOUT, dtype="float16"), False),
    ],
)
def test_an_embedding_goes_to_a_pod_that_takes_its_layout(
    layout: EmbedLayout | None, takes: bool
) -> None:
    demand = dataclasses.replace(IMAGE, embed_layout=LAYOUT)
    for pods, home in (
        ([encoder(embed_layout=layout), prefill(), decode()], "e"),
        ([prefill(stages=(E, P), embed_layout=layout), decode()], "p"),
        ([decode(stages=(E, P, D), embed_layout=layout)], "d"),
    ):
        route = choose(pods, demand)
        if takes:
            assert names(route)[0] == home
        else:
            assert route == NoRoute(E, NO_EMBEDDINGS)
            assert names(choose([*pods, encoder("e2", embed_layout=LAYOUT)], demand))[0] == "e2"
        assert names(choose(pods, IMAGE))[0] == home


def test_text_needs_no_encoder() -> None:
    assert names(choose([prefill(), decode()], TEXT)) == (None, "p", "d")


def test_one_token_needs_no_decode() -> None:
    demand = dataclasses.replace(TEXT, needs_decode=False)
    assert names(choose([prefill(), decode()], demand)) == (None, "p", None)


@pytest.mark.parametrize(
    ("pods", "stage"),
    [
        pytest.param([encoder(), prefill()], D, id="no decode"),
        pytest.param([encoder(), decode()], P, id="no prefill"),
        pytest.param([prefill(), decode()], E, id="no encoder"),
        pytest.param([encoder(ready=False), prefill(), decode()], E, id="an encoder not ready"),
        pytest.param(
            [encoder(), prefill(layout_fingerprint=b"other"), decode()], P, id="layouts differ"
        ),
        pytest.param(
            [encoder(embed_fingerprint=b"x"), prefill(), decode()], E, id="embeddings differ"
        ),
    ],
)
def test_no_route_names_the_stage_that_lacks_a_pod(pods: list[Candidate], stage: Stage) -> None:
    route = choose(pods, IMAGE)
    assert isinstance(route, NoRoute)
    assert route.stage is stage


def test_a_draining_pod_is_the_last_resort() -> None:
    draining = decode("old", accepting=False)
    assert names(choose([prefill(), draining, decode("new", kv_free_tokens=0)], TEXT))[2] == "new"
    route = choose([prefill(), draining], TEXT)
    assert isinstance(route, Route)
    assert route.decode is not None
    assert route.decode.last_resort


def test_a_pod_that_failed_is_tried_again_only_where_there_is_no_other() -> None:
    pods = [prefill(), decode("a"), decode("b", num_inflight=50)]
    assert names(choose(pods, TEXT, failed=frozenset({b"a"})))[2] == "b"
    assert names(choose(pods[:2], TEXT, failed=frozenset({b"a", b"p"}))) == (None, "p", "a")


def test_decode_goes_where_the_prompt_fits() -> None:
    pods = [prefill(), decode("full", kv_free_tokens=50), decode("free", num_inflight=9)]
    assert names(choose(pods, TEXT))[2] == "free"


def test_a_prompt_that_fits_nowhere_is_told_so_with_the_size() -> None:
    route = choose([prefill(), decode(kv_capacity_tokens=64)], TEXT)
    assert isinstance(route, NoRoute)
    assert route.capacity_tokens == 64


def test_another_decode_agrees_with_the_prefill_that_is_settled() -> None:
    pods = [prefill(), decode("a"), decode("b"), decode("c", layout_fingerprint=b"x")]
    route = choose(pods, TEXT)
    assert isinstance(route, Route)
    other = another_decode(pods, TEXT, route, frozenset({b"a"}))
    assert other is not None
    assert other.pod.name == "b"
    assert another_decode(pods, TEXT, route, frozenset({b"a", b"b"})) is None


def test_another_decode_is_never_the_prefill_pod_whatever_its_load_is() -> None:
    first = prefill(stages=(P, D))
    route = choose([first, decode()], TEXT)
    assert names(route) == (None, "p", "d")
    assert isinstance(route, Route)
    busier = dataclasses.replace(first, num_inflight=1)
    assert another_decode([busier, decode()], TEXT, route, frozenset({b"d"})) is None


def test_an_image_comes_home_until_its_home_is_busy() -> None:
    pods = [prefill(), decode(), *(encoder(f"e{i}") for i in range(3))]
    home = names(choose(pods, IMAGE))[0]
    busy = [
        dataclasses.replace(c, num_inflight=AFFINITY_SLACK_REQUESTS + 1) if c.name == home else c
        for c in pods
    ]
    assert names(choose(busy, IMAGE))[0] != home
    queued = [
        dataclasses.replace(c, work_queued_seconds=1.0) if c.name == home else c for c in pods
    ]
    assert names(choose(queued, IMAGE))[0] != home


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        pytest.param({"a": 30, "b": 60}, "b", id="more tokens go first"),
        pytest.param({"a": 30}, "a", id="any tokens go before none"),
        pytest.param({"gone": 90}, None, id="the boot id of no pod is no pod's"),
    ],
)
def test_a_request_goes_where_its_tokens_are(known: dict[str, int], expected: str | None) -> None:
    cached = {name.encode(): num_tokens for name, num_tokens in known.items()}
    pods = [encoder(name) for name in "abc"] + [prefill(name) for name in "abc"] + [decode()]
    today = names(choose(pods, IMAGE))
    images = dataclasses.replace(IMAGE, num_image_tokens=100, cached_images=cached)
    assert names(choose(pods, images))[0] == (expected or today[0])
    prefix = dataclasses.replace(IMAGE, cached_prefix=cached)
    assert names(choose(pods, prefix))[1] == (expected or today[1])


@pytest.mark.parametrize("num_cached", [1, 100])
def test_the_pod_with_most_tokens_has_the_slack_of_a_home(num_cached: int) -> None:
    cached = {b"a": num_cached}
    demand = dataclasses.replace(IMAGE, num_image_tokens=100, cached_images=cached)
    for num_inflight, expected in ((AFFINITY_SLACK_REQUESTS, "a"), (5, "b")):
        pods = [encoder("a", num_inflight=num_inflight), encoder("b"), prefill(), decode()]
        assert names(choose(pods, demand))[0] == expected


@pytest.mark.parametrize(
    ("num_cached", "on_idle", "num_inflight", "expected"),
    [
        pytest.param(50, 0, AFFINITY_SLACK_REQUESTS // 2, "second", id="half is worth half"),
        pytest.param(50, 0, AFFINITY_SLACK_REQUESTS // 2 + 1, "idle", id="and no more"),
        pytest.param(1, 0, 1, "idle", id="a shared beginning is worth no request"),
        pytest.param(90, 80, 1, "idle", id="what the idle pod has as well is not saved"),
        pytest.param(90, 80, 0, "second", id="of idle pods, the one with more"),
    ],
)
def test_if_the_first_is_busy_another_pod_is_weighed_by_what_it_saves(
    num_cached: int, on_idle: int, num_inflight: int, expected: str
) -> None:
    first = encoder("first", num_inflight=AFFINITY_SLACK_REQUESTS + 1)
    others = [encoder("second", num_inflight=num_inflight), encoder("idle")]
    cached = {b"first": 100, b"second": num_cached, b"idle": on_idle}
    demand = dataclasses.replace(IMAGE, num_image_tokens=100, cached_images=cached)
    assert names(choose([first, *others, prefill(), decode()], demand))[0] == expected


def test_tokens_on_a_pod_that_drains_failed_or_disagrees_attract_nothing() -> None:
    demand = dataclasses.replace(IMAGE, num_image_tokens=100, cached_images={b"warm": 100})
    rest = [encoder("other"), prefill(), decode()]
    assert names(choose([encoder("warm"), *rest], demand))[0] == "warm"
    for warm in (
        encoder("warm", accepting=False),
        encoder("warm", ready=False),
        encoder("warm", embed_fingerprint=b"x"),
    ):
        assert names(choose([warm, *rest], demand))[0] == "other"
    failed = choose([encoder("warm"), *rest], demand, failed=frozenset({b"warm"}))
    assert names(failed)[0] == "other"


def test_where_decode_pods_prefill_a_conversation_comes_back() -> None:
    pods = [decode("a", stages=(P, D)), decode("b", stages=(P, D), num_inflight=2)]
    demand = dataclasses.replace(TEXT, cached_prefix={b"b": 80})
    assert names(choose(pods, TEXT)) == (None, "a", "a")
    assert names(choose(pods, demand)) == (None, "b", "b")
    full = [pods[0], dataclasses.replace(pods[1], kv_free_tokens=0)]
    assert names(choose(full, demand)) == (None, "a", "a")


def test_of_equal_decode_pods_the_one_with_the_prefix_fetches_less() -> None:
    demand = dataclasses.replace(TEXT, cached_prefix={b"b": 80})
    assert names(choose([prefill(), decode("a"), decode("b")], demand))[2] == "b"
    loaded = decode("b", num_inflight=1)
    assert names(choose([prefill(), decode("a"), loaded], demand))[2] == "a"


@given(st.lists(st.text(min_size=1), min_size=2, max_size=8, unique=True), st.binary(min_size=1))
def test_a_pod_that_goes_moves_only_its_own_keys(pods: list[str], key: bytes) -> None:
    home = max(pods, key=lambda name: rendezvous(key, name))
    gone = next(name for name in pods if name != home)
    left = [name for name in pods if name != gone]
    assert max(left, key=lambda name: rendezvous(key, name)) == home


PODS = st.lists(
    st.builds(
        pod,
        st.uuids().map(str),
        st.sampled_from([Role.ENCODER, Role.PREFILL, Role.DECODE]),
        st.sets(st.sampled_from(list(Stage)), min_size=1),
        ready=st.booleans(),
        accepting=st.booleans(),
        layout_fingerprint=st.sampled_from([b"a", b"b"]),
        embed_fingerprint=st.sampled_from([b"a", b"b"]),
        num_inflight=st.integers(0, 20),
        kv_free_tokens=st.integers(0, 1000),
    ),
    max_size=8,
)


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 9), st.floats(0, 2)), min_size=1, max_size=6
    ),
    st.binary(min_size=1),
    st.sampled_from([E, P]),
)
def test_with_nothing_known_the_home_or_the_least_loaded_pod_is_chosen(
    loads: list[tuple[int, int, float]], key: bytes, stage: Stage
) -> None:
    """The rule of homes, written again: the empty knowledge changes no choice."""
    pods = [
        pod(
            f"{stage}{i}",
            Role(stage.value),
            num_inflight=inflight,
            num_waiting=waiting,
            work_queued_seconds=seconds,
        )
        for i, (inflight, waiting, seconds) in enumerate(loads)
    ]
    home = max(pods, key=lambda c: (rendezvous(key, c.name), c.name))
    idle = min(pods, key=lambda c: (c.work_queued_seconds, c.num_inflight + c.num_waiting, c.name))
    more = home.num_inflight + home.num_waiting - idle.num_inflight - idle.num_waiting
    seconds = home.work_queued_seconds > idle.work_queued_seconds + AFFINITY_SLACK_SECONDS
    expected = idle if more > AFFINITY_SLACK_REQUESTS or seconds else home
    others = [decode(), *([prefill("other")] if stage is E else [encoder("other")])]
    demand = Demand(100, image_digest=key, prefix_digest=key, num_image_tokens=50)
    gone = {b"gone": 50}
    for asked in (demand, dataclasses.replace(demand, cached_images=gone, cached_prefix=gone)):
        assert expected.name in names(choose([*pods, *others], asked))


@given(PODS, st.booleans(), st.booleans(), st.lists(st.integers(0, 100), max_size=8))
def test_a_route_is_able_ready_and_agreeing_whatever_is_known(
    pods: list[Candidate], images: bool, needs_decode: bool, known: list[int]
) -> None:
    cached = {c.boot_id: num_tokens for c, num_tokens in zip(pods, known, strict=False)}
    demand = dataclasses.replace(
        IMAGE if images else TEXT,
        needs_decode=needs_decode,
        num_image_tokens=100,
        cached_images=cached,
        cached_prefix=cached,
    )
    route = choose(pods, demand)
    if isinstance(route, NoRoute):
        return
    assert all(c.ready for c in route.pods)
    assert P in route.prefill.pod.stages
    assert (route.encoder is not None) == images
    assert (route.decode is not None) == needs_decode
    if route.decode is not None:
        assert D in route.decode.pod.stages
        assert route.decode.pod.layout_fingerprint == route.prefill.pod.layout_fingerprint
    if route.encoder is not None:
        assert E in route.encoder.pod.stages
        assert route.encoder.pod.embed_fingerprint == route.prefill.pod.embed_fingerprint
    for choice in (route.encoder, route.prefill, route.decode):
        if choice is not None and not choice.pod.accepting:
            assert choice.last_resort


def test_stages_are_missing_until_a_ready_and_accepting_pod_has_them() -> None:
    pods = [encoder(accepting=False), prefill(ready=False), decode()]
    assert missing_stages(pods, frozenset(Stage)) == [E, P]
    assert missing_stages([decode(stages=(E, P, D))], frozenset(Stage)) == []


def test_the_least_queued_work_is_that_of_a_pod_that_takes_new_images() -> None:
    """Idle pods that get no image would hide that all encoders are overloaded."""
    busy = [encoder("a", work_queued_seconds=9.0), encoder("b", work_queued_seconds=7.0)]
    idle = [
        encoder("drains", accepting=False),
        encoder("starts", ready=False),
        prefill(stages=(E, P)),
    ]
    assert least_queued_seconds([*idle, *busy], E) == 7.0
    assert least_queued_seconds([prefill(stages=(E, P), work_queued_seconds=3.0)], E) == 3.0
    assert least_queued_seconds([decode()], E) is None
