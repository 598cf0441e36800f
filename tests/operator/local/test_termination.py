"""A pod on a simulated node ends as on a real one: restarts, grace, hooks, children, memory."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until

from .pods import Pods, exists, first, pid, pod

pytestmark = pytest.mark.cluster
EVERY_SECOND = {"periodSeconds": 1, "failureThreshold": 1}
SLEEP = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); signal.pause()"


def _text(path: Path) -> str:
    return path.read_text()


def _running(word: str) -> list[str]:
    """The processes with `word` among their arguments."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in file.read_bytes().split(b"\0"):
                found.append(str(file))
    return found


async def test_a_container_that_ends_is_restarted_with_growing_waits(pods: Pods):
    await pods.create(pod("p", "print('once'); exit(1)"))
    crashing = await pods.until_waiting("p", "CrashLoopBackOff")
    assert crashing["status"]["phase"] == "Running"
    assert first(crashing)["lastState"]["terminated"]["exitCode"] == 1
    await pods.until_restarted("p", times=3)
    assert "once" in await pods.log("p", previous="true")


async def test_a_start_that_this_machine_refuses_is_told_and_made_up_for(
    pods: Pods, cluster: ControlPlane
):
    made = await pods.create(pod("p", SLEEP))
    running = await pods.until_condition("p", "Ready", "True")
    [folder] = (cluster.folder / "pods").glob(f"*/{made['metadata']['uid']}")
    (folder / "roots" / "main-1").touch()  # where the next run's root is to be
    os.kill(pid(running), signal.SIGKILL)
    again = first(await pods.until_restarted("p", times=2))
    assert again["lastState"]["terminated"]["reason"] == "StartError"
    assert "File exists" in again["lastState"]["terminated"]["message"]
    await pods.until_condition("p", "Ready", "True")


async def test_sigterm_gives_the_grace_and_sigkill_ends_it(pods: Pods):
    stubborn = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('no')); print('up')\n"
    stubborn += "while True: signal.pause()"
    await pods.create(pod("p", stubborn, spec={"terminationGracePeriodSeconds": 1}))
    await pods.until_logged("p", "up")
    loop = asyncio.get_running_loop()
    before = loop.time()
    await pods.delete("p")
    await pods.until_gone("p")
    assert loop.time() - before >= 1


async def test_sigterm_is_not_lost_on_a_program_that_only_begins(pods: Pods):
    slow = "import time; time.sleep(1)\n" + SLEEP  # no handler in its first second
    await pods.create(pod("p", slow, spec={"terminationGracePeriodSeconds": 60}))
    await pods.until_phase("p", "Running")
    loop = asyncio.get_running_loop()
    before = loop.time()
    await pods.delete("p")
    await pods.until_gone("p")
    assert loop.time() - before < 30


async def test_a_pre_stop_hook_runs_before_sigterm(pods: Pods):
    program = (
        "import os, signal, time\n"
        "def end(*_):\n"
        "    print('hook', os.path.exists('/state/hook'), flush=True)\n"
        "    while not os.path.exists('/state/seen'): time.sleep(0.02)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up'); signal.pause()\n"
    )
    hook = {"preStop": {"exec": {"command": ["touch", "/state/hook"]}}}
    mount = [{"name": "state", "mountPath": "/state"}]
    volumes = [{"name": "state", "emptyDir": {}}]
    spec = {"terminationGracePeriodSeconds": 60, "volumes": volumes}
    await pods.create(pod("p", program, lifecycle=hook, volumeMounts=mount, spec=spec))
    await pods.until_logged("p", "up")
    running = await pods.until_phase("p", "Running")
    state = Path(f"/proc/{pid(running)}/root/state")
    await pods.delete("p")
    await pods.until_logged("p", "hook True")
    (state / "seen").touch()  # the log is deleted with the pod
    await pods.until_gone("p")


async def test_a_forced_deletion_kills_at_once(pods: Pods):
    await pods.create(pod("p", SLEEP, spec={"terminationGracePeriodSeconds": 600}))
    running = await pods.until_condition("p", "Ready", "True")
    process = f"/proc/{pid(running)}"
    assert exists(process)
    await pods.delete("p", grace_seconds=0)

    async def dead() -> bool:
        return not exists(process)

    await until(dead, seconds=5, awaited="the process to die")


async def test_processes_of_a_container_end_with_it(pods: Pods):
    program = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'orphan-%s'],\n"
        "                 start_new_session=True)\n"
        "print('started', flush=True); exit(0)\n"
    )
    await pods.create(pod("p", program % pods.path.split("/")[4], spec={"restartPolicy": "Never"}))
    await pods.until_phase("p", "Succeeded")
    marker = f"orphan-{pods.path.split('/')[4]}"

    async def none_left() -> bool:
        return not _running(marker)

    await until(none_left, seconds=5, awaited="the orphan to die")


async def test_more_memory_than_the_limit_is_reported_as_oom(pods: Pods, cluster: ControlPlane):
    if "limits are not enforced" in _text(cluster.folder / "agent.log"):
        pytest.skip("no cgroup of ours on this machine: the agent's log says so")
    limits = {"limits": {"memory": "64Mi"}}
    spec = {"restartPolicy": "Never"}
    await pods.create(
        pod("p", "x = bytearray(256 << 20); print(len(x))", resources=limits, spec=spec)
    )
    ended = first(await pods.until_phase("p", "Failed"))["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")
