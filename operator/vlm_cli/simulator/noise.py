"""Random deviations of the simulated service from its curves and from its reports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of a run. All runs use the defaults; `QUIET` is for tests that compare with theory.

    Attributes:
        loss: share of reports that are lost.
        jitter: relative sigma of errors in reported queued work and KV in use.
        service: sigma of the logarithm of the duration of a batch or step.
        prediction: sigma of the logarithm of predicted over real work, common to a role. Each pod
            deviates from its role with half of this sigma.
        bias: additional factor of predicted over real work, for all pods.
    """

    loss: float = 0.05
    jitter: float = 0.05
    service: float = 0.1
    prediction: float = 0.2
    bias: float = 1.0


QUIET = Noise(loss=0.0, jitter=0.0, service=0.0, prediction=0.0)
