"""CRDs are awaited by `kubectl wait`, which is asked again if it fails at once."""

import pytest

from vlm_local.controlplane import CRD_TRIES, await_crds
from vlm_local.errors import LocalError


class Kubectl:
    """Fails a number of times; counts its calls."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_calls = 0

    def __call__(self, *arguments: str) -> str:
        assert arguments[0] == "wait"
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise LocalError("conditions are null", "")
        return "established"


@pytest.mark.parametrize("num_failures", [0, 1, CRD_TRIES - 1])
def test_a_wait_that_fails_at_once_is_asked_again(num_failures: int):
    kubectl = Kubectl(num_failures)
    await_crds(kubectl, failure=LocalError)
    assert kubectl.num_calls == num_failures + 1


def test_the_last_failure_is_what_the_caller_hears():
    kubectl = Kubectl(CRD_TRIES)
    with pytest.raises(LocalError, match="conditions are null"):
        await_crds(kubectl, failure=LocalError)
    assert kubectl.num_calls == CRD_TRIES


def test_another_failure_ends_it():
    def kubectl(*arguments: str) -> None:
        raise FileNotFoundError(arguments[0])

    with pytest.raises(FileNotFoundError):
        await_crds(kubectl, failure=LocalError)
