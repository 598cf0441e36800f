"""Pruned sequences: the same answers in any batch, blocks all free, originals still cached."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import make_image
from worker.core.simulation import (
    BLOCK_SIZE,
    MAX_STEPS,
    Simulation,
    Work,
    alone,
    expected,
    told,
    works,
)

from vlm_worker.core.kv_cache import root_hash
from vlm_worker.core.pruning import (
    MAX_OBSERVED,
    MIN_HISTORY_TOKENS,
    NUM_SINKS,
    first_changed_block,
    kept_permille_of,
    kept_tokens,
    observed_rows,
    plan_moves,
)
from vlm_worker.core.sequence import Status
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams


def conversation(
    number: int = 0,
    *,
    history: int = 20,
    last: int = 6,
    image_at: int | None = None,
    delivered: int = 0,
    max_tokens: int = 12,
    first: int = 30,
) -> Work:
    """A request whose last turn has `last` tokens; an image of 5 tokens is in its history."""
    token_ids = [first + i % 7 for i in range(history + last)]
    items, images = [], []
    if image_at is not None:
        image = make_image(1, num_tokens=5)
        token_ids[image_at : image_at + 5] = [IMAGE_TOKEN] * 5
        items, images = [ImageItem(image.image_key, image_at, 5, image.grid_thw)], [image]
    request = Request(
        RequestKey(str(number), 0),
        (*token_ids, *[3, 4, 5][:delivered]),
        len(token_ids),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        tuple(items),
        num_history_tokens=history,
    )
    return Work(request, tuple(images), 0)


@st.composite
def conversations(draw: st.DrawFn) -> list[Work]:
    """Requests of all kinds, each with a history of any length, and some with several choices."""
    todo = []
    for work in draw(works()):
        num_history = draw(st.integers(0, work.request.num_prompt_tokens))
        request = dataclasses.replace(work.request, num_history_tokens=num_history)
        for choice in range(draw(st.sampled_from([1, 1, 3]))):
            key = RequestKey(f"{request.key.request_id}:{choice}", 0)
            sampling = dataclasses.replace(request.sampling, temperature=0.7, seed=choice)
            one = dataclasses.replace(
                request, key=key, sampling=sampling, priority=draw(st.sampled_from([0, 0, 1]))
            )
            todo.append(dataclasses.replace(work, request=one))
    return todo


@st.composite
def common_histories(draw: st.DrawFn) -> list[Work]:
    """Requests that share most blocks of their prompts; some are not pruned."""
    history = draw(st.integers(16, 36))
    todo = []
    for number in range(draw(st.integers(2, 5))):
        delivered = draw(st.integers(0, 3))
        request = conversation(
            number,
            history=history,
            last=draw(st.integers(1, 6)),
            delivered=delivered,
            max_tokens=delivered + draw(st.integers(1, 20)),
        ).request
        if draw(st.sampled_from([False, False, True])):
            request = dataclasses.replace(request, num_history_tokens=0)
        request = dataclasses.replace(request, priority=draw(st.sampled_from([0, 0, 1])))
        todo.append(Work(request, (), draw(st.integers(0, 3))))
    return todo


# ---- which tokens ----------------------------------------------------------------------------


@given(
    history=st.integers(0, 400),
    last=st.integers(1, 60),
    image=st.none() | st.tuples(st.integers(0, 300), st.integers(1, 90)),
    permille=st.integers(1, 999),
    seed=st.integers(0, 9),
)
def test_only_text_between_the_first_tokens_and_the_last_turn_is_dropped(
    history: int, last: int, image: tuple[int, int] | None, permille: int, seed: int
) -> None:
    num_tokens = history + last
    items: tuple[ImageItem, ...] = ()
    if image is not None and sum(image) < num_tokens:
        items = (ImageItem(bytes(32), *image, (1, 2, 2 * image[1])),)
    request = Request(
        RequestKey("a", 0), (9,) * num_tokens, num_tokens, SamplingParams(1), items,
        num_history_tokens=history,
    )  # fmt: skip
    mass = np.random.default_rng(seed).integers(0, 5, num_tokens).astype(np.float32)
    kept = kept_tokens(request, mass, permille)
    dropped = sorted(set(range(num_tokens)) - set(kept.tolist()))
    visual = {token for item in items for token in range(item.offset, item.end)}
    candidates = [t for t in range(NUM_SINKS, history) if t not in visual]
    assert len(candidates) - len(dropped) == -(-len(candidates) * permille // 1000)
    assert set(dropped) <= set(candidates)
    ranked = sorted(candidates, key=lambda token: (-mass[token], token))
    assert set(dropped) == set(ranked[len(candidates) - len(dropped) :])
    assert (kept_permille_of(request, permille) > 0) == (
        history - len([t for t in visual if t < history]) >= MIN_HISTORY_TOKENS and len(dropped) > 0
    )
    rows = observed_rows(request)
    assert rows.stop == num_tokens
    assert len(rows) <= MAX_OBSERVED
    assert not visual & set(rows)


def test_a_prompt_that_ends_with_an_image_is_not_pruned() -> None:
    item = ImageItem(bytes(32), 400, 9, (1, 6, 6))
    request = Request(
        RequestKey("a", 0), (9,) * 409, 409, SamplingParams(1), (item,), num_history_tokens=390
    )
    assert kept_permille_of(request, 700) == 0


@pytest.mark.parametrize("permille", [0, 1000])
def test_neither_0_nor_1000_permille_prunes(permille: int) -> None:
    assert kept_permille_of(conversation(history=500).request, permille) == 0


@given(data=st.data(), num_tokens=st.integers(1, 60))
def test_moves_in_order_some_at_a_time_are_correct_in_place_and_elsewhere(
    data: st.DataObject, num_tokens: int
) -> None:
    size = data.draw(st.integers(1, 5))
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, num_tokens - 1), min_size=1))))
    num_blocks = -(-num_tokens // size)
    blocks = data.draw(st.permutations(range(1, num_blocks + 1)))
    first = first_changed_block(kept, block_size=size)
    assert np.array_equal(kept[: first * size], np.arange(first * size))
    new = [
        data.draw(st.sampled_from([block, 100 + number]))
        for number, block in enumerate(blocks[first : -(-len(kept) // size)])
    ]
    moves = plan_moves(kept, blocks, new, first=first, block_size=size)
    slots = np.full((200, size), -1)
    for index in range(num_tokens):
        slots[blocks[index // size], index % size] = index
    flat, step = slots.reshape(-1), data.draw(st.integers(1, 7))
    for at in range(0, len(moves.sources), step):
        flat[moves.targets[at : at + step]] = flat[moves.sources[at : at + step]]
    after = [*blocks[:first], *new]
    assert slots[after].reshape(-1)[: len(kept)].tolist() == kept.tolist()


# ---- laws of the scheduler -------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    todo=conversations() | common_histories(),
    num_blocks=st.integers(18, 60),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(8, 40),
    permille=st.integers(1, 999),
)
def test_together_equals_alone_and_every_block_is_returned(
    todo: list[Work], num_blocks: int, max_num_seqs: int, budget: int, permille: int
) -> None:
    run = Simulation(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, permille=permille
    )
    run.run(todo)
    assert run.answers == expected(todo, permille=permille)
    # the first time, it shares blocks; later, one that goes before it came to share its blocks
    assert max(run.without_copies.values(), default=0) <= len(todo)


@settings(max_examples=100, deadline=None)
@given(
    todo=common_histories(),
    for_peer=st.just([True] * 5) | st.lists(st.booleans(), min_size=5, max_size=5),
    reserved=st.booleans(),
    num_blocks=st.integers(17, 30),
    max_num_seqs=st.integers(1, 4),
    permille=st.integers(1, 999),
)
def test_sequences_that_are_adopted_only_if_nothing_else_runs_are_all_served(
    todo: list[Work],
    for_peer: list[bool],
    reserved: bool,
    num_blocks: int,
    max_num_seqs: int,
    permille: int,
) -> None:
    """So no sequence that awaits pruning waits for another that does, or for its row."""
    run = Simulation(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=24,
        max_pending_blocks=1000,
        permille=permille,
    )
    for work, is_for_peer in zip(todo, for_peer, strict=False):
        run.add(work, for_peer=is_for_peer, reserved=reserved)
        for _ in range(work.at):
            run.step()
    for _ in range(MAX_STEPS):
        if not run.step():
            if not run.held:
                break
            run.adopt(run.held[0])
    assert not run.scheduler.waiting, "a sequence was never served"
    assert run.pool.num_used == run.pool.num_reserved == 0
    assert run.scheduler.pending_transfers.num_blocks == 0
    assert run.answers == expected(todo, permille=permille)


@settings(max_examples=40, deadline=None)
@given(todo=conversations(), permille=st.sampled_from([0, 1000]))
def test_1000_permille_plans_and_answers_as_off(todo: list[Work], permille: int) -> None:
    plans: list[list[object]] = []
    for with_history in (True, False):
        run = Simulation(
            num_blocks=24, max_num_seqs=4, budget=20, permille=permille if with_history else 0
        )
        seen: list[object] = []
        schedule = run.schedule

        def recorded(schedule=schedule, seen=seen):  # type: ignore[no-untyped-def]
            seen.append(told(out := schedule()))
            return out

        run.schedule = recorded  # type: ignore[method-assign]
        run.run(todo)
        assert run.answers == expected(todo)
        plans.append(seen)
    assert plans[0] == plans[1]


def test_a_pruned_sequence_uses_fewer_blocks_and_its_originals_are_hit() -> None:
    run = Simulation(num_blocks=41, max_num_seqs=2, budget=40, permille=300)
    sequence = run.add(conversation(0))
    run.step()
    originals = list(sequence.blocks)
    run.prune()
    num_candidates = 20 - NUM_SINKS
    assert sequence.num_dropped == num_candidates - -(-num_candidates * 300 // 1000)
    assert len(sequence.blocks) == -(-(26 - sequence.num_dropped) // BLOCK_SIZE) < len(originals)
    assert sequence.blocks[0] == originals[0], "nothing of the first block was dropped"
    assert not set(sequence.blocks[1:]) & set(originals)
    other = run.add(conversation(1))
    run.step()
    assert other.num_cached_tokens == 24
    while run.step():
        pass
    assert run.answers == expected([conversation(0), conversation(1)], permille=300)


def test_no_hash_names_a_block_that_was_pruned() -> None:
    run = Simulation(num_blocks=41, max_num_seqs=2, budget=40, permille=300)
    sequence = run.add(conversation(0))
    num_pruned = 0
    while run.step():
        if sequence.num_dropped and sequence.row is not None:
            num_pruned += 1
            copies = set(sequence.blocks[1:])
            assert not copies & set(run.pool.match(sequence.hashes))
            assert all(run.pool._hash_of[block] is None for block in copies)
    assert num_pruned > 2
    assert len(sequence.hashes) == 26 // BLOCK_SIZE, "its answer was hashed"
    assert root_hash(b"", b"") not in sequence.hashes


def test_a_later_turn_does_not_hit_the_answer_of_a_pruned_sequence() -> None:
    run = Simulation(num_blocks=41, max_num_seqs=2, budget=40, permille=300)
    work = conversation(0, max_tokens=20)
    run.run([work])
    token_ids = (*work.request.token_ids, *run.answers["0"])
    request = Request(RequestKey("1", 0), token_ids, len(token_ids), SamplingParams(2))
    run.add(Work(request, (), 0))
    run.step()
    assert run.cached["1"] == 24


def test_positions_of_answer_tokens_do_not_change() -> None:
    positions: dict[int, list[list[int]]] = {}
    for permille in (0, 300):
        run = Simulation(num_blocks=41, max_num_seqs=2, budget=40, permille=permille)
        sequence = run.add(conversation(0, image_at=6))
        positions[permille] = []
        while run.step():
            if sequence.row is not None:
                positions[permille].append(run.batch.decode_columns.positions[:, 0].tolist())
    assert positions[0] == positions[300]
    assert len(positions[0]) == 11


@pytest.mark.parametrize("delivered", [0, 3])
def test_the_answer_after_a_preemption_is_the_same(delivered: int) -> None:
    run = Simulation(num_blocks=41, max_num_seqs=2, budget=16, permille=300)
    work = conversation(0, image_at=6, delivered=delivered)
    sequence = run.add(work)
    for _ in range(6):
        run.step()
    assert sequence.num_dropped
    run.scheduler._preempt(sequence)
    assert (sequence.num_dropped, sequence.status) == (0, Status.WAITING)
    while run.step():
        pass
    assert run.scheduler.pruner.counts.sequences == 2
    assert run.answers == expected([work], permille=300)


def test_without_a_free_block_rows_move_in_place() -> None:
    work = conversation(0, history=40, last=4, max_tokens=3)
    run = Simulation(num_blocks=12, max_num_seqs=2, budget=64, permille=500)
    sequence = run.add(work)
    run.step()
    assert run.pool.num_available == 0
    originals = list(sequence.blocks)
    run.prune()
    assert sequence.num_dropped
    assert set(sequence.blocks) < set(originals)
    assert run.pool.match(sequence.hashes) == originals[:1], "what moved is not in the cache"
    while run.step():
        pass
    assert run.answers == expected([work], permille=500)


def unpruned(work: Work) -> Work:
    """The same prompt under another name, whose history is unknown."""
    request = dataclasses.replace(work.request, key=RequestKey("b", 0), num_history_tokens=0)
    return dataclasses.replace(work, request=request)


@pytest.mark.parametrize("num_blocks", range(17, 21))
def test_a_sequence_without_blocks_for_its_copies_is_preempted_once(num_blocks: int) -> None:
    """It shares blocks with an older one, which are never written. Then it has its own."""
    younger = conversation(0, history=36, last=4, max_tokens=9)
    older = unpruned(conversation(0, history=36, last=4, max_tokens=24))
    run = Simulation(num_blocks=num_blocks, max_num_seqs=2, budget=80, permille=500)
    run.run([older, dataclasses.replace(younger, at=1)])
    assert run.without_copies == {"0": 1}
    assert run.answers == expected([older, younger], permille=500)


def test_sequences_for_peers_that_share_blocks_do_not_wait_for_each_other() -> None:
    """No lease ends here: only a sequence that is held is adopted."""
    todo = []
    for number in range(2):
        work = conversation(number, history=36, last=4, delivered=2, max_tokens=6)
        token_ids = (*work.request.token_ids[:38], 50 + number, *work.request.token_ids[39:])
        todo.append(Work(dataclasses.replace(work.request, token_ids=token_ids), (), 0))
    run = Simulation(num_blocks=18, max_num_seqs=2, budget=24, max_pending_blocks=22, permille=500)
    for work in todo:
        run.add(work, for_peer=True)
        run.step()
    assert (len(run.batch), run.pool.num_available) == (2, 1)
    for _ in todo:
        for _ in range(20):
            run.step()
        run.adopt(run.held[0])
    while run.step():
        pass
    assert run.scheduler.num_preemptions == 1
    assert run.answers == expected(todo, permille=500)
    assert run.pool.num_used == run.scheduler.pending_transfers.num_blocks == 0


def test_a_younger_sequence_is_preempted_for_the_blocks_that_it_shares() -> None:
    older = conversation(0, history=36, last=4, max_tokens=9)
    younger = unpruned(older)
    run = Simulation(num_blocks=16, max_num_seqs=2, budget=24, permille=500)
    sequence = run.add(older)
    run.step()
    other = run.add(younger)
    run.step()
    shared = set(sequence.blocks) & set(other.blocks)
    assert len(shared) == 6
    run.prune()
    assert sequence.num_dropped
    assert other.status is Status.WAITING
    while run.step():
        pass
    assert run.answers == expected([older, younger], permille=500)


@pytest.mark.parametrize("num_steps", range(12))
def test_a_sequence_that_is_removed_at_any_step_frees_all(num_steps: int) -> None:
    run = Simulation(num_blocks=41, max_num_seqs=2, budget=16, permille=300)
    sequence = run.add(conversation(0, image_at=6))
    for _ in range(num_steps):
        run.step()
    if num_steps == 3:
        run.prune()
    run.scheduler.remove(sequence)
    run.pool.check()
    assert run.pool.num_used == 0
    assert not run.batch.awaiting_pruning


@pytest.mark.parametrize("delivered", [0, 3])
def test_a_sequence_held_for_this_process_is_pruned_before_its_answer(delivered: int) -> None:
    run = Simulation(num_blocks=41, max_num_seqs=2, budget=16, permille=300)
    work = conversation(0, delivered=delivered)
    sequence = run.add(work, for_peer=True)
    while sequence.status is not Status.HELD:
        run.step()
    assert bool(sequence.num_dropped) is bool(delivered)
    run.adopt(sequence)
    while run.step():
        pass
    assert run.answers["0"] == alone(work, permille=300)
    assert run.pool.num_used == 0
