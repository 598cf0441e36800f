"""Every option of every command, as fields of frozen values (docs/contract.md).

    vlm-worker encoder|prefill|decode  ->  WorkerSettings
    vlm-worker gateway                 ->  GatewaySettings
    vlm-worker serve MODEL             ->  ServeSettings
    vlm-worker fetch                   ->  FetchSettings
    vlm-worker calibrate MODEL IMAGES  ->  CalibrateSettings

An error names the flag and the fix, and ends the process with code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vlm_worker.settings.encoder_cache import EncoderCacheSettings, session_pin_problem
from vlm_worker.settings.identity import Identity
from vlm_worker.settings.options import MAX_PORT, add_options, read
from vlm_worker.settings.source import HF_PREFIX, CalibrateSettings, FetchSettings, ModelSource
from vlm_worker.settings.values import (
    CHOSEN_BY_SERVE,
    MAX_LENT_KV_PERCENT,
    SERVE_DRAIN_SECONDS,
    AdmissionPolicy,
    AdmissionSettings,
    ComputeSettings,
    GatewaySettings,
    ProcessSettings,
    QueueSettings,
    ServeSettings,
    Settings,
    WorkerSettings,
)
from vlm_worker.types import WORKER_ROLES, Role, Stage

__all__ = [
    "AdmissionPolicy",
    "AdmissionSettings",
    "CalibrateSettings",
    "ComputeSettings",
    "EncoderCacheSettings",
    "FetchSettings",
    "GatewaySettings",
    "Identity",
    "ModelSource",
    "QueueSettings",
    "ServeSettings",
    "Settings",
    "WorkerSettings",
    "command_line",
    "parse",
]


def command_line() -> argparse.ArgumentParser:
    """The parser of `vlm-worker`; `args.parser` is the parser of the given command."""
    parser = argparse.ArgumentParser(prog="vlm-worker", description="One process of a VLM service.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for role in WORKER_ROLES:
        worker = commands.add_parser(role.value, help=f"a {role.value} worker", allow_abbrev=False)
        add_options(worker, WorkerSettings)
        worker.set_defaults(parser=worker)
    gateway = commands.add_parser(
        "gateway", help="the OpenAI API in front of the workers", allow_abbrev=False
    )
    add_options(gateway, GatewaySettings)
    gateway.set_defaults(parser=gateway)
    serve = commands.add_parser("serve", help="all roles on this machine", allow_abbrev=False)
    serve.add_argument("model", metavar="MODEL", help="a directory, or hf://org/name")
    for cls in (ProcessSettings, ServeSettings, WorkerSettings, GatewaySettings):
        add_options(serve, cls, without=CHOSEN_BY_SERVE, optional={"--served-name"})
    serve.set_defaults(parser=serve, served_name="", drain_timeout_seconds=SERVE_DRAIN_SECONDS)
    fetch = commands.add_parser(
        "fetch", help="download a model into a directory, once for many pods", allow_abbrev=False
    )
    add_options(fetch, FetchSettings, without={"--model-cache"})
    fetch.set_defaults(parser=fetch)
    calibrate = commands.add_parser(
        "calibrate", help="measure scales for layers in int8, from images", allow_abbrev=False
    )
    calibrate.add_argument("model", metavar="MODEL", help="a directory, or hf://org/name")
    calibrate.add_argument(
        "images", metavar="IMAGES", nargs="+", type=Path, help="files, and folders of them"
    )
    add_options(calibrate, CalibrateSettings, without={"--model"})
    calibrate.set_defaults(parser=calibrate)
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings of one command line; ends the process with code 2 if they are wrong."""
    args = command_line().parse_args(argv)
    fail: Callable[[str], NoReturn] = args.parser.error
    model = read(ModelSource, args)
    _check_model(model, fail, command=args.command)
    if args.command == "fetch":
        return read(FetchSettings, args, pod_uid=environ.get("POD_UID", ""))
    if args.command == "calibrate":
        return read(CalibrateSettings, args, model=model, images=tuple(args.images))
    ttl_seconds = getattr(args, "embedding_ttl_seconds", EncoderCacheSettings.embedding_ttl_seconds)
    problem = session_pin_problem(getattr(args, "session_pin_seconds", 0), ttl_seconds)
    if problem is not None:
        fail(problem)
    common: dict[str, Any] = {
        "model": model,
        "served_name": args.served_name or _name_of(args.model),
        "identity": _identity(environ),
        "trace_ratio": _trace_ratio(environ, fail),
    }
    if args.command == "serve":
        return _serve(args, common, fail)
    if args.command == "gateway":
        gateway = read(GatewaySettings, args, **common, api_server=_api_server(environ))
        _check_workers(gateway, fail)
        return gateway
    own = Stage(args.command)
    ports = {} if hasattr(args, "data_port") else {"data_port": _data_port(args)}
    worker = read(WorkerSettings, args, role=Role(args.command), **common, **ports)
    if worker.stages and own not in worker.stages:
        fail(f"--stages: must name {args.command} itself, it is this role's own stage")
    worker = dataclasses.replace(worker, stages=worker.stages or frozenset({own}))
    _check_scales(worker.compute, fail)
    _check_pruning(worker, fail)
    return _lending(worker, fail) if worker.max_lent_requests else worker


