"""The engine's interface to a model, and calls that turn its failures into typed errors.

`model.runner.ModelRunner` and `testing.ChecksumRunner` implement it; the engine thread calls it. A
failed call fails the requests that it affects, not the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import numpy as np

from vlm_worker.core.encoding import encode_each
from vlm_worker.core.step_values import StepInputs, StepOutput
from vlm_worker.core.window_cache import WindowCache
from vlm_worker.errors import EngineError, WorkerError
from vlm_worker.types import EmbedLayout, KVLayout, PreparedImage
from vlm_worker.wire.buffers import Regions

T = TypeVar("T")

logger = logging.getLogger(__name__)

Embedding = Any
"""An encoder output, opaque to the engine; `num_tokens` rows of `EmbedLayout.row_bytes`."""


class Runner(Protocol):
    """Owns weights, the KV buffer and the device."""

    @property
    def kv_layout(self) -> KVLayout | None:
        """None if neither prefill nor decode is loaded."""

    @property
    def embed_layout(self) -> EmbedLayout:
        """Layout of embedding rows in transfers."""

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks, the null block 0 included."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def windows(self) -> WindowCache | None:
        """The cache of states of windows; None if there is none. Only its counts may be read."""

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Run one packed step and sample, row by row of `inputs.sample_rows`."""

    def encode(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        """Encode images in one call; returns an embedding or an exception per image."""

    def encode_async(self, call: Callable[[], T]) -> Future[T] | None:
        """Run an encoder call on a separate thread, overlapped with steps.

        Returns None if the device cannot overlap: the caller then makes the call itself.
        """

    def reduce_embedding(self, embedding: Embedding, image: PreparedImage) -> Embedding | None:
        """The embedding of the kept tokens of a whole image; it has `places`, as `ImageRows` has.

        `image` has a reduction, and may have no patches. None if neither it nor this embedding can
        tell which tokens to keep, and the image must be encoded again.
        """

    def export_embedding(self, embedding: Embedding) -> memoryview:
        """The rows as bytes, `[num_tokens, row_bytes]`; a reduced one's with their places."""

    def import_embedding(self, rows: memoryview, num_tokens: int) -> Embedding:
        """The embedding of rows as bytes. Raises CorruptTransferError on a wrong size."""

    def export_scores(self, embedding: Embedding) -> memoryview:
        """The scores that reductions of a whole image read, float32 [num_tokens]; empty if none."""

    def with_scores(self, embedding: Embedding, scores: memoryview) -> Embedding:
        """An imported embedding with the scores of its export; it then reduces as the first did.

        Raises CorruptTransferError if there is not one score per row.
        """

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        """Copy whole blocks into `out` if given, `[len(block_ids), block_bytes]`.

        Other threads than the engine's call it, while a step may run.
        """

    def block_memory(self, block_ids: Sequence[int], *, to_write: bool = False) -> Regions | None:
        """The memory of whole blocks, for another thread to read or write while steps run.

        Host memory has one view per block. None if no thread may, as on a device without a digest:
        then `export_blocks` copies, and `import_blocks` writes between steps. Any thread may call
        it for reading; only the engine thread calls it with `to_write`.
        """

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Write whole blocks received from a peer."""

    @property
    def pruning_problem(self) -> str | None:
        """Why the KV of this model cannot be pruned; None if it can."""

    def attention_mass(self, inputs: StepInputs) -> np.ndarray:
        """The attention that each token of one sequence receives from its last rows.

        `inputs` has these rows, whose KV is in the cache; nothing is written. The sum over rows,
        layers and heads: float32 `[context_lens[0] + rows]`.
        """

    def move_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy rows of all layers within the KV cache, in order: int64 slots `[R]` each."""

    def embedding_bytes(self, embedding: Embedding) -> int:
        """Bytes of an embedding, for the encoder cache's budget: those of its export."""

    def prefault(self) -> bool:
        """Prefault some memory for coming steps, for a few milliseconds; False if all is done.

        The engine calls it while it is idle.
        """


def encode_isolated(runner: Runner, images: Sequence[PreparedImage]) -> list[Any]:
    """One embedding or exception per image; a call that fails as a whole is retried one by one."""

    def together(batch: Sequence[PreparedImage]) -> Sequence[Any]:
        try:
            results = runner.encode(batch)
            if len(results) != len(batch):
                raise EngineError(f"{len(results)} embeddings for {len(batch)} images")
        except Exception as error:
            logger.exception("encode failed", extra={"num_images": len(batch)})
            raise EngineError(f"the encoder failed: {error!r}") from error
        return results

    missing = EngineError("the encoder returned nothing for this image")
    return [missing if result is None else result for result in encode_each(together, images)]


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


class EmbeddingCopies:
    """The runner's copies of embeddings, by `run_device_copy`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.embedding_bytes = runner.embedding_bytes

    def export_embedding(self, embedding: Any) -> memoryview:
        return run_device_copy(
            "copying an embedding out", lambda: self._runner.export_embedding(embedding)
        )

    def import_embedding(self, rows: memoryview, num_tokens: int) -> Any:
        return run_device_copy(
            "copying an embedding in", lambda: self._runner.import_embedding(rows, num_tokens)
        )

    def export_scores(self, embedding: Any) -> memoryview:
        return run_device_copy("copying scores out", lambda: self._runner.export_scores(embedding))

    def with_scores(self, embedding: Any, scores: memoryview) -> Any:
        return run_device_copy(
            "copying scores in", lambda: self._runner.with_scores(embedding, scores)
        )

    def reduce_embedding(self, embedding: Any, image: PreparedImage) -> Any:
        return run_device_copy(
            "reducing an embedding",
            lambda: self._runner.reduce_embedding(embedding, image),
        )


class DeviceErrors:
    """Errors of the device. If it `is_lost`, every call fails until the process is replaced."""

    def __init__(self) -> None:
        self.num_out_of_memory = 0
        self.is_lost = False

    def record(self, error: BaseException) -> None:
        self.is_lost |= is_device_lost(error)
        self.num_out_of_memory += any(
            isinstance(one, MemoryError)
            or type(one).__name__ == "OutOfMemoryError"
            or "can't allocate memory" in str(one)
            for one in _causes(error)
        )


def is_device_lost(error: BaseException) -> bool:
    """Whether an error or one of its causes reports a lost device (torch.AcceleratorError)."""
    return any(type(one).__name__ == "AcceleratorError" for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, outermost first; stops at a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
