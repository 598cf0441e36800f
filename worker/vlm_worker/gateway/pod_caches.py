"""What the pods hold of earlier requests, as far as this gateway knows. Pure: no I/O, no clock.

    request ─▶ RequestDigests:  a key per image, a digest per mark of the prompt
    encoded, prefilled, answered ─▶ record(pod, digests)
    route of the next request    ─▶ images(), prefix(): tokens by boot id

It is an estimate: a pod evicts without telling. A wrong entry costs a miss, never a wrong answer.
All digests have the tenant's cache salt as key, so no tenant is routed by what another one sent.

Laws (tests/worker/gateway/test_pod_caches.py):

    C1  there are never more than `max_entries` pairs of digest and pod
    C2  `forget` leaves nothing of a pod; a restarted pod has another boot id
    C3  recording twice equals recording once
    C4  two prompts share a mark only if salt, tokens and images before it are equal
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from vlm_worker.gateway.images import RequestImage
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.route import Route
from vlm_worker.types import Stage

MAX_ENTRIES: Final = 32_768
"""Pairs of digest and pod. A conversation of 2,000 tokens has about 50."""
CACHES_BYTES: Final = 8 << 20
"""Memory of that many pairs: 233 bytes each, measured."""
MAX_MARKED_TOKENS: Final = 32_768
"""Hashing longer prompts blocks the event loop for milliseconds, and changes few routes."""
DIGEST_BYTES: Final = 16


class Mark(NamedTuple):
    """A digest of the first `num_tokens` tokens of a prompt, and of the images in them."""

    num_tokens: int
    digest: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class RequestDigests:
    """The keys of a request in `PodCaches`, and those of its homes.

    Attributes:
        head: of the first block and its images, without salt; its rendezvous is the home.
        images: a key per image, in order. Exact reductions of an image share one.
        marks: of the prompt, the shortest first.
    """

    head: bytes
    images: tuple[bytes, ...]
    marks: tuple[Mark, ...]
    _placed: tuple[tuple[int, bytes], ...]
    _salt: bytes
    _block_size: int

    @classmethod
    def of(
        cls, prompt: Prompt, images: Sequence[RequestImage], *, salt: bytes, block_size: int
    ) -> RequestDigests:
        """The digests of a prompt with its images, one per offset."""
        keys = tuple(_image_key(image, salt) for image in images)
        placed = tuple(
            (offset, image.reduction.key(key) if image.reduction else key)
            for image, key, offset in zip(images, keys, prompt.offsets, strict=True)
        )
        marks = _marks(prompt.token_ids, placed, salt, block_size)
        return cls(_head(prompt, images, block_size), keys, marks, placed, salt, block_size)

    def with_answer(self, prompt: Prompt, answer: Sequence[int]) -> tuple[Mark, ...]:
        """The marks of a prompt and its answer, as the next turn of a conversation has them.

        The last token of an answer has no KV.
        """
        token_ids = (*prompt.token_ids, *answer[:-1])
        return _marks(token_ids, self._placed, self._salt, self._block_size)

    def of_beginning(self, prompt: Prompt) -> tuple[Mark, ...]:
        """The marks of another prompt with the same images, as a next turn begins."""
        keys = (key for _, key in self._placed)
        placed = tuple(zip(prompt.offsets, keys, strict=True))
        return _marks(prompt.token_ids, placed, self._salt, self._block_size)

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._block_size


class PodCaches:
    """Digests by the pods that hold them: the least recently recorded goes first.

    `num_known_tokens` counts, by stage, tokens that a chosen pod was known to hold.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        self._held: dict[bytes, set[bytes]] = {}
        self.num_entries = 0
        self.num_known_tokens: Counter[Stage] = Counter(dict.fromkeys(Stage, 0))

    def record(self, boot_id: bytes, digests: Iterable[bytes]) -> None:
        """Record that a pod holds these. Of one call, the first are forgotten first."""
        for digest in digests:
            holders = self._holders.setdefault(digest, ())
            if boot_id not in holders:
                self._holders[digest] = (*holders, boot_id)
                self._held.setdefault(boot_id, set()).add(digest)
                self.num_entries += 1
            self._holders.move_to_end(digest)
        while self.num_entries > self._max_entries:
            digest, holders = self._holders.popitem(last=False)
            for holder in holders:
                self._drop(holder, digest)

    def forget(self, boot_id: bytes) -> None:
        """Remove every entry of a pod."""
        digests = self._held.pop(boot_id, set())
        self.num_entries -= len(digests)
        for digest in digests:
            holders = tuple(one for one in self._holders[digest] if one != boot_id)
            if holders:
                self._holders[digest] = holders
            else:
                del self._holders[digest]

    def count(self, route: Route) -> None:
        """Count the tokens that the pods of a route are known to hold."""
        choices = zip(Stage, (route.encoder, route.prefill, route.decode), strict=True)
        for stage, choice in choices:
            self.num_known_tokens[stage] += 0 if choice is None else choice.num_cached

    def prefix(self, marks: Sequence[Mark]) -> dict[bytes, int]:
        """Tokens of the longest prefix that each pod holds, by boot id. Changes nothing."""
        found: dict[bytes, int] = {}
        for mark in reversed(marks):
            for boot_id in self._holders.get(mark.digest, ()):
                found.setdefault(boot_id, mark.num_tokens)
        return found

    def images(self, images: Sequence[tuple[bytes, int]]) -> dict[bytes, int]:
        """Visual tokens that each pod holds, by boot id. Changes nothing.

        `images` are pairs of key and visual tokens; an image that occurs twice counts once.
        """
        found: Counter[bytes] = Counter()
        for key, num_tokens in dict(images).items():
            for boot_id in self._holders.get(key, ()):
                found[boot_id] += num_tokens
        return dict(found)

    def _drop(self, boot_id: bytes, digest: bytes) -> None:
        self.num_entries -= 1
        held = self._held[boot_id]
        held.discard(digest)
        if not held:
            del self._held[boot_id]


