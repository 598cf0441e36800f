"""argv -> settings: what the contract lists is understood; what is wrong is named with its fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.settings import (
    AdmissionPolicy,
    EncoderCacheSettings,
    GatewaySettings,
    ModelSource,
    ServeSettings,
    WorkerSettings,
    parse,
)
from vlm_worker.settings.kinds import (
    ADDRESSES,
    DELAY_BY_STAGE,
    DELAYS,
    IMAGES,
    MAX_IMAGES,
    SCALED_TIMERS,
    SHA256,
    STAGE_LIST,
    WEIGHTS,
)
from vlm_worker.settings.options import (
    FLAG,
    MAX_PORT,
    PATH,
    PERCENT,
    PERMILLE,
    PORT,
    SECONDS,
    SHARE,
    TEXT,
    Kind,
    options_of,
    to_argv,
)
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import Role, Stage
from vlm_worker.weights import PARTS, TYPES, canonical, rounded_types

T = TypeVar("T")

CONTRACT_WORKER = [
    "--model=/models/model", "--served-name=demo", "--model-revision=abc", "--bind=10.0.0.7",
    "--grpc-port=9000", "--http-port=9001", "--block-size=64", "--dtype=auto", "--kv-dtype=auto",
    "--kv-memory-bytes=1000000", "--kv-reserve-percent=5", "--kv-visual-percent=50",
    "--max-model-len=4096",
    "--drain-timeout-seconds=600", "--compat=c0ffee", "--embedding-disk-dir=/embeddings",
    "--embedding-disk-bytes=1000000", "--embedding-disk-age-seconds=3600",
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


def test_an_encoder_that_lends_bounds_its_requests_and_its_kv() -> None:
    flags = ["encoder", "--model=m", "--served-name=s", "--stages=encoder,prefill,decode"]
    off, lending = parse(flags, {}), parse([*flags, "--max-lent-requests=4"], {})
    assert isinstance(off, WorkerSettings)
    assert isinstance(lending, WorkerSettings)
    assert (off.max_requests, off.compute.kv_memory_percent) == (256, None)
    assert (lending.max_requests, lending.compute.kv_memory_percent) == (4, 30)


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
    "a share too high": (["decode", *CONTRACT_WORKER, "--kv-visual-percent=101"], "0 to 100"),
    "a share of text too high": (["decode", *CONTRACT_WORKER, "--kv-prune-text=1001"], "0 to 1000"),
    "a decode worker without prefill that prunes": (
        ["decode", *CONTRACT_WORKER, "--kv-prune-text=700"], "--stages=encoder,prefill,decode"
    ),
    "a prefill worker that prunes": (
        [
            "prefill", *CONTRACT_WORKER, "--stages=encoder,prefill,decode", "--kv-prune-text=700",
        ],
        "pruned KV is not handed over",
    ),
    "roles apart that prune": (
        ["serve", "/m", "--split", "--kv-prune-text=700"], "not with --split"
    ),
    "an unknown type of weights": (["decode", *CONTRACT_WORKER, "--weights=int3"], "int8 or int4"),
    "an unknown part": (
        ["decode", *CONTRACT_WORKER, "--weights=tower=int8"], "one of encoder, merger, layers, head"
    ),
    "an unknown type of a part": (
        ["decode", *CONTRACT_WORKER, "--weights=head=fp8"], "'head=fp8': the type must be one of"
    ),
    "a part without type": (["decode", *CONTRACT_WORKER, "--weights=head=int8,int8"], "'int8'"),
    "a part twice": (
        ["decode", *CONTRACT_WORKER, "--weights=head=int8,head=auto"], "head is given twice"
    ),
    "a decode worker that lends": (
        ["decode", *CONTRACT_WORKER, "--max-lent-requests=4"], "only of an encoder"
    ),
    "an encoder that lends a stage it lacks": (
        ["encoder", *CONTRACT_WORKER, "--max-lent-requests=4"], "--stages=encoder,prefill,decode"
    ),
    "too much KV to lend": (
        [
            "encoder", "--model=m", "--served-name=s", "--stages=encoder,prefill,decode",
            "--max-lent-requests=4", "--kv-memory-percent=31",
        ],
        "--kv-memory-percent: at most 30",
    ),
    "a session pin that outlasts its embedding": (
        ["encoder", *CONTRACT_WORKER, "--session-pin-seconds=601"], "--embedding-ttl-seconds (600)"
    ),
    "an unknown delay": (["decode", *CONTRACT_WORKER, "--inject-delay-ms=nap=3"], "kv_transfer"),
    "a delay too long": (["decode", *CONTRACT_WORKER, "--inject-delay-ms=media=99999"], "60000"),
    "a hub model without revision": (HF, "--model-revision"),
    "a hub model without organisation": ([*HF[:2], "--model=hf://name"], "hf://org/name"),
    "another source": ([*HF[:2], "--model=ftp://host/x"], "neither a directory nor hf://"),
    "a bucket": ([*HF[:2], "--model=s3://bucket/x"], "directory that `vlm-worker fetch` filled"),
    "no bucket": (["fetch", "--model=s3:///x", "--into=m"], "hf://org/name or s3://bucket/path"),
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


TYPES_BY_PART = st.sampled_from(TYPES) | st.dictionaries(
    st.sampled_from(PARTS), st.sampled_from(TYPES), min_size=1
).map(lambda types: ",".join(f"{part}={kind}" for part, kind in types.items()))


@given(TYPES_BY_PART)
def test_types_of_weights_have_one_way_to_be_written(text: str) -> None:
    written = canonical(text)
    assert canonical(written) == written
    assert rounded_types(written, PARTS) == rounded_types(text, PARTS)
    assert (written == "auto") == (rounded_types(text, PARTS) == {})


def strategy_of(kind: Kind[Any]) -> st.SearchStrategy[Any]:
    """Every value that a flag of this kind may set."""
    if kind.choices:
        return st.sampled_from(kind.choices).map(kind.read)
    known: dict[Kind[Any], st.SearchStrategy[Any]] = {
        FLAG: st.booleans(),
        TEXT: st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1),
        PATH: st.sampled_from(["/mem", "a/b"]).map(Path),
        PORT: st.integers(0, MAX_PORT),
        PERCENT: st.integers(0, 95),
        SHARE: st.integers(0, 100),
        PERMILLE: st.integers(0, 1000),
        SECONDS: st.floats(0, 86400),
        SCALED_TIMERS: st.floats(0.01, 1.0).map(PRODUCTION.scaled),
        STAGE_LIST: st.frozensets(st.sampled_from(Stage), min_size=1),
        ADDRESSES: st.lists(st.sampled_from(["a:1", "[::1]:2"])).map(tuple),
        DELAY_BY_STAGE: st.dictionaries(
            st.sampled_from(DELAYS), st.integers(0, 60_000).map(lambda ms: ms / 1000)
        ),
        IMAGES: st.integers(0, MAX_IMAGES),
        WEIGHTS: TYPES_BY_PART.map(canonical),
        SHA256: st.just("") | st.text("0123456789abcdef", min_size=64, max_size=64),
    }
    return known.get(kind, st.integers(1 << 28, 1 << 40))


# A pin may not outlast its embedding.
TOGETHER: dict[Any, dict[str, st.SearchStrategy[Any]]] = {
    EncoderCacheSettings: {
        "embedding_ttl_seconds": st.floats(600, 86400),
        "session_pin_seconds": st.integers(0, 600),
    }
}


def settings_of(cls: type[T], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Settings with any values of their options; of flags that exclude each other one is set."""
    fields: dict[str, st.SearchStrategy[Any]] = dict(given)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in given:
            continue
        if nested := field.metadata.get("group"):
            fields[field.name] = settings_of(nested, **TOGETHER.get(nested, {}))
        elif declared := field.metadata.get("option"):
            optional = st.none() if field.default is None else st.nothing()
            excluded = declared.exclusive and declared.flag != "--kv-memory-bytes"
            fields[field.name] = optional if excluded else optional | strategy_of(declared.kind)
    return st.builds(cls, **fields)


