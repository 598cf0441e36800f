"""OpenTelemetry spans of requests and calls; the extra `tracing`.

trace id      the request id: 32 hexadecimal digits, minted by the gateway
root span     the request, from the gateway; its id is computed from the trace id
children      the stages that the gateway measures, and the calls of the workers
grandchildren the stages of a call, as its replies report them

So the spans of all pods form one tree, and nothing about traces travels with a call. The sampler
decides by the trace id alone, so all pods sample the same requests.

Spans are made when the request or the call ends, from times that are measured anyway. If the
collector takes none, they are dropped.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vlm_worker.settings import Identity
from vlm_worker.telemetry import Span, WorkerCall

_TRACE_BYTES, _SPAN_BYTES = 16, 8
_SAMPLED = 1


class Tracer:
    """A `SpanExporter` for one event loop. A background thread sends the spans.

    Args:
        identity: names the pod in the spans' resource.
        role: encoder, prefill, decode or gateway.
        processor: an OpenTelemetry SpanProcessor; None sends batches over OTLP/HTTP.
        ratio: share of the requests that are traced, 0 to 1.

    Raises:
        ValueError: `ratio` is out of range.
    """

    def __init__(
        self,
        identity: Identity,
        role: str,
        *,
        ratio: float = 1.0,
        processor: SpanProcessor | None = None,
    ) -> None:
        self._ids = _Ids()
        resource = Resource.create(_resource(identity, role))
        self._provider = TracerProvider(
            resource=resource, sampler=TraceIdRatioBased(ratio), id_generator=self._ids
        )
        self._provider.add_span_processor(processor or _batches())
        self._tracer = self._provider.get_tracer("vlm_worker")

    def request(self, request_id: str, span: Span) -> None:
        """Export the root span of a request, with the stages of the gateway."""
        trace_id = trace_id_of(request_id)
        self._ids.trace_id, self._ids.span_id = trace_id, root_id_of(trace_id)
        self._export(span, parent=None, offset=_since_1970(), server=True)

    def call(self, call: WorkerCall, name: str, *, error: str = "") -> None:
        """Export the span of a call that ends now, with its stages, below that of its request."""
        stages = tuple(
            Span(span.stage, call.began + span.start, call.began + span.end, {"item": span.item})
            for span in call.spans.values()
        )
        attributes = {
            "triptych.request_id": call.key.request_id,
            "triptych.attempt": call.key.attempt,
        }
        trace_id = trace_id_of(call.key.request_id)
        root = trace.SpanContext(
            trace_id, root_id_of(trace_id), is_remote=True, trace_flags=trace.TraceFlags(_SAMPLED)
        )
        parent = trace.set_span_in_context(trace.NonRecordingSpan(root))
        span = Span(name, call.began, time.monotonic(), attributes, stages, error)
        self._export(span, parent=parent, offset=_since_1970(), server=True)

    def close(self) -> None:
        """Send what is left; waits for the collector, 30 seconds at most."""
        self._provider.shutdown()

    def _export(self, span: Span, *, parent: Any, offset: float, server: bool = False) -> None:
        started = self._tracer.start_span(
            span.name,
            context=parent,
            kind=trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL,
            attributes=span.attributes,
            links=_links(span.link),
            start_time=_nanoseconds(span.began + offset),
        )
        if span.error:
            started.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        if started.is_recording():
            below = trace.set_span_in_context(started)
            for child in span.children:
                self._export(child, parent=below, offset=offset)
        started.end(_nanoseconds(span.ended + offset))


def trace_id_of(request_id: str) -> int:
    """The trace id of a request: its 32 hexadecimal digits; a digest of any other id.

    The choices of one request, `ID:1` and so on, have the same trace.
    """
    head = request_id[: 2 * _TRACE_BYTES]
    try:
        number = int(head, 16) if len(head) == 2 * _TRACE_BYTES else 0
    except ValueError:
        number = 0
    return number or int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:_TRACE_BYTES])


def root_id_of(trace_id: int) -> int:
    """The id of the root span of a trace."""
    digest = hashlib.sha256(b"request" + trace_id.to_bytes(_TRACE_BYTES)).digest()
    return int.from_bytes(digest[:_SPAN_BYTES]) or 1


class _Ids(IdGenerator):
    """The given ids once, then random ones."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.trace_id: int | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        number, self.trace_id = self.trace_id, None
        return number or int(self._random.generate_trace_id())

    def generate_span_id(self) -> int:
        number, self.span_id = self.span_id, None
        return number or int(self._random.generate_span_id())

    def is_trace_id_random(self) -> bool:
        return True  # `secrets` mints the ids of requests


def _links(traceparent: str) -> list[Any]:
    """A link to the client's span. Its trace is not continued: ids of clients are not trusted."""
    if not traceparent:
        return []
    found = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    context = trace.get_current_span(found).get_span_context()
    return [trace.Link(context)] if context.is_valid else []


def _batches() -> Any:
    return BatchSpanProcessor(OTLPSpanExporter())  # its address is in the environment


def _resource(identity: Identity, role: str) -> dict[str, str]:
    """OpenTelemetry's names of the pod; without those that the environment does not know."""
    known = {
        "service.name": "-".join(filter(None, (identity.service or "triptych", role))),
        "service.namespace": identity.namespace,
        "service.instance.id": identity.pod_uid,
        "k8s.namespace.name": identity.namespace,
        "k8s.pod.name": identity.pod_name,
        "k8s.pod.uid": identity.pod_uid,
        "k8s.node.name": identity.node_name,
        "triptych.role": role,
        "triptych.variant": identity.variant,
        "triptych.revision": identity.revision,
    }
    return {name: value for name, value in known.items() if value}


def _since_1970() -> float:
    """Seconds to add to the monotonic clock."""
    return time.time() - time.monotonic()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
