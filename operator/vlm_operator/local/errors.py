"""What can go wrong on this machine, said with what to do about it."""


class LocalError(Exception):
    """The local cluster cannot do what was asked.

    Attributes:
        remedy: What the person at the keyboard can do, one command or sentence.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class ToolMissingError(LocalError):
    """A program that is needed is not installed, or is too old."""


class BuildError(LocalError):
    """The control plane could not be built."""


class StartError(LocalError):
    """A process of the control plane did not start or died early."""


class PortTakenError(LocalError):
    """A port that was asked for belongs to another process."""
