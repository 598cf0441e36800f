"""What a user reads: conditions that name the one thing, rounded figures, few events."""

import dataclasses
import math
import pathlib
import re

import pytest

from support.fakes import Saying, run_controllers, sample_of
from support.world import World, body, pool, rps
from vlm_operator.api.status import CONDITIONS, VLMServiceStatus
from vlm_operator.cluster import POD, Manifest
from vlm_operator.names import LABEL_ROLE, Role
from vlm_operator.observe import pod_states, unschedulable
from vlm_operator.state import StageSeconds, Ttft
from vlm_operator.status.events import Event, events

ROOT = pathlib.Path(__file__).parents[3]
DEADLINE = 600  # rollout.progressDeadlineSeconds


def test_the_status_is_what_the_crd_describes():
    world = World()
    world.turn()
    world.converge()
    VLMServiceStatus.model_validate(world.status)
    assert {item["type"] for item in world.status["conditions"]} <= set(CONDITIONS)


def test_a_condition_keeps_its_time_until_its_status_turns():
    world = World()
    world.converge()
    before = world.condition("Ready")
    world.apply(body(encoder=pool(2), prefill=pool(), decode=pool()))
    world.turn(seconds=50)
    turned = world.condition("Ready")
    assert turned["status"] == "False"
    assert turned["lastTransitionTime"] > before["lastTransitionTime"]
    world.turn(seconds=50)
    assert world.condition("Ready")["lastTransitionTime"] == turned["lastTransitionTime"]


READY_LINE = '{"level": "info", "message": "ready"}'
FAILED_LINE = '{"level": "error", "message": "the engine failed", "error": "no memory"}'


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        pytest.param(
            "0/3 nodes are available: 1 node(s) had untolerated taint {a: b}, "
            "2 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available.",
            "no node with 2 free nvidia.com/gpu (3 checked)",
            id="a device",
        ),
        pytest.param(
            "0/1 nodes are available: 1 Insufficient cpu.",
            "no node with 500m free cpu (1 checked)",
            id="cpu",
        ),
        pytest.param(
            "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
            "no node fits (2 checked): 2 node(s) didn't match Pod's node affinity/selector.",
            id="no such node type",
        ),
        pytest.param("no nodes available", "no nodes available", id="none"),
        pytest.param("", "no node was found", id="silence"),
    ],
)  # fmt: skip
def test_the_schedulers_words_become_one_sentence(message: str, sentence: str):
    resources = {"requests": {"cpu": "500m"}, "limits": {"nvidia.com/gpu": "2"}}
    assert unschedulable(message, {"containers": [{"resources": resources}]}) == sentence


