"""How kopf itself behaves: its settings, its credentials, its names of kinds."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import kopf

from vlm_operator import names
from vlm_operator.cluster import CHILD_KINDS, POD, Kind
from vlm_operator.kube import Connection


@dataclasses.dataclass(frozen=True)
class Watching:
    """How long kopf believes in a watch, in whole seconds.

    Attributes:
        whole: then it lists and watches anew: what an event did not tell is seen by then.
        silence: without an event or a bookmark, of which there is one a minute.
    """

    whole: int = 300
    silence: int = 70


async def configure(settings: kopf.OperatorSettings, memo: Any, **_: Any) -> None:
    """Settle how kopf itself behaves; each line answers a known trap."""
    watching: Watching = memo.app.watching
    settings.persistence.finalizer = names.FINALIZER
    prefix = names.GROUP
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=prefix)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=prefix)
    settings.persistence.consistency_timeout = 15
    settings.posting.enabled = False  # our own Events are counted, kopf's are not
    settings.peering.standalone = True  # the Lease elects
    settings.scanning.disabled = True  # no rights on namespaces and CRDs are needed
    settings.networking.error_backoffs = Backoffs()
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = max(1, round(watching.whole))  # API servers take integers
    settings.watching.client_timeout = watching.whole + 30
    settings.watching.inactivity_timeout = watching.silence
    settings.background.cancellation_polling = 1
    for kind in (*CHILD_KINDS, POD):
        settings.watching.label_selectors[selector(kind)] = (
            f"{names.LABEL_APP_MANAGED_BY}={names.MANAGER}"
        )


class Backoffs:
    """Growing pauses without an end, jittered: an API server may be away for long."""

    def __iter__(self) -> Iterator[float]:
        """Yield seconds: 1, 2, 4, 8, then about 15 for ever."""
        for attempt in itertools.count():
            yield min(15.0, 2.0**attempt) * random.uniform(0.7, 1.3)  # noqa: S311


async def login(memo: Any, **_: Any) -> kopf.ConnectionInfo:
    """Tell kopf how to connect, anew whenever its token is refused."""
    found: Connection = await memo.app.connect()
    return kopf.ConnectionInfo(
        server=found.server,
        ca_path=found.ca_path,
        insecure=found.insecure,
        token=found.token,
        certificate_path=found.certificate_path,
        private_key_path=found.private_key_path,
    )


def selector(kind: Kind) -> tuple[str, str, str]:
    """Name a kind as kopf does: group, version, plural."""
    group, _, version = kind.api_version.rpartition("/")
    return (group, version, kind.plural)