def _image_key(image: RequestImage, salt: bytes) -> bytes:
    """The key of an image: its bytes, and the pixels that the model sees of it.

    A reduction is not in it: an encoder keeps the whole image, too. An approximate one is: it has
    nothing in common with the whole image.
    """
    hasher = hashlib.blake2b(image.digest, key=salt, digest_size=DIGEST_BYTES)
    hasher.update(image.max_pixels.to_bytes(8, "little"))
    if image.reduction is not None and image.reduction.method.is_approximate:
        hasher.update(image.reduction.key(bytes(32)))
    return hasher.digest()


def _head(prompt: Prompt, images: Sequence[RequestImage], block_size: int) -> bytes:
    hasher = xxhash.xxh3_128()
    head = prompt.token_ids[:block_size]
    hasher.update(b"".join(token.to_bytes(4, "little") for token in head))
    for image, offset in zip(images, prompt.offsets, strict=True):
        if offset < block_size:
            hasher.update(image.digest)
    return hasher.digest()


def _marks(
    token_ids: Sequence[int], placed: Sequence[tuple[int, bytes]], salt: bytes, block_size: int
) -> tuple[Mark, ...]:
    """The marks of a prompt; `placed` are the images, by the offset of their first token."""
    data = memoryview(array("i", token_ids[:MAX_MARKED_TOKENS])).cast("B")
    itemsize = array("i").itemsize
    hasher = hashlib.blake2b(key=salt, digest_size=DIGEST_BYTES)
    marks: list[Mark] = []
    done, num_images = 0, 0
    for num_blocks in marked(len(data) // itemsize // block_size):
        end = num_blocks * block_size
        hasher.update(data[done * itemsize : end * itemsize])
        while num_images < len(placed) and placed[num_images][0] < end:
            hasher.update(placed[num_images][1])
            num_images += 1
        marks.append(Mark(end, hasher.digest()))
        done = end
    return tuple(marks)


def marked(num_blocks: int) -> Iterator[int]:
    """The lengths in blocks, up to `num_blocks`, that have a mark: 1 to 8, then four per octave.

    A shared prefix is underestimated by less than a fifth, with some 40 marks per prompt at most.
    """
    length, step = 1, 1
    while length <= num_blocks:
        yield length
        if length >= 8 * step:
            step *= 2
        length += step
