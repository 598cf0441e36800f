"""What a child says is checked: one that a file has taken over cannot reach into its worker."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_worker.core.families import load_family
from vlm_worker.media.decode_channel import (
    ChildConfig,
    ChildDiedError,
    DecodeChild,
    DecodeRequest,
    DecodeResult,
)
from vlm_worker.media.image_header import ImageHeader

MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
FAMILY = load_family(MODEL)
GEOMETRY = FAMILY.geometry(40, 60)
JOB = DecodeRequest(ImageHeader("PNG", 60, 40, 1, 8), 0, b"salt", 4)
GOOD = DecodeResult(
    True, bytes(32), bytes(32), GEOMETRY.grid_thw, GEOMETRY.num_tokens, 1, 1, 1,
    3 * GEOMETRY.height * GEOMETRY.width,
)  # fmt: skip

LIAR = """
import socket, sys
channel = socket.socket(fileno=0)
channel.recv(1)
channel.sendall(bytes.fromhex(sys.argv[1]))
try:
    while True: channel.sendall(bytes(65536))
except OSError: pass
"""


def liar(head: bytes) -> tuple[DecodeChild, subprocess.Popen[bytes]]:
    """A child that answers with `head` and then as many bytes as anybody reads."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        command = [sys.executable, "-S", "-c", LIAR, head.hex()]
        process = subprocess.Popen(command, stdin=theirs.fileno())
    return DecodeChild(process, ours), process


async def test_an_answer_of_the_right_shape_is_taken() -> None:
    child, _ = liar(GOOD.pack())
    done, body = await child.run(JOB, b"data", expected=GEOMETRY, timeout_seconds=10)
    assert (done, len(body)) == (GOOD, GOOD.num_bytes)
    child.close()


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"num_bytes": 1 << 40}, id="a terabyte of pixels"),
        pytest.param({"num_bytes": GOOD.num_bytes - 4}, id="too few bytes"),
        pytest.param({"grid_thw": (1, 2, 2)}, id="another grid"),
        pytest.param({"num_tokens": 10**6}, id="other tokens"),
        pytest.param({"ok": False, "num_bytes": 1 << 30}, id="a gigabyte of error"),
    ],
)
async def test_an_answer_of_another_shape_ends_the_child(lie: dict[str, object]) -> None:
    child, process = liar(GOOD._replace(**lie).pack())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChildDiedError) as caught:
        await child.run(JOB, b"data", expected=GEOMETRY, timeout_seconds=10)
    assert not caught.value.blameless
    assert process.returncode is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    child.close()


def test_frames_survive_the_wire() -> None:
    assert DecodeRequest.unpack(JOB.pack()) == JOB
    assert DecodeResult.unpack(GOOD.pack()) == GOOD
    config = ChildConfig(FAMILY.processor, 'revision/1 "quoted"', 1 << 29, 2)
    assert ChildConfig.from_json(config.to_json()) == config


async def test_a_child_can_open_nothing_and_is_not_heard_in_the_log() -> None:
    """What a file that has taken it over would try first."""
    config = ChildConfig(
        processor=FAMILY.processor,
        model_revision="r1",
        memory_bytes=1 << 29,
        cpu_seconds=2,
        native_library=None,
        scaled_jpeg=False,
    )
    child = await DecodeChild.start(config)
    try:
        proc = Path(f"/proc/{child.pid}")
        status = proc.joinpath("status").read_text()
        assert "NoNewPrivs:\t1" in status
        files = {file.name: str(file.readlink()) for file in proc.joinpath("fd").iterdir()}
        assert files.pop("0").startswith("socket:")
        assert files == {"1": os.devnull, "2": os.devnull}
        limits = proc.joinpath("limits").read_text().splitlines()
        (most,) = [line.split()[3:5] for line in limits if line.startswith("Max open files")]
        assert most == ["3", "3"]
    finally:
        child.close()
