"""A pod on a simulated node is a real process, and is reported as a kubelet reports it."""

import asyncio
import json
from pathlib import Path

import pytest

from vlm_local.agent.process import no_identities
from vlm_local.client import STRATEGIC, ApiError
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until

from .pods import POD_IP, Pods, condition, exists, first, pid, pod, server

pytestmark = pytest.mark.cluster
EVERY_SECOND = {"periodSeconds": 1, "failureThreshold": 1}
SLEEP = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); signal.pause()"


async def test_a_pod_runs_prints_and_ends_with_its_exit_code(pods: Pods):
    await pods.create(pod("p", "print('hello'); exit(3)", spec={"restartPolicy": "Never"}))
    ended = await pods.until_phase("p", "Failed")
    assert first(ended)["state"]["terminated"]["exitCode"] == 3
    assert first(ended)["state"]["terminated"]["reason"] == "Error"
    assert await pods.log("p") == "hello\n"


async def test_a_job_that_succeeds_is_completed(pods: Pods):
    await pods.create(pod("p", "print(1)", spec={"restartPolicy": "OnFailure"}))
    ended = await pods.until_phase("p", "Succeeded")
    assert condition(ended, "Ready")["reason"] == "PodCompleted"


async def test_environment_and_arguments_are_filled_in(pods: Pods):
    fields = ["metadata.name", "metadata.labels['app']", "spec.nodeName", "status.podIP"]
    env = [
        {"name": f"F{number}", "valueFrom": {"fieldRef": {"fieldPath": field}}}
        for number, field in enumerate(fields)
    ]
    env += [{"name": "JOINED", "value": "$(F0)/$(F1) $$(F0) $(NOT_SET)"}]
    program = "import os; print(os.environ['JOINED'], os.environ['F3'], '$(F2)')"
    body = pod("p", program, env=env, spec={"restartPolicy": "Never"})
    body["metadata"]["labels"] = {"app": "x"}
    await pods.create(body)
    ended = await pods.until_phase("p", "Succeeded")
    ip, node = ended["status"]["podIP"], ended["spec"]["nodeName"]
    assert await pods.log("p") == f"p/x $(F0) $(NOT_SET) {ip} {node}\n"


async def test_two_pods_have_addresses_of_their_own_and_the_same_port(pods: Pods):
    probe = {"tcpSocket": {"port": 8080}, **EVERY_SECOND}
    for name in ("one", "two"):
        await pods.create(server(name, readinessProbe=probe))
    one, two = [await pods.until_condition(name, "Ready", "True") for name in ("one", "two")]
    assert one["status"]["podIP"] != two["status"]["podIP"]


async def test_an_unknown_image_is_an_image_pull_error(pods: Pods):
    await pods.create(pod("p", "", image="registry.example/unknown:1"))
    waiting = first(await pods.until_waiting("p", "ErrImagePull"))["state"]["waiting"]
    assert "triptych/worker" in waiting["message"]


async def test_a_missing_key_holds_the_container_and_names_it(pods: Pods):
    reference = {"configMapKeyRef": {"name": "settings", "key": "colour"}}
    await pods.create(pod("p", SLEEP, env=[{"name": "COLOUR", "valueFrom": reference}]))
    waiting = first(await pods.until_waiting("p", "CreateContainerConfigError"))["state"]["waiting"]
    assert "settings" in waiting["message"]
    path = pods.path.removesuffix("pods") + "configmaps"
    await pods.api.create(path, {"metadata": {"name": "settings"}, "data": {"colour": "red"}})
    await pods.until_condition("p", "Ready", "True")


async def test_readiness_follows_the_probe_both_ways(pods: Pods):
    probe = {"httpGet": {"path": "/ready", "port": 8080}, **EVERY_SECOND}
    await pods.create(server("p", readinessProbe=probe))
    started = await pods.until_phase("p", "Running")
    assert condition(started, "Ready")["status"] == "False"
    state = await _state_folder(pods, "p")
    (state / "ready").touch()
    await pods.until_condition("p", "Ready", "True")
    (state / "ready").unlink()
    unready = await pods.until_condition("p", "Ready", "False")
    assert condition(unready, "ContainersReady")["reason"] == "ContainersNotReady"
    assert first(unready)["restartCount"] == 0


