"""Limits of tenants: requests and tokens per minute, and concurrent requests. Pure.

start ─ one more at once? a request left? ─▶ prompt ─ its tokens left? ─▶ output, each token ─▶ end
  └──────────────── RateLimitError with the time until the limit allows it ┘

A bucket holds at most what one minute allows, and refills evenly. Output tokens may put a bucket in
debt, because their number is not known before; the next request waits until the debt is paid.

Gateways share nothing. Each one enforces its part: the limit, divided by the number of ready ones.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

EVERY_OTHER: Final = "*"
"""The name of the entry for tenants, and for fields, that no other entry sets."""
CONCURRENT_RETRY_SECONDS: Final = 1.0
ROUNDING: Final = 1e-6
"""Units that a bucket may lack because its additions were rounded."""

HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{name}"
    for what in ("limit", "remaining", "reset")
    for name in ("requests", "tokens")
)
"""OpenAI's headers of a response (`RequestCharge.headers`)."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


class TenantLimits(msgspec.Struct, frozen=True):
    """One entry of `tenants` in gateway.json. None: that of `*`, or no limit.

    `weight` is the tenant's share of the order of waiting requests (`fair_queue`).
    """

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    concurrent_requests: Positive | None = None
    weight: Positive | None = None


def limits_of(tenant: str, tenants: Mapping[str, TenantLimits]) -> TenantLimits | None:
    """Return the limits of a tenant, field by field; None if no entry is for it."""
    own, others = tenants.get(tenant), tenants.get(EVERY_OTHER)
    if own is None or others is None:
        return own or others
    fields = {
        name: getattr(others, name) if value is None else value
        for name, value in msgspec.structs.asdict(own).items()
    }
    return TenantLimits(**fields)


