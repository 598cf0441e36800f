"""An engine with a disk tier, and a directory that fails as told."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.answers import kept_rows
from worker.engine.encode_helpers import events, key, prepared_image

from vlm_worker.core.embedding_file import file_name
from vlm_worker.engine.embedding_files import Directory
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemReady
from vlm_worker.reduction import Method, Reduction
from vlm_worker.testing import ChecksumRunner, PlacedRows, embed
from vlm_worker.types import PreparedImage

SIZE = embed(prepared_image(0)).nbytes
HALF = Reduction(Method.DIVERSE, 500)


class FaultyDirectory(Directory):
    """A directory whose calls wait for `gate`, and fail as told."""

    def __init__(self, path: Path) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_reads = 0
        self.write_error: OSError | None = None
        self.read_error: OSError | MemoryError | None = None
        self.remove_error: OSError | None = None
        self.num_removes = 0
        super().__init__(path)

    def read(self, name: str, max_bytes: int) -> tuple[bytearray, float]:
        self.num_reads += 1
        self.gate.wait()
        if self.read_error is not None:
            raise self.read_error
        return super().read(name, max_bytes)

    def remove(self, name: str) -> None:
        self.num_removes += 1
        if self.remove_error is not None:
            raise self.remove_error
        super().remove(name)

    def _write_all(self, fd: int, data: memoryview) -> None:
        self.gate.wait()
        if self.write_error is not None:
            os.write(fd, data[: data.nbytes // 2])  # a full disk takes a part
            raise self.write_error
        super()._write_all(fd, data)


@dataclasses.dataclass
class Tier:
    """An engine whose memory holds one image, on a directory."""

    engine: Engine
    runner: ChecksumRunner
    directory: FaultyDirectory
    until: Callable[..., Any]

    async def encode(self, image: PreparedImage, name: str = "a") -> ItemReady:
        (event,) = await events(self.engine.encode(key(name), [image]))
        assert isinstance(event, ItemReady), event
        rows = kept_rows(image)
        wire = rows.to_bytes() if isinstance(rows, PlacedRows) else rows.tobytes()
        assert bytes(await self.engine.export_embedding(key(name), 0)) == wire
        await self.engine.cancel(key(name))
        return event

    async def store(self, *numbers: int, resident: int = 1) -> None:
        """Encode images until all but the last are on the disk, and the engine knows it."""
        for number in numbers:
            await self.encode(prepared_image(number))
        names = {file_name(prepared_image(number).image_key) for number in numbers[:-resident]}
        await self.until(lambda: names <= self.files and len(self.files) == self.disk.entries)

    @property
    def files(self) -> set[str]:
        return {name for name in self.directory.names() if name.endswith(".embedding")}

    @property
    def disk(self) -> Any:
        return self.engine.stats().encoder_cache.disk
