"""How far the simulated service differs from its curves, and from what its pods report."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Noise:
    """The defaults are those of every run; `QUIET` is for tests that compare with theory.

    Attributes:
        loss: share of reports that do not arrive.
        jitter: sigma by which queued work and KV in use are misreported, as a share.
        service: sigma of the logarithm of how long a batch or step takes.
        prediction: sigma of the logarithm of predicted over true work, of a role as a whole; the
            pods of a role differ by half as much again.
        bias: predicted over true work of all pods, beside that.
    """

    loss: float = 0.05
    jitter: float = 0.05
    service: float = 0.1
    prediction: float = 0.2
    bias: float = 1.0


QUIET = Noise(loss=0.0, jitter=0.0, service=0.0, prediction=0.0)
