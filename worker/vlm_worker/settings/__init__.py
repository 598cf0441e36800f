"""Turns argv and environment into one validated, frozen value per command (docs/contract.md).

    vlm-worker encoder|prefill|decode  ->  WorkerSettings
    vlm-worker gateway                 ->  GatewaySettings
    vlm-worker serve MODEL             ->  ServeSettings

An error names the flag and the fix, and ends the process with code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vlm_worker.settings.flags import command_line
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.settings.values import (
    MAX_PORT,
    GatewaySettings,
    Identity,
    ModelSource,
    QueueSettings,
    ServeSettings,
    Settings,
    WorkerSettings,
)
from vlm_worker.types import Role, Stage

__all__ = [
    "GatewaySettings",
    "Identity",
    "ModelSource",
    "QueueSettings",
    "ServeSettings",
    "Settings",
    "WorkerSettings",
    "parse",
]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings of one command line; ends the process with code 2 if they are wrong."""
    args = command_line().parse_args(argv)
    fail: Callable[[str], NoReturn] = args.parser.error
    model = _model(args, fail)
    served_name = args.served_name or _name_of(args.model)
    delays: dict[str, float] = dict(args.inject_delay_ms)
    common: dict[str, Any] = {
        "model": model,
        "served_name": served_name,
        "block_size": args.block_size,
        "max_model_len": args.max_model_len,
        "drain_timeout_seconds": args.drain_timeout_seconds,
        "compat": args.compat,
        "delays": delays,
        "timers": PRODUCTION.scaled(args.timer_scale),
        "identity": _identity(environ),
        "parent": args.exit_with,
    }
    if args.command == "serve":
        worker = _worker(args, common, role=Role.DECODE, bind=args.host, stages=frozenset(Stage))
        gateway = GatewaySettings(
            **common,
            bind=args.host,
            http_port=args.port,
            admin_port=args.admin_port,
            **_front(args),
        )
        return ServeSettings(
            host=args.host, port=args.port, split=args.split, worker=worker, gateway=gateway
        )
    if args.command == "gateway":
        return _gateway(args, common, environ)
    role = Role(args.command)
    stages = args.stages or frozenset({Stage(args.command)})
    if Stage(args.command) not in stages:
        fail(f"--stages: must name {args.command} itself, it is this role's own stage")
    return _worker(args, common, role=role, bind=args.bind, stages=stages)


def _gateway(
    args: argparse.Namespace, common: Mapping[str, Any], environ: Mapping[str, str]
) -> GatewaySettings:
    fail: Callable[[str], NoReturn] = args.parser.error
    if bool(args.worker) == bool(args.namespace or args.service):
        fail("give --namespace and --service to watch pods, or --worker=HOST:PORT, not both")
    if not args.worker and not (args.namespace and args.service):
        fail("--namespace and --service go together")
    if not args.worker and not args.compat:
        fail("--compat: give it with --namespace and --service; pods of another one are not used")
    return GatewaySettings(
        **common,
        bind=args.bind,
        http_port=args.http_port,
        admin_port=args.admin_port,
        namespace=args.namespace,
        service=args.service,
        workers=tuple(args.worker),
        api_server=_api_server(environ),
        config=args.config,
        api_keys_dir=args.api_keys_dir,
        patience_seconds=args.patience_seconds,
        **_front(args),
    )


def _front(args: argparse.Namespace) -> dict[str, Any]:
    """The limits for clients; with `serve`, `--max-waiting` may be absent."""
    bounds = {
        "memory_bytes": args.gateway_memory_bytes,
        "max_connections": args.max_connections,
        "images_per_request": args.images_per_request,
        "any_priority": args.client_priority == "any",
    }
    return bounds if args.max_waiting is None else {**bounds, "max_waiting": args.max_waiting}


def _name_of(model: str) -> str:
    """The model's default name, from its path.

    It is `shapes` for `examples/shapes/model`, and `name` for `hf://org/name`.
    """
    path = Path(model) if model.startswith("hf://") else Path(model).absolute()
    return path.parent.name if path.name == "model" else path.name


def _worker(
    args: argparse.Namespace,
    common: Mapping[str, Any],
    *,
    role: Role,
    bind: str,
    stages: frozenset[Stage],
) -> WorkerSettings:
    return WorkerSettings(
        **common,
        role=role,
        stages=stages,
        bind=bind,
        grpc_port=args.grpc_port,
        http_port=args.worker_http_port,
        data_port=_data_port(args),
        announced_data_port=args.announced_data_port,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        device=args.device,
        packed_weights=args.packed_weights == "auto",
        weights=args.weights,
        compile=args.compile == "auto",
        scaled_jpeg=args.jpeg_scaling == "dct",
        kv_memory_bytes=args.kv_memory_bytes,
        kv_memory_percent=args.kv_memory_percent,
        kv_reserve_percent=args.kv_reserve_percent,
        max_requests=args.max_requests,
        max_batched_tokens=args.max_batched_tokens,
        queues=_queues(args),
        request_memory_bytes=args.request_memory_bytes,
        decode_processes=args.decode_processes,
        embedding_cache_bytes=args.embedding_cache_bytes,
        embedding_cold_cache_bytes=args.embedding_cold_cache_bytes,
        embedding_ttl_seconds=args.embedding_ttl_seconds,
        num_threads=args.threads,
        runner=args.runner,
        transport=args.transport,
        shared_memory_dir=args.shared_memory_dir,
        exposed_memory_bytes=args.exposed_memory_bytes,
        strict=args.strict,
    )


def _queues(args: argparse.Namespace) -> QueueSettings:
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(QueueSettings)}
    return QueueSettings(**{name: value for name, value in given.items() if value is not None})


def _data_port(args: argparse.Namespace) -> int:
    """The flag, else the gRPC port plus two (HTTP has plus one), so that policies can name it."""
    if args.data_port is not None:
        return int(args.data_port)
    port = args.grpc_port + 2 if args.grpc_port else 0
    return port if port <= MAX_PORT else 0


def _model(args: argparse.Namespace, fail: Callable[[str], NoReturn]) -> ModelSource:
    source = ModelSource(uri=args.model, revision=args.model_revision, cache=args.model_cache)
    repository = source.repository
    if repository is None:
        if "://" in source.uri:
            fail(f"--model: {source.uri!r} is neither a directory nor hf://org/name")
        return source
    if repository.count("/") != 1 or not all(repository.split("/")):
        fail(f"--model: {source.uri!r} must read hf://org/name")
    if not source.revision and args.command != "serve":
        fail("--model-revision: give the commit of the hf:// model, so that all pods run the same")
    return source


def _api_server(environ: Mapping[str, str]) -> str:
    """The API server's address, from the variables that Kubernetes sets in every container."""
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{port}" if host else ""


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
