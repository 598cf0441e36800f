"""The control plane is Kubernetes itself, and ends when it should."""

import asyncio
import contextlib
import json
import socket
import sys
from pathlib import Path

import pytest

from vlm_local.client import ApiError
from vlm_local.controlplane import ControlPlane
from vlm_local.errors import PortTakenError
from vlm_local.waiting import until

pytestmark = pytest.mark.cluster


async def test_an_object_that_was_created_is_read_back_and_deleted(control_plane: ControlPlane):
    async with control_plane.client() as api:
        path = "/api/v1/namespaces/default/configmaps"
        await api.create(path, {"metadata": {"name": "seen"}, "data": {"a": "1"}})
        assert (await api.get(f"{path}/seen"))["data"] == {"a": "1"}
        await api.delete(f"{path}/seen")
        with pytest.raises(ApiError) as gone:
            await api.get(f"{path}/seen")
        assert (gone.value.status, gone.value.reason) == (404, "NotFound")


def test_kubectl_speaks_to_it(control_plane: ControlPlane):
    version = json.loads(control_plane.kubectl("version", "-o", "json").stdout)
    assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"]


async def test_a_restricted_namespace_refuses_a_privileged_pod(control_plane: ControlPlane):
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    async with control_plane.client() as api:
        await api.create(
            "/api/v1/namespaces", {"metadata": {"name": "restricted", "labels": labels}}
        )
        with pytest.raises(ApiError, match="violates PodSecurity"):
            await api.create(
                "/api/v1/namespaces/restricted/pods",
                {
                    "metadata": {"name": "root"},
                    "spec": {"containers": [{"name": "main", "image": "any"}]},
                },
            )


async def test_the_audit_log_has_the_user_of_each_request(control_plane: ControlPlane):
    async with control_plane.client() as api:
        with pytest.raises(ApiError):
            await api.get("/api/v1/namespaces/default/configmaps/looked-for-by-the-audit-test")
    [asked] = [
        line
        for line in control_plane.audited()[0]
        if line.get("objectRef", {}).get("name") == "looked-for-by-the-audit-test"
    ]
    assert asked["user"]["username"] == "kubernetes-admin"
    assert (asked["verb"], asked["responseStatus"]["code"]) == ("get", 404)


async def test_a_watch_starts_with_the_state_and_goes_on_with_changes(control_plane: ControlPlane):
    path = "/api/v1/namespaces/kube-public/configmaps"
    async with control_plane.client() as api:
        changes = api.watch(path, labelSelector="test=watch")
        kind, listed = await anext(changes)
        assert (kind, listed["items"]) == ("SYNC", [])
        await api.create(path, {"metadata": {"name": "w", "labels": {"test": "watch"}}})
        assert (await anext(changes))[0] == "ADDED"
        await api.delete(f"{path}/w")
        assert (await anext(changes))[0] == "DELETED"
        await changes.aclose()


async def test_a_taken_port_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"Port {port} .*is taken.\n.*ss -ltnp"):
            await ControlPlane(port=port).start()


async def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path):
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from vlm_local.controlplane import ControlPlane\n"
        "async def main():\n"
        "    async with ControlPlane(folder=Path(sys.argv[1])):\n"
        "        print('up', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"up\n"
    assert len(_mentioning(tmp_path)) >= 4
    parent.kill()
    await parent.wait()

    async def all_gone() -> bool:
        return not _mentioning(tmp_path)

    await until(all_gone, seconds=5, awaited="the four processes to end")


def _mentioning(folder: Path) -> list[int]:
    """The processes, zombies apart, with `folder` in their command line."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in line.read_bytes():
                found.append(int(line.parent.name))
    return found
