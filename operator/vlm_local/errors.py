"""Errors of the local cluster, each with a remedy.

LocalError
├── ToolMissingError
├── BuildError
├── StartError
└── PortTakenError
"""


class LocalError(Exception):
    """The local cluster cannot do what the user wants.

    Attributes:
        remedy: one command or sentence for the user; "" if there is none.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class ToolMissingError(LocalError):
    """A required program is not installed, or is too old."""


class BuildError(LocalError):
    """The control plane could not be built."""


class StartError(LocalError):
    """A process of the local cluster did not start or ended early."""


class PortTakenError(LocalError):
    """Another process uses the requested port."""
