"""The messages and the decisions of the demo."""

import socket

import pytest

from vlm_local.demo.ask import is_right
from vlm_local.demo.checks import choose_port
from vlm_local.demo.line import DemoOptions, model_volume
from vlm_local.demo.watch import pod_state, service_state
from vlm_local.errors import PortTakenError


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("blue triangle", "blue triangle", True),
        ("A blue  triangle.", "blue triangle", True),
        ("blue", "blue triangle", False),
        ("not a blue triangle at all", "blue triangle", False),
        ("", "blue triangle", False),
        ("anything", None, True),
        (" ", None, False),
    ],
)
def test_an_answer_is_right_if_it_is_the_expected_one(answer, expected, right):
    assert is_right(answer, expected) is right


def test_an_image_or_a_question_of_ones_own_has_no_known_answer(tmp_path):
    assert DemoOptions().expected == "blue triangle"
    assert DemoOptions(question="How many?").expected is None
    own = DemoOptions(image=tmp_path)
    assert (own.expected, own.prompt) == (None, "Describe the image.")


def test_a_port_that_was_not_asked_for_gives_way():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"Port {port}"):
            choose_port(port)
    assert choose_port(port) == port


def test_the_volume_is_bound_to_its_claim_from_both_sides(tmp_path):
    volume, claim = model_volume(tmp_path)["items"]
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["hostPath"]["path"] == str(tmp_path)


def pod(*, phase: str = "Pending", state: dict | None = None, **conditions: dict) -> dict:
    entries = [{"type": kind, **fields} for kind, fields in conditions.items()]
    statuses = [] if state is None else [{"state": state}]
    return {"status": {"phase": phase, "conditions": entries, "containerStatuses": statuses}}


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        pytest.param(pod(), "Pending", id="just created"),
        pytest.param(
            pod(PodScheduled={"status": "False", "message": "0/3 nodes"}),
            "Pending: 0/3 nodes",
            id="no node",
        ),
        pytest.param(pod(phase="Running", state={"running": {}}), "starting", id="starting"),
        pytest.param(
            pod(state={"waiting": {"reason": "ErrImagePull", "message": "unknown"}}),
            "ErrImagePull: unknown",
            id="stuck",
        ),
        pytest.param(
            pod(state={"terminated": {"exitCode": 1, "reason": "Error"}}),
            "ended with code 1 (Error)",
            id="ended",
        ),
        pytest.param(pod(phase="Running", Ready={"status": "True"}), "Ready", id="ready"),
    ],
)
def test_a_pods_state_names_what_it_waits_for(seen, said):
    assert pod_state(seen) == said


def service(**conditions: dict) -> dict:
    entries = [{"type": kind, "observedGeneration": 2, **one} for kind, one in conditions.items()]
    return {"metadata": {"generation": 2}, "status": {"conditions": entries}}


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        pytest.param(service(), (False, "waiting for the operator"), id="no status yet"),
        pytest.param(
            service(Ready={"status": "False", "message": "decode 0/1"}),
            (False, "decode 0/1"),
            id="one pod is missing",
        ),
        pytest.param(
            service(Accepted={"status": "False", "message": "spec.x"}, Ready={"status": "False"}),
            (False, "Accepted=False: spec.x"),
            id="refused",
        ),
        pytest.param(service(Ready={"status": "True"}), (True, "Ready"), id="ready"),
        pytest.param(
            service(Ready={"status": "True", "observedGeneration": 1, "message": "old"}),
            (False, "old"),
            id="ready, but as it was before",
        ),
    ],
)
def test_a_service_is_ready_only_as_it_stands_now(seen, state):
    assert service_state(seen) == state
