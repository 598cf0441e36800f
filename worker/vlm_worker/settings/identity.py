"""The identity of a process in its cluster."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The identity of this process in its cluster, from the downward API; empty outside of one.

    `granted_gpus` is what the device plugin gave the container (NVIDIA_VISIBLE_DEVICES).
    """

    pod_name: str = ""
    pod_uid: str = ""
    pod_ip: str = ""
    namespace: str = ""
    node_name: str = ""
    service: str = ""
    variant: str = ""
    revision: str = ""
    granted_gpus: str = ""

    @property
    def holds_gpus(self) -> bool:
        """Whether the container was given GPUs."""
        return self.granted_gpus not in ("", "none", "void")
