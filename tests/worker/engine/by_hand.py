"""An engine's state turned by hand, without its thread; and a runner that notes who called it.

engine = ByHand(max_encode_tokens=5)
engine.encode("a", images); engine.submit(request, images)
engine.turn()                      engine.calls, engine.told["a"]
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlm_worker.core.fair_order import Rank
from vlm_worker.core.step_values import StepInputs, StepOutput
from vlm_worker.engine.events import EventStream, NeedItems
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.engine.state import State
from vlm_worker.testing import ChecksumRunner, embed, plain_positions
from vlm_worker.types import PreparedImage, Request, RequestKey, TokenEvent


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A call of the encoder: the images' keys, and their tokens."""

    images: tuple[bytes, ...]
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Stepped:
    """A step: how many sequences decoded, and the images whose rows it read."""

    num_decodes: int
    images: frozenset[bytes]


class NotingRunner(ChecksumRunner):
    """A ChecksumRunner that notes its calls, in order."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.calls: list[Encoded | Stepped] = []
        self._key_of: dict[int, bytes] = {}

    def execute(self, inputs: StepInputs) -> StepOutput:
        read = frozenset(self._key_of[int(rows.embedding[0])] for rows in inputs.image_rows)
        counts = np.diff(inputs.query_start)
        self.calls.append(Stepped(int((counts == 1).sum()), read))
        return super().execute(inputs)

    def encode(self, images: Sequence[PreparedImage]) -> list[np.ndarray | Exception]:
        keys = tuple(image.image_key for image in images)
        self.calls.append(Encoded(keys, sum(image.num_tokens for image in images)))
        for image in images:
            self.know(image)
        return super().encode(images)

    def know(self, image: PreparedImage) -> None:
        """Recognise the rows of an image that others encoded."""
        self._key_of[int(embed(image)[0])] = image.image_key


class ByHand:
    """A `State`, its clock, and whoever answers NeedItems.

    Attributes:
        told: by request id, all events.
        asked: by request id, the items that NeedItems named and `answer` has not put.
    """

    def __init__(
        self, num_blocks: int = 65, *, runner: NotingRunner | None = None, **changes: Any
    ) -> None:
        settings = EngineSettings(
            max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, strict=True
        )
        self.runner = runner or NotingRunner(num_blocks)
        self.now = 0.0
        self.state = State(
            self.runner,
            settings=dataclasses.replace(settings, **changes),
            positions=plain_positions,
            clock=lambda: self.now,
        )
        self.told: dict[str, list[Any]] = collections.defaultdict(list)
        self.asked: dict[str, list[int]] = collections.defaultdict(list)
        self._images: dict[str, tuple[PreparedImage, ...]] = {}

    def encode(self, name: str, images: Sequence[PreparedImage], **rank: Any) -> None:
        """Hand images to the encoder; `rank` has fields of `Rank`."""
        stream: EventStream[Any] = EventStream(RequestKey(name, 0))
        self.state.encode_requests.encode(stream.key, tuple(images), stream, rank=Rank(**rank))

    def submit(
        self, request: Request, images: Sequence[PreparedImage] = (), *, for_peer: bool = False
    ) -> None:
        """Hand a prompt to prefill."""
        self._images[request.key.request_id] = tuple(images)
        self.state.sequences.submit(request, EventStream(request.key), for_peer=for_peer)

    def turn(self) -> bool:
        """One turn of the engine, and the reading of what it said."""
        busy = self.state.turn()
        for stream, event in self.state.events.take():
            if event is None:
                continue
            name = stream.key.request_id
            self.told[name].append(event)
            if isinstance(event, NeedItems):
                self.asked[name] += event.items
        return busy

    def answer(self) -> None:
        """Put all that was asked for."""
        for name, items in self.asked.items():
            for item in items:
                image = self._images[name][item]
                self.runner.know(image)
                rows = memoryview(embed(image).tobytes())
                self.state.put_embedding(RequestKey(name, 0), item, rows)
            items.clear()

    def tokens(self, name: str) -> list[int]:
        """What a request was answered so far."""
        return [event.token_id for event in self.told[name] if isinstance(event, TokenEvent)]

    @property
    def calls(self) -> list[Encoded | Stepped]:
        """The runner's calls, in order."""
        return self.runner.calls

    @property
    def num_prompt_pins(self) -> int:
        """Embeddings that prompts hold."""
        requests = self.state.encode_requests
        return requests.cache.num_pins - requests.held.count
