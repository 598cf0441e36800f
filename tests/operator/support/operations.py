"""Operations during which an operator is killed, on a fake cluster and on a real one."""

from __future__ import annotations

import dataclasses

from support.world import body, pool
from vlm_operator.cluster import Manifest

OTHER_COMPAT = {"model": {"uri": "pvc://shapes", "dtype": "Float32"}}
ROLLBACK = {"rollout": {"progressDeadlineSeconds": 60, "onFailure": "Rollback"}}


@dataclasses.dataclass(frozen=True)
class Operation:
    """Something asked of a running operator.

    Attributes:
        before: what is there and at rest when it begins; None for nothing.
        after: the manifest then applied; None deletes the service.
        fails: pods of revisions that are new never serve.
        ended: what the reason of RolloutProgressing must be at the end, once pods serve.
    """

    before: Manifest | None
    after: Manifest | None
    fails: bool = False
    ended: str | None = None


OPERATIONS = {
    "create": Operation(None, body(encoder=pool(), decode=pool(2))),
    "scale": Operation(
        body(encoder=pool(3), decode=pool(1)), body(encoder=pool(1), decode=pool(3))
    ),
    "rollout": Operation(
        body(decode=pool(2)), body(OTHER_COMPAT, decode=pool(2)), ended="Complete"
    ),
    "rollback": Operation(
        body(ROLLBACK, decode=pool(2)),
        body({**ROLLBACK, **OTHER_COMPAT}, decode=pool(2)),
        fails=True,
        ended="RolledBack",
    ),
    "topology": Operation(
        body(encoder=pool(), prefill=pool(), decode=pool()),
        body(encoder=pool(), decode=pool(2)),
        ended="Complete",
    ),
    "delete": Operation(body(encoder=pool(), decode=pool()), None),
}
