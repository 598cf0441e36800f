"""The command and the environment of a container are computed from its spec alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_local.agent.command import (
    ConfigError,
    Facts,
    arguments,
    entrypoint,
    environment,
    expand,
    identity,
    on_shared_network,
)

FACTS = Facts(pod_ip="127.9.1.1", host_ip="127.9.0.1", node="n")
POD = {"metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"a": "b"}}, "spec": {}}
IMAGES = {"triptych/worker": ("run-worker",), "python": ("python",)}


@pytest.mark.parametrize(
    ("image", "command"),
    [
        ("triptych/worker", ("run-worker",)),
        ("triptych/worker:0.1.0", ("run-worker",)),
        ("registry.example:5000/team/triptych/worker:1@sha256:00", ("run-worker",)),
        ("python:3", ("python",)),
        ("mypython", None),
        ("triptych/worker/other", None),
    ],
)
def test_an_image_is_known_by_its_repository(image: str, command: tuple[str, ...] | None):
    assert entrypoint(image, IMAGES) == command


@given(st.text(alphabet="ab$()", max_size=12))
def test_text_without_references_stays_as_it_is(text: str):
    assert expand(text, {}) == text.replace("$$", "$")


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("x$(A)y$(B)z", "x1y2z"),
        ("$A", "$A"),
    ],
)
def test_references_are_filled_in_as_kubernetes_does(text: str, expanded: str):
    assert expand(text, {"A": "1", "B": "2"}) == expanded


def test_command_replaces_the_images_start_and_arguments_follow():
    assert arguments({"args": ["$(A)"]}, ["start"], {"A": "1"}) == ["start", "1"]
    assert arguments({"command": ["sh"], "args": ["-c"]}, ["start"], {}) == ["sh", "-c"]


def test_later_variables_see_earlier_ones():
    container = {
        "env": [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL", "value": "http://$(IP)"},
        ]
    }
    found = environment(container, POD, FACTS, base={"PATH": "/bin"}, objects={})
    assert found == {"PATH": "/bin", "IP": "127.9.1.1", "URL": "http://127.9.1.1"}


def test_env_wins_over_env_from():
    container = {
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "m"}}],
        "env": [{"name": "P_A", "value": "env"}],
    }
    objects = {("ConfigMap", "m"): {"A": "map", "B": "map"}}
    found = environment(container, POD, FACTS, base={}, objects=objects)
    assert found == {"P_A": "env", "P_B": "map"}


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({}, 'secret "s" not found'),
        ({("Secret", "s"): {"other": "x"}}, "couldn't find key k in Secret ns/s"),
    ],
    ids=["no Secret", "no key"],
)
def test_a_missing_key_is_an_error_in_kubelets_words_unless_it_is_optional(
    objects: dict[tuple[str, str], dict], words: str
):
    def container(optional: bool) -> dict:
        reference = {"name": "s", "key": "k", "optional": optional}
        return {"env": [{"name": "A", "valueFrom": {"secretKeyRef": reference}}]}

    with pytest.raises(ConfigError, match=words):
        environment(container(False), POD, FACTS, base={}, objects=objects)
    assert environment(container(True), POD, FACTS, base={}, objects=objects) == {}


def test_a_limit_is_in_units_of_its_divisor():
    reference = {"resource": "limits.memory", "divisor": "1Mi"}
    container = {
        "resources": {"limits": {"memory": "1Gi"}},
        "env": [{"name": "MIB", "valueFrom": {"resourceFieldRef": reference}}],
    }
    assert environment(container, POD, FACTS, base={}, objects={}) == {"MIB": "1024"}


@pytest.mark.parametrize(
    ("of_pod", "of_container", "found"),
    [
        (None, None, None),
        ({"runAsNonRoot": True}, None, (65532, 65532)),
        ({"runAsUser": 7, "runAsGroup": 8}, None, (7, 8)),
        ({"runAsUser": 7}, {"runAsUser": 9}, (9, 9)),
        ({"runAsUser": 7}, {"runAsUser": 0}, None),
    ],
)
def test_a_container_runs_as_its_security_context_says(
    of_pod: dict | None, of_container: dict | None, found: tuple[int, int] | None
):
    assert (
        identity({"securityContext": of_container}, {"spec": {"securityContext": of_pod}}) == found
    )


@pytest.mark.parametrize("everywhere", ["--bind=::", "--bind=0.0.0.0"])
def test_pods_of_one_network_namespace_bind_their_own_address(everywhere: str):
    argv = ["vlm-worker", "decode", everywhere, "--grpc-port=9000"]
    wanted = ["vlm-worker", "decode", "--bind=127.9.1.2", "--grpc-port=9000"]
    assert on_shared_network(argv, "127.9.1.2") == wanted


def test_an_address_that_a_pod_is_given_stays():
    argv = ["vlm-worker", "--bind=127.0.0.1", "::", "--served-name=::"]
    assert on_shared_network(argv, "127.9.1.2") == argv
