"""What each request attempt holds on the engine thread, and how it ends.

    acquire ─▶ resources, in order ─▶ end(track): released in reverse order
                                   └─ a block loan stays until its writer has confirmed

In a colocated worker one key encodes and generates at once, so an attempt has two tracks that end
apart. An attempt that holds nothing is closed: the table forgets it.

Laws (tests/worker/engine/test_attempts.py):

    A1  the totals equal the sums over the resources of all attempts
    A2  a track that ended holds nothing but loans
    A3  a resource is released once, after all that its attempt acquired later
    A4  an attempt is in the table while it holds something, and no longer
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, Protocol, TypeVar

from vlm_worker.core.encoder_cache import Entry
from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.limits import Limits
from vlm_worker.core.measurements import BusyTimeCounter
from vlm_worker.core.sequence import Sequence
from vlm_worker.engine.constraints import Constraints
from vlm_worker.engine.events import EventBuffer, EventStream, PrefillEvent
from vlm_worker.engine.runner import DeviceErrors, Runner, run_device_copy
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import GoneError, InvalidRequestError
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import LiveRegions

NUM_REMEMBERED: Final = 4096
"""Keys of ended generations that are still distinguished from unknown keys."""


class Track(enum.Enum):
    """A part of an attempt that ends as a whole."""

    ENCODE = "encode"
    GENERATION = "generation"


class ResourceKind(enum.Enum):
    """The label of a total. The value names the track to which it belongs, then the resource."""

    ENCODE_CALL = (Track.ENCODE, "encode_call")
    EMBEDDING_PIN = (Track.ENCODE, "embedding_pin")
    RESERVED_BLOCKS = (Track.GENERATION, "reserved_blocks")
    SEQUENCE = (Track.GENERATION, "sequence")
    READABLE_BLOCKS = (Track.GENERATION, "readable_blocks")
    BLOCK_LOAN = (Track.GENERATION, "block_loan")

    @property
    def track(self) -> Track:
        return self.value[0]


class Resource(Protocol):
    """Something that an attempt must free. Its size does not change while it is held."""

    @property
    def kind(self) -> ResourceKind: ...
    @property
    def num_bytes(self) -> int: ...

    def release(self) -> bool:
        """Free it; False if a writer must confirm first (`Attempt.confirm`)."""


R = TypeVar("R", bound=Resource)


@dataclasses.dataclass(slots=True)
class Totals:
    """Of one kind of resource, over all attempts."""

    count: int = 0
    num_bytes: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Attempt:
    """The record of one `RequestKey`; also the value of `Sequence.output`.

    Attributes:
        resources: what it holds, in the order of `acquire`.
        sequence: its generation, from `submit` or `receive` to its end.
        stream: receives the events; None while the sequence is held or received.
        first_only: the stream ends with the first token.
        supplied: the caller answers NeedItems. If it does not, a sequence that lost embeddings
            finishes as DRAINED, to be continued on another worker.
        successor_stream: replaces `stream` after the first token.
        scheduled: ScheduledEvent was sent.
        requested_items: items of NeedItems whose embeddings have not arrived.
        prompt_pins: the pinned cache entry of each item of the prompt.
        missing_blocks: blocks that a peer has not delivered yet.
        encode_cancelled: the encode track was ended; its images send no further event.
        releasing: resources whose `release` is running. It may end the item that it belongs to,
            which releases the same resource: unpinning a queued image fails that image.
    """

    key: RequestKey
    table: AttemptTable
    resources: list[Resource] = dataclasses.field(default_factory=list)
    sequence: Sequence | None = None
    stream: EventStream[PrefillEvent] | None = None
    first_only: bool = False
    supplied: bool = False
    successor_stream: EventStream[PrefillEvent] | None = None
    scheduled: bool = False
    requested_items: set[int] = dataclasses.field(default_factory=set)
    prompt_pins: dict[int, Entry] = dataclasses.field(default_factory=dict)
    missing_blocks: set[int] = dataclasses.field(default_factory=set)
    encode_cancelled: bool = False
    releasing: list[Resource] = dataclasses.field(default_factory=list)

    def acquire(self, resource: Resource) -> None:
        self.resources.append(resource)
        self.table.count(resource, 1)

    def release(self, resource: Resource) -> None:
        """Release a resource; idempotent, also within its own release.

        One that must be confirmed stays.
        """
        if resource not in self.resources or resource in self.releasing:
            return
        self.releasing.append(resource)
        try:
            is_free = resource.release()
        finally:
            self.releasing.remove(resource)
        if is_free:
            self.confirm(resource)

    def confirm(self, resource: Resource) -> None:
        """Forget a resource that was released, or that another one has taken over."""
        self.resources.remove(resource)
        self.table.count(resource, -1)
        self.table.close_if_empty(self)

    def of(self, resource_type: type[R]) -> list[R]:
        """Its resources of one type, in order."""
        return [resource for resource in self.resources if isinstance(resource, resource_type)]

    def holds(self, track: Track) -> bool:
        return any(resource.kind.track is track for resource in self.resources)

    def end(self, track: Track) -> None:
        """Release all resources of a track, the last one first; idempotent. Sends no event."""
        self.encode_cancelled |= track is Track.ENCODE
        for resource in reversed(self.resources.copy()):
            if resource.kind.track is track:
                self.release(resource)


class AttemptTable:
    """All attempts that hold something, by key."""

    def __init__(self) -> None:
        self.by_key: dict[RequestKey, Attempt] = {}
        self.totals = {kind: Totals() for kind in ResourceKind}
        self._ended: collections.OrderedDict[RequestKey, None] = collections.OrderedDict()

    def get(self, key: RequestKey) -> Attempt | None:
        return self.by_key.get(key)

    def of(self, key: RequestKey, resource_type: type[R]) -> list[R]:
        """The resources of one type that a key holds, in order; none if the key is unknown."""
        attempt = self.by_key.get(key)
        return [] if attempt is None else attempt.of(resource_type)

    def open(self, key: RequestKey) -> Attempt:
        """The attempt of a key, or a new one: the caller acquires something for it."""
        if key not in self.by_key:
            self.by_key[key] = Attempt(key, self)
        return self.by_key[key]

    def sequences(self) -> list[Sequence]:
        """The sequences of all generations, in the order in which their attempts began."""
        return [one.sequence for one in self.by_key.values() if one.sequence is not None]

    def close_if_empty(self, attempt: Attempt) -> None:
        if not attempt.resources and self.by_key.get(attempt.key) is attempt:
            del self.by_key[attempt.key]

    def remember(self, key: RequestKey) -> None:
        """Record that the generation of a key has ended: the key is not used again."""
        self._ended[key] = None
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, key: RequestKey) -> bool:
        """Whether a generation of this key ended here."""
        return key in self._ended

    def return_loans(self, key: RequestKey, loans: Seq[BlockLoan]) -> None:
        """Return loans of a key: nothing reads or writes their blocks. Idempotent."""
        attempt = self.get(key)
        for loan in loans:
            loan.is_returned = True
            if attempt is not None:
                attempt.release(loan)

    def count(self, resource: Resource, sign: int) -> None:
        totals = self.totals[resource.kind]
        totals.count += sign
        totals.num_bytes += sign * resource.num_bytes

    def check(self) -> None:
        """Raise AssertionError if the totals differ from the resources, or an attempt is empty."""
        counted, self.totals = self.totals, {kind: Totals() for kind in ResourceKind}
        for attempt in self.by_key.values():
            assert attempt.resources, f"{attempt.key} holds nothing"
            for resource in attempt.resources:
                self.count(resource, 1)
        assert counted == self.totals, f"{self.totals} are held, {counted} are counted"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineContext:
    """What all parts of the engine thread share."""

    runner: Runner
    settings: EngineSettings
    clock: Callable[[], float]
    events: EventBuffer = dataclasses.field(default_factory=EventBuffer)
    attempts: AttemptTable = dataclasses.field(default_factory=AttemptTable)
    limits: Limits = dataclasses.field(default_factory=Limits)
    busy: BusyTimeCounter = dataclasses.field(default_factory=BusyTimeCounter)
    device_errors: DeviceErrors = dataclasses.field(default_factory=DeviceErrors)
    constraints: Constraints | None = None


@dataclasses.dataclass(eq=False, frozen=True, slots=True)
class Held:
    """A resource that `free` frees at once."""

    kind: ResourceKind
    free: Callable[[], None]
    num_bytes = 0

    def release(self) -> bool:
        self.free()
        return True


@dataclasses.dataclass(eq=False, frozen=True, slots=True)
class ReservedBlocks:
    """Blocks that the pool keeps for a request that has not begun."""

    pool: BlockPool
    num_blocks: int
    kind = ResourceKind.RESERVED_BLOCKS
    num_bytes = 0

    def release(self) -> bool:
        self.pool.unreserve(self.num_blocks)
        return True


@dataclasses.dataclass(eq=False, slots=True)
class BlockLoan:
    """KV blocks lent to a transfer, which writes them, or lets a peer read them, while steps run.

    A loan holds a separate reference to each block: if the attempt ends, no other sequence gets the
    blocks until the transfer has returned the loan.
    """

    pool: BlockPool
    blocks: Seq[int]
    to_write: bool
    is_returned: bool = False
    kind = ResourceKind.BLOCK_LOAN
    num_bytes = 0

    def release(self) -> bool:
        if self.is_returned:
            self.pool.release(self.blocks)
        return self.is_returned


@dataclasses.dataclass(eq=False, slots=True)
class _Readable:
    """The readable blocks of one sequence, and whether a reader has read some.

    The engine thread writes `blocks`, readers write `read`. `revoke` replaces the object.
    """

    blocks: tuple[int, ...] = ()
    read: bool = False


class ReadableBlocks:
    """Blocks that peers may read while steps run: a transfer does not wait for the end of a step.

    engine thread   publish(key, blocks) ... revoke(key), forget(key)    before another writes
    other threads   copy: check, copy, check again     a copy of blocks revoked meanwhile is void
                    read: check, views; call `check` after copying them
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._readable: dict[RequestKey, _Readable] = {}

    def num_readable(self, key: RequestKey) -> int:
        readable = self._readable.get(key)
        return 0 if readable is None else len(readable.blocks)

    def was_read(self, key: RequestKey) -> bool:
        """Whether a peer has read blocks of a sequence."""
        readable = self._readable.get(key)
        return readable is not None and readable.read

    def publish(self, key: RequestKey, blocks: Seq[int]) -> None:
        """Make `blocks` readable: they are written, and not written again while they are held."""
        self._readable.setdefault(key, _Readable()).blocks = tuple(blocks)

    def revoke(self, key: RequestKey) -> None:
        """Revoke the blocks of a preempted sequence: other sequences may write to them."""
        if key in self._readable:
            self._readable[key] = _Readable(read=self._readable[key].read)

    def forget(self, key: RequestKey) -> None:
        """Remove an ended sequence."""
        self._readable.pop(key, None)

    def copy(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview | None = None
    ) -> memoryview:
        """A copy of announced blocks, `[num_blocks, block_bytes]`, into `out` if given.

        The calling thread copies, while a step may run.

        Raises:
            GoneError: the request is no longer here.
            InvalidRequestError: blocks that BlocksReady has not announced.
        """
        readable, blocks = self._lookup(key, first_block, num_blocks)
        data = run_device_copy(
            "copying KV blocks out", lambda: self._runner.export_blocks(blocks, out)
        )
        self._check(key, readable)
        return data

    def read(
        self, key: RequestKey, first_block: int, num_blocks: int, out: memoryview
    ) -> memoryview | LiveRegions:
        """As `copy`, but without a copy if other threads may read the memory."""
        readable, blocks = self._lookup(key, first_block, num_blocks)
        memory = self._runner.block_memory(blocks)
        if memory is None:
            return self.copy(key, first_block, num_blocks, out)
        return LiveRegions(memory, lambda: self._check(key, readable))

    def lookup(self, key: RequestKey, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """The ids of readable blocks, for a loan. Raises as `copy`."""
        return self._lookup(key, first_block, num_blocks)[1]

    def _lookup(
        self, key: RequestKey, first_block: int, num_blocks: int
    ) -> tuple[_Readable, tuple[int, ...]]:
        readable = self._readable.get(key)
        self._check(key, readable)
        assert readable is not None
        blocks, end = readable.blocks, first_block + num_blocks
        if not 0 <= first_block <= end <= len(blocks):
            raise InvalidRequestError(
                f"blocks {first_block} to {end} were asked for; {len(blocks)} are ready"
            )
        readable.read = True
        return readable, blocks[first_block:end]

    def _check(self, key: RequestKey, readable: _Readable | None) -> None:
        if readable is None or self._readable.get(key) is not readable:
            raise GoneError(f"{key.request_id} attempt {key.attempt} holds no blocks here")
