"""The scheduler's promises, for every arrival order, pool size and budget.

A simulation drives scheduler, batch builder and ChecksumRunner without a thread. Every law counts
steps, so that a sequence that is never served fails the test instead of hanging it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_worker.core.batch import BatchBuilder
from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.plan import Plan
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.table import SequenceTable
from vlm_worker.testing import (
    IMAGE_TOKEN,
    ChecksumRunner,
    answer_alone,
    embed,
    folded_positions,
    make_image,
)
from vlm_worker.types import (
    FinishReason,
    ImageItem,
    PreparedImage,
    Request,
    RequestKey,
    SamplingParams,
)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
EOS = 11
MAX_STEPS = 2_000


@dataclasses.dataclass(frozen=True)
class Work:
    """A request, its pictures, and the step at which it comes in."""

    request: Request
    images: tuple[PreparedImage, ...]
    at: int


@st.composite
def works(draw: st.DrawFn) -> list[Work]:
    """Requests with common prefixes, repeated pictures, and sampling of all kinds."""
    out = []
    for number in range(draw(st.integers(1, 9))):
        token_ids: list[int] = []
        items, images = [], []
        for _ in range(draw(st.integers(1, 4))):
            if draw(st.booleans()):
                token_ids += draw(st.sampled_from([[1, 2, 3], [5], [4] * 9]))
            elif len(token_ids) < 30:
                image = make_image(draw(st.integers(0, 2)), num_tokens=draw(st.integers(1, 7)))
                items.append(
                    ImageItem(image.image_key, len(token_ids), image.num_tokens, image.grid_thw)
                )
                images.append(image)
                token_ids += [IMAGE_TOKEN] * image.num_tokens
        token_ids = token_ids or [9]
        delivered = draw(st.integers(0, 2))
        sampling = SamplingParams(
            max_tokens=delivered + draw(st.integers(1, 20)),
            temperature=draw(st.sampled_from([0.0, 0.7])),
            seed=draw(st.integers(0, 3)),
            ignore_eos=draw(st.booleans()),
        )
        request = Request(
            RequestKey(str(number), 0),
            (*token_ids, *[3] * delivered),
            len(token_ids),
            sampling,
            tuple(items),
            cache_salt=draw(st.sampled_from([b"", b"tenant"])),
        )
        out.append(Work(request, tuple(images), draw(st.integers(0, 10))))
    return out


class Simulation:
    """Scheduler, builder and runner in one loop; checks the books after every step."""

    def __init__(
        self, *, num_blocks: int, max_num_seqs: int, budget: int, whole_images: bool = False
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size=BLOCK_SIZE)
        self.table = SequenceTable(
            max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            eos_token_ids=(EOS,),
        )
        self.scheduler = Scheduler(
            self.pool,
            self.table,
            max_num_batched_tokens=budget,
            watermark_blocks=1,
            whole_images=whole_images,
        )
        self.builder = BatchBuilder(
            self.table, max_num_batched_tokens=budget, whole_images=whole_images
        )
        self.runner = ChecksumRunner(num_blocks, block_size=BLOCK_SIZE)
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.held: list[Sequence] = []
        self.max_chunk = 0

    def add(self, work: Work, *, hold: bool = False) -> Sequence:
        request = work.request
        positions, delta = folded_positions(request.token_ids, request.items)
        sequence = Sequence(
            request=request,
            arrival=len(self.answers),
            token_ids=np.array(request.token_ids, np.int32),
            positions=positions,
            position_delta=delta,
            hold=hold,
            embeddings=[embed(image) for image in work.images],
        )
        self.answers[request.key.request_id] = list(request.token_ids[request.num_prompt_tokens :])
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        schedule = self.scheduler.schedule()
        for sequence in schedule.admitted:
            self.cached[sequence.request.key.request_id] = sequence.num_cached_tokens
        plan = schedule.plan
        if plan is None:
            return bool(schedule.preempted)
        assert plan.num_tokens <= self.budget
        assert len(set(plan.rows.tolist())) == len(plan) <= self.max_num_seqs
        self.max_chunk = max(self.max_chunk, int(plan.counts.max()))
        sampled = self.runner.execute(self.builder.build(plan))
        outcome = self.scheduler.update(plan, sampled)
        for sequence, token_id, index in zip(
            outcome.sequences, outcome.token_ids, outcome.indices, strict=True
        ):
            answer = self.answers[sequence.request.key.request_id]
            assert index == len(answer)
            answer.append(token_id)
        for sequence, reason in outcome.finished:
            self.reasons[sequence.request.key.request_id] = reason
        self.held += outcome.held
        self.check_books()
        return True

    def check_books(self) -> None:
        self.pool.check()
        holding = self.table.running + self.held
        owned = {block for sequence in holding for block in sequence.blocks}
        assert len(owned) == self.pool.num_used
        for sequence in self.table.running:
            row = sequence.row
            assert row is not None
            assert sequence.status is Status.RUNNING
            num_blocks = len(sequence.blocks)
            assert self.table.num_blocks[row] == num_blocks
            assert self.table.block_table[row, :num_blocks].tolist() == sequence.blocks
            assert self.table.num_computed[row] <= num_blocks * BLOCK_SIZE
            assert not self.table.block_table[row, num_blocks:].any()

    def run(self, todo: list[Work]) -> None:
        pending = sorted(todo, key=lambda work: work.at)
        for number in range(MAX_STEPS):
            while pending and pending[0].at <= number:
                self.add(pending.pop(0))
            if not self.step() and not pending:
                break
        assert not self.scheduler.waiting, "somebody was never served"
        assert self.pool.num_used == 0, "a block did not come back"
        assert len(self.table) == 0


def alone(work: Work) -> list[int]:
    return answer_alone(
        work.request,
        work.images,
        positions=folded_positions,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(EOS,),
    )


def expected(todo: list[Work]) -> dict[str, list[int]]:
    return {work.request.key.request_id: alone(work) for work in todo}


@settings(max_examples=300, deadline=None)
@given(works(), st.integers(17, 40), st.integers(1, 6), st.integers(6, 64))
def test_together_is_alone(
    todo: list[Work], num_blocks: int, max_num_seqs: int, budget: int
) -> None:
    simulation = Simulation(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget)
    simulation.run(todo)
    assert simulation.answers == expected(todo)


@settings(max_examples=60, deadline=None)
@given(works(), st.integers(1, 6))
def test_an_image_that_may_not_be_cut_runs_in_one_chunk(
    todo: list[Work], max_num_seqs: int
) -> None:
    # the runner raises where a chunk ends inside an image
    simulation = Simulation(
        num_blocks=40, max_num_seqs=max_num_seqs, budget=7 + max_num_seqs, whole_images=True
    )
    simulation.run(todo)
    assert simulation.answers == expected(todo)


def text(number: int, length: int, *, max_tokens: int = 4, at: int = 0, token: int = 1) -> Work:
    request = Request(
        RequestKey(str(number), 0),
        (token,) * length,
        length,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return Work(request, (), at)


def test_a_long_prompt_runs_in_chunks_beside_decodes() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=8)
    todo = [text(0, 3, max_tokens=20), text(1, 40, at=2)]
    simulation.run(todo)
    assert simulation.answers == expected(todo)
    assert simulation.max_chunk == 7  # one of eight tokens belongs to the decoding sequence


def test_the_youngest_is_preempted_and_says_the_same() -> None:
    simulation = Simulation(num_blocks=17, max_num_seqs=4, budget=64)
    todo = [text(number, 14, max_tokens=40, token=number + 1) for number in range(3)]
    simulation.run(todo)
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.answers == expected(todo)
    assert next(iter(simulation.reasons)) == "0"  # the oldest was never put back


def test_a_prefix_hit_says_the_same_and_leaves_one_token_to_compute() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    todo = [text(0, 16), text(1, 16, at=20)]
    simulation.run(todo)
    assert simulation.cached == {"0": 0, "1": 12}
    assert simulation.answers == expected(todo)


def test_tenants_share_no_prefix() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    other = text(1, 16, at=20)
    salted = dataclasses.replace(other.request, cache_salt=b"other")
    simulation.run([text(0, 16), Work(salted, (), 20)])
    assert simulation.cached["1"] == 0


def test_who_does_not_fit_lets_others_pass_but_not_for_ever() -> None:
    simulation = Simulation(num_blocks=18, max_num_seqs=3, budget=64)
    big = text(0, 60, max_tokens=2, token=2)
    small = [text(n, 9, max_tokens=20, at=n // 40, token=3 + n % 50) for n in range(1, 150)]
    simulation.run([text(150, 9, max_tokens=20, token=1), big, *small])
    finished = list(simulation.reasons)
    assert finished.index("150") == 0
    assert 1 < finished.index("0") < len(finished) - 1  # passed by some, and not by all


def test_a_missing_embedding_stalls_one_sequence_and_nobody_else() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    image = make_image(1, num_tokens=5)
    request = Request(
        RequestKey("stalled", 0),
        (1, 2, *[IMAGE_TOKEN] * 5, 3),
        8,
        SamplingParams(max_tokens=3, ignore_eos=True),
        (ImageItem(image.image_key, 2, 5, image.grid_thw),),
    )
    sequence = simulation.add(Work(request, (image,), 0))
    sequence.embeddings[0] = None
    other = text(1, 5)
    simulation.add(other)
    for _ in range(20):
        simulation.step()
    assert sequence.stalled
    assert sequence.row is not None
    assert simulation.table.num_computed[sequence.row] == 2  # the text before the image ran
    assert simulation.pool.match(sequence.hashes) == []  # K3: nothing is known before it is written
    assert simulation.answers["1"] == alone(other)
    sequence.embeddings[0] = embed(image)
    sequence.stalled = False
    while simulation.step():
        pass
    assert simulation.answers["stalled"] == alone(Work(request, (image,), 0))


def about_picture(name: str, *, num_text_before: int) -> Work:
    """Text, a picture, and one more token."""
    image = make_image(1, num_tokens=5)
    token_ids = (*range(30, 30 + num_text_before), *[IMAGE_TOKEN] * 5, 3)
    item = ImageItem(image.image_key, num_text_before, 5, image.grid_thw)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    request = Request(RequestKey(name, 0), token_ids, len(token_ids), sampling, (item,))
    return Work(request, (image,), 0)


def test_who_waits_for_an_embedding_takes_no_blocks_and_blocks_nobody() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=64)
    waiting = simulation.add(about_picture("stalled", num_text_before=0))
    waiting.embeddings[0] = None
    simulation.step()
    assert waiting.stalled
    other = text(1, 5)
    simulation.add(other)
    while simulation.step():
        pass
    assert waiting.status is Status.WAITING
    assert simulation.answers["1"] == alone(other)


def test_kv_that_a_peer_may_be_reading_is_not_preempted() -> None:
    simulation = Simulation(num_blocks=17, max_num_seqs=2, budget=64)
    old = simulation.add(text(0, 8, max_tokens=50))
    simulation.step()
    held = simulation.add(about_picture("held", num_text_before=34), hold=True)
    held.embeddings[0] = None  # it runs, and waits in the middle of its prompt
    simulation.step()
    blocks = list(held.blocks)
    assert len(blocks) == 10
    for _ in range(60):
        simulation.step()
    assert simulation.scheduler.num_preemptions > 0
    assert old.status is Status.WAITING  # the older one gave way
    assert held.status is Status.RUNNING
    assert held.blocks == blocks
    simulation.scheduler.remove(held)
    while simulation.step():
        pass
    assert simulation.answers["0"] == alone(text(0, 8, max_tokens=50))


def test_the_halves_of_a_plan_are_the_plan() -> None:
    rows = np.array([4, 0, 2, 1, 3])
    counts = np.array([1, 1, 1, 5, 6])
    plan = Plan(rows, counts, np.array([True, True, True, False, True]), 3)
    first, second = plan.halves()
    assert first.rows.tolist() + second.rows.tolist() == rows.tolist()
    assert first.counts.tolist() + second.counts.tolist() == counts.tolist()
    assert (first.num_decodes, second.num_decodes) == (2, 1)
    assert second.sampled_rows.tolist() == [2, 3]
    assert plan.without({0, 1}).rows.tolist() == [4, 2, 3]


def test_a_held_sequence_keeps_its_blocks_and_goes_on_where_it_stopped() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=64)
    work = text(0, 10, max_tokens=9)
    sequence = simulation.add(work, hold=True)
    while simulation.step():
        if sequence.status is Status.HELD:
            break
    assert len(simulation.table) == 0
    assert simulation.pool.num_used == 3
    simulation.held.remove(sequence)
    simulation.scheduler.resume(sequence)
    while simulation.step():
        pass
    assert simulation.answers["0"] == alone(work)
    assert simulation.pool.num_used == 0


def test_a_poisoned_sequence_fails_alone_and_its_kv_is_forgotten() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=6)
    simulation.runner.faults.poison_token = 13
    todo = [text(0, 5, max_tokens=9), text(1, 12, token=2)]
    bad = todo[1].request
    poisoned = dataclasses.replace(bad, token_ids=(*bad.token_ids[:11], 13))
    simulation.add(todo[0])
    sequence = simulation.add(Work(poisoned, (), 0))
    while simulation.step():
        pass
    assert sequence.status is Status.FINISHED
    assert simulation.answers == {"0": alone(todo[0]), "1": []}
    assert simulation.pool.match(sequence.hashes) == []


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 100])
def test_chunked_is_whole(budget: int) -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=budget)
    image = make_image(2, num_tokens=9)
    token_ids = (1, 2, *[IMAGE_TOKEN] * 9, 3, 4, *[IMAGE_TOKEN] * 9)
    items = tuple(ImageItem(image.image_key, at, 9, image.grid_thw) for at in (2, 13))
    request = Request(RequestKey("0", 0), token_ids, 22, SamplingParams(max_tokens=5), items)
    work = Work(request, (image, image), 0)
    simulation.run([work])
    assert simulation.answers["0"] == alone(work)
