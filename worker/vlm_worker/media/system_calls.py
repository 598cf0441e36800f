"""The seccomp filter of a decode child: the system calls that it may make after its start.

call ─▶ foreign architecture? kill the process ─▶ on the list? allow ─▶ else EPERM

A child reads requests from an open socket, computes, and allocates memory. It never opens,
connects, executes, forks, traces or signals, so the list has none of these calls. A refused call
fails without ending the process: a C library may try it and continue without.

The filter is classic BPF over `struct seccomp_data`: seccomp(2), linux/seccomp.h, linux/filter.h.
Numbers: linux/arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_FILTER_FLAG_TSYNC: Final = 1
"""Apply to all threads of the process, not only to the calling one."""

KILL: Final = 0x8000_0000
REFUSE: Final = 0x0005_0000 | errno.EPERM
ALLOW: Final = 0x7FFF_0000

_LOAD: Final = 0x20
"""Load a 32-bit word at a fixed offset."""
_IF_EQUAL: Final = 0x15
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_NUMBER_AT: Final = 0
_ARCHITECTURE_AT: Final = 4
_ARGUMENTS_AT: Final = 16
_PROT_EXEC: Final = 4


class Instruction(NamedTuple):
    """`struct sock_filter`: jumps are relative to the next instruction."""

    code: int
    if_true: int
    if_false: int
    value: int


class Machine(NamedTuple):
    """An architecture: its audit number, the number of seccomp(2), and of the allowed calls."""

    audit: int
    seccomp: int
    free: Mapping[str, int]
    no_new_code: Mapping[str, int]
    own_process: Mapping[str, int]


_X86_64 = Machine(
    audit=0xC000_003E,
    seccomp=317,
    free={
        "read": 0, "write": 1, "close": 3, "fstat": 5, "munmap": 11, "brk": 12, "rt_sigaction": 13,
        "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25, "madvise": 28,
        "getpid": 39, "sendto": 44, "recvfrom": 45, "exit": 60, "gettimeofday": 96,
        "getrusage": 98, "sigaltstack": 131, "gettid": 186, "futex": 202, "restart_syscall": 219,
        "clock_gettime": 228, "exit_group": 231, "getrandom": 318,
    },
    no_new_code={"mmap": 9, "mprotect": 10},
    own_process={"prlimit64": 302},
)  # fmt: skip
_AARCH64 = Machine(
    audit=0xC000_00B7,
    seccomp=277,
    free={
        "close": 57, "read": 63, "write": 64, "fstat": 80, "exit": 93, "exit_group": 94,
        "futex": 98, "clock_gettime": 113, "sched_yield": 124, "restart_syscall": 128,
        "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
        "getrusage": 165, "gettimeofday": 169, "getpid": 172, "gettid": 178, "sendto": 206,
        "recvfrom": 207, "brk": 214, "munmap": 215, "mremap": 216, "madvise": 233,
        "getrandom": 278,
    },
    no_new_code={"mmap": 222, "mprotect": 226},
    own_process={"prlimit64": 261},
)  # fmt: skip
MACHINES: Final[Mapping[str, Machine]] = {"x86_64": _X86_64, "aarch64": _AARCH64}


def set_no_new_privileges() -> None:
    """Set PR_SET_NO_NEW_PRIVS with prctl(2); raises OSError if the system does not support it."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None or prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot give up new privileges")


def allow_only_what_decoding_needs() -> str | None:
    """Install the filter permanently. Returns why it could not be installed; None if it is active.

    Call `set_no_new_privileges` first.
    """
    system, machine = os.uname().sysname, os.uname().machine
    if system != "Linux" or machine not in MACHINES or sys.maxsize < 2**32:
        return f"there is no filter for {system} on {machine}"
    chosen = MACHINES[machine]
    packed = b"".join(struct.pack("=HBBI", *each) for each in program(chosen))
    filters = ctypes.create_string_buffer(packed, len(packed))
    # struct sock_fprog: the number of instructions, and their address
    described = struct.pack("@HP", len(packed) // 8, ctypes.addressof(filters))
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    ended = syscall(
        ctypes.c_long(chosen.seccomp),
        ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER),
        ctypes.c_ulong(_SECCOMP_FILTER_FLAG_TSYNC),
        described,
    )
    if ended == 0:
        return None
    return f"seccomp(2) failed: {os.strerror(ctypes.get_errno()) if ended < 0 else 'of a thread'}"


def program(machine: Machine) -> Sequence[Instruction]:
    return [
        Instruction(_LOAD, 0, 0, _ARCHITECTURE_AT),
        Instruction(_IF_EQUAL, 1, 0, machine.audit),
        Instruction(_RETURN, 0, 0, KILL),
        Instruction(_LOAD, 0, 0, _NUMBER_AT),
        *(part for number in machine.free.values() for part in _always(number)),
        *(part for number in machine.no_new_code.values() for part in _without_exec(number)),
        *(part for number in machine.own_process.values() for part in _of_itself(number)),
        Instruction(_RETURN, 0, 0, REFUSE),
    ]


def _always(number: int) -> tuple[Instruction, ...]:
    return (Instruction(_IF_EQUAL, 0, 1, number), Instruction(_RETURN, 0, 0, ALLOW))


def _without_exec(number: int) -> tuple[Instruction, ...]:
    """mmap, mprotect: refuse PROT_EXEC in the third argument, the protection."""
    return (
        Instruction(_IF_EQUAL, 0, 4, number),
        Instruction(_LOAD, 0, 0, _low_word_of(argument=2)),
        Instruction(_IF_ANY_BIT, 0, 1, _PROT_EXEC),
        Instruction(_RETURN, 0, 0, REFUSE),
        Instruction(_RETURN, 0, 0, ALLOW),
    )


def _of_itself(number: int) -> tuple[Instruction, ...]:
    """prlimit64: the first argument is a process; only 0, the caller, is allowed."""
    return (
        Instruction(_IF_EQUAL, 0, 4, number),
        Instruction(_LOAD, 0, 0, _low_word_of(argument=0)),
        Instruction(_IF_EQUAL, 1, 0, 0),
        Instruction(_RETURN, 0, 0, REFUSE),
        Instruction(_RETURN, 0, 0, ALLOW),
    )


def _low_word_of(*, argument: int) -> int:
    """Offset of an argument's low word in seccomp_data; both architectures are little-endian."""
    return _ARGUMENTS_AT + 8 * argument
