"""Which URLs and which addresses images may be fetched from. Pure.

    URL ──check_url──▶ scheme, port, host, user ──▶ host is allowed? ──▶ dial ──check_address──▶

`check_url` refuses by what is written. A name says nothing about its addresses, so `check_address`
decides again on each address that is dialled, after DNS and for each redirect.

yarl parses the URL here and for the request. So no second parser reads another host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

import msgspec
import yarl

MAX_URL_CHARACTERS: Final = 8192
"""Signed URLs of object stores have about 2,000."""
MAX_REDIRECTS: Final = 3
_PORTS: Final = {"https": 443, "http": 80}
_URL: Final = re.compile(r"[!-\[\]-~]+")  # printable ASCII without a space and a backslash
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL_V4: Final = tuple(
    ipaddress.IPv4Network(one)
    for one in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
    )
)  # fmt: skip
_PUBLIC_V6: Final = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6: Final = tuple(
    ipaddress.IPv6Network(one) for one in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
"""IANA's registries of special addresses; `is_global` of older Pythons lacks some of them."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Media(msgspec.Struct, frozen=True):
    """`media` of gateway.json.

    Attributes:
        allowed_domains: hosts; `*.example.com` allows every host below example.com.
        allow_http: whether URLs without TLS are fetched.
        allowed_networks: CIDRs that are not public and may be dialled.
        max_redirects: redirects that are followed, each checked like the first URL; up to 3.
    """

    allowed_domains: list[str] = []
    allow_http: bool = False
    allowed_networks: list[str] = []
    max_redirects: int = 0

    @property
    def networks(self) -> tuple[Network, ...]:
        return tuple(ipaddress.ip_network(one, strict=False) for one in self.allowed_networks)


class NotAllowedError(Exception):
    """The service fetches nothing from there. The message is fit for a client."""


def problem_of(media: Media) -> str:
    """Return what is wrong with the settings; empty if nothing is."""
    try:
        _ = media.networks
    except ValueError as error:
        return f"media.allowed_networks: {error}"
    if not 0 <= media.max_redirects <= MAX_REDIRECTS:
        return f"media.max_redirects: {media.max_redirects} is not 0 to {MAX_REDIRECTS}"
    return ""


def is_url(text: str) -> bool:
    """Whether a part names its image by an http or https URL, allowed or not."""
    return text[:8].lower().startswith(("http://", "https://"))


def check_url(text: str, media: Media) -> yarl.URL:
    """Return the URL to fetch.

    Raises:
        NotAllowedError: it is malformed, or the settings do not allow it.
    """
    if len(text) > MAX_URL_CHARACTERS or not _URL.fullmatch(text):
        raise NotAllowedError(
            f"The URL must have up to {MAX_URL_CHARACTERS} printable ASCII characters, without "
            "spaces and backslashes: encode others with % and write hosts in punycode"
        )
    try:
        url = yarl.URL(text)
        port, host = url.explicit_port, url.host
    except ValueError as error:
        raise NotAllowedError("The URL is malformed") from error
    if url.scheme not in _PORTS or not host:
        raise NotAllowedError("The URL must begin with https:// and a host")
    if not is_allowed(host, media.allowed_domains):
        raise NotAllowedError(
            "This service fetches no images from this host: send a data: URL. Its operator sets "
            "the hosts: gateway.media.allowedDomains of a VLMService"
        )
    if url.scheme == "http" and not media.allow_http:
        raise NotAllowedError("This service fetches images by https only")
    if url.user is not None or url.password is not None:
        raise NotAllowedError("The URL must have no user and no password")
    if port not in (None, _PORTS[url.scheme]):
        raise NotAllowedError(f"The port must be that of {url.scheme}, {_PORTS[url.scheme]}")
    return url


def is_allowed(host: str, domains: Sequence[str]) -> bool:
    """Whether a host is one of `domains`, or below one that begins with `*.`."""
    host = host.lower()
    return any(
        host.endswith(domain[1:]) if domain.startswith("*.") else host == domain
        for domain in map(str.lower, domains)
    )


def check_address(text: str, networks: Sequence[Network]) -> None:
    """Check an address before it is dialled.

    Raises:
        NotAllowedError: it is not public, and in none of `networks`.
    """
    address = _unmapped(ipaddress.ip_address(text.partition("%")[0]))
    if any(address in network for network in networks):
        return
    if not _is_public(address):
        raise NotAllowedError("The host has an address that is not public")


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _SPECIAL_V6)


def _unmapped(address: Address) -> Address:
    """Return the IPv4 address inside an IPv6 one that a gateway or the kernel translates."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address.teredo is not None:
        inner = address.teredo[1]
    if inner is None and address in _NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address if inner is None else inner
