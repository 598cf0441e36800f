"""Prunes the KV of conversations between two steps: observe, choose, copy. Engine thread only.

sequences_to_prune ─▶ runner: attention of the last rows ─▶ scheduler: blocks ─▶ runner: copy rows
                   └─ a twin was pruned ───────────────────────▲

If a call of the runner fails, the sequence fails, and its blocks are freed.
"""

from __future__ import annotations

import logging

import numpy as np

from vlm_worker.core.pruning import SlotMoves
from vlm_worker.core.sequence import Sequence
from vlm_worker.engine.attempts import EngineContext
from vlm_worker.engine.runner import run_device_copy
from vlm_worker.engine.sequences import Sequences
from vlm_worker.errors import EngineError, WorkerError

logger = logging.getLogger(__name__)


class KVPruning:
    """Prunes the sequences whose prompt is computed.

    Attributes:
        seconds: time that it took, of failed attempts too.
    """

    def __init__(self, context: EngineContext, sequences: Sequences) -> None:
        self._context, self._sequences = context, sequences
        self._scheduler = sequences.scheduler
        self.seconds = 0.0

    def run(self) -> bool:
        """Prune all sequences that are ready; True if one was preempted for their blocks."""
        ready = self._scheduler.sequences_to_prune()
        if not ready:
            return False
        self._context.events.flush()  # the first tokens do not wait for it
        started = self._context.clock()
        has_preempted = False
        for sequence in ready:
            if sequence.row is None:
                continue  # preempted for another
            try:
                has_preempted |= self._prune(sequence)
            except WorkerError as error:
                self._context.device_errors.record(error)
                self._sequences.fail(sequence, error)
        self.seconds += self._context.clock() - started
        return has_preempted

    def _prune(self, sequence: Sequence) -> bool:
        mass = None
        if self._scheduler.pruner.twin_of(sequence) is None:
            mass = self._observe(sequence)
            if mass is None:
                return False
        moves, preempted = self._scheduler.prune(sequence, mass)
        for victim in preempted:  # before its blocks are written, or it is admitted again
            self._sequences.readable_blocks.revoke(victim.request.key)
            self._sequences.release_pins(victim)
        if moves is not None:
            # peers do not read the copies: they are not what the hashes say
            self._sequences.readable_blocks.revoke(sequence.request.key)
            self._copy(sequence, moves)
        return bool(preempted)

    def _observe(self, sequence: Sequence) -> np.ndarray | None:
        """The attention of the prompt's last rows; None if it is not finite: the sequence fails."""
        runner = self._context.runner
        inputs = self._scheduler.pruner.observed_inputs(sequence)
        mass = run_device_copy("observing attention", lambda: runner.attention_mass(inputs))
        if mass.shape == (sequence.request.num_prompt_tokens,) and np.isfinite(mass).all():
            return mass
        blocks = sequence.blocks
        error = EngineError("the attention of the prompt's last rows is not finite")
        self._context.device_errors.record(error)
        self._sequences.fail(sequence, error)
        self._sequences.pool.invalidate(blocks)  # nothing else has read this KV yet
        return None

    def _copy(self, sequence: Sequence, moves: SlotMoves) -> None:
        move_rows = self._context.runner.move_rows
        run_device_copy("pruning KV", lambda: move_rows(moves.sources, moves.targets))
        logger.debug(
            "kv pruned",
            extra={
                "request_id": sequence.request.key.request_id,
                "num_dropped": sequence.num_dropped,
            },
        )
