"""Decides when certificates and CAs are issued, renewed and dropped. Pure.

CA n     ├─ signs ───────────────────────────┤ trusted until its last leaf has expired ┤
CA n+1           created ├─ trusted for one leaf's life ─┼─ signs ─────────────────────────

A leaf's life after its creation, every Secret contains the new CA: each was written again. So no
pod meets a certificate whose CA its bundle lacks.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from vlm_operator.state.identities import Certificate

LEAF_SECONDS = 24 * 3600.0
AUTHORITY_SECONDS = 365 * 24 * 3600.0
BACKDATE_SECONDS = 300.0
"""Validity starts this long before the issue: clocks of nodes differ."""
_RENEW_AT = 2 / 3


class Cause(enum.StrEnum):
    """Why a certificate is issued."""

    FIRST = "First"
    RENEWAL = "Renewal"
    NOT_YET_VALID = "NotYetValid"
    ANCHORS = "Anchors"
    LOST = "Lost"
    CHANGED = "Changed"


def due(certificate: Certificate | None, *, anchors: str, now: float) -> Cause | None:
    """Return why a certificate must be issued now; None if the present one stays.

    Args:
        certificate: the present one; None if the operator knows none.
        anchors: digest of the trust anchors that its Secret should contain.
        now: seconds since the epoch.
    """
    if certificate is None:
        return Cause.FIRST
    if now < certificate.not_before:
        return Cause.NOT_YET_VALID  # its issuer had a wrong clock
    if now >= renew_at(certificate.not_before, certificate.not_after):
        return Cause.RENEWAL
    return Cause.ANCHORS if certificate.anchors != anchors else None


def renew_at(not_before: float, not_after: float) -> float:
    """Return when two thirds of a certificate's life after its issue have passed."""
    issued = not_before + BACKDATE_SECONDS
    return issued + _RENEW_AT * (not_after - issued)


@dataclasses.dataclass(frozen=True)
class Validity:
    """The validity of one CA in seconds since the epoch; `serial` names it."""

    serial: str
    not_before: float
    not_after: float

    @property
    def created(self) -> float:
        return self.not_before + BACKDATE_SECONDS


@dataclasses.dataclass(frozen=True)
class AuthorityPlan:
    """What the operator does with its CAs.

    Attributes:
        signing: serial of the CA that signs; None if there is no usable one.
        trusted: serials of the CAs in every bundle, oldest first.
        create: whether a new CA is due.
    """

    signing: str | None
    trusted: tuple[str, ...]
    create: bool


def plan_authorities(
    authorities: Sequence[Validity], *, leaf_seconds: float, now: float
) -> AuthorityPlan:
    """Decide which CA signs, which are trusted, and whether a new one is due.

    It follows from the CAs' dates alone, so a new leader decides the same.
    """
    usable = sorted(
        (item for item in authorities if now < item.not_after),
        key=lambda item: (item.created, item.serial),
    )
    if not usable:
        return AuthorityPlan(None, (), create=True)
    signs_from = [usable[0].created, *(item.created + leaf_seconds for item in usable[1:])]
    started = [index for index, start in enumerate(signs_from) if start <= now]
    signing = max(started, default=0)
    # the last leaf of a CA is signed just before the next one starts to sign
    ended = signs_from[signing] + leaf_seconds + BACKDATE_SECONDS <= now
    trusted = usable[signing:] if ended else usable[max(0, signing - 1) :]
    newest = usable[-1]
    create = now >= renew_at(newest.not_before, newest.not_after)
    return AuthorityPlan(
        signing=usable[signing].serial,
        trusted=tuple(item.serial for item in trusted),
        create=create,
    )
