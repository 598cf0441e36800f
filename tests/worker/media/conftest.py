"""Pools of one child."""

from collections.abc import AsyncIterator

import pytest
from worker.media.pooling import FAMILY, UNLIMITED, Heard

from vlm_worker.media.pool import MediaPool, MediaSettings


@pytest.fixture
async def heard() -> Heard:
    return Heard()


@pytest.fixture
async def pool(heard: Heard) -> AsyncIterator[MediaPool]:
    pool = MediaPool(
        FAMILY.processor,
        model_revision="r1",
        settings=MediaSettings(num_children=1),
        observer=heard,
    )
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
async def unguarded() -> AsyncIterator[MediaPool]:
    """A pool whose header check lets every size through, so that the child meets the bombs."""
    settings = MediaSettings(num_children=1, limits=UNLIMITED)
    pool = MediaPool(FAMILY.processor, model_revision="r1", settings=settings)
    await pool.start()
    yield pool
    await pool.close()
