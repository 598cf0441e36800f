"""Tries to make the gateway dial what it must not. Run in a network namespace by a test.

    python fetch_attacks.py

All addresses of `ADDRESSES` are on the loopback device of the namespace. One server listens on port
80 of all of them. It records the address that each connection came to, so a connection to any
address but `PUBLIC` is seen. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import socket
import urllib.parse
from collections import Counter
from collections.abc import Iterator

import aiohttp

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parts import ImagePart
from vlm_worker.gateway.fetching import urls as rules
from vlm_worker.gateway.fetching.fetcher import ImageFetcher
from vlm_worker.gateway.fetching.urls import Media

PUBLIC = "93.184.215.14"
LOOPBACK = ("127.0.0.1", "127.8.8.8")
V4 = (
    *LOOPBACK, "10.1.2.3", "172.16.0.1", "172.31.255.254", "192.168.1.1",
    "169.254.169.254", "169.254.170.2", "100.64.0.1", "192.0.0.8", "192.0.2.7", "198.18.0.1",
    "198.51.100.9", "203.0.113.5", "240.0.0.1",
)  # fmt: skip
V6 = ("fd00:ec2::254", "fc00::1", "fe80::a9fe:a9fe", "2001:db8::1", "100::1", "fec0::1")
ANY = ("0.0.0.0", "::", "::1")
"""The kernel takes them to this machine."""
TRANSLATED = tuple(
    str(ipaddress.IPv6Address(prefix | int(ipaddress.IPv4Address(one)) << shift))
    for one in ("127.0.0.1", "10.1.2.3", "169.254.169.254")
    for prefix, shift in ((0x64FF9B << 96, 0), (0x2002 << 112, 80))
)
"""NAT64 and 6to4 forms of IPv4 addresses."""
ADDRESSES = tuple(one for one in (PUBLIC, *V4, *V6, *TRANSLATED) if one not in LOOPBACK)
"""What the loopback device needs besides its own addresses."""
FORBIDDEN = (*V4, *V6, *TRANSLATED, *ANY, *(f"::ffff:{one}" for one in V4))
MEDIA = Media(allow_http=True, max_redirects=3)


class Answers(aiohttp.abc.AbstractResolver):
    """A DNS whose owner is the attacker: each question of a name gets the next answer."""

    def __init__(self) -> None:
        self.of: dict[str, Iterator[list[str]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: int = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        if host not in self.of:  # decimal, octal and shortened forms are addresses for libc
            infos = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
            addresses = [info[4][0] for info in infos]
        else:
            addresses = next(self.of[host])
        return [
            aiohttp.abc.ResolveResult(
                hostname=host,
                host=str(one),
                port=port,
                family=socket.AF_INET6 if ":" in str(one) else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for one in addresses
        ]

    async def close(self) -> None:
        """Nothing is open."""


class Server:
    """Redirects `/to/URL` to URL, and answers anything else with a few bytes."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        self.reached[address.removeprefix("::ffff:")] += 1
        path = urllib.parse.unquote((await reader.readline()).decode().split(" ")[1])
        body, head = b"bytes", "200 OK"
        if path.startswith("/to/"):
            head = f"302 Found\r\nLocation: {path.removeprefix('/to/')}"
        head = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()


