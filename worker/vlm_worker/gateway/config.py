"""What may change while the gateway runs: gateway.json and the keys, re-read each second.

A file that cannot be read or parsed changes nothing: the last good one stays, and the log says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Literal

import msgspec

from vlm_worker.gateway.auth import Keys, load_keys
from vlm_worker.types import Modality

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0


class Slo(msgspec.Struct, frozen=True):
    """Targets in milliseconds; `overrides` by modality."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    overrides: dict[str, float] = {}

    def ttft_seconds(self, modality: Modality) -> float | None:
        """The TTFT that requests of this modality should reach."""
        milliseconds = self.overrides.get(modality.value, self.ttft_ms)
        return None if milliseconds is None else milliseconds / 1000


class Limits(msgspec.Struct, frozen=True):
    """Bounds on the pictures of a request."""

    images_per_request: int = 4
    bytes_per_image: int = 20 * 2**20
    pixels_per_image: int = 16_700_000
    on_oversize: Literal["Downscale", "Reject"] = "Downscale"
    on_corrupt: Literal["Reject", "Skip"] = "Reject"
    video_seconds: int = 0


class Admission(msgspec.Struct, frozen=True):
    """How long a request may wait for room."""

    max_queue_seconds: float | None = None
    on_exceeded: Literal["Queue", "Reject"] = "Queue"


class Media(msgspec.Struct, frozen=True):
    """Where pictures may be fetched from."""

    allowed_domains: list[str] = []


class Config(msgspec.Struct, frozen=True):
    """gateway.json (docs/contract.md). Unknown fields are news for later gateways."""

    served_name: str | None = None
    revision: str = ""
    slo: Slo = Slo()
    limits: Limits = Limits()
    max_model_len_tokens: int | None = None
    on_demand: Literal["InlineAtPrefill", "Queue", "Reject"] = "InlineAtPrefill"
    admission: Admission = Admission()
    media: Media = Media()


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """What holds now. `config_hash` is the SHA-256 of the file's bytes, None without a file."""

    config: Config
    config_hash: str | None
    keys: Keys | None


class Live:
    """The applied settings; `watch` is their only writer."""

    def __init__(
        self, config: Path | None, api_keys_dir: Path | None, *, images_per_request: int
    ) -> None:
        """`images_per_request` holds until a `config` says otherwise."""
        self._config_path = config
        self._keys_path = api_keys_dir
        # Without a readable directory of keys nobody gets in.
        keys = None if api_keys_dir is None else Keys(())
        limits = Limits(images_per_request=images_per_request)
        self.now = Applied(Config(limits=limits), None, keys)
        self._complaint = ""
        self.reload()

    async def watch(self) -> None:
        """Reload every second, for ever."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Read both; what fails keeps its last good value."""
        complaints = []
        try:
            self._reload_config()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            complaints.append(f"gateway.json: {error}")
        try:
            self._reload_keys()
        except OSError as error:
            complaints.append(f"keys: {error}")
        complaint = "; ".join(complaints)
        if complaint and complaint != self._complaint:
            logger.warning("the last good settings stay", extra={"reason": complaint})
        self._complaint = complaint

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
