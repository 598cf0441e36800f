"""Volumes are at their mount paths, change while a pod runs, and are separate."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_local.agent.command import Facts
from vlm_local.agent.volumes import Volumes, write_atomically
from vlm_local.client import Client
from vlm_local.waiting import until

from .pods import Pods, condition, first, pod

NAMES = st.sampled_from(["a", "b", "c", "d/e", "d/f"])
CONTENTS = st.lists(st.dictionaries(NAMES, st.binary(max_size=8)), min_size=1, max_size=4)
FOREVER = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); signal.pause()"
ONCE = {"restartPolicy": "Never"}


@given(CONTENTS)
def test_a_folder_holds_what_was_written_last_and_nothing_else(tmp_path_factory, versions):
    folder = tmp_path_factory.mktemp("volume")
    for files in versions:
        write_atomically(folder, files)
        seen = {
            str(path.relative_to(folder)): path.read_bytes()
            for name in files
            for path in [folder / name]
        }
        assert seen == files
        shown = {entry.name for entry in folder.iterdir() if not entry.name.startswith("..")}
        assert shown == {name.split("/")[0] for name in files}


def test_writing_the_same_again_changes_nothing(tmp_path: Path):
    write_atomically(tmp_path, {"a": b"1"})
    version = (tmp_path / "..data").readlink()
    write_atomically(tmp_path, {"a": b"1"})
    assert (tmp_path / "..data").readlink() == version


def test_files_have_the_mode_of_the_volume(tmp_path: Path):
    for content in (b"1", b"2"):
        write_atomically(tmp_path, {"tls.key": content}, mode=0o444)
        assert (tmp_path / "tls.key").stat().st_mode & 0o777 == 0o444


@pytest.mark.cluster
async def test_a_sub_path_that_cannot_be_made_holds_the_container_and_names_it(
    pods: Pods, tmp_path: Path
):
    (tmp_path / "file").touch()
    volumes = [{"name": "v", "hostPath": {"path": str(tmp_path)}}]
    mounts = [{"name": "v", "mountPath": "/mnt/v", "subPath": "file/folder"}]
    await pods.create(pod("p", FOREVER, volumeMounts=mounts, spec={"volumes": volumes}))
    held = await pods.until_waiting("p", "CreateContainerError")
    assert "file/folder" in first(held)["state"]["waiting"]["message"]
    (tmp_path / "file").unlink()
    await pods.until_condition("p", "Ready", "True")


@pytest.mark.cluster
async def test_a_config_map_changes_while_a_pod_runs(pods: Pods):
    maps = pods.path.removesuffix("pods") + "configmaps"
    await pods.api.create(maps, {"metadata": {"name": "m"}, "data": {"key": "old"}})
    program = (
        "import time\n"
        "said = None\n"
        "while said != 'new':\n"
        "    now = open('/etc/demo/key').read()\n"
        "    if now != said: print(now, flush=True)\n"
        "    said = now; time.sleep(0.02)\n"
    )
    volumes = [{"name": "m", "configMap": {"name": "m"}}]
    mounts = [{"name": "m", "mountPath": "/etc/demo", "readOnly": True}]
    await pods.create(pod("p", program, volumeMounts=mounts, spec={**ONCE, "volumes": volumes}))
    await pods.until_logged("p", "old")
    await pods.api.patch(f"{maps}/m", {"data": {"key": "new"}})
    await pods.until_phase("p", "Succeeded")
    assert await pods.log("p") == "old\nnew\n"


@pytest.mark.cluster
async def test_a_pod_waits_for_a_secret_that_comes_later(pods: Pods):
    volumes = [
        {"name": "s", "secret": {"secretName": "late", "items": [{"key": "k", "path": "f"}]}}
    ]
    mounts = [{"name": "s", "mountPath": "/secret"}]
    program = "print(open('/secret/f').read())"
    await pods.create(pod("p", program, volumeMounts=mounts, spec={**ONCE, "volumes": volumes}))
    events = pods.path.removesuffix("pods") + "events"

    async def told() -> bool:
        found = (await pods.api.get(events))["items"]
        return any(one["reason"] == "FailedMount" and "late" in one["message"] for one in found)

    await until(told, seconds=15, awaited="an event about the mount")
    waiting = await pods.api.get(f"{pods.path}/p")
    assert "podIP" not in waiting["status"], "kubelet mounts volumes before it asks for an address"
    secrets = pods.path.removesuffix("pods") + "secrets"
    await pods.api.create(secrets, {"metadata": {"name": "late"}, "stringData": {"k": "shh"}})
    await pods.until_phase("p", "Succeeded")
    assert await pods.log("p") == "shh\n"
    assert (await pods.api.get(f"{pods.path}/p"))["status"]["podIP"]


@pytest.mark.cluster
async def test_a_claim_on_a_host_path_is_read_only_where_it_is_mounted_so(
    pods: Pods, tmp_path: Path, namespace: str
):
    (tmp_path / "file").write_text("weights")
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {
        "metadata": {"name": namespace},
        "spec": {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(tmp_path)}},
    }
    await pods.api.create("/api/v1/persistentvolumes", volume)
    claim = {
        "metadata": {"name": "model"},
        "spec": {
            **common,
            "volumeName": namespace,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    await pods.api.create(pods.path.removesuffix("pods") + "persistentvolumeclaims", claim)
    program = (
        "print(open('/models/model/file').read())\n"
        "try: open('/models/model/new', 'w')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    volumes = [{"name": "m", "persistentVolumeClaim": {"claimName": "model"}}]
    mounts = [{"name": "m", "mountPath": "/models/model", "readOnly": True}]
    await pods.create(pod("p", program, volumeMounts=mounts, spec={**ONCE, "volumes": volumes}))
    await pods.until_phase("p", "Succeeded")
    assert await pods.log("p") == "weights\nRead-only file system\n"
    await pods.api.delete(f"/api/v1/persistentvolumes/{namespace}")


@pytest.mark.cluster
async def test_a_read_only_root_can_be_written_in_its_volumes_alone(pods: Pods, tmp_path: Path):
    program = (
        f"for path in ('/tmp/x', '/dev/shm/x', '/etc/x', '/x', {str(tmp_path / 'x')!r}):\n"
        "    try: open(path, 'w'); print('wrote')\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    volumes = [{"name": "tmp", "emptyDir": {}}]
    more = {
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    await pods.create(pod("p", program, spec={**ONCE, "volumes": volumes}, **more))
    await pods.until_phase("p", "Succeeded")
    said = (await pods.log("p")).splitlines()
    refused = "Read-only file system"
    assert said[:4] == ["wrote", "wrote", refused, refused]
    assert said[4] in (refused, "No such file or directory")  # under /tmp it is hidden


@pytest.mark.cluster
async def test_containers_of_a_pod_share_an_empty_dir(pods: Pods):
    writer = pod("p", "open('/out/word', 'w').write('shared')")["spec"]["containers"][0]
    mounts = [{"name": "out", "mountPath": "/out"}]
    body = pod("p", "print(open('/out/word').read())", volumeMounts=mounts)
    body["spec"] |= {
        **ONCE,
        "volumes": [{"name": "out", "emptyDir": {}}],
        "initContainers": [{**writer, "name": "first", "volumeMounts": mounts}],
    }
    await pods.create(body)
    ended = await pods.until_phase("p", "Succeeded")
    assert await pods.log("p", container="main") == "shared\n"
    assert condition(ended, "Initialized")["status"] == "True"


@pytest.mark.cluster
async def test_a_sidecar_starts_before_the_container_and_ends_after_it(pods: Pods):
    """The order in which each one wrote its lines is read in a file that both share."""
    mounts = [{"name": "out", "mountPath": "/out"}]
    program = (
        "import os, signal, sys, time\n"
        "def note(word): open('/out/log', 'a').write(sys.argv[1] + word + chr(10))\n"
        "def end(*_): note(' ends'); print(open('/out/log').read(), flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "note(' starts')\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    body = pod("p", program, volumeMounts=mounts)
    main = body["spec"]["containers"][0]
    body["spec"] |= {
        "volumes": [{"name": "out", "emptyDir": {}}],
        "terminationGracePeriodSeconds": 20,
        "initContainers": [
            {**main, "name": "side", "args": [*main["args"], "side"], "restartPolicy": "Always"}
        ],
    }
    main["args"] = [*main["args"], "main"]
    await pods.create(body)
    await pods.until_condition("p", "Ready", "True")
    reading = asyncio.create_task(pods.log("p", container="side", follow="true"))
    await pods.until_logged("p", "up", container="main")
    await pods.delete("p")
    lines = (await reading).split("\n")
    assert [line for line in lines if line and line != "up"] == [
        "side starts",
        "main starts",
        "main ends",
        "side ends",
    ]
    await pods.until_gone("p")


@pytest.mark.cluster
async def test_a_token_for_an_audience_names_the_pod_it_is_bound_to(pods: Pods):
    source = {"serviceAccountToken": {"path": "t", "audience": "vlm", "expirationSeconds": 600}}
    program = (
        "import base64, json\n"
        "body = open('/token/t').read().split('.')[1]\n"
        "claims = json.loads(base64.urlsafe_b64decode(body + '=='))\n"
        "print(json.dumps([claims['aud'], claims['kubernetes.io']['pod']['name']]))\n"
    )
    volumes = [{"name": "t", "projected": {"sources": [source]}}]
    mounts = [{"name": "t", "mountPath": "/token"}]
    await pods.create(pod("p", program, volumeMounts=mounts, spec={**ONCE, "volumes": volumes}))
    await pods.until_phase("p", "Succeeded")
    assert json.loads(await pods.log("p")) == [["vlm"], "p"]


@pytest.mark.cluster
async def test_a_token_is_renewed_before_it_ends(pods: Pods, tmp_path: Path):
    await pods.create(pod("p", FOREVER))
    body = await pods.until_condition("p", "Ready", "True")
    source = {"serviceAccountToken": {"path": "t", "expirationSeconds": 600}}
    body["spec"]["volumes"] = [{"name": "t", "projected": {"sources": [source]}}]
    facts = Facts("127.0.0.1", "127.0.0.1", "n")
    volumes = Volumes(body, facts, pods.api, tmp_path, renew_after=0.001)
    token = (await volumes.prepare())["t"] / "t"
    first = token.read_text()
    refreshing = asyncio.create_task(volumes.refresh())

    async def renewed() -> bool:
        return token.read_text() != first

    await until(renewed, seconds=10, awaited="another token")
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)


class Tokens:
    """An API server that gives another token each time."""

    def __init__(self) -> None:
        self.given = 0

    async def create(self, *_: Any) -> dict[str, Any]:
        self.given += 1
        return {"status": {"token": str(self.given)}}


async def test_a_disk_that_is_full_for_a_moment_does_not_end_renewing(tmp_path: Path):
    source = {"serviceAccountToken": {"path": "t", "expirationSeconds": 600}}
    spec = {"volumes": [{"name": "v", "projected": {"sources": [source]}}]}
    body = {"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}
    facts, tokens = Facts("127.0.0.1", "127.0.0.1", "n"), Tokens()
    volumes = Volumes(body, facts, cast("Client", tokens), tmp_path, renew_after=0.0)
    folder = (await volumes.prepare())["v"]
    folder.rename(tmp_path / "away")
    folder.touch()  # nothing can be written there
    refreshing = asyncio.create_task(volumes.refresh())

    async def asked_again() -> bool:
        return tokens.given > 2

    await until(asked_again, seconds=10, awaited="a token after the one that was lost")
    assert not refreshing.done()
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)
