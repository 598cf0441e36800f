"""Run a command as a pod would: `confined.py [--uid N] [--net A,B] [--no-ipv6] -- ARGV`.

--uid       as this uid and gid, in a user namespace: no entry in the user database has it
--net       in a network namespace with these addresses; 127.0.0.1 only beside another IPv4
            address, ::1 only beside another IPv6 address
--no-ipv6   as if the kernel had no IPv6 (`ipv6.disable=1`): a seccomp filter refuses its sockets

Nothing of it needs root. Stands alone: the standard library only.
"""

import argparse
import contextlib
import ctypes
import fcntl
import os
import pathlib
import socket
import struct
import subprocess
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SIOCSIFFLAGS, SIOCSIFADDR, SIOCDIFADDR = 0x8914, 0x8916, 0x8936
IFF_UP = 1
EAFNOSUPPORT = 97
SOCKET_CALLS = {"x86_64": 41, "aarch64": 198}

libc = ctypes.CDLL(None, use_errno=True)


def confined(
    *argv: str, uid: int | None = None, addresses: tuple[str, ...] = (), ipv6: bool = True
) -> list[str]:
    """The command line that runs `argv` like this; it ends with the calling thread."""
    options = [f"--parent={os.getpid()}"]
    options += [f"--uid={uid}"] if uid is not None else []
    options += [f"--net={','.join(addresses)}"] if addresses else []
    options += [] if ipv6 else ["--no-ipv6"]
    return [sys.executable, "-I", "-S", __file__, *options, "--", *argv]


def refused(uid: int | None = None, addresses: tuple[str, ...] = (), *, ipv6: bool = True) -> str:
    """Why this machine does not let a process be confined so; empty where it does."""
    command = confined(sys.executable, "-c", "", uid=uid, addresses=addresses, ipv6=ipv6)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def main() -> None:
    """Confine this process, then become the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--net", default="")
    parser.add_argument("--no-ipv6", action="store_true")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    addresses = [one for one in options.net.split(",") if one]
    _separate(options.uid, network=bool(addresses))
    if addresses:
        _configure(addresses)
    if options.no_ipv6:
        _refuse_ipv6()
    # last: a change of identity forgets it
    _checked(libc.prctl(PR_SET_PDEATHSIG, 9), "PR_SET_PDEATHSIG")
    if os.getppid() != options.parent:
        sys.exit("the parent ended")
    os.execvp(options.argv[0], options.argv)


def _separate(uid: int | None, *, network: bool) -> None:
    if uid is None and not network:
        return
    own_uid, own_gid = os.geteuid(), os.getegid()
    _checked(libc.unshare(CLONE_NEWUSER | (CLONE_NEWNET if network else 0)), "unshare")
    inside = (own_uid, own_gid) if uid is None else (uid, uid)
    pathlib.Path("/proc/self/setgroups").write_text("deny")
    pathlib.Path("/proc/self/uid_map").write_text(f"{inside[0]} {own_uid} 1")
    pathlib.Path("/proc/self/gid_map").write_text(f"{inside[1]} {own_gid} 1")


def _configure(addresses: list[str]) -> None:
    """Bring the loopback device up with these addresses; each kind brings its 127.0.0.1 or ::1.

    Every port is free for every user.
    """
    pathlib.Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as four:
        _ioctl(four, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
        wanted = [one for one in addresses if "." in one]
        for number, one in enumerate(wanted, start=1):
            _ioctl(four, SIOCSIFADDR, _ifreq(f"lo:{number}", one))
        if not wanted:
            _ioctl(four, SIOCSIFADDR, _ifreq("lo", "0.0.0.0"))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as six:
        index = socket.if_nametoindex("lo")
        wanted = [one for one in addresses if ":" in one]
        for one in wanted:
            _ioctl(six, SIOCSIFADDR, struct.pack("16sIi", _packed(one), 128, index))
        if not wanted:
            _ioctl(six, SIOCDIFADDR, struct.pack("16sIi", _packed("::1"), 128, index))


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, address)


def _ifreq(device: str, address: str) -> bytes:
    return struct.pack("16sHH4s8x", device.encode(), socket.AF_INET, 0, socket.inet_aton(address))


def _ioctl(sock: socket.socket, request: int, argument: bytes) -> None:
    fcntl.ioctl(sock, request, argument)


def _refuse_ipv6() -> None:
    """Have socket(AF_INET6, …) fail with EAFNOSUPPORT, as it does without IPv6 in the kernel."""
    number = SOCKET_CALLS[os.uname().machine]
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = b"".join(
        struct.pack("HBBI", *line)
        for line in (
            (load, 0, 0, 0),  # the number of the call
            (equal, 0, 3, number),
            (load, 0, 0, 16),  # its first argument
            (equal, 0, 1, socket.AF_INET6),
            (answer, 0, 0, 0x00050000 | EAFNOSUPPORT),
            (answer, 0, 0, 0x7FFF0000),
        )
    )
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _checked(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header)), "PR_SET_SECCOMP")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
