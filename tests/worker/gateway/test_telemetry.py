"""Log lines of one request over all roles, and its spans at a collector on the loopback."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from worker.gateway.image_files import ask, png
from worker.gateway.stack import E_PD, EPD, ONE_PROCESS, stack, stack_of

from vlm_worker.serve.process import JsonFormatter
from vlm_worker.settings import Identity, parse
from vlm_worker.tracing import Tracer, root_id_of, trace_id_of

_HEAD, _, _PIXELS = png().partition(b"IDAT")
CORRUPT = _HEAD + b"IDAT" + bytes(8) + _PIXELS[8:]  # what only a decoder finds
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextlib.contextmanager
def logged() -> Iterator[list[dict[str, str]]]:
    """The lines of gateway and workers, as a container prints them; complete at the end."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    logger, lines = logging.getLogger("vlm_worker"), list[dict[str, str]]()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        lines += map(json.loads, text.getvalue().splitlines())


class Collector:
    """An OpenTelemetry collector: keeps the spans that are posted to it, with their service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    facts = {it.key: it.value.string_value for it in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        spans.extend((facts["service.name"], span) for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


async def post(url: str, image: bytes, **headers: str) -> httpx.Response:
    body = {"model": "shapes", "messages": [ask("What is it?", image)], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
        return await client.post("/v1/chat/completions", json=body)


async def test_a_request_leaves_one_line_in_each_role_with_its_id() -> None:
    with logged() as lines:
        async with stack(*EPD) as served:
            answer = await post(served.url, png())
            await served.until_idle()
    assert answer.status_code == 200, answer.text
    own = [line for line in lines if line.get("request_id") == answer.headers["x-request-id"]]
    calls = {line["call"]: line for line in own if line["message"] == "call"}
    assert calls.keys() == {"Encode", "Prefill", "Decode"}
    assert {line["outcome"] for line in calls.values()} == {"ok"}
    assert all(0 <= float(line["seconds"]) < 60 for line in calls.values())
    (request,) = (line for line in own if line["message"] == "request")
    (route,) = request["pods"]
    assert route.keys() == {"encoder", "prefill", "decode"}
    assert "home of the images" in route["encoder"]
    assert all(line in own for line in lines if line["message"] in ("call", "request"))


async def test_in_one_process_the_decode_call_has_the_id_too() -> None:
    with logged() as lines:
        async with stack_of(ONE_PROCESS) as served:
            answer = await post(served.url, png())
    own = [line for line in lines if line.get("request_id") == answer.headers["x-request-id"]]
    assert {line["call"] for line in own if line["message"] == "call"} >= {"Encode", "Decode"}


async def test_an_image_that_only_the_encoder_refuses_is_in_both_logs() -> None:
    with logged() as lines:
        async with stack(*E_PD) as served:
            answer = await post(served.url, CORRUPT)
    assert answer.status_code == 400
    (line,) = (line for line in lines if line.get("call") == "Encode")
    assert line["request_id"] == answer.headers["x-request-id"]
    (request,) = (line for line in lines if line["message"] == "request")
    assert request["outcome"] == "invalid"


async def test_the_spans_of_all_pods_form_one_tree(collector: Collector) -> None:
    async with stack(*EPD, trace_ratio=1.0) as served:
        answer = await post(served.url, png(), traceparent=TRACEPARENT)
        await served.until_idle()
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-request-id"]
    spans = [span for _, span in collector.spans]
    assert {span.trace_id.hex() for span in spans} == {request_id}
    (root,) = (span for span in spans if not span.parent_span_id)
    assert (root.name, root.kind) == ("chat shapes", Span.SPAN_KIND_SERVER)
    (link,) = root.links
    assert link.trace_id.hex() == TRACEPARENT.split("-")[1]
    below = defaultdict(list)
    for service, span in collector.spans:
        below[span.parent_span_id].append((service, span))
    calls = {(service, span.name): span for service, span in below[root.span_id]}
    assert {name for service, name in calls if service != "triptych-gateway"} == {
        "encode",
        "prefill",
        "decode",
    }
    stages = {span.name for _, span in below[calls["triptych-prefill", "prefill"].span_id]}
    assert {"prefill_queue", "prefill"} <= stages
    assert {span.name for _, span in below[calls["triptych-encoder", "encode"].span_id]} >= {
        "encode"
    }
    assert ("triptych-gateway", "gateway") in calls
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano + 50_000_000
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    facts = {it.key: it.value for it in root.attributes}
    assert facts["gen_ai.request.model"].string_value == "shapes"
    assert facts["gen_ai.usage.output_tokens"].int_value > 0
    assert 0 < facts["triptych.ttft_seconds"].double_value < 60


async def test_a_failed_request_has_the_status_error(collector: Collector) -> None:
    async with stack(*E_PD, trace_ratio=1.0) as served:
        await post(served.url, CORRUPT, traceparent="00-not-a-trace")
    (root,) = (span for _, span in collector.spans if not span.parent_span_id)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert root.status.message
    assert not root.links


async def test_all_pods_sample_the_same_requests(collector: Collector) -> None:
    async with stack(*EPD, trace_ratio=0.5) as served:
        answers = [await post(served.url, png()) for _ in range(16)]
        await served.until_idle()
    roots = {s.trace_id.hex() for _, s in collector.spans if not s.parent_span_id}
    calls = defaultdict(set)
    for service, span in collector.spans:
        if service != "triptych-gateway":
            calls[span.trace_id.hex()].add(span.name)
    assert roots <= {answer.headers["x-request-id"] for answer in answers}
    assert calls.keys() == roots
    assert all({"encode", "prefill", "decode"} <= names for names in calls.values())


async def test_a_collector_that_is_down_delays_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    async with stack(*E_PD, trace_ratio=1.0) as served:
        answer = await post(served.url, png())
    assert answer.status_code == 200


def test_the_choices_of_a_request_are_in_its_trace() -> None:
    minted = "0af7651916cd43dd8448eb211c80319c"
    assert trace_id_of(minted) == trace_id_of(f"{minted}:2") == int(minted, 16)
    assert trace_id_of("r-1") != trace_id_of("r-2")
    assert root_id_of(trace_id_of("r-1")) != root_id_of(trace_id_of("r-2"))


def test_a_share_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="must be in range"):
        Tracer(Identity(), "decode", ratio=2.0)
    command = ["gateway", "--model=m", "--served-name=s", "--worker=127.0.0.1:1"]
    collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    with pytest.raises(SystemExit):
        parse(command, {**collector, "OTEL_TRACES_SAMPLER_ARG": "7"})
    assert "from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "ratio"),
    [
        ({}, 0.0),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.1"}, 0.0),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, 1.0),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, 1.0),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_TRACES_SAMPLER_ARG": "0.1"}, 0.1),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_SDK_DISABLED": "true"}, 0.0),
    ],
)
def test_only_a_collector_in_the_environment_turns_traces_on(
    environment: dict[str, str], ratio: float
) -> None:
    command = ["gateway", "--model=m", "--served-name=s", "--worker=127.0.0.1:1"]
    settings = parse(command, environment)
    assert settings.trace_ratio == ratio  # type: ignore[union-attr]
