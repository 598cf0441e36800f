"""All checks, in the order of their output: prerequisites come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vlm_cli.doctor import installed, nodes, rights, services
from vlm_cli.doctor.facts import Facts, Finding, Level

Check = Callable[[Facts], Iterator[Finding]]


def unread(facts: Facts) -> Iterator[Finding]:
    """Report kinds that could not be read, and so are not checked."""
    for kind, why in facts.unread.items():
        message = f"{kind.plural} cannot be judged: {why}"
        yield Finding("access", Level.WARN, message, "run it as an administrator, or with -n")


def gateway(facts: Facts) -> Iterator[Finding]:
    """Report the fetch of one gateway's metrics, if --probe was given."""
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
    services.gateways,
    services.pods,
    services.writers,
    gateway,
)


def examine(facts: Facts) -> list[Finding]:
    """Run all checks."""
    return [finding for check in CHECKS for finding in check(facts)]
