"""The log of a container has all that it printed, in any chunks."""

import asyncio
import itertools
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from vlm_local.agent.logs import ContainerLog, LogOptions

LINES = st.lists(st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=8))


async def written(path: Path, pieces: list[bytes]) -> ContainerLog:
    log = ContainerLog(path)
    output = asyncio.StreamReader()
    pumping = asyncio.create_task(log.pump(output))
    for piece in pieces:
        output.feed_data(piece)
        await asyncio.sleep(0)
    output.feed_eof()
    await pumping
    return log


async def read(log: ContainerLog, **options) -> str:
    return b"".join([piece async for piece in log.read(LogOptions(**options))]).decode()


@given(lines=LINES, cuts=st.lists(st.integers(0, 80), max_size=5), tail=st.integers(0, 5))
def test_what_was_printed_is_read_back(tmp_path_factory, lines, cuts, tail):
    text = "".join(f"{line}\n" for line in lines).encode()
    marks = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(marks)]

    async def run() -> None:
        log = await written(tmp_path_factory.mktemp("log") / "0.log", pieces)
        assert (await read(log)).encode() == text
        assert await read(log, tail_lines=tail) == "".join(
            f"{line}\n" for line in lines[len(lines) - min(tail, len(lines)) :]
        )
        assert (await read(log, limit_bytes=7)).encode() == text[:7]

    asyncio.run(run())


async def test_a_full_disk_does_not_block_a_container_that_prints():
    log = ContainerLog(Path("/dev/full"))
    output = asyncio.StreamReader()
    pumping = asyncio.create_task(log.pump(output))
    output.feed_data(b"lost\n")
    await asyncio.sleep(0)
    output.feed_data(b"lost too\n")
    output.feed_eof()
    await pumping
    assert output.at_eof()


async def test_following_ends_when_the_container_does(tmp_path: Path):
    log = ContainerLog(tmp_path / "0.log")
    output = asyncio.StreamReader()
    pumping = asyncio.create_task(log.pump(output))
    following = asyncio.create_task(read(log, follow=True))
    output.feed_data(b"first\n")
    await asyncio.sleep(0)
    assert not following.done()
    output.feed_data(b"last without an end")
    output.feed_eof()
    assert await following == "first\nlast without an end\n"
    await pumping


async def test_a_line_without_end_is_kept_in_pieces(tmp_path: Path):
    log = await written(tmp_path / "0.log", [b"x" * 40_000] * 4)
    assert (await read(log)).replace("\n", "") == "x" * 160_000


async def test_lines_before_a_moment_are_left_out(tmp_path: Path):
    log = await written(tmp_path / "0.log", [b"old\n"])
    assert await read(log, since=datetime(2000, 1, 1, tzinfo=UTC)) == "old\n"
    assert await read(log, since=datetime(2100, 1, 1, tzinfo=UTC)) == ""


def test_the_query_of_kubectl_is_understood():
    now = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
    options = LogOptions.parse({"follow": "true", "tailLines": "5", "sinceSeconds": "60"}, now=now)
    assert options == LogOptions(follow=True, tail_lines=5, since=datetime(2026, 1, 1, tzinfo=UTC))


async def test_a_line_as_long_as_a_decision_record_stays_one(tmp_path: Path):
    text = b"%b\nnext\n" % (b"x" * 200_000)
    log = await written(tmp_path / "0.log", [text[:70_000], text[70_000:]])
    assert (await read(log)).encode() == text
