"""The account of exposed memory adds up, whatever is taken, given back and lost."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vlm_worker.transfer.transport import ExposureAccount


class LedgerMachine(RuleBasedStateMachine):
    """A account of 1000 bytes beside lists of what is out and what is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.account = ExposureAccount(1000)
        self.out: list[int] = []
        self.abandoned: list[int] = []

    @rule(num_bytes=st.integers(1, 600))
    def take(self, num_bytes: int) -> None:
        fits = sum(self.out) + sum(self.abandoned) + num_bytes <= 1000
        assert self.account.take(num_bytes) == fits
        if fits:
            self.out.append(num_bytes)

    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        if not self.out:
            return
        num_bytes = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if data.draw(st.booleans()):
            self.account.release(num_bytes)
        else:
            self.account.abandon(num_bytes)
            self.abandoned.append(num_bytes)

    @invariant()
    def the_books_add_up(self) -> None:
        assert self.account.used == sum(self.out)
        assert self.account.abandoned == sum(self.abandoned)
        assert self.account.num_exposed == len(self.out)
        assert (self.account.unhealthy_reason is not None) == (sum(self.abandoned) > 50)


LedgerMachine.TestCase.settings = hypothesis_settings(max_examples=40)
TestLedger = LedgerMachine.TestCase
