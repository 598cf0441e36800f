"""Settings that may change while the gateway runs: gateway.json and the keys, read each second.

If a file cannot be read or parsed, its last valid content applies and the log has the reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Literal

import msgspec

from vlm_worker.gateway.auth import ApiKeys, load_keys
from vlm_worker.types import Modality

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0


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
    """Limits on the images of a request."""

    images_per_request: int = 4
    bytes_per_image: int = 20 * 2**20
    pixels_per_image: int = 16_700_000
    on_oversize: Literal["Downscale", "Reject"] = "Downscale"
    on_corrupt: Literal["Reject", "Skip"] = "Reject"
    video_seconds: int = 0


class Admission(msgspec.Struct, frozen=True):
    """Limit on the wait of a request for admission, and what happens if it is exceeded."""

    max_queue_seconds: float | None = None
    on_exceeded: Literal["Queue", "Reject"] = "Queue"


class Media(msgspec.Struct, frozen=True):
    """Domains that images may be fetched from."""

    allowed_domains: list[str] = []


class Config(msgspec.Struct, frozen=True):
    """gateway.json (docs/contract.md). Unknown fields are ignored; newer gateways use them."""

    served_name: str | None = None
    revision: str = ""
    slo: Slo = Slo()
    limits: Limits = Limits()
    max_model_len_tokens: int | None = None
    on_demand: Literal["InlineAtPrefill", "Queue", "Reject"] = "InlineAtPrefill"
    admission: Admission = Admission()
    media: Media = Media()


@dataclasses.dataclass(frozen=True, slots=True)
class AppliedConfig:
    """Current settings. `config_hash` is the SHA-256 of the file's bytes; None without a file."""

    config: Config
    config_hash: str | None
    keys: ApiKeys | None


class ConfigWatcher:
    """The applied settings; `watch` is their only writer."""

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
        self._last_problem = ""
        self.reload()

    async def watch(self) -> None:
        """Reload every `RELOAD_SECONDS`. Never returns."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Read both files. If one cannot be read, its last valid value stays."""
        problems = []
        try:
            self._reload_config()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            problems.append(f"gateway.json: {error}")
        try:
            self._reload_keys()
        except OSError as error:
            problems.append(f"keys: {error}")
        problem = "; ".join(problems)
        if problem and problem != self._last_problem:
            logger.warning("the last good settings stay", extra={"reason": problem})
        self._last_problem = problem

    def _reload_config(self) -> None:
        if self._config_path is None:
            return
        raw = self._config_path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        if digest == self.now.config_hash:
            return
        config = msgspec.json.decode(raw, type=Config)
        self.now = dataclasses.replace(self.now, config=config, config_hash=digest)
        logger.info("settings applied", extra={"config_hash": digest})

    def _reload_keys(self) -> None:
        if self._keys_path is None:
            return
        keys = load_keys(self._keys_path)
        if keys != self.now.keys:
            self.now = dataclasses.replace(self.now, keys=keys)
            logger.info("keys applied", extra={"tenants": [key.tenant for key in keys.by_tenant]})
