"""One step of the language model, and what everybody is told about it.

schedule -> stalled: gather embeddings -> guarded run -> update -> events
         -> preempted, roomless: let them go
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from vlm_worker.core.adaptive import AdaptiveLimit
from vlm_worker.core.batch import BatchBuilder
from vlm_worker.core.busy import BusyMeter, StepWork
from vlm_worker.core.inputs import StepOutput
from vlm_worker.core.plan import Outcome, Plan, Schedule
from vlm_worker.core.prefix import PrefixCounts
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.engine.guard import StepGuard
from vlm_worker.engine.outbox import Outbox
from vlm_worker.engine.prompt_images import PromptImages
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Sequences
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import EngineError
from vlm_worker.types import BlocksReady, ScheduledEvent, TokenEvent, TokenLogprobs


class Stepping:
    """The engine thread's loop body for sequences."""

    def __init__(
        self,
        runner: Runner,
        sequences: Sequences,
        *,
        images: PromptImages,
        settings: EngineSettings,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        builder = BatchBuilder(
            sequences.table,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            whole_images=settings.whole_images,
        )
        self.guard = StepGuard(runner, builder, before_call=outbox.post)
        self.limit = AdaptiveLimit(settings.target_step_seconds, maximum=settings.max_num_seqs)
        self.num_steps = 0
        self.num_output_tokens = 0
        self.busy = BusyMeter()
        self.prefix = PrefixCounts()
        self.admitted_seconds = 0.0
        self._sequences = sequences
        self._images = images
        self._scheduler = sequences.scheduler
        self._settings = settings
        self._outbox = outbox
        self._clock = clock
        self._scheduler.entrance.max_running = self.limit.limit.value
        self._listened_to: list[Sequence] = []
        self._streams: list[EventStream[PrefillEvent] | None] = []

    def turn(self) -> bool:
        """Run one step, if there is anything to run; whether another turn may bring more."""
        started = self._clock()
        schedule = self._scheduler.schedule(now=started)
        for sequence in schedule.admitted:
            self._admitted(sequence, started)
        for sequence in schedule.preempted:
            self._sequences.exports.withdraw(sequence.request.key)
            self._sequences.let_go(sequence)
        for sequence, start in schedule.stalled:
            self._sequences.gather(sequence, start)
        for sequence in schedule.roomless:
            self._images.let_go(sequence)
        if schedule.plan is None:
            return bool(schedule.preempted or schedule.stalled)
        work = self._work(schedule)
        for result in self.guard.run(schedule.plan):
            if isinstance(result.outcome, EngineError):
                for row in result.plan.rows.tolist():
                    self._fail(self._scheduler.table.sequences[row], result.outcome)
            else:
                outcome = self._scheduler.update(result.plan, result.outcome.token_ids)
                self._deliver(outcome, result.outcome.finite if outcome.failed else result.outcome)
        seconds = self._clock() - started
        self._measured(schedule.plan, seconds)
        self.busy.stepped(work, seconds)
        self.num_steps += 1
        return True

    @property
    def queued_tokens(self) -> int:
        """Tokens of waiting sequences."""
        return self._scheduler.waiting.num_tokens

    def predict(self, num_tokens: int) -> float:
        """Predicted seconds to compute so many tokens of prompts."""
        return self._sequences.room.predict(num_tokens)

    def _work(self, schedule: Schedule) -> StepWork:
        """What the step is to compute; asked before it does."""
        plan = schedule.plan
        assert plan is not None
        table, num_decodes = self._scheduler.table, plan.num_decodes
        return StepWork(
            num_decodes=num_decodes,
            kv_tokens=table.decoding.num_kv_tokens if num_decodes else 0,
            chunks=plan.counts[num_decodes:],
            before=table.num_computed[plan.rows[num_decodes:]],
            num_prompts=len(schedule.admitted),
        )

    def _measured(self, plan: Plan, seconds: float) -> None:
        """Learn from a step; those in which nobody decoded say nothing about a pace of answers."""
        self._sequences.room.work.observe(plan.num_tokens, seconds)
        if plan.num_decodes:
            limit = self.limit.observe(seconds, num_running=len(plan))
            self._scheduler.entrance.max_running = limit.value

    def _admitted(self, sequence: Sequence, now: float) -> None:
        new_tokens = sequence.num_tokens - sequence.num_cached_tokens
        self.admitted_seconds += self.predict(new_tokens)
        if not sequence.sink.scheduled:  # one that was preempted finds its own blocks, at best
            sequence.sink.scheduled = True
            self.prefix.add(
                sequence.items,
                num_tokens=sequence.num_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
            )
            self._outbox.emit(sequence.sink.stream, ScheduledEvent(now))

    def _deliver(self, outcome: Outcome, output: StepOutput) -> None:
        for sequence, num_computed, num_blocks in outcome.prefilled:
            if sequence.status is not Status.FINISHED:
                self._advanced(sequence, num_computed, num_blocks)
        indices, token_ids = outcome.indices, outcome.token_ids
        cached, logprobs = _cached(outcome), _logprobs(outcome, output)
        events = map(TokenEvent, indices, token_ids, cached, logprobs)
        self._outbox.emit_all(self._streams_of(outcome.sequences), events)
        self.num_output_tokens += len(outcome.sequences)
        for sequence, reason in outcome.finished:
            self._sequences.finish(sequence, reason)
        for sequence, _, _ in outcome.prefilled:
            self._pass_on(sequence)
        for sequence in outcome.failed:
            self._fail(sequence, EngineError("the model's logits are not finite"))

    def _streams_of(self, sequences: list[Sequence]) -> list[EventStream[PrefillEvent] | None]:
        """Who listens to each. While the same decode, the same do: they change with the prefill."""
        if sequences is not self._listened_to:
            self._listened_to = sequences
            self._streams = [sequence.sink.stream for sequence in sequences]
        return self._streams

    def _advanced(self, sequence: Sequence, num_computed: int, num_blocks: int) -> None:
        """A chunk is done: images behind it are free, blocks before it may be read."""
        self._images.drop_passed(sequence, num_computed)
        exports, key = self._sequences.exports, sequence.request.key
        if sequence.hold and num_blocks > exports.num_shown(key):
            exports.show(key, sequence.blocks[:num_blocks])
            self._outbox.emit(sequence.sink.stream, BlocksReady(num_blocks))

    def _pass_on(self, sequence: Sequence) -> None:
        """After the first token the prefill's stream ends; whoever adopted early listens now."""
        sink = sequence.sink
        prefilling = sequence.row is not None and self._scheduler.table.prefilling[sequence.row]
        if not sink.first_only or prefilling or sequence.status is Status.FINISHED:
            return
        self._outbox.end(sink.stream)
        sink.stream, sink.adopter = sink.adopter, None
        sink.first_only = sink.supplied = False

    def _fail(self, sequence: Sequence | None, error: EngineError) -> None:
        assert sequence is not None
        self._sequences.fail(sequence, error)


def _cached(outcome: Outcome) -> Iterable[int]:
    """Prefix tokens that were not computed; told with a submission's first token alone."""
    if not outcome.prefilled:
        return itertools.repeat(0)
    return [
        sequence.num_cached_tokens if index == sequence.request.num_delivered_tokens else 0
        for sequence, index in zip(outcome.sequences, outcome.indices, strict=True)
    ]


def _logprobs(outcome: Outcome, output: StepOutput) -> Iterable[TokenLogprobs | None]:
    """Of each token, for whom they are wanted."""
    if output.logprobs is None:
        return itertools.repeat(None)
    wanted = [sequence.request.sampling.num_logprobs for sequence in outcome.sequences]
    return [None if num is None else output.logprobs_of(at, num) for at, num in enumerate(wanted)]
