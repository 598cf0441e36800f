"""The operator runs as its image does: as a uid that no user database names."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest
from confined import confined, refused

from support.live import Live, install
from support.world import body, pool
from vlm_local.controlplane import ControlPlane

UID = 65532
NO_NAMES = ("env", "-u", "USER", "-u", "LOGNAME", "-u", "LNAME", "-u", "USERNAME", "-u", "POD_ID")
MODULE = (sys.executable, "-P", "-m", "vlm_operator")
# the same for machines without user namespaces: only the look-up fails
LOOKUP_FAILS = """
import pwd
def refuse(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = refuse
from vlm_operator.__main__ import main
main()
"""


@pytest.mark.parametrize("how", ["a uid without a name", "a lookup that fails"])
def test_it_leads_and_looks_after_services(
    control_plane: ControlPlane, tmp_path: Path, how: str
) -> None:
    if how == "a uid without a name":
        if why := refused(uid=UID):
            pytest.skip(f"this machine runs no process as uid {UID}: {why}")
        program = confined(*NO_NAMES, *MODULE, uid=UID)
    else:
        program = [*NO_NAMES, sys.executable, "-P", "-c", LOOKUP_FAILS]
    install(control_plane, tmp_path)
    namespace = f"user-{uuid.uuid4().hex[:6]}"
    control_plane.kubectl("create", "namespace", namespace)
    operator = Live(control_plane, tmp_path, f"--namespace={namespace}", program=program)
    operator.start()
    try:
        manifest = body(name="one", encoder=pool(), decode=pool())
        operator.apply({**manifest, "metadata": {"name": "one", "namespace": namespace}})
        # only kopf notifies the operator of a new service
        operator.until(lambda: operator.items("deploy", "one", namespace), seconds=20)
    finally:
        status = operator.stop()
        control_plane.kubectl("-n", namespace, "delete", "vlm", "--all", "--wait=false")
        control_plane.kubectl("delete", "namespace", namespace, "--wait=false")
    assert status == 0
