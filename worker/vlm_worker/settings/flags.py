"""Defines every flag of every command: its name, its type, its default."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from vlm_worker.settings.values import (
    DEFAULT_PATIENCE_SECONDS,
    DEFAULT_SHARED_MEMORY_DIR,
    LEAST_MEMORY_BYTES,
    MAX_IMAGES,
    MAX_PORT,
)
from vlm_worker.types import STAGES, Role, Stage

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "bfloat16", "float32", "int8")
DEVICES = ("auto", "cpu", "cuda")
PACKINGS = ("auto", "off")
JPEG_SCALINGS = ("exact", "dct")
WEIGHTS = ("auto", "int8", "int4")
COMPILING = ("auto", "off")
ADMISSION_POLICIES = ("fcfs", "dual_queue")
CLIENT_PRIORITIES = ("later", "any")
RUNNERS = ("model", "checksum")
TRANSPORTS = ("stream", "shared-memory", "nixl")
DELAYS = (*STAGES, "kv_transfer")


def command_line() -> argparse.ArgumentParser:
    """The parser of `vlm-worker`; `args.parser` is the parser of the given command."""
    parser = argparse.ArgumentParser(prog="vlm-worker", description="One process of a VLM service.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for role in (Role.ENCODER, Role.PREFILL, Role.DECODE):
        worker = commands.add_parser(role.value, help=f"a {role.value} worker", allow_abbrev=False)
        _add_model(worker)
        _add_server(worker, http_port=None)
        worker.add_argument("--http-port", dest="worker_http_port", type=_port, default=9001)
        _add_engine(worker)
        worker.add_argument(
            "--stages", type=_stages, help="what is loaded: encoder,prefill,decode (own stage)"
        )
        worker.set_defaults(parser=worker)
    gateway = commands.add_parser(
        "gateway", help="the OpenAI API in front of the workers", allow_abbrev=False
    )
    _add_model(gateway)
    _add_server(gateway, http_port=8000)
    gateway.add_argument("--admin-port", type=_port, default=9001, help="/stats and /metrics")
    gateway.add_argument("--namespace", default="", help="where the service's pods are")
    gateway.add_argument("--service", default="", help="the VLMService whose pods are watched")
    gateway.add_argument(
        "--worker", type=_address, action="append", default=[], help="HOST:PORT, repeatable"
    )
    gateway.add_argument("--config", type=Path, help="gateway.json, re-read every second")
    gateway.add_argument("--api-keys-dir", type=Path, help="one bearer key per file")
    gateway.add_argument(
        "--patience-seconds",
        type=_seconds,
        default=DEFAULT_PATIENCE_SECONDS,
        help="for a pool without pods",
    )
    gateway.add_argument("--max-waiting", type=_at_least(0), default=512, help="for room at once")
    _add_front(gateway)
    gateway.set_defaults(parser=gateway)
    serve = commands.add_parser("serve", help="all roles on this machine", allow_abbrev=False)
    _add_model(serve, positional=True)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=_port, default=8000)
    serve.add_argument("--split", action="store_true", help="one process per role")
    serve.add_argument(
        "--admin-port",
        type=_port,
        default=0,
        help="the gateway's /stats and /metrics (any free one; it is printed at the start)",
    )
    _add_engine(serve)
    _add_front(serve)
    serve.set_defaults(
        parser=serve,
        max_waiting=None,  # limits the gateway and each worker; each has its own default
        grpc_port=0,
        data_port=0,
        announced_data_port=None,
        worker_http_port=0,
        drain_timeout_seconds=5.0,
    )
    return parser


def _add_model(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    text = "a directory, or hf://org/name"
    if positional:
        parser.add_argument("model", metavar="MODEL", help=text)
    else:
        parser.add_argument("--model", required=True, help=text)
    parser.add_argument(
        "--served-name", required=not positional, default="", help="name in the API"
    )
    parser.add_argument("--model-revision", default="", help="commit of an hf:// model")
    parser.add_argument("--model-cache", type=Path, help="where hf:// models are downloaded to")
    parser.add_argument("--block-size", type=_at_least(1), default=64, help="tokens of a KV block")
    parser.add_argument("--max-model-len", type=_at_least(64), default=4096, help="tokens")
    parser.add_argument("--drain-timeout-seconds", type=_seconds, default=600.0)
    parser.add_argument("--compat", default="", help="hash of what workers must agree on")
    parser.add_argument("--exit-with", type=_at_least(2), help=argparse.SUPPRESS)
    parser.add_argument(
        "--timer-scale", type=_scale, default=1.0, help="shorten every timer alike; for tests"
    )
    parser.add_argument(
        "--inject-delay-ms",
        type=_delay,
        action="append",
        default=[],
        metavar="STAGE=MS",
        help="delay one hop; for tests",
    )


def _add_server(parser: argparse.ArgumentParser, *, http_port: int | None) -> None:
    parser.add_argument("--bind", default="::", help="address that every server listens on")
    if http_port is None:
        parser.add_argument("--grpc-port", type=_port, default=9000)
        parser.add_argument(
            "--data-port", type=_port, help="of KV and embeddings (two above --grpc-port)"
        )
        parser.add_argument("--announced-data-port", type=_port, help=argparse.SUPPRESS)
    else:
        parser.add_argument("--http-port", type=_port, default=http_port)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument(
        "--packed-weights",
        choices=PACKINGS,
        default="auto",
        help="linear layers in the order that a CPU multiplies fastest, where it gains by it",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="auto",
        help="linear layers rounded: faster, less exact; int8 on a CPU also what they multiply, "
        "int4 on a GPU alone",
    )
    parser.add_argument(
        "--compile",
        choices=COMPILING,
        default="auto",
        help="layers that torch computes on a GPU are compiled at start: seconds there, and less "
        "time for each image",
    )
    parser.add_argument(
        "--jpeg-scaling",
        choices=JPEG_SCALINGS,
        default="exact",
        help="dct decodes a JPEG no larger than the model needs it: faster, less exact",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--kv-memory-bytes", type=_at_least(1))
    memory.add_argument("--kv-memory-percent", type=_percent)
    parser.add_argument("--kv-reserve-percent", type=_percent, default=5)
    parser.add_argument("--max-requests", type=_at_least(1), default=256, help="running at once")
    parser.add_argument("--max-batched-tokens", type=_at_least(16), default=2048, help="of a step")
    _add_queues(parser)
    parser.add_argument(
        "--request-memory-bytes",
        type=_at_least(1),
        help="that requests may hold beside weights and KV: files, decoded images, embeddings "
        "(the sum of these parts' own bounds, at most half of the memory that is left)",
    )
    parser.add_argument(
        "--decode-processes",
        type=_at_least(0),
        default=0,
        help="that decode images; 0: half as many as CPUs, 2 to 16",
    )
    parser.add_argument(
        "--embedding-cache-bytes", type=_at_least(0), default=256 << 20, help="of device memory"
    )
    parser.add_argument(
        "--embedding-cold-cache-bytes",
        type=_at_least(0),
        help="of host memory, behind it; a copy between the two delays a step "
        "(1 GiB, and 0 on a CPU: there both are host memory)",
    )
    parser.add_argument(
        "--embedding-ttl-seconds", type=_seconds, default=600.0, help="of one that is not used"
    )
    parser.add_argument(
        "--threads", type=_at_least(0), default=0, help="of the CPU; 0 is all of them"
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="stream", help="of KV and embeddings"
    )
    parser.add_argument(
        "--shared-memory-dir",
        type=Path,
        default=DEFAULT_SHARED_MEMORY_DIR,
        help="in memory, of all workers that share it",
    )
    parser.add_argument(
        "--exposed-memory-bytes", type=_at_least(1), default=256 << 20, help="at a time"
    )
    parser.add_argument("--strict", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--runner", choices=RUNNERS, default="model", help=argparse.SUPPRESS)


def _add_front(parser: argparse.ArgumentParser) -> None:
    """Add the limits for clients: flags of the gateway and of `serve`."""
    parser.add_argument(
        "--gateway-memory-bytes",
        type=_at_least(LEAST_MEMORY_BYTES),
        default=512 << 20,
        help="that requests may hold in the gateway: twice each body, then its images and texts",
    )
    parser.add_argument(
        "--max-connections", type=_at_least(1), default=1024, help="of clients to the gateway"
    )
    parser.add_argument(
        "--images-per-request",
        type=_images,
        default=4,
        help=f"0 to {MAX_IMAGES}; a gateway.json (--config) goes before it",
    )
    parser.add_argument(
        "--client-priority",
        choices=CLIENT_PRIORITIES,
        default="later",
        help="whether a client may only let others go first, or go first itself",
    )


def _add_queues(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of `QueueSettings`."""
    parser.add_argument(
        "--admission-policy", choices=ADMISSION_POLICIES, default="fcfs", help="who enters first"
    )
    for name, least, default, text in (
        ("--max-round-text", 1, 32, "of the text lane admitted by one step of dual_queue"),
        ("--max-round-vision", 1, 8, "of the vision lane admitted by one step of dual_queue"),
        ("--max-waiting", 1, 256, "sequences waiting for prefill"),
        ("--max-waiting-tokens", 1, 1 << 20, "their tokens"),
        ("--max-waiting-images", 1, 256, "images waiting for the encoder"),
        ("--max-waiting-pixels", 1, 1 << 26, "their pixels"),
        ("--long-prefill-tokens", 16, 1024, "of one prompt in a step while others can use more"),
        ("--target-step-ms", 0, 0, "adapt how many run at once to this; 0: as many as fit"),
    ):
        parser.add_argument(name, type=_at_least(least), default=default, help=text)
    parser.add_argument(
        "--ageing-seconds", type=_seconds, default=3.0, help="who waited so long goes first"
    )


def _at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return value

    return convert


def _images(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_IMAGES:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 to {MAX_IMAGES}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a port, 0 to {MAX_PORT} (0: any free one)"
        )
    return int(text)


def _percent(text: str) -> int:
    if not text.isdecimal() or int(text) > 95:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole percentage from 0 to 95")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, 0 to 86400")
    return value


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a factor from 0.01 to 1")
    return value


def _stages(text: str) -> frozenset[Stage]:
    try:
        return frozenset(Stage(part) for part in text.split(","))
    except ValueError:
        known = ",".join(stage.value for stage in Stage)
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a comma-separated choice of {known}"
        ) from None


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} must read HOST:PORT")
    return text


def _delay(text: str) -> tuple[str, float]:
    stage, _, milliseconds = text.partition("=")
    if stage not in DELAYS or not milliseconds.isdecimal() or int(milliseconds) > 60_000:
        raise argparse.ArgumentTypeError(
            f"{text!r} must read STAGE=MS with MS up to 60000 and STAGE one of {', '.join(DELAYS)}"
        )
    return stage, int(milliseconds) / 1000
