"""Embeddings on their way into prompts: found in the cache, awaited, or asked of whoever submitted.

an item is   on hand   Sequence.embeddings[item], its cache entry pinned
             coming    this engine is encoding it
             asked     NeedItems was said; put_embedding brings it

KV blocks come before embeddings: only a sequence that has its blocks, or a claim to as many
(`core.claims`), asks for embeddings and holds any (E4). What comes when it has neither any more
goes to the cache, for as long as that has room.
"""

from __future__ import annotations

from collections.abc import Callable

from vlm_worker.core.encoder_entries import Entry
from vlm_worker.core.sequence import Sequence
from vlm_worker.engine.events import NeedItems
from vlm_worker.engine.guard import guarded
from vlm_worker.engine.outbox import Outbox
from vlm_worker.engine.pictures import Pictures
from vlm_worker.engine.runner import Runner
from vlm_worker.errors import InvalidRequestError


class PromptImages:
    """Brings embeddings and sequences together. Lives on the engine thread."""

    def __init__(self, runner: Runner, *, pictures: Pictures, outbox: Outbox) -> None:
        self._runner = runner
        self._pictures = pictures
        self._outbox = outbox
        self._askers: dict[bytes, list[tuple[Sequence, int]]] = {}
        pictures.queue.on_ready = self._on_ready

    def gather(self, sequence: Sequence, start: int) -> bool:
        """Bring what tokens from `start` on need; False where nobody can be asked for the missing.

        A sequence that was stalled goes on as soon as the first item that it needs is on hand.
        """
        assert sequence.may_pin
        needed = self.needs(sequence, start)
        lacking = [number for number in needed if not self._supply(sequence, number)]
        if lacking and not sequence.sink.supplied:
            return False
        new = tuple(number for number in lacking if number not in sequence.sink.asked)
        if new:
            sequence.sink.asked.update(new)
            for number in new:
                asker = (sequence, number)
                self._askers.setdefault(sequence.items[number].image_key, []).append(asker)
            self._outbox.emit(sequence.sink.stream, NeedItems(new))
        if needed and sequence.embeddings[needed[0]] is not None:
            sequence.wake()
        return True

    def needs(self, sequence: Sequence, start: int) -> list[int]:
        """The items that tokens from `start` on need."""
        return [number for number, item in enumerate(sequence.items) if item.end > start]

    def can_gather(self, sequence: Sequence, start: int) -> bool:
        """Whether `gather` would bring them now."""
        items = [sequence.items[number] for number in self.needs(sequence, start)]
        return sequence.sink.supplied or all(self._pictures.is_known(item) for item in items)

    def on_hand(self, sequence: Sequence, start: int) -> bool:
        """Whether nothing that tokens from `start` on need has to be made or fetched."""
        return all(self._pictures.is_ready(item) for item in sequence.items if item.end > start)

    def put(self, sequence: Sequence, number: int, rows: memoryview) -> None:
        """Take in what was asked for.

        Raises:
            InvalidRequestError: there is no such item.
            CorruptTransferError: a wrong size, or values that are not finite.
            EngineError: the device has no room for it, or fails otherwise.
        """
        if not 0 <= number < len(sequence.items):
            raise InvalidRequestError(f"the request has no item {number}", param="item")
        if number not in sequence.sink.asked:
            return
        item = sequence.items[number]
        embedding = guarded(
            "taking in an embedding",
            lambda: self._runner.import_embedding(rows, item.num_tokens),
        )
        self._asked_no_more(sequence, number)
        if sequence.may_pin:
            sequence.embeddings[number] = embedding
            sequence.wake()
        if not self._pictures.is_known(item):
            owner = (sequence.request.key, "prompt", number)
            sequence.sink.pins[number] = self._pictures.insert(item, embedding, owner)
            if not sequence.may_pin:
                self._drop(sequence, number)

    def drop_passed(self, sequence: Sequence, num_computed: int) -> None:
        """Let go of the embeddings of images that are computed whole."""
        for number, item in enumerate(sequence.items):
            if item.end <= num_computed:
                self._drop(sequence, number)

    def let_go(self, sequence: Sequence) -> None:
        """Hold nothing for a sequence that cannot run yet (E4); it is gathered again when it can.

        What was asked for may still come, and stays in the cache as long as that has room.
        """
        for number in range(len(sequence.items)):
            self._drop(sequence, number)

    def drop_all(self, sequence: Sequence) -> None:
        """Let go of everything."""
        for number in range(len(sequence.items)):
            self._drop(sequence, number)
            self._asked_no_more(sequence, number)

    def _supply(self, sequence: Sequence, number: int) -> bool:
        """Whether an item is on hand, or coming; pins it then."""
        if sequence.embeddings[number] is not None or number in sequence.sink.pins:
            return True
        key = sequence.request.key
        entry = self._pictures.take(sequence.items[number], (key, "prompt", number), key=key)
        if entry is None:
            return False
        sequence.sink.pins[number] = entry
        if entry.ready:
            sequence.embeddings[number] = self._pictures.cache.get(entry)
        else:
            self._pictures.queue.when_settled(entry, self._on_settled(sequence, number, entry))
        return True

    def _on_settled(
        self, sequence: Sequence, number: int, entry: Entry
    ) -> Callable[[Exception | None], None]:
        def settled(error: Exception | None) -> None:
            if sequence.sink.pins.get(number) is not entry:  # dropped meanwhile
                return
            if error is None:
                sequence.embeddings[number] = self._pictures.cache.get(entry)
            else:
                self._drop(sequence, number)
            sequence.wake()  # the next step asks again for what is missing

        return settled

    def _on_ready(self, image_key: bytes) -> None:
        """An image that prompts had asked for is on hand, whoever brought it."""
        for sequence, number in list(self._askers.get(image_key, ())):
            if sequence.may_pin and self._supply(sequence, number):
                self._asked_no_more(sequence, number)
                sequence.wake()

    def _asked_no_more(self, sequence: Sequence, number: int) -> None:
        if number not in sequence.sink.asked:
            return
        sequence.sink.asked.remove(number)
        image_key = sequence.items[number].image_key
        askers = self._askers[image_key]
        askers.remove((sequence, number))
        if not askers:
            del self._askers[image_key]

    def _drop(self, sequence: Sequence, number: int) -> None:
        sequence.embeddings[number] = None
        entry = sequence.sink.pins.pop(number, None)
        if entry is not None:
            self._pictures.unpin(entry, (sequence.request.key, "prompt", number))
