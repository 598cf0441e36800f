"""Checks the RBAC permissions of the user and of the operators. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_cli.doctor.facts import Facts, Finding, Level, Right
from vlm_cli.doctor.installed import INSTALL, installations
from vlm_operator import names

_RBAC = "rbac.authorization.k8s.io"
_CHILD_VERBS = ("get", "list", "watch", "create", "patch", "delete")
_LISTED = 4  # limit of permissions in one line

# Permissions of users, with the commands that need them.
OF_USERS: dict[Right, str] = {
    Right("get", names.GROUP, names.PLURAL_SERVICE): "every command",
    Right("list", names.GROUP, names.PLURAL_SERVICE): "every command",
    Right("list", "", "pods"): "vlm chat, vlm bench, vlm top",
    Right("create", "", "pods/portforward"): "vlm chat, vlm bench, vlm top",
    Right("get", "", "pods/log"): "vlm logs, vlm bundle",
    Right("get", "", "configmaps"): "vlm why",
    Right("list", "apps", "deployments"): "vlm rollout-plan",
    Right("patch", names.GROUP, names.PLURAL_SERVICE): "vlm release-finalizers",
}

# Permissions that the chart grants an operator: in watched namespaces, and in the whole cluster.
OF_NAMESPACES = (
    *(Right(verb, names.GROUP, names.PLURAL_SERVICE) for verb in ("get", "list", "watch", "patch")),
    Right("patch", names.GROUP, f"{names.PLURAL_SERVICE}/status"),
    Right("patch", names.GROUP, f"{names.PLURAL_POOL}/status"),
    Right("update", names.GROUP, f"{names.PLURAL_SERVICE}/finalizers"),
    *(
        Right(verb, group, resource)
        for group, resource in (
            (names.GROUP, names.PLURAL_POOL),
            ("apps", "deployments"),
            ("", "services"),
            ("", "configmaps"),
            ("", "serviceaccounts"),
            ("", "persistentvolumeclaims"),
            ("batch", "jobs"),
            ("policy", "poddisruptionbudgets"),
            ("networking.k8s.io", "networkpolicies"),
            (_RBAC, "roles"),
            (_RBAC, "rolebindings"),
        )
        for verb in _CHILD_VERBS
    ),
    *(Right(verb, "", "pods") for verb in ("get", "list", "watch", "patch")),
    Right("patch", "", "pods/status"),
    *(Right(verb, "", "events") for verb in ("get", "create", "patch")),
)
OF_CLUSTER = (
    Right("list", names.GROUP, names.PLURAL_NODE_CLASS),
    Right("watch", names.GROUP, names.PLURAL_NODE_CLASS),
    Right("patch", names.GROUP, f"{names.PLURAL_NODE_CLASS}/status"),
    Right("list", "", "nodes"),
    Right("watch", "", "nodes"),
)

# Permissions that the chart grants for certificates. They are not asked for: a chart with other
# `identity.issuers` lacks them, and the condition CertificatesReady names the missing one.
OF_CERTIFICATES = (
    *(Right(verb, "", "secrets") for verb in ("create", "patch")),
    *(Right(verb, "cert-manager.io", "certificates") for verb in ("create", "patch")),
)


def of_authority(name: str) -> tuple[Right, ...]:
    """Return the permissions to keep the operator's CA, in its namespace."""
    return (
        Right("create", "", "secrets"),
        Right("get", "", "secrets", name),
        Right("update", "", "secrets", name),
    )


def of_lease(name: str) -> tuple[Right, ...]:
    """Return the permissions to hold the Lease, in its namespace."""
    group = "coordination.k8s.io"
    return (
        Right("create", group, "leases"),
        Right("get", group, "leases", name),
        Right("update", group, "leases", name),
    )


def own(facts: Facts) -> Iterator[Finding]:
    """Check that the user has the permissions that commands need."""
    missing = [right for right, allowed in facts.user_rights.items() if not allowed]
    for right in missing:
        needed = OF_USERS[right]
        level = Level.FAIL if needed == "every command" else Level.WARN
        message = f"you may not {right.text}, which {needed} needs"
        yield Finding("rights", level, message, "ask for it: kubectl auth can-i --list")
    if facts.user_rights and not missing:
        yield Finding("rights", Level.OK, "you may do what every command needs")


def operators(facts: Facts) -> Iterator[Finding]:
    """Check that each operator has the permissions that the chart grants."""
    if facts.review_problem:
        message = f"the rights of the operator are unknown: {facts.review_problem}"
        yield Finding("operator-rights", Level.WARN, message, "run it as an administrator")
        return
    for found in installations(facts):
        by_namespace = {
            namespace: rights
            for (name, namespace), rights in facts.operators.items()
            if name == found.name
        }
        account = f"ServiceAccount {found.namespace}/{found.account}"
        fine = bool(by_namespace)
        for namespace, rights in by_namespace.items():
            missing = [right.text for right, allowed in rights.items() if not allowed]
            if missing:
                fine = False
                others = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
                where = f" in namespace {namespace}" if namespace else ""
                message = f"{account} may not {', '.join(missing[:_LISTED])}{others}{where}"
                yield Finding("operator-rights", Level.FAIL, message, INSTALL)
        if fine:
            count = sum(len(rights) for rights in by_namespace.values())
            message = f"{account} has the {count} rights that it needs"
            yield Finding("operator-rights", Level.OK, message)
