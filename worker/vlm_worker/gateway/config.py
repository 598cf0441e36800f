"""Settings that may change while the gateway runs: gateway.json and the keys, read each second.

If a file cannot be read or parsed, its last valid content applies and the log has the reason. A
tenant is the name of the file that contains its keys, one per line. All of them are valid, so that
clients can change from one to the next; the first one gives the tenant's salt. A file of several
lines is refused if one of them does not look like a key: it is another file of the Secret.

key ─┬─ SHA-256 ─▶ compared with the digest of a client's key
     └─ HMAC ────▶ secret ─ HMAC(model, tenant) ─▶ the tenant's cache salt (decision 0027)
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from vlm_worker.gateway import cors
from vlm_worker.gateway.cors import Cors
from vlm_worker.gateway.fetching import urls
from vlm_worker.gateway.fetching.urls import Media
from vlm_worker.gateway.rate_limits import TenantLimits
from vlm_worker.gateway.visual import VisualLimits, problem_of
from vlm_worker.types import Modality

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
MAX_KEY_BYTES = 4096
_ONE_OF_SEVERAL: Final = re.compile(rb"(?!-----)[A-Za-z0-9._~+/-]{16,}=*")
"""A key beside others in its file: a bearer token of RFC 6750, and neither PEM, JSON nor prose."""
SECRET_BYTES = 32
# No request waits longer than this for free KV.
MAX_WAIT_SECONDS = 600.0


class Slo(msgspec.Struct, frozen=True):
    """Latency targets in milliseconds. `overrides` has TTFT targets by modality."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    overrides: dict[str, float] = {}

    def ttft_seconds(self, modality: Modality) -> float | None:
        """Return the TTFT target of a modality, in seconds; None without a target."""
        milliseconds = self.overrides.get(modality.value, self.ttft_ms)
        return None if milliseconds is None else milliseconds / 1000


class Limits(msgspec.Struct, frozen=True):
    images_per_request: int = 4
    bytes_per_image: int = 20 * 2**20
    pixels_per_image: int = 16_700_000
    on_oversize: Literal["Downscale", "Reject"] = "Downscale"
    on_corrupt: Literal["Reject", "Skip"] = "Reject"
    video_seconds: int = 0
    visual: VisualLimits = VisualLimits()


class Admission(msgspec.Struct, frozen=True):
    """Limit on the wait of a request for admission, and what happens if it is exceeded."""

    max_queue_seconds: float | None = None
    on_exceeded: Literal["Queue", "Reject"] = "Queue"


class Config(msgspec.Struct, frozen=True):
    """gateway.json (docs/contract.md). Unknown fields are ignored; newer gateways use them."""

    served_name: str | None = None
    revision: str = ""
    slo: Slo = Slo()
    limits: Limits = Limits()
    max_model_len_tokens: int | None = None
    on_demand: Literal["InlineAtPrefill", "Queue", "Reject"] = "InlineAtPrefill"
    wake_timeout_seconds: float | None = None  # None: the service never scales to zero
    admission: Admission = Admission()
    media: Media = Media()
    tenants: dict[str, TenantLimits] = {}
    cors: Cors = Cors()
    access_log: bool = False

    @property
    def is_fair(self) -> bool:
        """Whether tenants take turns where requests wait for a pod: one of them has a weight."""
        return any(limits.weight is not None for limits in self.tenants.values())


def max_hold_seconds(config: Config) -> float:
    """Return how long a request with images waits for a pool at zero to have an encoder."""
    if config.on_demand != "Queue":
        return 0.0
    bound = config.admission.max_queue_seconds
    return MAX_WAIT_SECONDS if bound is None else min(bound, MAX_WAIT_SECONDS)


def max_wait_seconds(admission: Admission) -> float:
    """Return how long a request may wait for admission before it is rejected."""
    if admission.on_exceeded == "Reject" and admission.max_queue_seconds is not None:
        return min(admission.max_queue_seconds, MAX_WAIT_SECONDS)
    return MAX_WAIT_SECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class AppliedConfig:
    """Current settings. `config_hash` is the SHA-256 of the file's bytes; None without a file."""

    config: Config
    config_hash: str | None
    keys: ApiKeys | None


