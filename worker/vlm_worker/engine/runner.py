"""What the engine asks of a model: the seam between what to compute and how.

`model.runner.ModelRunner` and `testing.ChecksumRunner` implement it; the engine thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from vlm_worker.core.inputs import StepInputs, StepOutput
from vlm_worker.types import EmbedLayout, KVLayout, PreparedImage

T = TypeVar("T")

Embedding = Any
"""An encoder output, opaque to the engine; `num_tokens` rows of `EmbedLayout.row_bytes`."""


class Runner(Protocol):
    """Owns weights, the KV buffer and the device."""

    @property
    def kv_layout(self) -> KVLayout | None:
        """None where neither prefill nor decode is loaded."""

    @property
    def embed_layout(self) -> EmbedLayout:
        """How rows that leave or enter an encoder lie in memory."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that there are, the null block 0 included."""

    @property
    def vocab_size(self) -> int:
        """Logits of a token."""

    def execute(self, inputs: StepInputs) -> StepOutput:
        """Run one packed step and sample, row by row of `inputs.sample_rows`."""

    def encode(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        """Encode pictures in one call; a failed item is an exception in its place."""

    def beside(self, call: Callable[[], T]) -> Future[T] | None:
        """Begin a call that encodes, in a thread of its own, while steps go on.

        None where the device does one thing at a time: then the call has to be made in turn.
        """

    def export_embedding(self, embedding: Embedding) -> memoryview:
        """The rows as bytes, `[num_tokens, row_bytes]`."""

    def import_embedding(self, rows: memoryview, num_tokens: int) -> Embedding:
        """Rows received from an encoder. Raises CorruptTransferError on a wrong size."""

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        """A gather copy of whole blocks, `[len(block_ids), block_bytes]`, in `out` if it is given.

        Called by other threads than the engine's, while a step may run.
        """

    def block_memory(
        self, block_ids: Sequence[int], *, to_write: bool = False
    ) -> list[memoryview] | None:
        """The memory of whole blocks, for another thread to read or write while steps use others.

        None where no thread may: then `import_blocks` writes, between steps. Called by any thread
        for reading, and by the engine thread alone with `to_write`.
        """

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Write whole blocks received from a peer."""

    def embedding_bytes(self, embedding: Embedding) -> int:
        """Memory that it holds, for the encoder cache's budget."""

    def use_idle_time(self) -> bool:
        """Do a little, some milliseconds at most, for steps to come; False where nothing is left.

        Called while nobody waits for anything.
        """