@given(settings_of(WorkerSettings, role=st.sampled_from([Role.ENCODER, Role.DECODE])))
def test_a_worker_reads_its_settings_from_the_flags_that_write_them(want: WorkerSettings) -> None:
    own = Stage(want.role.value)
    want = dataclasses.replace(want, stages=want.stages | {own}, model=ModelSource("/m"))
    num_lent = want.max_lent_requests if want.role is Role.ENCODER else 0
    want = dataclasses.replace(want, max_lent_requests=num_lent)
    if num_lent:
        percent = 30 if want.compute.kv_memory_bytes is None else None
        compute = dataclasses.replace(want.compute, kv_memory_percent=percent)
        changes = {"stages": frozenset(Stage), "compute": compute, "max_requests": num_lent}
        want = dataclasses.replace(want, **changes)
    if want.compute.activation_scales_hash:
        compute = dataclasses.replace(want.compute, activation_scales=Path("/scales.json"))
        want = dataclasses.replace(want, compute=compute)
    if not {Stage.PREFILL, Stage.DECODE} <= want.stages or "=" in want.compute.kv_dtype:
        want = dataclasses.replace(want, kv_prune_text=0)
    assert parse([want.role.value, *to_argv(want)], {}) == want


@given(settings_of(GatewaySettings, workers=st.just(("a:1",)), namespace=st.just("")))
def test_a_gateway_reads_its_settings_from_the_flags_that_write_them(want: GatewaySettings) -> None:
    want = dataclasses.replace(want, service="", model=ModelSource("/m"))
    assert parse(["gateway", *to_argv(want)], {}) == want


def test_each_flag_of_a_command_is_declared_once() -> None:
    for cls in (WorkerSettings, GatewaySettings):
        flags = [declared.flag for declared, _ in options_of(cls)]
        assert len(flags) == len(set(flags))


def test_serve_starts_its_parts_with_the_flags_that_it_was_given() -> None:
    argv = ["serve", "/models/m", "--kv-memory-percent=7", "--threads=3", "--client-priority=any",
            "--timer-scale=0.3", "--strict", "--admission-policy=dual_queue"]  # fmt: skip
    settings = parse(argv, {})
    assert isinstance(settings, ServeSettings)
    worker, gateway = settings.worker, settings.gateway
    assert (worker.compute.kv_memory_percent, worker.compute.num_threads) == (7, 3)
    assert worker.queues.admission.policy is AdmissionPolicy.DUAL_QUEUE
    assert (worker.strict, gateway.any_priority) == (True, True)
    assert worker.timers == gateway.timers == PRODUCTION.scaled(0.3)
    assert (worker.grpc_port, worker.http_port, worker.data_port, gateway.admin_port) == (0,) * 4