async def test_a_failed_liveness_probe_restarts_the_container(pods: Pods):
    startup = {"httpGet": {"path": "/alive", "port": 8080}, "periodSeconds": 1}
    liveness = {**startup, "failureThreshold": 1}
    await pods.create(server("p", startupProbe=startup, livenessProbe=liveness))
    state = await _state_folder(pods, "p")
    (state / "alive").touch()
    await pods.until_condition("p", "Ready", "True")
    (state / "alive").unlink()
    restarted = await pods.until_restarted("p")
    assert first(restarted)["lastState"]["terminated"]["exitCode"] == 0  # it heard SIGTERM


async def test_an_exec_probe_runs_inside_the_container(pods: Pods):
    probe = {"exec": {"command": ["test", "-e", "/state/ready"]}, **EVERY_SECOND}
    await pods.create(server("p", readinessProbe=probe))
    state = await _state_folder(pods, "p")
    (state / "ready").touch()
    await pods.until_condition("p", "Ready", "True")
    assert not exists("/state")


async def test_a_grpc_probe_asks_the_health_service(pods: Pods):
    program = (
        "import os, signal, grpc\n"
        "from concurrent import futures\n"
        "from grpc_health.v1 import health, health_pb2, health_pb2_grpc\n"
        "service = health.HealthServicer()\n"
        "service.set('decode', health_pb2.HealthCheckResponse.SERVING)\n"
        "server = grpc.server(futures.ThreadPoolExecutor(2))\n"
        "health_pb2_grpc.add_HealthServicer_to_server(service, server)\n"
        "server.add_insecure_port(os.environ['POD_IP'] + ':9000')\n"
        "server.start()\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "signal.pause()\n"
    )
    for name, service in (("known", "decode"), ("unknown", "encoder")):
        probe = {"grpc": {"port": 9000, "service": service}, **EVERY_SECOND}
        await pods.create(pod(name, program, env=[POD_IP], readinessProbe=probe))
    await pods.until_condition("known", "Ready", "True")
    unknown = await pods.until_phase("unknown", "Running")
    assert condition(unknown, "Ready")["status"] == "False"


async def test_a_pod_whose_node_was_given_up_is_ready_again_when_the_node_is_back(pods: Pods):
    await pods.create(pod("p", SLEEP))
    await pods.until_condition("p", "Ready", "True")
    given_up = {"conditions": [{"type": "Ready", "status": "False"}]}  # as the node controller does
    path = f"{pods.path}/p/status"
    answer = await pods.api.patch(path, {"status": given_up}, kind=STRATEGIC)
    assert condition(answer, "Ready")["status"] == "False"
    await pods.until_condition("p", "Ready", "True")


@pytest.mark.parametrize("context", [{"runAsUser": 65532}, {"runAsNonRoot": True}])
async def test_a_pod_and_what_is_run_in_it_have_a_uid_that_no_user_database_names(
    pods: Pods, context: dict[str, object]
):
    if why := no_identities():
        pytest.skip(f"this machine gives containers no uid: {why}")
    program = (
        f"import os, pwd; print(os.getuid(), 65532 in [u.pw_uid for u in pwd.getpwall()])\n{SLEEP}"
    )
    probe = {"exec": {"command": ["sh", "-c", "test $(id -u) = 65532"]}, **EVERY_SECOND}
    spec = {"securityContext": context}
    await pods.create(pod("p", program, readinessProbe=probe, spec=spec))
    await pods.until_condition("p", "Ready", "True")
    assert await pods.log("p") == "65532 False\n"


