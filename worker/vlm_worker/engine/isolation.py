"""Isolate failures of model calls: an error fails the affected requests, not the engine.

execute(plan) --ok--> tokens
              --error--> halves, each once more --ok--> tokens
                                                --error--> that half's requests fail
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from vlm_worker.core.batch_builder import BatchBuilder
from vlm_worker.core.step_values import StepOutput, StepPlan
from vlm_worker.engine.runner import Runner
from vlm_worker.errors import EngineError, WorkerError
from vlm_worker.types import PreparedImage

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of a plan, or the error of the step."""

    plan: StepPlan
    outcome: StepOutput | EngineError


class StepIsolation:
    """Runs plans; counts steps in which every half failed.

    If `device_lost` is set, no step can succeed: only a new process gets the device back. It calls
    `before_call` when the model is about to compute.
    """

    def __init__(
        self, runner: Runner, builder: BatchBuilder, *, before_call: Callable[[], None]
    ) -> None:
        self.num_failures = 0
        self.num_out_of_memory = 0
        self.failures_in_a_row = 0
        self.device_lost = False
        self._runner = runner
        self._builder = builder
        self._before_call = before_call

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Execute a plan, as a whole or, if that fails, as two halves."""
        whole = self._try(plan)
        results = [whole]
        if isinstance(whole.outcome, EngineError):
            self.num_failures += 1
            if len(plan) > 1:
                results = [self._try(half) for half in plan.halves()]
        dead = all(isinstance(result.outcome, EngineError) for result in results)
        self.failures_in_a_row = self.failures_in_a_row + 1 if dead else 0
        return results

    def _try(self, plan: StepPlan) -> StepResult:
        inputs = self._builder.build(plan)
        self._before_call()
        try:
            output = self._runner.execute(inputs)
        except Exception as error:  # a model may raise anything; its requests get the error
            logger.exception("step failed", extra={"num_sequences": len(plan)})
            self.num_out_of_memory += is_out_of_memory(error)
            self.device_lost = self.device_lost or is_device_lost(error)
            failure = EngineError(f"the step failed: {error!r}")
            failure.__cause__ = error
            return StepResult(plan, failure)
        wanted = len(inputs.sample_rows)
        if not isinstance(output, StepOutput) or not output.has_shape(wanted):
            return StepResult(
                plan, EngineError(f"the runner did not answer for {wanted} sampled rows")
            )
        return StepResult(plan, output)


def encode_isolated(runner: Runner, images: Sequence[PreparedImage]) -> list[Any]:
    """One embedding or exception per image; a call that fails as a whole is retried one by one."""
    try:
        results = runner.encode(images)
        if len(results) != len(images):
            raise EngineError(f"{len(results)} embeddings for {len(images)} images")
    except Exception as error:  # a model may raise anything; each image is tried alone
        logger.exception("encode failed", extra={"num_images": len(images)})
        if len(images) == 1:
            failure = EngineError(f"the encoder failed: {error!r}")
            failure.__cause__ = error
            return [failure]
        return [result for image in images for result in encode_isolated(runner, [image])]
    missing = EngineError("the encoder returned nothing for this image")
    return [missing if result is None else result for result in results]


def run_device_copy(what: str, call: Callable[[], T]) -> T:
    """Make a copy call of the runner; raises EngineError if the device fails.

    If the device is out of memory, this request fails. If the device is lost, all later steps fail.
    """
    try:
        return call()
    except WorkerError:
        raise
    except Exception as error:  # a runner may raise anything; the request gets the error
        logger.exception("a copy failed", extra={"what": what})
        raise EngineError(f"{what} failed: {error!r}") from error


def is_device_lost(error: BaseException | None) -> bool:
    """Whether an error or one of its causes reports a lost device (torch.AcceleratorError)."""
    return any(type(one).__name__ == "AcceleratorError" for one in _causes(error))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes reports memory exhaustion (Python, CUDA or CPU)."""
    return any(
        isinstance(one, MemoryError)
        or type(one).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(one)
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, outermost first; stops at a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
