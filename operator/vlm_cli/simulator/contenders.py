"""The autoscalers that `vlm simulate` can run, by name, and their tuned settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlm_cli.simulator.baselines import baseline
from vlm_cli.simulator.run import Autoscaler
from vlm_cli.simulator.triptych_policy import TriptychAutoscaler
from vlm_operator.autoscale.policy import ServicePolicy

OURS = "triptych"
Settings = Mapping[str, Any]


def contender(name: str, policy: ServicePolicy, settings: Settings) -> Autoscaler:
    """Build the autoscaler `name`.

    Raises:
        KeyError: no autoscaler has that name.
    """
    return TriptychAutoscaler(policy) if name == OURS else baseline(name, policy, settings)


def read_tuned(text: str) -> dict[str, dict[str, Any]]:
    """Return settings by autoscaler from the output of `bench/simulate.py --tune`."""
    return {name: item["settings"] for name, item in json.loads(text)["contenders"].items()}