async def test_a_readiness_gate_keeps_a_pod_unready_until_it_is_true(pods: Pods):
    gate = "triptych.dev/accepting"
    await pods.create(pod("p", SLEEP, spec={"readinessGates": [{"conditionType": gate}]}))
    held = await pods.until_condition("p", "ContainersReady", "True")
    assert condition(held, "Ready")["reason"] == "ReadinessGatesNotReady"
    opened = {"status": {"conditions": [{"type": gate, "status": "True"}]}}
    kind = "application/strategic-merge-patch+json"
    await pods.api.patch(f"{pods.path}/p/status", opened, kind=kind)
    ready = await pods.until_condition("p", "Ready", "True")
    assert condition(ready, gate)["status"] == "True"  # the node's writes kept it


async def test_a_token_speaks_for_the_service_account(pods: Pods, namespace: str):
    program = (
        "import json, os, ssl, urllib.request\n"
        "home = '/var/run/secrets/kubernetes.io/serviceaccount/'\n"
        "tls = ssl.create_default_context(cafile=home + 'ca.crt')\n"
        "url = 'https://%s:%s/apis/authentication.k8s.io/v1/selfsubjectreviews' % (\n"
        "    os.environ['KUBERNETES_SERVICE_HOST'], os.environ['KUBERNETES_SERVICE_PORT'])\n"
        "headers = {'Authorization': 'Bearer ' + open(home + 'token').read(),\n"
        "           'Content-Type': 'application/json'}\n"
        "body = json.dumps(\n"
        "    {'apiVersion': 'authentication.k8s.io/v1', 'kind': 'SelfSubjectReview'})\n"
        "request = urllib.request.Request(url, body.encode(), headers)\n"
        "answer = urllib.request.urlopen(request, context=tls)\n"
        "print(json.load(answer)['status']['userInfo']['username'])\n"
    )
    await pods.create(pod("p", program, spec={"restartPolicy": "Never"}))
    await pods.until_phase("p", "Succeeded")
    assert await pods.log("p") == f"system:serviceaccount:{namespace}:default\n"


async def test_a_deployment_rolls_out_and_its_pods_go_with_it(
    pods: Pods, cluster: ControlPlane, namespace: str
):
    template = pod("ignored", SLEEP)["spec"]
    del template["terminationGracePeriodSeconds"]
    labels = {"app": "rolled"}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "rolled"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }
    kubectl = ["-n", namespace]
    await asyncio.to_thread(
        cluster.kubectl, *kubectl, "apply", "-f", "-", stdin=json.dumps(deployment)
    )
    rollout = [*kubectl, "rollout", "status", "deployment/rolled", "--timeout=20s"]
    assert "successfully" in (await asyncio.to_thread(cluster.kubectl, *rollout)).stdout
    await asyncio.to_thread(cluster.kubectl, *kubectl, "rollout", "restart", "deployment/rolled")
    assert "successfully" in (await asyncio.to_thread(cluster.kubectl, *rollout)).stdout
    await asyncio.to_thread(cluster.kubectl, *kubectl, "delete", "deployment", "rolled")

    async def no_pods() -> bool:
        return not (await pods.api.get(pods.path))["items"]

    await until(no_pods, seconds=20, awaited="garbage collection to end the pods")


async def test_a_node_can_read_secrets_of_its_own_pods_only(cluster: ControlPlane):
    node = ["--as=system:node:cpu-large", "--as-group=system:nodes"]
    denied = cluster.kubectl("get", "secrets", "-A", *node, check=False)
    assert "Forbidden" in denied.stderr


async def test_asking_for_the_log_of_what_never_ran_is_an_answer(pods: Pods):
    await pods.create(pod("p", "", image="unknown"))
    await pods.until_waiting("p", "ErrImagePull")
    with pytest.raises(ApiError, match="waiting to start"):
        await pods.log("p")


async def _state_folder(pods: Pods, name: str) -> Path:
    """The emptyDir of a `server` pod as this machine sees it: through its process 1."""
    running = await pods.until_phase(name, "Running")
    await pods.until_logged(name, "serving")
    return Path(f"/proc/{pid(running)}/root/state")
