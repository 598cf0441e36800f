"""A HorizontalPodAutoscaler of Kubernetes' own scales a VLMPool of mode External.

HPA ─ external metric ─▶ API server ─ APIService ─▶ ExternalName Service ─▶ stub in this process
  └─ /scale of the VLMPool ─▶ operator ─▶ Deployment
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.live import Live
from support.world import body, external, pool
from vlm_local.pki import Authority
from vlm_local.settings import LocalSettings

pytestmark = pytest.mark.cluster

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
LEARN_SECONDS = 30  # until the HPA's controller has learnt of a new kind
SYNC_SECONDS = 5  # between two of its looks, and then ours


class Metrics:
    """An external metrics API with one metric, whose value tests set."""

    def __init__(self, certificate: ssl.SSLContext) -> None:
        self.waiting = 0
        self.asked = 0
        metrics = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = metrics.answer(self.path.partition("?")[0])
                text = json.dumps(answer or {}).encode()
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = certificate.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]

    def answer(self, path: str) -> dict[str, Any] | None:
        """The object at a path of the API; None if there is none."""
        base = f"/apis/{GROUP}/{VERSION}"
        if path == base:
            resource = {"name": "waiting", "namespaced": True, "kind": "ExternalMetricValueList"}
            head = {"kind": "APIResourceList", "apiVersion": "v1"}
            verbs = {"singularName": "", "verbs": ["get"]}
            return {**head, "groupVersion": f"{GROUP}/{VERSION}", "resources": [resource | verbs]}
        if path != f"{base}/namespaces/live/waiting":
            return None
        self.asked += 1
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        value = {"metricName": "waiting", "metricLabels": {}, "timestamp": now}
        return {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": [{**value, "value": str(self.waiting)}],
        }

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Answer in a thread."""
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


@pytest.fixture
def metrics(live: Live) -> Iterator[Metrics]:
    """The API, registered; what stays registered without a server would break discovery."""
    authority = Authority(live.plane.folder / "pki", LocalSettings.read().environment)
    pair = authority.issue("metrics", addresses=["metrics.live.svc", "localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    found = Metrics(context)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "metrics", "namespace": "live"},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{VERSION}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "service": {"name": "metrics", "namespace": "live", "port": found.port},
            "caBundle": base64.b64encode(authority.certificate.encode()).decode(),
        },
    }
    with found.served():
        try:
            live.apply(service)
            live.apply(api)
            live.kubectl("wait", "--for=condition=Available", f"apiservice/{VERSION}.{GROUP}")
            yield found
        finally:
            live.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}", "--ignore-not-found")
            live.kubectl("-n", "live", "delete", "service", "metrics", "--ignore-not-found")


def test_an_hpa_scales_a_pool_of_mode_external_both_ways(live: Live, metrics: Metrics):
    manifest = body(name="hpa", encoder=external(1, 3), decode=pool())
    manifest["metadata"]["namespace"] = "live"
    live.apply(manifest)
    live.until(lambda: len(live.items("vlmpools", "hpa")) == 2, seconds=5)
    live.until(lambda: live.get("vlmp", "hpa-encoder").get("status"), seconds=5)
    metrics.waiting = 20
    target = {"type": "AverageValue", "averageValue": "10"}
    live.apply(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "hpa", "namespace": "live"},
            "spec": {
                "scaleTargetRef": {
                    "apiVersion": "triptych.dev/v1alpha1",
                    "kind": "VLMPool",
                    "name": "hpa-encoder",
                },
                "minReplicas": 1,
                "maxReplicas": 5,
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
                "metrics": [
                    {
                        "type": "External",
                        "external": {"metric": {"name": "waiting"}, "target": target},
                    }
                ],
            },
        }
    )

    def encoders() -> list[int]:
        found = live.items("deployments", "hpa")
        return [i["spec"]["replicas"] for i in found if "-encoder-" in i["metadata"]["name"]]

    live.until(lambda: encoders() == [2], seconds=LEARN_SECONDS + SYNC_SECONDS)
    assert metrics.asked
    active = live.condition("hpa", "ScalingActive")
    assert (active["status"], active["reason"]) == ("True", "Scaling"), "nobody is fought"
    metrics.waiting = 50
    live.until(lambda: encoders() == [3], seconds=SYNC_SECONDS)
    assert live.get("vlmp", "hpa-encoder")["spec"]["replicas"] == 5, "its number stays its own"
    live.until(  # the Deployment is written before the status
        lambda: "maxReplicas is 3" in live.condition("hpa", "ScalingActive")["message"], seconds=1
    )
    metrics.waiting = 5
    live.until(lambda: encoders() == [1], seconds=SYNC_SECONDS)
    live.kubectl("-n", "live", "delete", "hpa,vlm", "hpa")
