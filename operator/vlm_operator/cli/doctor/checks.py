"""Every check, in the order in which one asks: what a later one needs, an earlier one has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vlm_operator.cli.doctor import installed, nodes, rights, services
from vlm_operator.cli.doctor.facts import Facts, Finding, Level

Check = Callable[[Facts], Iterator[Finding]]


def unread(facts: Facts) -> Iterator[Finding]:
    """What could not be read is not judged, and that is said."""
    for kind, why in facts.unread.items():
        message = f"{kind.plural} cannot be judged: {why}"
        yield Finding("access", Level.WARN, message, "run it as an administrator, or with -n")


def gateway(facts: Facts) -> Iterator[Finding]:
    """How one gateway's metrics came, where they were asked for."""
    if facts.gateway is not None:
        yield facts.gateway


CHECKS: tuple[Check, ...] = (
    installed.version,
    unread,
    installed.definitions,
    rights.own,
    installed.operator,
    installed.alone,
    rights.operators,
    installed.gateway_role,
    nodes.ready,
    nodes.classes,
    nodes.variants,
    services.watched,
    services.security,
    services.claims,
    services.conditions,
    services.pods,
    services.writers,
    gateway,
)


def examine(facts: Facts) -> list[Finding]:
    """Ask every check."""
    return [finding for check in CHECKS for finding in check(facts)]
