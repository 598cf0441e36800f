"""No secret and no prompt passes `vlm bundle`'s rules; what explains a bug does."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_cli.bundle.redact import REDACTED, redact_log, redact_object, redact_text

CANARY = "c4n4ry-Zebra-77"
B64 = base64.b64encode(bytes(range(7, 55))).decode()


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {CANARY}",
        f"headers: {{'authorization': 'Basic {CANARY}'}}",
        f"(b'Authorization', b'Bearer {CANARY}')",
        f"proxy-authorization={CANARY}",
        f"sent bearer {CANARY}",
        f"GET data:text/plain,{CANARY}",
        f'"url": "data:image/png;base64,{CANARY}"',
        f"https://user:{CANARY}@host/path",
        f"https://host/path?X-Amz-Signature={CANARY}&x=1",
        f"https://host/path?key={CANARY}",
        f"HF_TOKEN={CANARY}",
        f"export OPENAI_API_KEY='{CANARY}'",
        f"--api-key={CANARY}",
        f'{{"client_secret": "{CANARY}"}}',
        f"password: {CANARY}",
        f"set-cookie: {CANARY}",
        "-----BEGIN RSA PRIVATE KEY-----\n" + CANARY.replace("-", "+") + "\n-----END",
    ],
)
def test_a_secret_in_a_text_is_removed(text: str):
    found = redact_log(text)
    assert CANARY not in found
    assert CANARY.replace("-", "+") not in redact_text(text)
    assert REDACTED in found


@pytest.mark.parametrize(
    "secret",
    [
        *("hf_abcdefgh1234", "sk-abcdefgh1234", "ghp_abcdefgh1234", "AKIAABCDEFGHIJKL"),
        *("eyJhbGciOi.eyJzdWIi.c2ln", "ab" * 32, B64),
    ],
)
def test_a_token_of_a_known_form_is_removed_anywhere(secret: str):
    assert secret not in redact_text(f"the worker was given {secret} and failed")


@pytest.mark.parametrize(
    "text",
    [
        "image: registry.example/triptych/worker@sha256:" + "ab" * 32,
        "boot_id 0123456789abcdef0123456789abcdef, uid 0b4f4b9e-1111-2222-3333-444455556666",
        'pod shapes-decode-default-1a2b3c4d-5e6f7a8b9c-x2x2x: Secret "hf-token" not found',
        '{"kv": {"capacity_tokens": 4096}, "first_token": 0.04, "max_tokens": 16}',
        'triptych_ttft_seconds_bucket{modality="image",le="0.5"} 12',
        "Traceback (most recent call last): ValueError: 3 is no position",
        "secretName: shapes-keys",
    ],
)
def test_what_explains_a_bug_is_kept(text: str):
    assert redact_log(text) == text


def test_env_values_are_removed_by_name_or_form():
    env = [
        {"name": "HF_TOKEN", "value": "x"},
        {"name": "MY_KEY", "value": "short"},
        {"name": "HARMLESS", "value": "q7x93hdk20fjq81m"},
        {"name": "OMP_NUM_THREADS", "value": "4"},
        {"name": "MODE", "value": "expandable_segments:True"},
        {"name": "CACHE", "value": "/var/cache/triptych1/models"},
        {"name": "FROM", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}},
    ]
    found = redact_object({"env": env})["env"]
    assert [item.get("value") for item in found] == [
        REDACTED, REDACTED, REDACTED, "4", "expandable_segments:True",
        "/var/cache/triptych1/models", None,
    ]  # fmt: skip
    assert found[-1] == env[-1]


def test_fields_flags_and_copies_of_a_manifest_are_removed():
    copy = "kubectl.kubernetes.io/last-applied-configuration"
    found = redact_object(
        {
            "metadata": {"annotations": {copy: CANARY}, "managedFields": [CANARY]},
            "spec": {
                "args": ["--api-key", CANARY, f"--token={CANARY}", "--max-tokens", "16"],
                "apiKey": CANARY,
                "secretName": "shapes-keys",
                "tolerations": [{"key": "nvidia.com/gpu"}],
            },
            "data": {"token": CANARY, "gateway.json": json.dumps({"password": CANARY, "text": 1})},
            "binaryData": {"x": CANARY},
        }
    )
    assert CANARY not in json.dumps(found)
    assert found["spec"]["args"][3:] == ["--max-tokens", "16"]
    assert found["spec"]["secretName"] == "shapes-keys"
    assert found["spec"]["tolerations"] == [{"key": "nvidia.com/gpu"}]
    assert json.loads(found["data"]["gateway.json"])["text"] == 1


def test_prompts_are_removed_from_log_lines():
    line = {"level": "error", "message": "request failed", "request_id": "r-1"}
    nested = {**line, "body": {"messages": [{"role": "user", "content": CANARY}]}, "prompt": CANARY}
    trace = {**line, "traceback": f"ValueError: {{'content': '{CANARY} and', 'role': 'user'}}"}
    text = f"prompt: {CANARY} is too long"
    for one in (nested, trace):
        found = redact_log(f"2026-11-21T10:00:00.1Z {json.dumps(one)}")
        assert CANARY not in found
        assert json.loads(found.partition(" ")[2])["request_id"] == "r-1"
    assert CANARY not in redact_log(text)


def test_the_message_of_a_terminated_container_is_a_log():
    line = json.dumps({"level": "error", "message": "failed", "text": CANARY})
    status = {"lastState": {"terminated": {"message": f"start\n{line}\n"}}}
    found = redact_object(status)["lastState"]["terminated"]["message"]
    assert CANARY not in found
    assert found.startswith("start\n{")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(JSON)
def test_redacting_is_idempotent_and_keeps_the_structure(value: Any):
    found = redact_object(value)
    assert redact_object(found) == found
    json.dumps(found)


@pytest.mark.parametrize("text", ["a" * 300_000, "token" * 60_000, "aB3" * 100_000, "://" * 90_000])
def test_a_long_line_takes_no_quadratic_time(text: str):
    """The test's timeout would end a rule that is quadratic in the line's length."""
    assert redact_log(text)
