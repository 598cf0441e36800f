"""Streams of a GPU that is not there: what would run out of order on one is found by its clocks.

    stream      counts its operations, and knows how far it has waited for each other stream
    event       what a stream knew when it was recorded; who waits for it knows that, too
    memory      who wrote it last, who has read it since, and whose it is: when nobody holds it any
                more, it goes back to the stream on which it was made

Operations compute at once, in the order of Python. Two of them that share memory, and that no event
orders, are a race all the same; so is memory that goes back while another stream may still read it.
That Python waited for a stream orders nothing here: nobody is to rely on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

METADATA_ALONE = re.compile(r"aten::(new_.*|.*_like)$")

Clock = dict[int, int]
"""How far each stream had come, by its number."""


@dataclasses.dataclass(eq=False)
class Stream:
    """`clock[number]` counts its own operations."""

    number: int
    priority: int
    clock: Clock

    def knows(self, other: int, time: int) -> bool:
        return self.clock.get(other, 0) >= time


@dataclasses.dataclass(eq=False)
class Memory:
    """A storage; accesses are `(stream, time)`."""

    owner: Stream
    written: tuple[int, int]
    read: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    kept: set[int] = dataclasses.field(default_factory=set)


class WatchedQueues:
    """As `CudaStreams`; `races` says what is wrong."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.num_operations: dict[int, int] = {}
        self.priorities: list[int] = []
        self._memories: dict[int, Memory] = {}
        self._default = Stream(0, 0, {})
        self._here = threading.local()
        self._lock = threading.RLock()

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self._here, "stream", self._default)
        return stream

    def stream(self, *, priority: int) -> Stream:
        self.priorities.append(priority)
        return Stream(len(self.priorities), priority, {})

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        try:
            with Watch(self):
                yield
        finally:
            self._here.stream = before

    def record(self) -> Clock:
        with self._lock:
            return dict(self.current.clock)

    def wait(self, event: Clock) -> None:
        with self._lock:
            clock = self.current.clock
            for number, time in event.items():
                clock[number] = max(clock.get(number, 0), time)

    def keep(self, x: torch.Tensor) -> None:
        with self._lock:
            memory = self._memories.get(x.untyped_storage()._cdata)
            if memory is not None:
                memory.kept.add(self.current.number)

    def ran(self, name: str, read: set[int], written: set[int], made: list[torch.Tensor]) -> None:
        """Note an operation of the current stream, by the storages that it touched."""
        with self._lock:
            stream = self.current
            now = stream.clock.get(stream.number, 0) + 1
            stream.clock[stream.number] = now
            self.num_operations[stream.number] = now
            for key in (read | written) & self._memories.keys():
                memory = self._memories[key]
                before = [memory.written, *(memory.read if key in written else ())]
                if not all(stream.knows(*access) for access in before):
                    self.races.append(f"{name} on {stream.number} beside {before}")
                if key in written:
                    memory.written, memory.read = (stream.number, now), []
                else:
                    memory.read.append((stream.number, now))
            for x in made:
                storage = x.untyped_storage()
                if storage._cdata not in self._memories:
                    self._memories[storage._cdata] = Memory(stream, (stream.number, now))
                    weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        with self._lock:
            memory = self._memories.pop(key)
            for number, time in (memory.written, *memory.read):
                if number not in memory.kept and not memory.owner.knows(number, time):
                    self.races.append(f"memory of {memory.owner.number} is read by {number}")


class Watch(TorchDispatchMode):
    """Tells the queues what a thread computes."""

    def __init__(self, queues: WatchedQueues) -> None:
        super().__init__()
        self._queues = queues

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(one, kwargs[one.name]) for one in schema.arguments if one.name in kwargs]
        touched: dict[bool, set[int]] = {False: set(), True: set()}
        for argument, value in given:
            alias = argument.alias_info
            if alias is None and METADATA_ALONE.match(schema.name):
                continue
            if alias is None or alias.is_write:
                touched[alias is not None] |= {key(x) for x in tensors(value)}
        inputs = {key(x) for x in tensors((args, kwargs))}
        found = func(*args, **kwargs)
        made = [x for x in tensors(found) if key(x) not in inputs]
        self._queues.ran(schema.name, touched[False], touched[True], made)
        return found


def key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def tensors(found: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
