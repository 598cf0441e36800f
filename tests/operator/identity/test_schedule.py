"""Certificates and CAs are replaced early enough that no pod meets an unknown or expired one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_operator.identity.schedule import (
    BACKDATE_SECONDS,
    LEAF_SECONDS,
    AuthorityPlan,
    Cause,
    Validity,
    due,
    plan_authorities,
    renew_at,
)
from vlm_operator.names import Role
from vlm_operator.state.identities import OPERATOR_CA, Certificate

NOW = 1_800_000_000.0
HOUR = 3600.0
LEAF = Certificate(
    role=Role.DECODE,
    secret="demo-decode-identity",
    identity=OPERATOR_CA,
    serial="1",
    not_before=NOW - BACKDATE_SECONDS,
    not_after=NOW + LEAF_SECONDS,
    version="1",
    anchors="a",
)


def test_a_certificate_stays_until_two_thirds_of_its_life():
    assert due(None, anchors="a", now=NOW) is Cause.FIRST
    assert due(LEAF, anchors="a", now=NOW) is None
    assert due(LEAF, anchors="a", now=NOW + 16 * HOUR - 1) is None
    assert due(LEAF, anchors="a", now=NOW + 16 * HOUR) is Cause.RENEWAL


def test_a_certificate_with_other_anchors_or_of_the_future_is_replaced():
    assert due(LEAF, anchors="b", now=NOW) is Cause.ANCHORS
    assert due(LEAF, anchors="a", now=NOW - BACKDATE_SECONDS - 1) is Cause.NOT_YET_VALID


def test_without_a_usable_ca_one_is_created():
    empty = AuthorityPlan(None, (), create=True)
    expired = Validity("1", NOW - 10, NOW)
    assert plan_authorities([], leaf_seconds=LEAF_SECONDS, now=NOW) == empty
    assert plan_authorities([expired], leaf_seconds=LEAF_SECONDS, now=NOW) == empty


@dataclasses.dataclass
class Pod:
    """A pod with the Secret as its kubelet last wrote it."""

    serial: str
    bundle: frozenset[str]
    not_after: float


@given(
    life=st.sampled_from([10 * 24 * HOUR, 20 * 24 * HOUR]),
    lag=st.integers(0, 3),
    step=st.sampled_from([HOUR, 2 * HOUR]),
)
def test_pods_trust_each_other_at_every_moment_of_rotations(life: float, lag: int, step: float):
    """Two pods, of which one receives each Secret up to six hours later than the other."""
    authorities: list[Validity] = []
    secrets: list[Pod] = []
    issued = 0.0
    signers = set()
    now = NOW
    while now < NOW + 3 * life:
        plan = plan_authorities(authorities, leaf_seconds=LEAF_SECONDS, now=now)
        if plan.create:
            fresh = Validity(
                str(len(signers | set(plan.trusted))) + f"-{now}", now - 300, now + life
            )
            authorities = [a for a in authorities if a.serial in plan.trusted] + [fresh]
            plan = plan_authorities(authorities, leaf_seconds=LEAF_SECONDS, now=now)
        assert plan.signing is not None
        bundle = frozenset(plan.trusted)
        assert plan.signing in bundle
        signers.add(plan.signing)
        stale = not secrets or secrets[-1].bundle != bundle
        if stale or now >= renew_at(issued - BACKDATE_SECONDS, issued + LEAF_SECONDS):
            signer = next(a for a in authorities if a.serial == plan.signing)
            secrets.append(Pod(plan.signing, bundle, min(now + LEAF_SECONDS, signer.not_after)))
            issued = now
        else:
            secrets.append(secrets[-1])
        fast, slow = secrets[-1], secrets[max(0, len(secrets) - 1 - lag)]
        for one, other in ((fast, slow), (slow, fast)):
            assert one.serial in other.bundle
            assert one.not_after > now
        now += step
    assert len(signers) >= 3


@pytest.mark.parametrize("hours", [0, 23])
def test_a_new_ca_is_trusted_before_it_signs(hours: int):
    old = Validity("old", NOW - 40 * HOUR, NOW + 20 * HOUR)
    new = Validity("new", NOW - BACKDATE_SECONDS, NOW + 60 * HOUR)
    # the old one is shorter than a leaf's overlap here, but it has not expired yet
    plan = plan_authorities([old, new], leaf_seconds=LEAF_SECONDS, now=NOW + min(hours, 19) * HOUR)
    assert plan == AuthorityPlan("old", ("old", "new"), create=False)
