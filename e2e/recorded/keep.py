"""From the log of an operator to the records that test_recorded.py replays.

    pytest e2e/test_bottlenecks.py          and meanwhile kubectl logs -f … > operator.log
    python e2e/recorded/keep.py operator.log > e2e/recorded/bottlenecks.jsonl

Kept is what pods said at the ticks in which a pool grew, slept or woke: their stage times, counters
and queues, and what the operator remembered of those before. Fields that say nothing are left out.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from vlm_operator.autoscale.outcome import Reason
from vlm_operator.autoscale.record import RECORD, VERSION, Record, RecordError, read_log

SERVICE = "bottlenecks/shapes"
KEPT = {Reason.SCALE_UP, Reason.IDLE, Reason.WAKE}


def records(log: Path) -> Iterator[Record]:
    """The records of the service in which a pool's load decided, the first of each kind."""
    known = set()
    lines = (line[line.find("{") :] for line in log.read_text().splitlines())
    for _, record in read_log(lines):
        if isinstance(record, RecordError) or record.service != SERVICE:
            continue
        moved = {
            (role, item.reason)
            for role, item in record.outcome.decisions.items()
            if item.before != item.to and item.reason in KEPT
        }
        if moved - known:
            known |= moved
            yield record


if __name__ == "__main__":
    for one in records(Path(sys.argv[1])):
        value = RECORD.dump_python(one, mode="json", exclude_defaults=True)
        value["policy"] = RECORD.dump_python(one, mode="json")["policy"]
        print(json.dumps({"version": VERSION, **value}, separators=(",", ":")))
