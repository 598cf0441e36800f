"""The memory that requests may hold in one worker process, and who gets it next. Pure.

    MemoryBudget     one number of bytes, divided into a share for each kind of use
    UploadMemory     bytes of files, counted when they arrive: what does not fit is refused
    ImageMemory      decoded images: what does not fit waits its turn, a call's images all at once

Laws (tests/worker/core/test_memory.py):

    M1  what is in use never exceeds its share
    M2  a claim gets all that it asks for or nothing, so no two claims wait for each other
    M3  if whoever holds memory gives it back, every claim that may ever fit is granted
    M4  small claims never wait for large ones, and no tenant waits for all claims of another
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping
from typing import Final

SMALL_SHARE: Final = 8
"""One eighth of the image memory is kept for small claims."""
SMALL_CLAIMS: Final = 4
"""A claim is small if so many of its size fit into what is kept for small ones."""


class MemoryKind(enum.StrEnum):
    """What requests hold memory for; the label of `vlm_request_memory_bytes`."""

    UPLOADS = "uploads"
    IMAGES = "images"
    EMBEDDINGS = "embeddings"
    EXPOSED = "exposed"


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that requests may hold in one process, by kind.

    Attributes:
        uploads: files of images that are received or wait to be decoded.
        images: pixels and patches, from decoding until they are encoded.
        embeddings: embeddings that are queued or held for peers, with the copies made for these.
        exposed: memory that peers read by themselves.
    """

    uploads: int = 0
    images: int = 0
    embeddings: int = 0
    exposed: int = 0

    @property
    def total(self) -> int:
        """All of them: what the process declares."""
        return self.uploads + self.images + self.embeddings + self.exposed

    def by_kind(self) -> Mapping[MemoryKind, int]:
        """The same by kind."""
        return {kind: getattr(self, kind.value) for kind in MemoryKind}


def divide(
    total: int | None,
    *,
    uploads: int,
    images: int,
    embeddings: int,
    exposed: int,
    least_uploads: int,
    least_images: int,
) -> MemoryBudget:
    """Divide a process's bytes among the kinds; None is the sum of the defaults.

    `embeddings` and `exposed` are bounds of their own, which stay as they are. `uploads` and
    `images` are defaults: a given total changes them alike.

    Raises:
        ValueError: the total is too small to serve even one image, with the numbers.
    """
    if total is None:
        return MemoryBudget(uploads, images, embeddings, exposed)
    serves_images = uploads + images > 0
    own = embeddings + exposed
    least = own + (least_uploads + least_images if serves_images else 0)
    if total < least:
        raise ValueError(
            f"the request memory of {total} bytes is too small: {embeddings} are for embeddings, "
            f"{exposed} for memory that peers read, and one image needs {least - own}: "
            f"give it at least {least}"
        )
    if not serves_images:
        return MemoryBudget(0, 0, embeddings, exposed)
    rest = total - own
    share = rest * uploads // (uploads + images)
    share = min(max(share, least_uploads), rest - least_images)
    return MemoryBudget(share, rest - share, embeddings, exposed)


class UploadMemory:
    """Bytes of files that have arrived and are still needed.

    Attributes:
        num_refused: times that files or a part of one did not fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.num_refused = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes would fit now; a refusal is counted, the bytes are not."""
        fits = self.used + num_bytes <= self.capacity
        self.num_refused += not fits
        return fits

    def take(self, num_bytes: int) -> bool:
        """Count bytes that have arrived; False if they do not fit: their call has to end."""
        if not self.has_room(num_bytes):
            return False
        self.used += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """They are not needed any more."""
        assert 0 <= num_bytes <= self.used
        self.used -= num_bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The memory that one call's images need, all of it. `tenant` is whose call it is."""

    num_bytes: int
    tenant: bytes
    is_small: bool