class Limit(enum.StrEnum):
    """The limit that refused a request."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


class RateLimitError(Exception):
    """A limit of the tenant is reached. The message is fit for the client."""

    def __init__(self, message: str, limit: Limit, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class TokenBucket:
    """Units of one limit, at most those of one minute and at least one. It starts full.

    `per_minute` may change at each call; `level` is what is left, negative in debt.
    """

    def __init__(self, per_minute: float, *, now: float) -> None:
        self.level = capacity(per_minute)
        self._filled_at = now

    def refill(self, per_minute: float, *, now: float) -> None:
        """Add what the time since the last call allows."""
        passed = max(0.0, now - self._filled_at)
        self._filled_at = max(now, self._filled_at)
        self.level = min(capacity(per_minute), self.level + passed * per_minute / 60)

    def take(self, amount: float) -> None:
        self.level -= amount

    def seconds_until(self, amount: float, per_minute: float) -> float:
        """Return the time until the level is `amount`, at most the capacity; 0 if it is."""
        missing = min(amount, capacity(per_minute)) - self.level
        return missing * 60 / per_minute if missing > ROUNDING else 0.0


def capacity(per_minute: float) -> float:
    """Return the most units that a bucket holds; one, if a minute allows less."""
    return max(1.0, per_minute)


@dataclasses.dataclass(eq=False, slots=True)
class Account:
    """What one tenant used at this gateway. `RateLimits` and `RequestCharge` write it.

    `limits` are those of the settings when the tenant's last request came, also for older ones.
    """

    limits: TenantLimits = dataclasses.field(default_factory=TenantLimits)
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_running: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    refusals: Counter[Limit] = dataclasses.field(
        default_factory=lambda: Counter(dict.fromkeys(Limit, 0))
    )


class RateLimits:
    """The accounts of all tenants that have limits, at one gateway. `now` is in seconds.

    `num_gateways` is the number of gateways of the service that are ready, itself included.
    """

    def __init__(self) -> None:
        self.num_gateways = 1
        self.accounts: dict[str, Account] = {}

    def charge(self, tenant: str, limits: TenantLimits | None) -> RequestCharge:
        """Return the charge of a new request; with None, the tenant has no limits now.

        `limits` apply to the requests of the tenant that run, too. A bucket without a limit ends.
        """
        account = self.accounts.get(tenant)
        if account is None:
            if limits is None:
                return RequestCharge(None, self)
            account = self.accounts[tenant] = Account()
        account.limits = limits or TenantLimits()
        if account.limits.requests_per_minute is None:
            account.requests = None
        if account.limits.tokens_per_minute is None:
            account.tokens = None
        return RequestCharge(None if limits is None else account, self)

    def part(self, limit: int | None) -> float | None:
        """Return the part of this gateway in a limit."""
        return None if limit is None else limit / self.num_gateways


class RequestCharge:
    """The charge of one request, from `start` to `end`. Without an account it has no limits."""

    def __init__(self, account: Account | None, rates: RateLimits) -> None:
        self._account = account
        self._rates = rates
        self._is_running = False

    def start(self, *, now: float) -> None:
        """Count the request.

        Raises:
            RateLimitError: as many requests of the tenant run as may, or too many came in the last
                minute. Nothing is counted.
        """
        account = self._account
        if account is None:
            return
        limits, per_minute, _ = self._refill(now)
        concurrent, num_gateways = limits.concurrent_requests, self._rates.num_gateways
        if concurrent is not None and account.num_running >= max(1, concurrent // num_gateways):
            raise self._refusal(
                Limit.CONCURRENT,
                f"{account.num_running} of your requests run at this gateway, as many as may "
                f"({limits.concurrent_requests} at all gateways).",
                CONCURRENT_RETRY_SECONDS,
            )
        if account.requests is not None and per_minute is not None:
            if wait := account.requests.seconds_until(1, per_minute):
                raise self._refusal(
                    Limit.REQUESTS,
                    f"Your requests exceed {per_minute:g} per minute, the part of this gateway "
                    f"in your limit of {limits.requests_per_minute}.",
                    wait,
                )
            account.requests.take(1)
        account.num_running += 1
        account.num_requests += 1
        self._is_running = True

    def prompt(self, num_tokens: int, *, now: float) -> None:
        """Take the tokens of the prompts. A full bucket allows any number.

        Raises:
            RateLimitError: fewer are left; none is taken.
        """
        account = self._account
        if account is None:
            return
        limits, _, per_minute = self._refill(now)
        if account.tokens is not None and per_minute is not None:
            if wait := account.tokens.seconds_until(num_tokens, per_minute):
                raise self._refusal(
                    Limit.TOKENS,
                    f"The prompt has {num_tokens} tokens, and yours exceed {per_minute:g} per "
                    "minute, the part of this gateway in your limit of "
                    f"{limits.tokens_per_minute}.",
                    wait,
                )
            account.tokens.take(num_tokens)
        account.num_prompt_tokens += num_tokens

    def output(self, num_tokens: int) -> None:
        """Take tokens of an answer, which may put the bucket in debt."""
        if self._account is None:
            return
        self._account.num_output_tokens += num_tokens
        if self._account.tokens is not None:
            self._account.tokens.take(num_tokens)

    def end(self) -> None:
        """Stop counting the request as concurrent; idempotent."""
        if self._account is not None and self._is_running:
            self._account.num_running -= 1
        self._is_running = False

    def headers(self, *, now: float) -> dict[str, str]:
        """Return OpenAI's headers of this gateway's part of each limit; none without limits.

        `reset` is the time until the bucket is full.
        """
        account, found = self._account, dict[str, str]()
        if account is None:
            return found
        _, requests, tokens = self._refill(now)
        for name, bucket, per_minute in (
            ("requests", account.requests, requests),
            ("tokens", account.tokens, tokens),
        ):
            if bucket is not None and per_minute is not None:
                reset = bucket.seconds_until(capacity(per_minute), per_minute)
                found[f"x-ratelimit-limit-{name}"] = str(int(capacity(per_minute)))
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = duration(reset)
        return found

    def _refill(self, now: float) -> tuple[TenantLimits, float | None, float | None]:
        """Bring the buckets to `now`, or create them; return the limits, and parts per minute."""
        account = self._account
        assert account is not None
        requests = self._rates.part(account.limits.requests_per_minute)
        tokens = self._rates.part(account.limits.tokens_per_minute)
        account.requests = _refilled(account.requests, requests, now)
        account.tokens = _refilled(account.tokens, tokens, now)
        return account.limits, requests, tokens

    def _refusal(self, limit: Limit, message: str, seconds: float) -> RateLimitError:
        assert self._account is not None
        self._account.refusals[limit] += 1
        return RateLimitError(message, limit, retry_after_seconds=seconds)


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: `0s`, `120ms`, `8.64s` or `6m0s`; rounded up."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


def _refilled(
    bucket: TokenBucket | None, per_minute: float | None, now: float
) -> TokenBucket | None:
    if per_minute is None:
        return None
    bucket = bucket or TokenBucket(per_minute, now=now)
    bucket.refill(per_minute, now=now)
    return bucket
