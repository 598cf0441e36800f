"""What a gateway knows of the caches of its pods: laws, then requests through real workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.image_files import ask, broken_inside, png
from worker.gateway.stack import D, E, P, Stack, Worker, stack

from vlm_worker.gateway.images import RequestImage
from vlm_worker.gateway.pod_caches import MAX_MARKED_TOKENS, PodCaches, RequestDigests, marked
from vlm_worker.gateway.pod_registry import static_pods
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.gateway.visual import Choice
from vlm_worker.reduction import Method, Reduction
from vlm_worker.types import Role, Stage

PODS = [b"a", b"b", b"c"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(PODS), st.lists(st.integers(0, 9).map(lambda n: bytes([n])), max_size=12)
    ),
    max_size=20,
)


def filled(steps: Sequence[tuple[bytes, Sequence[bytes]]], max_entries: int = 8) -> PodCaches:
    caches = PodCaches(max_entries)
    for boot_id, digests in steps:
        caches.record(boot_id, digests)
    return caches


def content(caches: PodCaches) -> list[tuple[bytes, tuple[bytes, ...]]]:
    return list(caches._holders.items())


def check(caches: PodCaches, max_entries: int = 8) -> None:
    pairs = {(boot_id, digest) for digest, held_by in content(caches) for boot_id in held_by}
    assert caches.num_entries == len(pairs) <= max_entries
    assert pairs == {(boot_id, one) for boot_id, held in caches._held.items() for one in held}
    assert all(caches._held.values())


@given(STEPS)
def test_it_is_bounded_and_both_of_its_indices_agree(
    steps: list[tuple[bytes, list[bytes]]],
) -> None:
    check(filled(steps))


@given(STEPS, st.sampled_from(PODS))
def test_a_pod_that_is_forgotten_leaves_nothing(
    steps: list[tuple[bytes, list[bytes]]], gone: bytes
) -> None:
    caches = filled(steps)
    others = [
        (digest, tuple(one for one in held_by if one != gone))
        for digest, held_by in content(caches)
        if set(held_by) - {gone}
    ]
    caches.forget(gone)
    check(caches)
    assert content(caches) == others
    caches.forget(gone)
    assert content(caches) == others


@given(STEPS, st.sampled_from(PODS), st.lists(st.binary(min_size=1, max_size=2), max_size=8))
def test_recording_twice_equals_recording_once(
    steps: list[tuple[bytes, list[bytes]]], boot_id: bytes, digests: list[bytes]
) -> None:
    caches = filled(steps, max_entries=64)
    caches.record(boot_id, digests)
    once = content(caches)
    caches.record(boot_id, digests)
    assert content(caches) == once


def test_the_least_recently_recorded_goes_first() -> None:
    caches = filled([(b"a", [b"1"]), (b"a", [b"2"]), (b"a", [b"1"]), (b"a", [b"3"])], max_entries=2)
    assert [digest for digest, _ in content(caches)] == [b"1", b"3"]


# ---- digests of requests -------------------------------------------------------------------------


def image(name: bytes, *, reduction: Reduction | None = None, max_pixels: int = 0) -> RequestImage:
    choice = Choice(max_pixels, reduction)
    return RequestImage(b"", "PNG", 28, 28, 4, max_pixels, name, "", choice)


def digests(
    token_ids: Sequence[int], images: Sequence[RequestImage] = (), *, salt: bytes = b"salt"
) -> RequestDigests:
    """Of a prompt whose images begin at 2, 8, 14, …"""
    offsets = tuple(2 + 6 * i for i in range(len(images)))
    prompt = Prompt(tuple(token_ids), offsets, (4,) * len(images))
    return RequestDigests.of(prompt, images, salt=salt, block_size=4)


@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), max_size=20),
)
def test_prompts_share_the_marks_of_their_common_prefix(
    common: list[int], first: list[int], second: list[int]
) -> None:
    one, other = [*common, *first], [*common, *second]
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    marks = digests(one).marks
    found = [mark.num_tokens for mark in digests(other).marks if mark in marks]
    assert found == [4 * num_blocks for num_blocks in marked(shared // 4)]


def test_tenants_images_and_reductions_share_no_mark_behind_them() -> None:
    tokens, reduced = range(24), Reduction(Method.DIVERSE, 500)
    plain = digests(tokens, [image(b"a"), image(b"b")])
    assert digests(tokens, [image(b"a"), image(b"b")]) == plain
    salted = digests(tokens, [image(b"a"), image(b"b")], salt=b"other")
    assert not set(salted.marks) & set(plain.marks)
    assert not set(salted.images) & set(plain.images)
    for second in (image(b"c"), image(b"b", reduction=reduced), image(b"b", max_pixels=9)):
        other = digests(tokens, [image(b"a"), second])
        assert set(other.marks) & set(plain.marks) == set(plain.marks[:2])


def test_an_image_has_one_key_for_all_exact_reductions_and_one_for_each_size() -> None:
    whole, kept = image(b"a"), image(b"a", reduction=Reduction(Method.DIVERSE, 500))
    small = image(b"a", max_pixels=1000)
    keys = [digests(range(24), [one]).images[0] for one in (whole, kept, small)]
    assert keys[0] == keys[1] != keys[2]
    halves = [Reduction(Method.ARRCOC_PYRAMID, permille) for permille in (500, 250)]
    apart = [digests(range(24), [image(b"a", reduction=half)]).images[0] for half in halves]
    assert len({*keys, *apart}) == 4, "an approximate reduction has nothing of the whole image"


def test_the_next_turn_begins_with_the_marks_of_prompt_and_answer() -> None:
    prompt = Prompt(tuple(range(30)), (2,), (4,))
    first = RequestDigests.of(prompt, [image(b"a")], salt=b"s", block_size=4)
    answer = [7] * 11
    following = Prompt((*prompt.token_ids, *answer, 1, 2, 3), (2,), (4,))
    second = RequestDigests.of(following, [image(b"a")], salt=b"s", block_size=4)
    marks = first.with_answer(prompt, answer)
    assert marks == second.marks[: len(marks)]
    assert marks[-1].num_tokens == 40  # of 40 with KV


@given(st.integers(1, 4000))
def test_a_prefix_is_underestimated_by_less_than_a_fifth_with_few_marks(num_blocks: int) -> None:
    lengths = list(marked(num_blocks))
    assert lengths == sorted(set(lengths))
    assert 0.8 * num_blocks < lengths[-1] <= num_blocks
    assert len(lengths) <= 8 + 4 * max(0, num_blocks.bit_length() - 3)


def test_tokens_beyond_the_bound_have_no_mark() -> None:
    marks = digests([1] * (2 * MAX_MARKED_TOKENS)).marks
    assert marks == digests([1] * MAX_MARKED_TOKENS).marks
    assert marks[-1].num_tokens == MAX_MARKED_TOKENS


def test_a_pod_counts_by_its_longest_mark_and_an_image_once() -> None:
    long, short = digests(range(40)), digests(range(8))
    caches = PodCaches()
    caches.record(b"a", [mark.digest for mark in long.marks])
    caches.record(b"b", [mark.digest for mark in short.marks])
    assert caches.prefix(long.marks) == {b"a": 40, b"b": 8}
    caches.record(b"b", [b"image"])
    assert caches.images([(b"image", 4), (b"image", 4), (b"other", 9)]) == {b"b": 4}


# ---- through real workers ------------------------------------------------------------------------


async def chat(served: Stack, *messages: dict[str, object]) -> str:
    body = {"model": "shapes", "messages": messages, "max_tokens": 6, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def connect(served: Stack, workers: Sequence[Worker]) -> None:
    """Let the gateway know these workers alone."""
    registry = served.gateway.context.registry
    registry.apply(static_pods([worker.address for worker in workers]))
    assert await registry.waiters.wait_until(
        lambda: len(registry.candidates()) == len(workers), timeout=30
    )


def user(*contents: object) -> dict[str, object]:
    return ask(*contents)


def num_hits(worker: Worker) -> int:
    return worker.components.engine._thread.state.step_loop.prefix.hits


async def test_a_second_turn_goes_to_the_pod_that_has_the_first_not_to_the_home_of_its_block() -> (
    None
):
    """All requests share their first block; its home joins after the first turn."""
    async with stack(
        (Role.PREFILL, (P,)), (Role.PREFILL, (P,)), (Role.PREFILL, (P,)), (Role.DECODE, (D,))
    ) as served:
        prefills = served.of(Role.PREFILL)
        system = {"role": "system", "content": "You answer questions."}
        await chat(served, system, {"role": "user", "content": "first"})
        (home,) = [worker for worker in prefills if worker.runner.num_steps]
        await served.until_idle()
        await connect(served, [worker for worker in served.workers if worker is not home])
        turn = {"role": "user", "content": "What is the colour of the third shape?"}
        answer = await chat(served, system, turn)
        (first,) = [w for w in prefills if w is not home and w.runner.num_steps]
        await connect(served, served.workers)
        num_steps, hits = home.runner.num_steps, num_hits(first)
        again = {"role": "user", "content": "And of the fourth?"}
        await chat(served, system, turn, {"role": "assistant", "content": answer}, again)
        assert home.runner.num_steps == num_steps
        assert num_hits(first) > hits + 4
        routed = served.gateway.context.registry.caches.num_known_tokens
        assert routed[Stage.PREFILL] > 4
        await served.until_idle()


async def test_images_go_to_the_encoder_that_has_most_of_them_not_to_the_home_of_the_first() -> (
    None
):
    a, b, c = (png(colour) for colour in ((1, 2, 3), (9, 8, 7), (50, 60, 70)))
    async with stack(
        (Role.ENCODER, (E,)), (Role.ENCODER, (E,)), (Role.ENCODER, (E,)), (Role.DECODE, (P, D))
    ) as served:
        encoders = served.of(Role.ENCODER)
        await chat(served, user(a, "one"))
        (home,) = [worker for worker in encoders if worker.runner.batch_sizes]
        await served.until_idle()
        await connect(served, [worker for worker in served.workers if worker is not home])
        await chat(served, user(b, c, "two"))
        (warm,) = [w for w in encoders if w is not home and w.runner.batch_sizes]
        assert sum(warm.runner.batch_sizes) == 2
        await connect(served, served.workers)
        await chat(served, user(a, b, c, "three"))
        assert sum(warm.runner.batch_sizes) == 3  # `a` alone
        assert sum(home.runner.batch_sizes) == 1
        await served.until_idle()


async def test_an_image_that_was_skipped_is_on_no_pod_and_neither_is_its_prompt(
    tmp_path: Path,
) -> None:
    config = tmp_path / "gateway.json"
    config.write_text('{"limits": {"on_corrupt": "Skip"}}')
    async with stack((Role.DECODE, (E, P, D)), config=config) as served:
        caches = served.gateway.context.registry.caches
        await chat(served, user(png(), broken_inside(png((7, 8, 9))), "What is this?"))
        assert caches.num_entries == 1  # the image that could be decoded
        await chat(served, user(png(), "What is this?"))
        assert caches.num_entries > 1 + 2
        await served.until_idle()


async def test_a_lost_pod_is_forgotten_and_records_of_it_come_too_late() -> None:
    async with stack((Role.DECODE, (E, P, D)), (Role.DECODE, (E, P, D))) as served:
        await chat(served, user(png(), "What is this?"))
        caches = served.gateway.context.registry.caches
        (boot_id,) = caches._held
        (holder,) = [w for w in served.workers if w.boot_id == boot_id]
        await served.until_idle()
        await connect(served, [w for w in served.workers if w is not holder])
        assert caches.num_entries == 0
        assert not served.gateway.context.registry.is_connected(boot_id)


async def test_where_pods_do_everything_a_conversation_comes_back_to_its_pod() -> None:
    async with stack((Role.DECODE, (E, P, D)), (Role.DECODE, (E, P, D))) as served:
        preferred, other = sorted(served.workers, key=lambda worker: worker.address)
        await connect(served, [other])
        turn = user(png(), "What is this?")
        answer = await chat(served, turn)
        await connect(served, served.workers)
        num_steps = preferred.runner.num_steps
        again = user("And its colour?")
        await chat(served, turn, {"role": "assistant", "content": answer}, again)
        assert preferred.runner.num_steps == num_steps
        await chat(served, user("Another question"))
        assert preferred.runner.num_steps > num_steps
        await served.until_idle()
