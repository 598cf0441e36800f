"""Prompts for peers: their KV never takes more than its share, and all of them have their turn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from worker.core.simulation import BLOCK_SIZE, MAX_STEPS, Simulation, Work

from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.types import Request, RequestKey, SamplingParams

NUM_BLOCKS = 17
MOST = 8


def prompt(number: int, num_blocks: int) -> Work:
    """A prompt of its own that fills so many blocks; the token after it goes into the last one."""
    tokens = tuple(1000 * number + i for i in range(num_blocks * BLOCK_SIZE - 1))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    return Work(Request(RequestKey(str(number), 0), tokens, len(tokens), sampling), (), 0)


def for_peers(simulation: Simulation) -> list[Sequence]:
    running = [sequence for sequence in simulation.batch.running if sequence.for_peer]
    return running + simulation.held


def read(simulation: Simulation, sequence: Sequence) -> None:
    simulation.held.remove(sequence)
    simulation.scheduler.remove(sequence)


@settings(max_examples=60)
@given(st.data())
def test_kv_for_peers_keeps_to_its_share_and_everybody_has_a_turn(data: st.DataObject) -> None:
    """Prompts of all sizes, some for peers; these read when they like, and in any order."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 15), st.booleans()), max_size=12))
    simulation = Simulation(
        num_blocks=NUM_BLOCKS, max_num_seqs=4, budget=16, max_pending_blocks=MOST
    )
    everybody = [
        simulation.add(prompt(number, num_blocks), for_peer=for_peer)
        for number, (num_blocks, for_peer) in enumerate(sizes)
    ]
    for _ in range(MAX_STEPS):
        if not simulation.step() or data.draw(st.booleans()):
            if simulation.held:
                read(simulation, data.draw(st.sampled_from(simulation.held)))
            elif not simulation.scheduler.waiting and not simulation.batch.running:
                break
        owners = for_peers(simulation)
        num_blocks = sum(len(sequence.blocks) for sequence in owners)
        assert num_blocks <= MOST or len(owners) == 1
        assert simulation.scheduler.pending_transfers.num_blocks == num_blocks
    assert all(sequence.status is Status.FINISHED for sequence in everybody)
    pending_transfers = simulation.scheduler.pending_transfers
    assert (
        pending_transfers.num_blocks
        == pending_transfers.num_held_blocks
        == simulation.pool.num_used
        == 0
    )


def test_prompts_that_queue_already_wait_until_peers_have_read() -> None:
    simulation = Simulation(
        num_blocks=NUM_BLOCKS, max_num_seqs=4, budget=64, max_pending_blocks=MOST
    )
    queued = [simulation.add(prompt(number, 3), for_peer=True) for number in range(4)]
    while simulation.step():
        pass
    assert [s.status for s in queued] == [Status.HELD] * 2 + [Status.WAITING] * 2
    own = simulation.add(prompt(9, 3))
    while simulation.step():
        pass
    assert own.status is Status.FINISHED, "what nobody has to read goes past them"
    read(simulation, queued[0])
    while simulation.step():
        pass
    assert [s.status for s in queued[1:]] == [Status.HELD] * 2 + [Status.WAITING]