def _check_pruning(worker: WorkerSettings, fail: Callable[[str], NoReturn]) -> None:
    """Refuse a worker that would prune KV of another, or hand over pruned KV (decision 0051)."""
    both = {Stage.PREFILL, Stage.DECODE}
    if worker.kv_prune_text and (worker.role is Role.PREFILL or not both <= worker.stages):
        fail(
            "--kv-prune-text: only of a decode worker, or an encoder that lends, with "
            "--stages=encoder,prefill,decode: pruned KV is not handed over"
        )
    _check_pruned_types(worker, fail)


def _check_pruned_types(worker: WorkerSettings, fail: Callable[[str], NoReturn]) -> None:
    """Refuse to prune KV of two types."""
    if worker.kv_prune_text and "=" in worker.compute.kv_dtype:
        fail(
            f"--kv-prune-text: not with --kv-dtype={worker.compute.kv_dtype}: rows do not move "
            "between blocks of two types; remove one of them"
        )


def _lending(worker: WorkerSettings, fail: Callable[[str], NoReturn]) -> WorkerSettings:
    """The settings of an encoder that answers text-only requests (`docs/decisions/0038`)."""
    if worker.role is not Role.ENCODER or worker.stages != frozenset(Stage):
        fail("--max-lent-requests: only of an encoder with --stages=encoder,prefill,decode")
    compute = worker.compute
    if compute.kv_memory_bytes is None:
        percent = compute.kv_memory_percent or MAX_LENT_KV_PERCENT
        if percent > MAX_LENT_KV_PERCENT:
            fail(
                f"--kv-memory-percent: at most {MAX_LENT_KV_PERCENT} with --max-lent-requests, so "
                "that images keep their memory"
            )
        compute = dataclasses.replace(compute, kv_memory_percent=percent)
    return dataclasses.replace(worker, compute=compute, max_requests=worker.max_lent_requests)


def _serve(
    args: argparse.Namespace, common: Mapping[str, Any], fail: Callable[[str], NoReturn]
) -> ServeSettings:
    alone = read(ServeSettings, args, worker=None, gateway=None)
    worker = read(
        WorkerSettings,
        args,
        **common,
        role=Role.DECODE,
        stages=frozenset(Stage),
        bind=alone.host,
        grpc_port=0,
        http_port=0,
        data_port=0,
    )
    gateway = read(
        GatewaySettings,
        args,
        **common,
        bind=alone.host,
        http_port=alone.port,
        admin_port=alone.admin_port,
    )
    _check_scales(worker.compute, args.parser.error)
    _check_pruned_types(worker, args.parser.error)
    if alone.split and worker.kv_prune_text:
        fail("--kv-prune-text: not with --split, pruned KV is not handed over: remove one of them")
    return dataclasses.replace(alone, worker=worker, gateway=gateway)