@pytest.mark.parametrize(
    ("status", "blocked"),
    [
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
            "ImagePullBackOff: no such image",
        ),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                "lastState": {
                    "terminated": {"reason": "Error", "exitCode": 2, "message": "a\n--model: no"}
                },
            },
            "CrashLoopBackOff: Error, exit code 2: --model: no",
        ),
        (
            {
                "restartCount": 3,
                "state": {"running": {}},
                "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
            },
            "restarted 3 times: OOMKilled, exit code 137",
        ),
        (
            {"state": {"terminated": {"exitCode": 137, "message": READY_LINE}}},
            "Error, exit code 137",
        ),
        (
            {"state": {"terminated": {"exitCode": 137, "message": f"{FAILED_LINE}\n{READY_LINE}"}}},
            "Error, exit code 137",
        ),
        (
            {"state": {"terminated": {"exitCode": 1, "message": f"{FAILED_LINE}\n{READY_LINE}"}}},
            "Error, exit code 1: the engine failed: no memory",
        ),
        (
            {"state": {"terminated": {"exitCode": 134, "message": f"{READY_LINE}\nabort()"}}},
            "Error, exit code 134: abort()",
        ),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, ""),
        ({"state": {"running": {}}, "ready": True}, ""),
    ],
    ids=[
        "image",
        "crash",
        "memory",
        "killed",
        "killed after an error",
        "failed",
        "aborted",
        "creating",
        "running",
    ],
)
def test_a_container_that_cannot_run_says_why(status: dict, blocked: str):
    manifest = {
        "metadata": {
            "name": "p",
            "uid": "u",
            "labels": {"triptych.dev/role": "decode"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {},
        "status": {"containerStatuses": [{"name": "worker", **status}]},
    }
    (found,) = pod_states([manifest])
    assert found.blocked == blocked


def ttft(count: int, *, slow: int = 0) -> Ttft:
    fast = count - slow
    return Ttft(
        count=count,
        missed=slow,
        sum_seconds=0.2 * fast + 3.0 * slow,
        buckets={0.25: fast, 1.0: fast, 4.0: count, math.inf: count},
        stages={
            "prefill": StageSeconds(met=0.1 * fast, missed=1.0 * slow),
            "encode": StageSeconds(met=0.1 * fast, missed=2.0 * slow),
        },
    )


def asked_world(goal: int = 1000) -> World:
    """A service with a goal, whose gateways count what a test puts into `counted`."""
    world = World(body({"slo": {"ttftP95Milliseconds": goal}}))
    world.counted = {}
    plain = world.scraper.scrape

    async def scrape(pods):
        return {
            uid: dataclasses.replace(item, ttft=dict(world.counted))
            if item.role is Role.GATEWAY
            else item
            for uid, item in (await plain(pods)).items()
        }

    world.scraper.scrape = scrape
    world.converge()
    world.counted = {"image": ttft(0)}
    world.turn(seconds=5)
    return world


def test_ttft_is_that_of_the_window_and_shares_are_those_of_missed_requests():
    world = asked_world()
    assert "slo" not in world.status
    assert world.condition("SLOAttainable")["reason"] == "NoRequests"
    world.counted = {"image": ttft(200, slow=50)}
    world.turn(seconds=5)
    (found,) = world.status["slo"]
    assert 1000 < found.pop("ttftP95Milliseconds") <= 4000
    assert found == {
        "modality": "Image",
        "targetMilliseconds": 1000,
        "stages": {"encode": 65, "prefill": 35},
        "dominantStage": "encode",
    }
    assert world.condition("SLOAttainable")["reason"] == "GoalMissed"


def test_a_goal_that_is_missed_names_stage_and_remedy():
    world = asked_world(goal=3200)
    world.counted = {"image": ttft(200, slow=50)}
    world.turn(seconds=5)
    found = world.condition("SLOAttainable")
    assert (found["status"], found["reason"]) == ("Unknown", "GoalMissed")
    assert "exceeds the goal of 3200 ms, most of it goes to encode" in found["message"]
    assert "a faster node type for the encoder would help" in found["message"]


def test_a_window_that_only_slides_on_is_not_written_until_nothing_is_in_it():
    world = asked_world()
    for count in (50, 100, 200):
        world.counted = {"image": ttft(count, slow=count // 10)}
        world.turn(seconds=30)
    before, told = world.written(), world.status["slo"]
    for _ in range(8):
        world.turn(seconds=25)
    assert (world.written(), world.status["slo"]) == (before, told)
    for _ in range(40):
        world.turn(seconds=25)
    assert "slo" not in world.status
    assert world.written() == before + 1
    assert world.condition("SLOAttainable")["reason"] == "NoRequests"


def test_small_changes_of_load_write_nothing():
    world = World()
    world.converge()

    async def scrape(pods, level=[0]):  # noqa: B006
        level[0] += 3
        found = {}
        for item in pods:
            if not item.containers_ready:
                continue
            plain = sample_of(item)
            kv = plain.kv and dataclasses.replace(plain.kv, running=200 + level[0] % 10)
            found[item.uid] = dataclasses.replace(
                plain, kv=kv, queued_work_seconds=level[0] % 4 / 10
            )
        return found

    world.scraper.scrape = scrape
    world.turn(seconds=30)
    before = world.written()
    for _ in range(10):
        world.turn(seconds=5)
    assert world.written() == before
    assert world.status["summary"]["kvOccupancyPercent"] == "20"


def test_what_workers_measured_stays_while_none_answers():
    world = World()
    world.converge()
    assert world.status["model"]["weightsBytes"] == {
        "encoder": 4096,
        "prefill": 4096,
        "decode": 4096,
    }
    world.scraper.silent = {pod.name for pod in world.loop._seen.pods}
    world.turn()
    assert world.status["model"]["kvBytesPerToken"] == 64
    assert world.condition("MetricsAvailable")["reason"] == "PodsSilent"


def test_docs_events_md_lists_every_event_that_is_posted_with_its_type():
    posted, strings = set(), set()
    for name in ("status/events.py", "reconcile/report.py"):
        source = (ROOT / "operator/vlm_operator" / name).read_text()
        strings |= set(re.findall(r'"(\w+)"', source))
        posted |= set(re.findall(r'Event\(\s*"(\w+)"', source))
        posted |= set(re.findall(r'Event\("\w+" if \w+ else "(\w+)"', source))
    page = (ROOT / "docs/events.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \| .* \|$", page, re.MULTILINE))
    assert posted <= set(documented) <= strings
    for reason, kind in documented.items():
        assert Event(reason, "").warning == (kind == "Warning"), reason


def test_the_same_status_twice_is_no_news():
    world = World()
    world.converge()
    assert events(world.status, world.status) == ()


def test_each_step_of_a_start_is_progress_and_its_share_is_in_the_message():
    world = World(body(decode=pool()))
    saying = Saying("decode", phase="loading", accepting=False, message="downloading a/b: 90 %")
    world.scraper = saying
    world.loop = world.new_loop()
    world.turn()
    run_controllers(world.cluster)

    def unready(pod: Manifest) -> None:
        for item in pod["status"]["conditions"]:
            if item["type"] == "Ready":
                item |= {"status": "False", "lastTransitionTime": world.cluster.clock.stamp()}

    for item in world.cluster.all(POD):
        if item["metadata"]["labels"][LABEL_ROLE] == "decode":
            world.cluster.edit(POD, "ns", item["metadata"]["name"], unready, manager="kubelet")
    world.turn()
    saying.said["message"] = "packing weights: 23 %, 40 s left"  # less than the download had
    world.turn(seconds=DEADLINE - 100)
    assert world.condition("DecodeReady")["message"].count("starts: packing weights: 20 %") == 1
    world.turn(seconds=DEADLINE - 100)
    assert rps(world) == "F/T/F"
    world.turn(seconds=101)
    assert rps(world) == "F/F/T"
