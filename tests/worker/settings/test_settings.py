"""argv -> settings: what the contract lists is understood; what is wrong is named with its fix."""

from __future__ import annotations

import dataclasses

import pytest

from vlm_worker.settings import GatewaySettings, ServeSettings, WorkerSettings, parse
from vlm_worker.settings.child import gateway_argv, worker_argv
from vlm_worker.types import Role, Stage

CONTRACT_WORKER = [
    "--model=/models/model", "--served-name=demo", "--model-revision=abc", "--bind=10.0.0.7",
    "--grpc-port=9000", "--http-port=9001", "--block-size=64", "--dtype=auto", "--kv-dtype=auto",
    "--kv-memory-bytes=1000000", "--kv-reserve-percent=5", "--max-model-len=4096",
    "--drain-timeout-seconds=600", "--compat=c0ffee",
]  # fmt: skip
CONTRACT_GATEWAY = [
    "--model=/models/model", "--served-name=demo", "--bind=10.0.0.8", "--http-port=8000",
    "--admin-port=9001", "--namespace=ns", "--service=demo", "--config=/etc/vlm/gateway.json",
    "--api-keys-dir=/etc/keys", "--block-size=64", "--max-model-len=4096",
    "--drain-timeout-seconds=600", "--compat=c0ffee",
]  # fmt: skip


@pytest.mark.parametrize("role", ["encoder", "prefill", "decode"])
def test_a_role_loads_its_own_stage_unless_told_otherwise(role: str) -> None:
    settings = parse([role, *CONTRACT_WORKER], {"POD_NAME": "p", "TRIPTYCH_VARIANT": "v"})
    assert isinstance(settings, WorkerSettings)
    assert settings.stages == {Stage(role)}
    assert (settings.identity.pod_name, settings.identity.variant) == ("p", "v")
    all_stages = parse([role, *CONTRACT_WORKER, "--stages=encoder,prefill,decode"], {})
    assert isinstance(all_stages, WorkerSettings)
    assert all_stages.stages == frozenset(Stage)


def test_a_gateway_watches_pods_or_has_addresses() -> None:
    watching = parse(["gateway", *CONTRACT_GATEWAY], {})
    assert isinstance(watching, GatewaySettings)
    assert (watching.namespace, watching.service, watching.workers) == ("ns", "demo", ())
    argv = ["gateway", "--model=m", "--served-name=s", "--worker=a:1", "--worker=[::1]:2"]
    static = parse(argv, {})
    assert isinstance(static, GatewaySettings)
    assert static.workers == ("a:1", "[::1]:2")


def test_serve_has_every_stage_behind_one_port() -> None:
    settings = parse(["serve", "examples/shapes", "--port=0", "--split"], {})
    assert isinstance(settings, ServeSettings)
    assert settings.worker.stages == frozenset(Stage)
    assert (settings.worker.served_name, settings.port, settings.split) == ("shapes", 0, True)


def test_the_bound_of_waiting_requests_holds_for_all_that_serve_starts() -> None:
    bounded = parse(["serve", "/m", "--max-waiting=8"], {})
    assert isinstance(bounded, ServeSettings)
    assert bounded.gateway.max_waiting == bounded.worker.queues.max_waiting == 8
    usual = parse(["serve", "/m"], {})
    assert isinstance(usual, ServeSettings)
    gateway = parse(["gateway", "--model=/m", "--served-name=m", "--worker=h:1"], {})
    worker = parse(["prefill", "--model=/m", "--served-name=m"], {})
    assert isinstance(gateway, GatewaySettings)
    assert isinstance(worker, WorkerSettings)
    assert usual.gateway.max_waiting == gateway.max_waiting
    assert usual.worker.queues.max_waiting == worker.queues.max_waiting


def test_delays_are_seconds_by_stage() -> None:
    flags = ["--inject-delay-ms=encode=300", "--inject-delay-ms=kv_transfer=20"]
    settings = parse(["encoder", *CONTRACT_WORKER, *flags], {})
    assert isinstance(settings, WorkerSettings)
    assert settings.delays == {"encode": 0.3, "kv_transfer": 0.02}


GATEWAY = ["gateway", "--model=m", "--served-name=s"]
HF = ["decode", "--served-name=s", "--model=hf://org/name"]
WRONG = {
    "no command": ([], "COMMAND"),
    "an abbreviation": (["decode", *CONTRACT_WORKER, "--thread=2"], "unrecognized arguments"),
    "a stage list without its own": (["decode", *CONTRACT_WORKER, "--stages=prefill"], "--stages"),
    "an unknown stage": (["decode", *CONTRACT_WORKER, "--stages=cook"], "encoder,prefill,decode"),
    "a port that is none": (["decode", *CONTRACT_WORKER, "--grpc-port=70000"], "--grpc-port"),
    "two kv memories": (["decode", *CONTRACT_WORKER, "--kv-memory-percent=5"], "not allowed with"),
    "a percentage too high": (["decode", *CONTRACT_WORKER, "--kv-reserve-percent=99"], "0 to 95"),
    "an unknown delay": (["decode", *CONTRACT_WORKER, "--inject-delay-ms=nap=3"], "kv_transfer"),
    "a delay too long": (["decode", *CONTRACT_WORKER, "--inject-delay-ms=media=99999"], "60000"),
    "a hub model without revision": (HF, "--model-revision"),
    "a hub model without organisation": ([*HF[:2], "--model=hf://name"], "hf://org/name"),
    "another source": ([*HF[:2], "--model=s3://bucket/x"], "neither a directory nor hf://"),
    "a gateway without workers": (GATEWAY, "--worker=HOST:PORT"),
    "a gateway that watches pods of any compat": (
        ["gateway", *CONTRACT_GATEWAY[:-1]], "--compat: give it with --namespace"
    ),
    "a gateway with both": (["gateway", *CONTRACT_GATEWAY, "--worker=a:1"], "not both"),
    "an address without port": ([*GATEWAY, "--worker=a"], "HOST:PORT"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_line_ends_with_2_and_says_what_to_write(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, told = WRONG[case]
    with pytest.raises(SystemExit) as ended:
        parse(argv, {})
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_the_children_of_serve_get_the_settings_of_their_parent() -> None:
    argv = ["serve", "/models/m", "--kv-memory-percent=7", "--max-model-len=128", "--block-size=4",
            "--inject-delay-ms=encode=5", "--model-revision=r1", "--timer-scale=0.3",
            "--transport=shared-memory", "--shared-memory-dir=/mem", "--exposed-memory-bytes=9",
            "--strict", "--client-priority=any", "--jpeg-scaling=dct",
            "--admission-policy=dual_queue", "--target-step-ms=50", "--max-waiting=8",
            "--images-per-request=9", "--max-connections=77",
            "--gateway-memory-bytes=200000000"]  # fmt: skip
    settings = parse(argv, {})
    assert isinstance(settings, ServeSettings)
    child = parse(worker_argv(settings.worker, Role.PREFILL, bind="127.0.0.1", parent=7), {})
    assert child == dataclasses.replace(
        settings.worker, role=Role.PREFILL, stages=frozenset({Stage.PREFILL}), parent=7
    )
    gateway = parse(gateway_argv(settings.gateway, workers=["127.0.0.1:5"], parent=7), {})
    assert gateway == dataclasses.replace(settings.gateway, workers=("127.0.0.1:5",), parent=7)