def _check_scales(compute: ComputeSettings, fail: Callable[[str], NoReturn]) -> None:
    if compute.activation_scales_hash and compute.activation_scales is None:
        fail("--activation-scales-hash: give the file, too, with --activation-scales=FILE")


def _check_workers(gateway: GatewaySettings, fail: Callable[[str], NoReturn]) -> None:
    """Refuse a gateway without one way to find its workers."""
    if bool(gateway.workers) == bool(gateway.namespace or gateway.service):
        fail("give --namespace and --service to watch pods, or --worker=HOST:PORT, not both")
    if not gateway.workers and not (gateway.namespace and gateway.service):
        fail("--namespace and --service go together")
    if not gateway.workers and not gateway.compat:
        fail("--compat: give it with --namespace and --service; pods of another one are not used")


def _check_model(source: ModelSource, fail: Callable[[str], NoReturn], *, command: str) -> None:
    fetches, repository = command == "fetch", source.repository
    if source.folder is not None and not fetches:
        fail(f"--model: {source.uri!r}: name the directory that `vlm-worker fetch` filled")
    if repository is None:
        if source.folder is None and "://" in source.uri:
            fail(f"--model: {source.uri!r} is neither a directory nor hf://org/name")
        if fetches and (source.folder is None or not source.folder[0]):
            fail(f"--model: {source.uri!r} must read hf://org/name or s3://bucket/path")
        return
    if repository.count("/") != 1 or not all(repository.split("/")):
        fail(f"--model: {source.uri!r} must read hf://org/name")
    if not source.revision and command not in {"serve", "calibrate"}:
        fail("--model-revision: give the commit of the hf:// model, so that all pods run the same")


def _name_of(model: str) -> str:
    """The model's default name, from its path.

    It is `shapes` for `examples/shapes/model`, and `name` for `hf://org/name`.
    """
    path = Path(model) if model.startswith(HF_PREFIX) else Path(model).absolute()
    return path.parent.name if path.name == "model" else path.name


def _data_port(args: argparse.Namespace) -> int:
    """The gRPC port plus two (HTTP has plus one), so that policies can name it."""
    grpc_port: int = getattr(args, "grpc_port", 9000)
    port = grpc_port + 2 if grpc_port else 0
    return port if port <= MAX_PORT else 0


def _api_server(environ: Mapping[str, str]) -> str:
    """The API server's address, from the variables that Kubernetes sets in every container."""
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{port}" if host else ""


def _trace_ratio(environ: Mapping[str, str], fail: Callable[[str], NoReturn]) -> float:
    """The share of traced requests; 0 if OpenTelemetry's variables name no collector."""
    collectors = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if environ.get("OTEL_SDK_DISABLED") == "true" or not any(map(environ.get, collectors)):
        return 0.0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        fail(f"OTEL_TRACES_SAMPLER_ARG={text}: give the share of traced requests, from 0 to 1")
    return ratio


def _identity(environ: Mapping[str, str]) -> Identity:
    return Identity(
        pod_name=environ.get("POD_NAME", ""),
        pod_uid=environ.get("POD_UID", ""),
        pod_ip=environ.get("POD_IP", ""),
        namespace=environ.get("POD_NAMESPACE", ""),
        node_name=environ.get("NODE_NAME", ""),
        service=environ.get("TRIPTYCH_SERVICE", ""),
        variant=environ.get("TRIPTYCH_VARIANT", ""),
        revision=environ.get("TRIPTYCH_REVISION", ""),
        granted_gpus=environ.get("NVIDIA_VISIBLE_DEVICES", ""),
    )