def urls(answers: Answers) -> Iterator[tuple[str, str]]:
    """The attacks: a kind, and a URL. Every host of theirs is allowed by its name."""
    names = (f"a{number}.evil.example" for number in itertools.count())
    answers.of["good.example"] = itertools.repeat([PUBLIC])
    for address in FORBIDDEN:
        literal = f"[{address}]" if ":" in address else address
        yield "literal", f"http://{literal}/"
        for kind, given in (
            ("dns", [[address]]),
            ("dns, twice", [[address, "10.1.2.3"]]),
            ("dns, before a public one", [[address, PUBLIC]]),
            ("dns, after a public one", [[PUBLIC, address]]),
            ("rebinding", [[PUBLIC], [address]]),
        ):
            name = next(names)
            answers.of[name] = itertools.cycle(given)
            yield kind, f"http://{name}/"
            if kind == "rebinding":  # the second question has the other answer
                yield kind, f"http://{name}/"
                yield kind, f"http://{name}/to/http://{name}/"
        name = next(names)
        answers.of[name] = itertools.repeat([address])
        yield "redirect to a literal", f"http://good.example/to/http://{literal}/"
        yield "redirect to a name", f"http://good.example/to/http://{name}/"
        yield "two redirects", f"http://good.example/to/http://good.example/to/http://{literal}/"
        yield "user", f"http://good.example@{literal}/"
        yield "password", f"http://good.example:80@{literal}/"
        yield "backslash", f"http://good.example\\@{literal}/"
        yield "tab", f"http://good.exam\tple@{literal}/"
        yield "fragment", f"http://{literal}#@good.example/"
        yield "query", f"http://{literal}?@good.example/"
        yield "port of another service", f"http://{literal}:6443/"
        yield "scheme of a redirect", f"http://good.example/to/file://{literal}/etc/passwd"
        yield "no scheme in a redirect", f"http://good.example/to///{literal}/"
    for address in V4:
        number = int(ipaddress.IPv4Address(address))
        parts = [number >> shift & 255 for shift in (24, 16, 8, 0)]
        yield "decimal", f"http://{number}/"
        yield "hexadecimal", f"http://{number:#x}/"
        yield "octal", f"http://0{number:o}/"
        yield "octal parts", "http://" + ".".join(f"0{part:o}" for part in parts) + "/"
        yield "hexadecimal parts", "http://" + ".".join(f"{part:#x}" for part in parts) + "/"
        yield "two parts", f"http://{parts[0]}.{number & 0xFFFFFF}/"
        yield "three parts", f"http://{parts[0]}.{parts[1]}.{number & 0xFFFF}/"
        yield "trailing dot", f"http://{address}./"
        yield "encoded", "http://" + "".join(f"%{ord(c):02x}" for c in address) + "/"
        wide = "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else "。" for c in address)
        yield "full width", f"http://{wide}/"
        yield "mapped, hexadecimal", f"http://[::ffff:{number >> 16:x}:{number & 0xFFFF:x}]/"
        yield "compatible", f"http://[::{address}]/"
        yield "zone", f"http://[fe80::{number >> 16:x}%25lo]/"


async def reachable(server: Server) -> list[str]:
    """The forbidden addresses at which the server answers here: what an attack could reach."""
    found = []
    for address in FORBIDDEN:
        try:
            reader, writer = await asyncio.open_connection(address, 80)
        except OSError:
            continue
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        found += [address] if await reader.read() else []
        writer.close()
    server.reached.clear()
    return found


async def main() -> None:
    server, answers = Server(), Answers()
    listening = [
        await asyncio.start_server(server, host, 80, family=family)
        for host, family in (("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6))
    ]
    open_to_attack = await reachable(server)
    rules.is_allowed = lambda host, domains: True  # type: ignore[assignment]
    images = ImageFetcher(resolver=answers)
    outcomes: dict[str, Counter[str]] = {}
    tries = list(urls(answers))
    for kind, url in tries:
        outcome = "fetched"
        try:
            await images.fetch(
                [ImagePart(url, "auto", "x")], MEDIA, tenant="t", max_bytes=100, hold=int
            )
        except ApiError as error:
            outcome = f"{error.status} {error.code}"
        outcomes.setdefault(kind, Counter())[outcome] += 1
    await images.close()
    print(
        json.dumps(
            {
                "tries": len(tries),
                "outcomes": outcomes,
                "reached": server.reached,
                "open": open_to_attack,
            }
        )
    )
    for one in listening:
        one.close()


if __name__ == "__main__":
    asyncio.run(main())
