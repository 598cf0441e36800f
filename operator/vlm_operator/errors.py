"""The operator's error tree. Each class says who must act.

OperatorError
├── SpecError           the user: edit this field, retrying cannot help      Accepted=False
├── NameConflictError   the user: somebody else owns an object of that name  Stalled=True
├── ClusterError        the API server refused, with its status and reason
│   ├── ConflictError   ... 409: read again, then decide again
│   ├── NamespaceEndsError  nobody: the namespace is being deleted, nothing is created there
│   └── UnavailableError  nobody: it cannot be reached, it comes back
├── NotReadyError       nobody: ask again after `retry_after` seconds
└── LeaseLostError      nobody: this process may not write, until it leads again or ends
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of everything this package raises on purpose."""


class SpecError(OperatorError):
    """A manifest cannot be satisfied as written.

    Args:
        path: the field as a user writes it, `spec.pools.decode.scaling.replicas`.
        message: what is wrong and what to write instead.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


class NameConflictError(OperatorError):
    """An object of a child's name exists and is not ours; it is never adopted."""

    def __init__(self, kind: str, name: str, owner: str | None) -> None:
        whose = f"belongs to {owner}" if owner else "has no owner"
        super().__init__(f"{kind} {name} {whose}: delete or rename it, or rename the VLMService")
        self.kind = kind
        self.name = name
        self.owner = owner


class ClusterError(OperatorError):
    """The API server refused a call.

    Args:
        status: the HTTP status.
        reason: `Invalid`, `Forbidden`, ...: Status.reason of the answer.
        message: Status.message, as the server wrote it.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason} ({status}): {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ConflictError(ClusterError):
    """Somebody wrote the object in between: read again, then decide again."""


class NamespaceEndsError(ClusterError):
    """The namespace is being deleted: the API server creates nothing there any more."""


class UnavailableError(ClusterError):
    """The API server cannot be reached or asks for patience (429, 5xx, a broken connection)."""


class NotReadyError(OperatorError):
    """The cluster is still moving; ask again in `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LeaseLostError(OperatorError):
    """The lease went to another process, or could not be renewed in time."""
