"""The operator's error hierarchy. The second column is the required action.

OperatorError
├── SpecError               user: edit the field; a retry cannot help            Accepted=False
├── NameConflictError       user: an object of that name has another owner       Stalled=True
├── ClusterError            depends on the status and reason of the API server
│   ├── ConflictError       operator: read the object again, decide again (409)
│   ├── DiffersError        the caller: it asked for a comparison (422)
│   ├── NamespaceEndsError  none: the namespace is being deleted
│   └── UnavailableError    none: the operator retries until the API server answers
├── IdentityError           depends on its message: certificates cannot be issued
└── LeaseLostError          none: the process writes nothing until it leads again or ends
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base class."""


class SpecError(OperatorError):
    """A manifest cannot be satisfied as written.

    `path` is the field, such as `spec.pools.decode.scaling.replicas`. `message` says what is wrong
    and what to write instead.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


class NameConflictError(OperatorError):
    """An object with a child's name has another owner; the operator never adopts it."""

    def __init__(self, kind: str, name: str, owner: str | None) -> None:
        whose = f"belongs to {owner}" if owner else "has no owner"
        super().__init__(f"{kind} {name} {whose}: delete or rename it, or rename the VLMService")
        self.kind = kind
        self.name = name
        self.owner = owner


class ClusterError(OperatorError):
    """The API server refused a call; `reason` and `message` are those of the `Status` object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason} ({status}): {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ConflictError(ClusterError):
    """Another writer changed the object since it was read."""


class DiffersError(ClusterError):
    """A field of the object has another value than `Cluster.metadata_if` expects."""


class NamespaceEndsError(ClusterError):
    """The namespace is being deleted, so the API server creates no objects in it."""


class UnavailableError(ClusterError):
    """The API server cannot be reached or is overloaded (429, 5xx, a broken connection)."""


class IdentityError(OperatorError):
    """A certificate cannot be issued; the message names the cause and the fix."""


class LeaseLostError(OperatorError):
    """Another process holds the lease, or it was not renewed in time."""


# The API server's answers after which a turn ends; other refusals concern one object.
ENDS_TURN = (UnavailableError, ConflictError, NamespaceEndsError)
