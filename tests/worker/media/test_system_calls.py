"""A decode child that a hostile file has taken over can make no system call but those it needs."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from worker.media.pooling import FAMILY, proc

from vlm_worker.media.decode_channel import READY, READY_UNFILTERED, ChildConfig, DecodeChild
from vlm_worker.media.pool import DecodeProcessPool
from vlm_worker.media.system_calls import ALLOW, KILL, MACHINES, REFUSE, Machine, program

CONFIG = ChildConfig(FAMILY.processor, "r1", 1 << 29, 2)
WORKS_UNDER_LIMITS_ALONE = ("read a file", "write a file", "connect by IPv4", "fork")
SAYS_READY = """#!{python} -S
import socket
channel = socket.socket(fileno=0)
channel.sendall({ready!r})
channel.recv(1)
"""


def taken_over(directory: Path, *flags: str) -> dict[str, str]:
    directory.joinpath("empty").mkdir()
    command = [sys.executable, str(Path(__file__).with_name("taken_over.py")), str(directory)]
    ended = subprocess.run([*command, *flags], stdout=subprocess.PIPE, timeout=60, check=True)
    said: dict[str, str] = json.loads(ended.stdout)
    return said


def test_code_that_takes_over_a_child_can_reach_nothing(tmp_path: Path) -> None:
    said = taken_over(tmp_path)
    if (reason := said.pop("filter")) != "in force":
        pytest.skip(f"no filter of system calls here: {reason}")
    assert said == dict.fromkeys(said, "EPERM")
    assert len(said) == 12


def test_limits_alone_would_not_hold_it(tmp_path: Path) -> None:
    """So the attempts are real ones, and what refuses them is the filter."""
    said = taken_over(tmp_path, "limits")
    assert {name: said[name] for name in WORKS_UNDER_LIMITS_ALONE} == dict.fromkeys(
        WORKS_UNDER_LIMITS_ALONE, "done"
    )
    assert said["execute"] == "ENOENT"


async def test_a_child_says_whether_it_is_filtered() -> None:
    child = await DecodeChild.start(CONFIG)
    try:
        status = proc(child.pid, "status") or b""
        assert child.filtered == (b"Seccomp:\t2" in status)
    finally:
        child.close()


@pytest.mark.parametrize("ready", [READY, READY_UNFILTERED])
async def test_the_log_says_so_if_the_kernel_takes_no_filter(
    ready: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text(SAYS_READY.format(python=sys.executable, ready=ready))
    python.chmod(0o700)
    monkeypatch.setattr("vlm_worker.media.decode_channel.sys.executable", str(python))
    children = DecodeProcessPool(CONFIG, num_places=2)
    await children.start()
    children.end()
    warned = [record for record in caplog.records if "filter of system calls" in record.message]
    assert len(warned) == (ready == READY_UNFILTERED)


# ---- the program, on every architecture ----------------------------------------------------------


def verdict(machine: Machine, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the kernel would do with a call: as much of its interpreter as the program uses."""
    words = {0: number, 4: machine.audit if audit is None else audit}
    for index, argument in enumerate(arguments):
        words[16 + 8 * index] = argument & 0xFFFF_FFFF
    instructions, at, accumulator = program(machine), 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        match code:
            case 0x20:
                accumulator = words[value]
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(f"an instruction {code:#x} that is not used")


@pytest.mark.parametrize("name", MACHINES)
def test_only_listed_calls_of_the_own_architecture_pass(name: str) -> None:
    machine = MACHINES[name]
    free = set(machine.free.values())
    conditional = {*machine.no_new_code.values(), *machine.own_process.values()}
    assert not free & conditional
    for number in range(1024):
        if number not in conditional:
            assert verdict(machine, number) == (ALLOW if number in free else REFUSE), number
    x32 = 0x4000_0000
    assert all(verdict(machine, x32 | number) == REFUSE for number in free)
    i386 = 0x4000_0003
    assert all(verdict(machine, number, audit=i386) == KILL for number in range(512))


@pytest.mark.parametrize("name", MACHINES)
def test_memory_for_new_code_and_limits_of_others_are_refused(name: str) -> None:
    machine = MACHINES[name]
    for number in machine.no_new_code.values():
        assert verdict(machine, number, 0, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == ALLOW
        assert verdict(machine, number, 0, 4096, mmap.PROT_READ | mmap.PROT_EXEC) == REFUSE
    (prlimit,) = machine.own_process.values()
    assert verdict(machine, prlimit, 0) == ALLOW
    assert verdict(machine, prlimit, 1234) == REFUSE
