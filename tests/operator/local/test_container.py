"""One container from start to end, for each result of its runs."""

import signal
from typing import NoReturn

from vlm_local.agent.container import Backoff, CannotStartError, Container, Prepared


class Story:
    """Runs of one container: the first has an unexpected error, the second is the last."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.events: list[str] = []
        self.container = Container(
            {"name": "main", "image": "any"},
            restart_policy="Always",
            prepare=self._prepare,
            prober=lambda _: self.fail(),
            changed=lambda: None,
            record=self._record,
            backoff=Backoff(),
            grace_seconds=0,
        )

    def fail(self) -> NoReturn:
        raise AssertionError("nothing runs that could be probed")

    async def _prepare(self, number: int) -> Prepared:
        self.runs.append(number)
        if number == 0:
            raise RuntimeError("nobody thought of this")
        await self.container.stop(0)
        raise CannotStartError("CreateContainerError", "the last run")

    async def _record(self, reason: str, message: str, *, warning: bool) -> None:
        self.events.append(f"{reason} {message} {warning}")


async def test_a_defect_ends_a_run_which_is_told_and_followed_by_the_next():
    story = Story()
    await story.container.run()
    assert story.runs == [0, 1]
    last = story.container.view.last
    assert last is not None
    assert (last.why, last.exit_code) == ("ContainerStatusUnknown", 128 + signal.SIGKILL)
    assert "nobody thought of this" in last.message
    assert "nobody thought of this" in story.events[0]
