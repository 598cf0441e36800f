"""Embeddings for prompts: from the cache, from the encoder in flight, or requested by NeedItems.

an item is   cached      Sequence.embeddings[item], its cache entry pinned
             in flight   this engine is encoding it
             requested   NeedItems was sent; `put_embedding` delivers it

KV blocks come before embeddings: only a sequence with blocks or a soft reservation
(`core.admission`) requests and pins embeddings (E4). An embedding that arrives when it has
neither goes to the cache, if it fits.
"""

from __future__ import annotations

import functools

from vlm_worker.core.encoder_cache import Entry
from vlm_worker.core.sequence import Sequence
from vlm_worker.engine.attempts import Attempt, EngineContext
from vlm_worker.engine.encode_requests import EncodeRequests
from vlm_worker.engine.events import NeedItems
from vlm_worker.errors import InvalidRequestError


class PromptEmbeddings:
    """Supplies sequences with embeddings. Engine thread only."""

    def __init__(self, context: EngineContext, encode_requests: EncodeRequests) -> None:
        self._events = context.events
        self._encode_requests = encode_requests
        self._requesters: dict[bytes, list[tuple[Sequence, int]]] = {}
        encode_requests.queue.on_ready = self._on_ready

    def request_embeddings(self, sequence: Sequence, start: int) -> bool:
        """Request embeddings for the tokens from `start` on; False if a missing one has no source.

        A blocked sequence is unblocked as soon as the first item that it needs is here; if its
        prompt runs in one chunk, all of them.
        """
        assert sequence.can_pin_embeddings
        needed = self.needs(sequence, start)
        attempt: Attempt = sequence.output
        lacking = [number for number in needed if not self._supply(sequence, number)]
        if lacking and not attempt.supplied:
            return False
        new = tuple(number for number in lacking if number not in attempt.requested_items)
        if new:
            attempt.requested_items.update(new)
            for number in new:
                requester = (sequence, number)
                self._requesters.setdefault(sequence.items[number].image_key, []).append(requester)
            self._events.emit(attempt.stream, NeedItems(new))
        first = needed if sequence.whole_prompt else needed[:1]
        if first and all(sequence.embeddings[number] is not None for number in first):
            sequence.unblock()
        return True

    def needs(self, sequence: Sequence, start: int) -> list[int]:
        """The items that tokens from `start` on need."""
        return [number for number, item in enumerate(sequence.items) if item.end > start]

    def can_supply(self, sequence: Sequence, start: int) -> bool:
        """Whether `request_embeddings` would succeed now."""
        entries = self._entries(sequence, start)
        return sequence.output.supplied or all(entry is not None for entry in entries)

    def is_cached(self, sequence: Sequence, start: int) -> bool:
        """Whether all embeddings for the tokens from `start` on are cached."""
        return all(entry is not None and entry.ready for entry in self._entries(sequence, start))

    def put(self, sequence: Sequence, number: int, rows: memoryview) -> None:
        """Accept a requested embedding; ignore one that was not requested.

        Raises:
            InvalidRequestError: the request has no such item.
            CorruptTransferError: a wrong size, or values that are not finite.
            EngineError: the device is out of memory, or fails otherwise.
        """
        if not 0 <= number < len(sequence.items):
            raise InvalidRequestError(f"the request has no item {number}", param="item")
        if number not in sequence.output.requested_items:
            return
        item = sequence.items[number]
        self._encode_requests.check_size(item, rows)
        embedding = self._encode_requests.copies.import_embedding(rows, item.num_tokens)
        self._forget_requested_item(sequence, number)
        if sequence.can_pin_embeddings:
            sequence.embeddings[number] = embedding
            sequence.unblock()
        if self._encode_requests.find(item) is None:
            owner = (sequence.request.key, "prompt", number)
            entry = self._encode_requests.insert(item, embedding, owner)
            sequence.output.prompt_pins[number] = entry
            if not sequence.can_pin_embeddings:
                self._drop(sequence, number)

    def release_consumed(self, sequence: Sequence, num_computed: int) -> None:
        """Release the embeddings of images that are computed completely."""
        for number, item in enumerate(sequence.items):
            if item.end <= num_computed:
                self._drop(sequence, number)

    def release_pins(self, sequence: Sequence) -> None:
        """Release the embeddings of a sequence that cannot run yet (E4).

        It requests them again when it can run. A requested embedding may still arrive and stays in
        the cache until it is evicted.
        """
        self.release_consumed(sequence, sequence.num_tokens)

    def drop_all(self, sequence: Sequence) -> None:
        """Release the embeddings and forget the requested items."""
        self.release_pins(sequence)
        for number in tuple(sequence.output.requested_items):
            self._forget_requested_item(sequence, number)

    def _entries(self, sequence: Sequence, start: int) -> list[Entry | None]:
        """The cache entry of each item that tokens from `start` on need."""
        return [self._encode_requests.find(item) for item in sequence.items if item.end > start]

    def _supply(self, sequence: Sequence, number: int) -> bool:
        """Pin the embedding of an item; False if it is neither cached nor in flight."""
        if sequence.embeddings[number] is not None or number in sequence.output.prompt_pins:
            return True
        key = sequence.request.key
        entry = self._encode_requests.take(sequence.items[number], (key, "prompt", number), key=key)
        if entry is None:
            return False
        sequence.output.prompt_pins[number] = entry
        if entry.ready:
            sequence.embeddings[number] = entry.buffer
        else:
            entry.waiters.append(functools.partial(self._on_filled, sequence, number, entry))
        return True

    def _on_filled(
        self, sequence: Sequence, number: int, entry: Entry, error: Exception | None
    ) -> None:
        if sequence.output.prompt_pins.get(number) is not entry:  # dropped meanwhile
            return
        if error is None:
            sequence.embeddings[number] = entry.buffer
        else:
            self._drop(sequence, number)
        sequence.unblock()  # the next step requests the missing items again

    def _on_ready(self, image_key: bytes) -> None:
        """Supply the prompts that requested an image; its embedding is cached now."""
        for sequence, number in list(self._requesters.get(image_key, ())):
            if sequence.can_pin_embeddings and self._supply(sequence, number):
                self._forget_requested_item(sequence, number)
                sequence.unblock()

    def _forget_requested_item(self, sequence: Sequence, number: int) -> None:
        if number not in sequence.output.requested_items:
            return
        sequence.output.requested_items.remove(number)
        image_key = sequence.items[number].image_key
        requesters = self._requesters[image_key]
        requesters.remove((sequence, number))
        if not requesters:
            del self._requesters[image_key]

    def _drop(self, sequence: Sequence, number: int) -> None:
        sequence.embeddings[number] = None
        entry = sequence.output.prompt_pins.pop(number, None)
        if entry is not None:
            self._encode_requests.unpin(entry, (sequence.request.key, "prompt", number))