class ConfigWatcher:
    """The applied settings; `watch` is their only writer.

    Attributes:
        problem: why a file is not applied as it is; empty if all are.
    """

    def __init__(
        self, config: Path | None, api_keys_dir: Path | None, *, images_per_request: int
    ) -> None:
        """`images_per_request` applies until a `config` is read."""
        self._config_path = config
        self._keys_path = api_keys_dir
        # If the directory of keys is unreadable, no key is valid: every request is rejected.
        keys = None if api_keys_dir is None else ApiKeys(())
        limits = Limits(images_per_request=images_per_request)
        self.now = AppliedConfig(Config(limits=limits), None, keys)
        self.problem = ""
        self.reload()

    async def watch(self) -> None:
        """Reload every `RELOAD_SECONDS`. Never returns."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Read all files. If one cannot be used, its last valid value stays."""
        problems = []
        try:
            self._reload_config()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            problems.append(f"gateway.json: {error}")
        try:
            problems += self._reload_keys()
        except OSError as error:
            problems.append(f"keys: {error}")
        problem = "; ".join(problems)
        if problem and problem != self.problem:
            kept = "default" if self.now.config_hash is None else "last good"
            logger.warning("the %s settings stay", kept, extra={"reason": problem})
        self.problem = problem

    def _reload_config(self) -> None:
        if self._config_path is None:
            return
        raw = self._config_path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        if digest == self.now.config_hash:
            return
        config = msgspec.json.decode(raw, type=Config)
        visual, media = problem_of(config.limits.visual), urls.problem_of(config.media)
        if problem := visual or media or cors.problem_of(config.cors):
            raise msgspec.ValidationError(problem)
        self.now = dataclasses.replace(self.now, config=config, config_hash=digest)
        logger.info("settings applied", extra={"config_hash": digest})

    def _reload_keys(self) -> list[str]:
        """Apply the keys of all files that are not refused; return why the others are."""
        if self._keys_path is None:
            return []
        keys, refused = load_keys(self._keys_path)
        if refused and self.now.keys is not None:
            kept = (key for key in self.now.keys.by_tenant if key.tenant in refused)
            keys = ApiKeys((*keys.by_tenant, *kept))
        if keys != self.now.keys:
            self.now = dataclasses.replace(self.now, keys=keys)
            logger.info("keys applied", extra={"tenants": list(keys.tenants)})
        return [f"keys: {tenant}: {why}" for tenant, why in refused.items()]


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The stored part of one bearer key.

    Attributes:
        tenant: the tenant that owns the key.
        digest: SHA-256 of the key, 32 bytes.
        secret: input of the tenant's cache salt, 32 bytes; not derivable from the digest.
    """

    tenant: str
    digest: bytes
    secret: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKeys:
    """All keys. If the gateway has None instead of this object, requests need no key.

    Keys of one tenant follow one another, the first of its file first.
    """

    by_tenant: tuple[Key, ...]

    @property
    def tenants(self) -> tuple[str, ...]:
        """The names of the tenants, each once."""
        return tuple(dict.fromkeys(key.tenant for key in self.by_tenant))

    def tenant_of(self, authorization: str | None) -> str | None:
        """Return the tenant of an `Authorization` header; None if it contains no known key.

        All keys are compared, each in constant time, so that the duration reveals no key.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        tenant = None
        for known in self.by_tenant:
            if hmac.compare_digest(known.digest, digest):
                tenant = known.tenant
        return tenant if scheme.lower() == "bearer" and key.strip() else None

    def secret_of(self, tenant: str) -> bytes | None:
        """Return the input of a tenant's salt; None if the tenant has no key."""
        return next((key.secret for key in self.by_tenant if key.tenant == tenant), None)


class Salts:
    """The cache salts of one gateway process; `keys` returns the keys that are valid now.

    A tenant with a key has the same salt at every gateway that has the key. The salt of any other
    tenant derives from a random secret of this process. Only requests through this process can hit
    its cache entries.
    """

    def __init__(self, served_name: str, keys: Callable[[], ApiKeys | None]) -> None:
        self._served_name = served_name
        self._keys = keys
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._known: dict[str, bytes] = {}
        self._known_by: ApiKeys | None = None

    def of(self, tenant: str) -> bytes:
        """Return the salt, 32 bytes, that separates a tenant's cache entries from all others."""
        keys = self._keys()
        if keys is not self._known_by:
            self._known, self._known_by = {}, keys
        if tenant not in self._known:
            secret = None if keys is None else keys.secret_of(tenant)
            self._known[tenant] = cache_salt(secret or self._secret, self._served_name, tenant)
        return self._known[tenant]


def load_keys(directory: Path) -> tuple[ApiKeys, dict[str, str]]:
    """Read a mounted Secret. Hidden, empty and oversized files are skipped.

    Returns:
        The keys, and why files have none of them, by file name.
    """
    keys, refused = list[Key](), dict[str, str]()
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        content = path.read_bytes()[: MAX_KEY_BYTES + 1].strip()
        if not 0 < len(content) <= MAX_KEY_BYTES:
            logger.warning("a file holds no usable key", extra={"tenant": path.name})
            continue
        lines = list(filter(None, map(bytes.strip, content.splitlines())))
        if (number := _other_than_key(lines)) is not None:
            refused[path.name] = (
                f"line {number} of {len(lines)} is no key; if there are several, each needs 16 or "
                "more characters of A-Z a-z 0-9 . _ ~ + / -"
            )
        else:
            keys += [Key(path.name, _digest(key), _secret(key)) for key in lines]
    return ApiKeys(tuple(keys)), refused


def _other_than_key(lines: list[bytes]) -> int | None:
    """Return the number of the first of several lines that does not look like a key, from 1."""
    if len(lines) == 1:
        return None
    numbered = enumerate(lines, 1)
    return next((n for n, line in numbered if not _ONE_OF_SEVERAL.fullmatch(line)), None)


def cache_salt(secret: bytes, served_name: str, tenant: str) -> bytes:
    """Return 32 bytes: HMAC-SHA-256 over the fields, each after its length.

    Without the secret the salt cannot be computed.
    """
    framed = b"".join(
        len(part).to_bytes(4, "little") + part
        for part in (b"triptych/cache-salt/2", served_name.encode(), tenant.encode())
    )
    return hmac.digest(secret, framed, "sha256")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _secret(key: bytes) -> bytes:
    return hmac.digest(key, b"triptych/cache-salt-secret/1", "sha256")