class ImageMemory:
    """Memory of decoded images. Claims are granted whole, in the order of their lane.

    small    first come, first served
    large    one claim of each tenant in turn; the next one is chosen when the last was granted

    Small claims may use everything while no large one waits, and else what is kept for them.

    Attributes:
        num_refused: claims that found too many others waiting.
        num_waiting: images of claims that wait.
    """

    def __init__(self, capacity: int, *, max_waiting: int) -> None:
        self.capacity = capacity
        self.num_refused = 0
        self.num_waiting = 0
        self._max_waiting = max_waiting
        self._kept = capacity // SMALL_SHARE
        self._used_small = 0
        self._used_large = 0
        self._small: collections.deque[tuple[Claim, int]] = collections.deque()
        self._large: collections.OrderedDict[bytes, collections.deque[tuple[Claim, int]]]
        self._large = collections.OrderedDict()

    @property
    def used(self) -> int:
        """Bytes of all claims that are granted."""
        return self._used_small + self._used_large

    @property
    def largest(self) -> int:
        """Bytes of the largest claim that is ever granted."""
        return self.capacity - self._kept

    def claim(self, num_bytes: int, *, tenant: bytes) -> Claim:
        """A claim, which holds nothing yet. It must not exceed `largest`."""
        assert 0 <= num_bytes <= self.largest
        return Claim(num_bytes, tenant, is_small=num_bytes * SMALL_CLAIMS <= self._kept)

    def take_early(self, claim: Claim) -> bool:
        """Grant a claim whose files are not all here, if half of the memory stays free.

        A caller that never sends the rest of its files holds no more than that half.
        """
        waits = self._small or self._large
        if waits or self.used + claim.num_bytes > self.capacity // 2 or not self._fits(claim):
            return False
        self._grant(claim)
        return True

    def wait(self, claim: Claim, *, num_images: int) -> bool:
        """Put a claim into its lane; False if too many images wait already."""
        if self.num_waiting and self.num_waiting + num_images > self._max_waiting:
            self.num_refused += 1
            return False
        self.num_waiting += num_images
        if claim.is_small:
            self._small.append((claim, num_images))
        else:
            lane = self._large.setdefault(claim.tenant, collections.deque())
            lane.append((claim, num_images))
        return True

    def granted(self) -> list[Claim]:
        """Grant what fits now, in order; called after every change."""
        found = []
        while self._large:
            tenant, lane = next(iter(self._large.items()))
            if not self._fits(lane[0][0]):
                break
            found.append(self._leave(lane))
            del self._large[tenant]
            if lane:  # this tenant's next claim comes after one of each other tenant
                self._large[tenant] = lane
        while self._small and self._fits(self._small[0][0]):
            found.append(self._leave(self._small))
        return found

    def give_up(self, claim: Claim) -> None:
        """Take a claim that still waits out of its lane."""
        lane = self._small if claim.is_small else self._large[claim.tenant]
        entry = next(entry for entry in lane if entry[0] is claim)
        lane.remove(entry)
        self.num_waiting -= entry[1]
        if not claim.is_small and not lane:
            del self._large[claim.tenant]

    def give_back(self, claim: Claim) -> None:
        """A claim that was granted is not needed any more."""
        if claim.is_small:
            self._used_small -= claim.num_bytes
        else:
            self._used_large -= claim.num_bytes
        assert self._used_small >= 0
        assert self._used_large >= 0

    def _fits(self, claim: Claim) -> bool:
        if not claim.is_small:
            beyond = max(self._used_small - self._kept, 0)
            return self._used_large + beyond + claim.num_bytes <= self.largest
        if self._large:
            return self._used_small + claim.num_bytes <= self._kept
        return self.used + claim.num_bytes <= self.capacity

    def _leave(self, lane: collections.deque[tuple[Claim, int]]) -> Claim:
        claim, num_images = lane.popleft()
        self.num_waiting -= num_images
        self._grant(claim)
        return claim

    def _grant(self, claim: Claim) -> None:
        if claim.is_small:
            self._used_small += claim.num_bytes
        else:
            self._used_large += claim.num_bytes
