"""One step of the language model, and its events.

prune -> schedule -> stalled: request embeddings -> run -> update -> events
                  -> preempted, blocked_on_kv: release their embeddings

run(plan) --ok--> tokens
          --error--> halves, each tried again --ok--> tokens
                                            --error--> that half's requests fail
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable

import numpy as np

from vlm_worker.annotations import MAX_PROMPT_LOGPROBS
from vlm_worker.core.kv_cache import PrefixCounts
from vlm_worker.core.measurements import StepWork
from vlm_worker.core.prompt_scores import ChunkScores, by_chunk, scored_chunks
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.step_inputs import BatchBuilder
from vlm_worker.core.step_time import AdaptiveLimit
from vlm_worker.core.step_values import StepInputs, StepOutcome, StepOutput, StepPlan
from vlm_worker.engine.attempts import EngineContext
from vlm_worker.engine.constraints import refused_by
from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.engine.kv_pruning import KVPruning
from vlm_worker.engine.prompt_embeddings import PromptEmbeddings
from vlm_worker.engine.sequences import Sequences
from vlm_worker.errors import EngineError, WorkerError
from vlm_worker.types import BlocksReady, ScheduledEvent, TokenEvent, TokenLogprobs

logger = logging.getLogger(__name__)


class StepLoop:
    """Plans, runs and evaluates one step per turn. Engine thread only."""

    def __init__(
        self, context: EngineContext, sequences: Sequences, prompt_embeddings: PromptEmbeddings
    ) -> None:
        settings = context.settings
        self._builder = BatchBuilder(
            sequences.batch,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            whole_images=settings.whole_images,
        )
        self.limit = AdaptiveLimit(
            settings.target_step_ms / 1000 or None, maximum=settings.max_num_seqs
        )
        self.failures_in_a_row = 0
        self.num_output_tokens = 0
        self.prefix = PrefixCounts()
        self.admitted_seconds = 0.0
        self._sequences = sequences
        self._prompt_embeddings = prompt_embeddings
        self._scheduler = sequences.scheduler
        self.pruning = KVPruning(context, sequences)
        self._context = context
        self._events, self._clock = context.events, context.clock
        self._scheduler.admission.max_running = self.limit.limit.value
        self._listened_to: list[Sequence] = []
        self._streams: list[EventStream[PrefillEvent] | None] = []

    def turn(self) -> bool:
        """Run one step, if a sequence can run; True if another turn may have work."""
        started = self._clock()
        has_preempted = self.pruning.run()
        schedule = self._scheduler.schedule(now=started)
        for sequence in schedule.admitted:
            self._admitted(sequence, started)
        for sequence in schedule.preempted:
            self._sequences.readable_blocks.revoke(sequence.request.key)
            self._sequences.release_pins(sequence)
        for sequence, start in schedule.blocked_on_embedding:
            self._sequences.request_embeddings(sequence, start)
        for sequence in schedule.blocked_on_kv:
            self._prompt_embeddings.release_pins(sequence)
        if schedule.plan is None:
            return bool(has_preempted or schedule.preempted or schedule.blocked_on_embedding)
        work = self._work(schedule.plan, num_prompts=len(schedule.admitted))
        for plan, output in self._execute_isolated(schedule.plan):
            if isinstance(output, EngineError):
                for sequence in self._scheduler.batch.members(plan.rows):
                    self._sequences.fail(sequence, output)
            else:
                self._record(plan, output)
        seconds = self._clock() - started
        self._sequences.work.observe(schedule.plan.num_tokens, seconds)
        if work.num_decodes:
            limit = self.limit.observe(seconds, num_running=len(schedule.plan))
            self._scheduler.admission.max_running = limit.value
        self._context.busy.stepped(work, seconds)
        return True

    def _record(self, plan: StepPlan, output: StepOutput) -> None:
        """Record the results of a step and deliver them. A prompt with bad scores fails."""
        scores = by_chunk(scored_chunks(self._scheduler.batch, plan), output.scores)
        failed = [
            row
            for one in scores
            if not one.is_finite and (row := one.chunk.sequence.row) is not None
        ]
        if failed:
            output = output.failing(np.isin(plan.sampled_rows, failed))
        outcome = self._scheduler.update(plan, output.token_ids, failed=failed)
        self._deliver_scores([one for one in scores if one.is_finite], outcome.failed)
        self._deliver(outcome, output.finite if outcome.failed else output)

    def _deliver_scores(self, scores: list[ChunkScores], failed: list[Sequence]) -> None:
        """Emit the log-probabilities of prompts; the loop makes the values as it delivers them."""
        for one in scores:
            sequence = one.chunk.sequence
            if sequence not in failed:
                parts = one.parts(MAX_PROMPT_LOGPROBS)
                events = itertools.starmap(one.logprobs, parts)
                self._events.emit_all([sequence.output.stream] * len(parts), events)

    def _execute_isolated(self, plan: StepPlan) -> list[tuple[StepPlan, StepOutput | EngineError]]:
        """Execute a plan, as a whole or, if that fails, as two halves."""
        results = [(plan, self._execute(plan))]
        if isinstance(results[0][1], EngineError) and len(plan) > 1:
            results = [(half, self._execute(half)) for half in plan.halves()]
        has_failed = all(isinstance(output, EngineError) for _, output in results)
        self.failures_in_a_row = self.failures_in_a_row + 1 if has_failed else 0
        return results

    def _execute(self, plan: StepPlan) -> StepOutput | EngineError:
        inputs = self._with_masks(self._builder.build(plan))
        self._events.flush()  # the model is about to compute
        try:
            output = self._context.runner.execute(inputs)
        except Exception as error:  # a model may raise anything; its requests get the error
            logger.exception("step failed", extra={"num_sequences": len(plan)})
            self._context.device_errors.record(error)
            failure = EngineError(f"the step failed: {error!r}")
            failure.__cause__ = error
            return failure
        num_rows = len(inputs.sample_rows)
        if isinstance(output, StepOutput) and output.has_shape(num_rows, inputs.scored):
            return output
        return EngineError(f"the runner did not answer for {num_rows} sampled rows")

    def _with_masks(self, inputs: StepInputs) -> StepInputs:
        """Start to fill the masks of constrained rows; the runner waits for them to sample."""
        constrained, constraints = inputs.sampling.constrained, self._context.constraints
        if not constrained:
            return inputs
        assert constraints is not None, "a sequence has a matcher of no grammar"
        masks = constraints.start_masks(constrained, len(inputs.sample_rows))
        sampling = dataclasses.replace(inputs.sampling, masks=masks)
        return dataclasses.replace(inputs, sampling=sampling)

    def _work(self, plan: StepPlan, *, num_prompts: int) -> StepWork:
        """The work of a step, measured before the step changes the state."""
        batch, num_decodes = self._scheduler.batch, plan.num_decodes
        return StepWork(
            num_decodes=num_decodes,
            kv_tokens=batch.decode_columns.num_kv_tokens if num_decodes else 0,
            chunks=plan.counts[num_decodes:],
            before=(batch.num_computed - batch.num_dropped)[plan.rows[num_decodes:]],
            num_prompts=num_prompts,
        )

    def _admitted(self, sequence: Sequence, now: float) -> None:
        new_tokens = sequence.num_tokens - sequence.num_cached_tokens
        self.admitted_seconds += self._sequences.predict(new_tokens)
        if not sequence.output.scheduled:  # a preempted sequence would hit its own blocks
            sequence.output.scheduled = True
            pool = self._scheduler.pool
            pool.count_used(sequence.blocks[: sequence.num_cached_tokens // pool.block_size])
            self.prefix.add(
                sequence.items,
                num_tokens=sequence.num_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
            )
            self._events.emit(sequence.output.stream, ScheduledEvent(now))

    def _deliver(self, outcome: StepOutcome, output: StepOutput) -> None:
        for sequence, num_computed, num_blocks in outcome.prefilled:
            if sequence.status is not Status.FINISHED:
                self._advanced(sequence, num_computed, num_blocks)
        indices, token_ids = outcome.indices, outcome.token_ids
        cached, logprobs = _cached(outcome), _logprobs(outcome, output)
        events = map(TokenEvent, indices, token_ids, cached, logprobs)
        self._events.emit_all(self._streams_of(outcome.sequences), events)
        self.num_output_tokens += len(outcome.sequences)
        for sequence, reason in outcome.finished:
            self._sequences.finish(sequence, reason)
        for sequence, _, _ in outcome.prefilled:
            self._pass_on(sequence)
        for sequence in outcome.failed:
            self._sequences.fail(sequence, _failure_of(sequence))

    def _streams_of(self, sequences: list[Sequence]) -> list[EventStream[PrefillEvent] | None]:
        """The stream of each sequence; cached while the same sequences decode."""
        if sequences is not self._listened_to:
            self._listened_to = sequences
            self._streams = [sequence.output.stream for sequence in sequences]
        return self._streams

    def _advanced(self, sequence: Sequence, num_computed: int, num_blocks: int) -> None:
        """After a chunk: release the computed images, publish the written blocks."""
        self._prompt_embeddings.release_consumed(sequence, num_computed)
        readable_blocks, key = self._sequences.readable_blocks, sequence.request.key
        is_whole = sequence.for_peer and not sequence.num_dropped
        if is_whole and num_blocks > readable_blocks.num_readable(key):
            self._sequences.publish(sequence, num_blocks)
            self._events.emit(sequence.output.stream, BlocksReady(num_blocks))

    def _pass_on(self, sequence: Sequence) -> None:
        """After the first token, end the prefill stream and switch to the successor stream."""
        output = sequence.output
        if not output.first_only or sequence.status is Status.FINISHED:
            return
        if self._scheduler.is_prefilling(sequence):
            return
        self._events.end(output.stream)
        output.stream, output.successor_stream = output.successor_stream, None
        output.first_only = output.supplied = False


def _failure_of(sequence: Sequence) -> WorkerError:
    """Why a sequence got no token."""
    if sequence.matcher is not None and sequence.matcher.error is not None:
        return refused_by(sequence.matcher)
    return EngineError("the model's logits are not finite")


def _cached(outcome: StepOutcome) -> Iterable[int]:
    """Cached prefix tokens, reported only with the first token of a submission."""
    if not outcome.prefilled:
        return itertools.repeat(0)
    return [
        sequence.num_cached_tokens if index == sequence.request.num_delivered_tokens else 0
        for sequence, index in zip(outcome.sequences, outcome.indices, strict=True)
    ]


def _logprobs(outcome: StepOutcome, output: StepOutput) -> Iterable[TokenLogprobs | None]:
    """Log-probabilities of each token; None if not requested."""
    if output.logprobs is None:
        return itertools.repeat(None)
    nums = [sequence.request.sampling.num_logprobs for sequence in outcome.sequences]
    return [None if num is None else output.logprobs_of(at, num) for at, num in enumerate(nums)]
