"""Builds the status of a VLMPool that no VLMService controls: no controller reads it. Pure."""

from __future__ import annotations

from vlm_operator import names
from vlm_operator.state import Manifest, controller
from vlm_operator.status.build import conditions
from vlm_operator.status.causes import sentence
from vlm_operator.status.inputs import ConditionState

NO_SERVICE = "NoService"


def unowned_status(manifest: Manifest, *, now: float) -> Manifest | None:
    """Return the status of a VLMPool that a user created; None if a VLMService controls it.

    None also if it is being deleted. kstatus reads Stalled=True as Failed.

    Args:
        manifest: the VLMPool; an unchanged condition keeps its time.
        now: seconds since the epoch.
    """
    meta = manifest["metadata"]
    owner = controller(manifest)
    if "deletionTimestamp" in meta or (
        owner is not None
        and owner.get("kind") == names.KIND_SERVICE
        and str(owner.get("apiVersion", "")).partition("/")[0] == names.GROUP
    ):
        return None
    verdict = ConditionState(
        "Stalled",
        True,
        NO_SERVICE,
        sentence(
            "no VLMService controls this VLMPool: nobody reads it and it makes no pod",
            "delete it and write a VLMService, whose operator makes the VLMPools that can be "
            "scaled",
        ),
    )
    previous = manifest.get("status", {})
    return {"conditions": conditions([verdict], previous, meta["generation"], now=now)}
