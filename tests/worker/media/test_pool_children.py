"""Decode children die; the pool, and every other image, live on. Real processes throughout."""

import asyncio
import os
import signal

import pytest
from worker.media.files import encode, noise
from worker.media.pooling import FAMILY, proc, spec_of, until, works

from vlm_worker.errors import EngineError, InvalidImageError, OverloadedError
from vlm_worker.media.decode_channel import ChildConfig, DecodeChild
from vlm_worker.media.pool import MediaPool, MediaSettings


async def test_a_frozen_child_is_replaced_and_the_image_still_decoded() -> None:
    pool = MediaPool(
        FAMILY.processor,
        model_revision="r",
        settings=MediaSettings(num_children=1, timeout_seconds=0.5),
    )
    await pool.start()
    (frozen,) = pool.pids
    os.kill(frozen, signal.SIGSTOP)
    await works(pool)
    assert frozen not in pool.pids
    assert proc(frozen, "stat") is None
    await pool.close()


async def test_a_child_that_is_killed_is_replaced_and_the_image_still_decoded(
    pool: MediaPool,
) -> None:
    (killed,) = pool.pids
    os.kill(killed, signal.SIGKILL)
    await works(pool)
    assert len(pool.pids) == 1
    assert killed not in pool.pids


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGABRT, signal.SIGXCPU])
async def test_an_image_that_crashes_the_decoder_is_not_tried_again(
    pool: MediaPool, fault: signal.Signals
) -> None:
    (crashed,) = pool.pids
    os.kill(crashed, fault)
    data = encode(noise())
    with pytest.raises(InvalidImageError, match="cannot be decoded within 2 s"):
        await pool.prepare(data, spec_of(data))
    await until(lambda: len(pool.pids) == 1 and crashed not in pool.pids)
    await works(pool)


async def test_cpu_time_is_bounded_per_image(pool: MediaPool) -> None:
    """The kernel's limit counts a whole life; many images must not use it up together."""
    (child,) = pool.pids
    data = encode(noise(2000, 2000), "PNG", compress_level=1)
    spec = spec_of(data)
    for _ in range(12):
        await pool.prepare(data, spec)
    ticks = sum(int(x) for x in (proc(child, "stat") or b"").split()[13:15])
    soft = (proc(child, "limits") or b"").split(b"Max cpu time")[1].split()[0]
    used = ticks / os.sysconf("SC_CLK_TCK")
    assert int(soft) <= used + 4
    assert pool.pids == {child}


async def test_a_cancelled_image_gives_its_child_back(pool: MediaPool) -> None:
    data = encode(noise(2000, 2000))
    spec = spec_of(data)
    task = asyncio.create_task(pool.prepare(data, spec))
    waiting = asyncio.create_task(pool.prepare(data, spec))
    await until(lambda: pool.num_waiting == 1)
    waiting.cancel()
    task.cancel()
    results = await asyncio.gather(task, waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert pool.num_waiting == 0
    await works(pool)
    assert len(pool.pids) == 1


async def test_a_full_queue_gives_a_retry_time() -> None:
    settings = MediaSettings(num_children=1, max_waiting=2)
    pool = MediaPool(FAMILY.processor, model_revision="r", settings=settings)
    await pool.start()
    data = encode(noise(1000, 1000))
    spec = spec_of(data)
    tasks = [asyncio.create_task(pool.prepare(data, spec)) for _ in range(3)]
    await until(lambda: pool.num_waiting == 2)
    with pytest.raises(OverloadedError, match="2 images wait") as caught:
        await pool.prepare(data, spec)
    assert caught.value.retry_after_seconds >= 1
    assert len({(await task).image_key for task in tasks}) == 1
    await pool.close()


async def test_waiting_pixels_are_bounded_too() -> None:
    settings = MediaSettings(num_children=1, max_waiting_pixels=1000)
    pool = MediaPool(FAMILY.processor, model_revision="r", settings=settings)
    await pool.start()
    data = encode(noise())
    with pytest.raises(OverloadedError):
        await pool.prepare(data, spec_of(data))
    await pool.close()


async def test_closing_ends_children_and_answers_everyone() -> None:
    pool = MediaPool(FAMILY.processor, model_revision="r", settings=MediaSettings(num_children=1))
    await pool.start()
    (child,) = pool.pids
    data = encode(noise(1000, 1000))
    spec = spec_of(data)
    tasks = [asyncio.create_task(pool.prepare(data, spec)) for _ in range(3)]
    await until(lambda: pool.num_waiting == 2)
    await pool.close()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineError | asyncio.CancelledError) for r in results)
    assert proc(child, "stat") is None
    with pytest.raises(EngineError, match="closed"):
        await pool.prepare(data, spec)


async def test_a_child_that_cannot_start_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    pool = MediaPool(FAMILY.processor, model_revision="r")
    with pytest.raises(EngineError, match=r"did not start \(exit status 1\)"):
        await pool.start()
    assert not pool.pids


async def test_a_child_holds_nothing_of_its_worker(pool: MediaPool) -> None:
    (child,) = pool.pids
    environment = (proc(child, "environ") or b"").split(b"\0")
    names = {entry.split(b"=")[0] for entry in environment if entry}
    assert names == {b"PYTHONPATH", b"OPENBLAS_NUM_THREADS"}
    maps = proc(child, "maps") or b""
    assert b"_imaging" in maps
    assert b"libtorch" not in maps


async def test_children_end_with_their_worker() -> None:
    """A worker that is killed closes the channel; nothing else tells the child."""
    config = ChildConfig(FAMILY.processor, "r", memory_bytes=1 << 29, cpu_seconds=2)
    child = await DecodeChild.start(config)
    child._channel.close()
    await until(lambda: child._process.poll() is not None)
    child.close()
