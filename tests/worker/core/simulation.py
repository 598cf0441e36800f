"""Scheduler, batch builder and ChecksumRunner in one loop, without a thread; and work for it."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
from hypothesis import strategies as st
from worker.answers import answer_alone, folded_positions, make_image

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.pruning import kept_permille_of
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.step_inputs import BatchBuilder
from vlm_worker.core.step_values import SchedulerOutput, StepPlan
from vlm_worker.settings import AdmissionSettings
from vlm_worker.testing import IMAGE_TOKEN, ChecksumRunner, embed
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
    """A request, its images, and the step at which it comes in."""

    request: Request
    images: tuple[PreparedImage, ...]
    at: int


@st.composite
def works(draw: st.DrawFn) -> list[Work]:
    """Requests with common prefixes, repeated images, and sampling of all kinds."""
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
            min_tokens=draw(st.sampled_from([0, 0, 1])),
            presence_penalty=draw(st.sampled_from([0.0, 0.5])),
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

    step_seconds = 1.0

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        whole_images: bool = False,
        whole_prompts: bool = False,
        long_prefill_tokens: int | None = None,
        max_pending_blocks: int | None = None,
        visual_percent: int = 100,
        settings: AdmissionSettings | None = None,
        permille: int = 0,
        kinds: BlockKinds | None = None,
    ) -> None:
        self.permille, self.whole_prompts = permille, whole_prompts
        self.pool = BlockPool(
            num_blocks, block_size=BLOCK_SIZE, kinds=kinds, visual_percent=visual_percent
        )
        self.batch = PersistentBatch(
            max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            kinds=kinds,
            eos_token_ids=(EOS,),
        )
        self.scheduler = Scheduler(
            self.pool,
            self.batch,
            max_num_batched_tokens=budget,
            watermark_blocks=1,
            whole_images=whole_images,
            long_prefill_tokens=long_prefill_tokens,
            max_pending_blocks=max_pending_blocks,
            settings=settings,
        )
        self.now = 0.0
        self.builder = BatchBuilder(
            self.batch, max_num_batched_tokens=budget, whole_images=whole_images
        )
        narrow = None if kinds is None else kinds.narrow
        self.runner = ChecksumRunner(num_blocks, block_size=BLOCK_SIZE, narrow=narrow)
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.held: list[Sequence] = []
        self.max_chunk = 0
        self.num_observed = 0
        self.without_copies: collections.Counter[str] = collections.Counter()

    def add(
        self, work: Work, *, for_peer: bool = False, lane: Lane = Lane.TEXT, reserved: bool = False
    ) -> Sequence:
        """Let a request wait; `reserved` sets blocks aside for it, if there are any to be had."""
        request = work.request
        positions, delta = folded_positions(request.token_ids, request.items)
        sequence = Sequence(
            request=request,
            arrival=len(self.answers),
            token_ids=np.array(request.token_ids, np.int32),
            positions=positions,
            position_delta=delta,
            arrived_at=self.now,
            lane=lane,
            for_peer=for_peer,
            embeddings=[embed(image) for image in work.images],
            whole_prompt=self.whole_prompts,
            kept_permille=kept_permille_of(request, self.permille, min_history=1),
        )
        num_blocks = self.pool.kinds.of(sequence).num_blocks(sequence.num_tokens)
        if reserved and self.pool.reserve(
            num_blocks, keep=self.scheduler.admission.withheld_blocks
        ):
            sequence.reserved_blocks = num_blocks
        self.answers[request.key.request_id] = list(request.token_ids[request.num_prompt_tokens :])
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        """One step; False where there was nothing to do."""
        self.now += self.step_seconds
        has_pruned = self.prune()
        schedule = self.schedule()
        for sequence in schedule.admitted:
            self.cached[sequence.request.key.request_id] = sequence.num_cached_tokens
        plan = self.check_plan(schedule)
        if plan is None:
            return bool(schedule.preempted) or has_pruned
        sampled = self.runner.execute(self.builder.build(plan)).token_ids
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

    def prune(self) -> bool:
        """Prune what is ready to be, as the step loop does; False if there was nothing."""
        ready = self.scheduler.sequences_to_prune()
        for sequence in ready:
            if sequence.row is None:
                continue
            mass, pruner = None, self.scheduler.pruner
            if pruner.twin_of(sequence) is None:
                mass = self.runner.attention_mass(pruner.observed_inputs(sequence))
                self.num_observed += 1
            moves, _ = self.scheduler.prune(sequence, mass)
            if moves is not None:
                self.runner.move_rows(moves.sources, moves.targets)
            else:
                assert sequence.status is Status.WAITING
                self.without_copies[sequence.request.key.request_id] += 1
            self.check_books()
        return bool(ready)

    def adopt(self, sequence: Sequence) -> None:
        """Let a sequence that is held for a peer decode here."""
        self.held.remove(sequence)
        sequence.for_peer = False
        self.scheduler.pending_transfers.discard(sequence)
        self.scheduler.resume(sequence)

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule(now=self.now)

    def check_plan(self, schedule: SchedulerOutput) -> StepPlan | None:
        plan = schedule.plan
        if plan is not None:
            assert plan.num_tokens <= self.budget
            assert len(set(plan.rows.tolist())) == len(plan) <= self.max_num_seqs
            self.max_chunk = max(self.max_chunk, int(plan.counts.max()))
        return plan

    def check_books(self) -> None:
        self.pool.check()
        holding = self.batch.running + self.held
        owned = {block for sequence in holding for block in sequence.blocks}
        assert len(owned) == self.pool.num_used
        for sequence in self.batch.running:
            row = sequence.row
            assert row is not None
            assert sequence.status is Status.RUNNING
            shape = self.pool.kinds.of(sequence)
            entries = list(shape.entries(sequence.blocks))
            assert self.batch.num_entries[row] == len(entries)
            assert self.batch.block_table[row, : len(entries)].tolist() == entries
            assert len(entries) * BLOCK_SIZE == shape.num_tokens(len(sequence.blocks))
            num_kept = self.batch.num_computed[row] - self.batch.num_dropped[row]
            assert num_kept <= shape.num_tokens(len(sequence.blocks))
            assert not self.batch.block_table[row, len(entries) :].any()
        self.check_columns()

    def check_columns(self) -> None:
        """What steps have added to, is what the rows say."""
        kept = self.batch.decode_columns
        rows = self.batch.decode_columns_of(self.batch.decode_rows.copy())
        assert kept is not rows
        assert kept.members == rows.members
        assert kept.num_kv_tokens == rows.num_kv_tokens
        for name in (
            "token_ids",
            "num_computed",
            "context_lens",
            "indices",
            "positions",
            "capacity",
        ):
            assert np.array_equal(getattr(kept, name), getattr(rows, name)), name
        has_slots = kept.num_computed < kept.capacity
        assert np.array_equal(kept.slots[has_slots], rows.slots[has_slots])
        width = rows.block_table.shape[1]
        assert np.array_equal(kept.block_table[:, :width], rows.block_table)
        assert not kept.block_table[:, width:].any()

    def run(self, todo: list[Work]) -> None:
        pending = sorted(todo, key=lambda work: work.at)
        for number in range(MAX_STEPS):
            while pending and pending[0].at <= number:
                self.add(pending.pop(0))
            if not self.step() and not pending:
                break
        assert not self.scheduler.waiting, "somebody was never served"
        assert self.pool.num_used == 0, "a block did not come back"
        assert len(self.batch) == 0


def told(schedule: SchedulerOutput) -> object:
    """What a schedule says, as a value that compares."""
    plan = schedule.plan
    return (
        plan and (plan.rows.tolist(), plan.counts.tolist(), plan.samples.tolist()),
        [s.request.key for s in schedule.admitted],
        [s.request.key for s in schedule.preempted],
        [(s.request.key, start) for s, start in schedule.blocked_on_embedding],
    )


def alone(work: Work, *, permille: int = 0) -> list[int]:
    return answer_alone(
        work.request,
        work.images,
        positions=folded_positions,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(EOS,),
        kept_permille=kept_permille_of(work.request, permille, min_history=1),
    )


def expected(todo: list[Work], *, permille: int = 0) -> dict[str, list[int]]:
    return {work.request.key.request_id: alone(work, permille=permille) for work in todo}
