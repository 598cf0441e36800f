"""Removes secrets and prompts from objects and texts. Pure.

Objects     env values with a secret's name or the form of a token; fields and flags with a secret's
            name; kubectl's copy of the manifest; managedFields; then the rules of logs per string
Logs        fields of prompts in JSON lines, else the rest of a line after the key of a prompt; then
            the rules of texts
Texts       data: URLs, private keys, Authorization headers, assignments to names of secrets,
            passwords of URLs, tokens of known forms, long random strings

The rules remove too much rather than too little. They keep counts, names of Secrets, digests of
images, and the ids of requests and pods.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "REDACTED"

# All repetitions before a rule's anchor are bounded, so that a rule is linear in a line's length.
_WORDS = (
    r"(?:token|secret|passw(?:or)?d|passphrase|pwd|api[._-]?key|access[._-]?key|private[._-]?key"
    r"|secret[._-]?key|signing[._-]?key|authorization|credentials?|cookie|signature)"
)
_FIELD_NAME = re.compile(rf"(?i:{_WORDS})(?![sS](?:$|[._-]))(?![a-z])")
_ENV_NAME = re.compile(
    rf"{_FIELD_NAME.pattern}|(?i:(?:^|[_-])(?:auth|keys?|pass|bearer)(?:$|[_-]))"
)
_REFERENCES = ("secretName",)
_DROPPED = ("managedFields",)
_WHOLE = ("kubectl.kubernetes.io/last-applied-configuration", "binaryData")
_PROMPTS = (
    *("prompt", "prompts", "messages", "content", "contents", "text", "texts", "input", "inputs"),
    *("question", "answer", "completion", "delta", "image_url", "query"),
)
_PROMPT_TEXT = re.compile(
    rf"(?i)([\"'\\](?:{'|'.join(_PROMPTS)})[\"'\\]{{1,4}}\s?[:=]\s?|\bprompts?\s?[:=]\s?)\S.*"
)

# An env value without spaces, of letters and digits, that is no path.
_TOKEN_VALUE = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[^\s/]\S{15,}")
_QUOTES = r"[\"'\\]{0,4}"
_ASSIGN = rf"{_QUOTES}\s?[:=]\s?{_QUOTES}"
_VALUE = r"[^\s\"'\\,;&}\])]+"
_NO_VALUE = r"(?:true|false|null|none)(?:[^\w.-]|$)"

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[\sA-Za-z0-9+/=\\]*")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"(?i)\bdata:[\w.+-]{0,80}/?[\w.+-]{0,80}(?:;[\w=.+-]{1,80}){0,4},[^\s\"'<>)\\]*"
        ),
        f"data:{REDACTED}",
    ),
    (
        re.compile(
            rf"(?i)(authorization{_QUOTES}\s?[:=,]\s?(?:b(?=[\"']))?{_QUOTES})"
            rf"(?:(?:bearer|basic|digest|token|negotiate)\s+)?{_VALUE}"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"(://)[^\s/@\"']{1,200}@"), rf"\1{REDACTED}@"),
    # a count or a time may have such a name, as `first_token: 0.04`
    (
        re.compile(rf"(?i)(token{_ASSIGN})(?!{_NO_VALUE}|-?[\d.]{{1,20}}(?:[^\w.-]|$)){_VALUE}"),
        rf"\1{REDACTED}",
    ),
    (re.compile(rf"(?i)((?!token){_WORDS}{_ASSIGN})(?!{_NO_VALUE}){_VALUE}"), rf"\1{REDACTED}"),
    (re.compile(rf"(?i)([?&](?:key|sig|auth)=){_VALUE}"), rf"\1{REDACTED}"),
    (
        re.compile(
            r"\b(?:hf_\w{8,}|sk-[\w-]{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
            r"|xox[abprs]-[\w-]{8,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}|nvapi-[\w-]{8,}"
            r"|eyJ[\w-]{6,}\.[\w-]{4,}(?:\.[\w-]*)?)"
        ),
        REDACTED,
    ),
)
_HEX = re.compile(r"(?<!sha256:)(?<![0-9A-Za-z])[0-9a-fA-F]{48,}(?![0-9A-Za-z])")
_RANDOM = re.compile(r"[A-Za-z0-9+/_-]{32,}={0,2}")


def redact_object(value: Any) -> Any:
    """Return a copy of a manifest or of a part of it, without secrets."""
    if isinstance(value, str):
        return _redact_string(value)
    if isinstance(value, Mapping):
        copy = {key: _field(key, item) for key, item in value.items() if key not in _DROPPED}
        if "name" in value and isinstance(value.get("value"), str):  # an env variable, or a header
            is_secret = _ENV_NAME.search(str(value["name"])) or _is_token(value["value"])
            copy["value"] = REDACTED if is_secret else copy["value"]
        return copy
    if isinstance(value, list | tuple):
        return _items(value)
    return value


def redact_log(text: str) -> str:
    """Return a log without secrets and prompts.

    A line is the JSON of a worker or any text, with or without a time before it.
    """
    text = _PRIVATE_KEY.sub(REDACTED, text)  # of several lines
    return "\n".join(_line(line) for line in text.split("\n"))


def redact_text(text: str) -> str:
    """Return a text without secrets; prompts are not looked for."""
    text = _PRIVATE_KEY.sub(REDACTED, text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _HEX.sub(_fingerprint, text)
    return _RANDOM.sub(lambda found: REDACTED if _is_random(found[0]) else found[0], text)


def _redact_string(text: str) -> str:
    """Redact a string of an object: JSON such as gateway.json, else as a log."""
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except ValueError:
            return redact_log(text)
        if not _is_log_line(value):
            return json.dumps(redact_object(value))
    return redact_log(text)


def _field(key: str, value: Any) -> Any:
    is_secret = isinstance(value, str) and key not in _REFERENCES and _FIELD_NAME.search(key)
    return REDACTED if key in _WHOLE or is_secret else redact_object(value)


def _items(values: Sequence[Any]) -> list[Any]:
    """Redact a list; after a flag with a secret's name, such as `--api-key`, also its value."""
    copy = [redact_object(item) for item in values]
    for number, flag in enumerate(values[:-1]):
        if isinstance(flag, str) and flag.startswith("-") and "=" not in flag:
            is_secret = _FIELD_NAME.search(flag) and isinstance(values[number + 1], str)
            copy[number + 1] = REDACTED if is_secret else copy[number + 1]
    return copy


def _line(line: str) -> str:
    head, brace, body = line.partition("{")
    if brace and (not head or head.endswith(" ")):
        try:
            fields = json.loads(brace + body)
        except ValueError:
            fields = None
        if _is_log_line(fields):
            return redact_text(head) + json.dumps(_log_value(fields))
    return redact_text(_PROMPT_TEXT.sub(rf"\g<1>{REDACTED}", line))


def _is_log_line(value: Any) -> bool:
    return (
        isinstance(value, dict) and "message" in value and bool({"level", "severity"} & set(value))
    )


def _log_value(value: Any, key: str = "") -> Any:
    """Redact a value of a JSON log line."""
    if key.lower() in _PROMPTS:
        return REDACTED
    if isinstance(value, dict):
        return {name: _log_value(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_log_value(item) for item in value]
    if isinstance(value, str):
        return REDACTED if _FIELD_NAME.search(key) else redact_log(value)
    return value


def _is_token(text: str) -> bool:
    """Whether an env value may be a token: one long word of letters and digits, no path or URL."""
    return "://" not in text and _TOKEN_VALUE.fullmatch(text) is not None


def _is_random(text: str) -> bool:
    """Whether a long word has upper case, lower case and digits, as base64 has."""
    return all(re.search(kind, text) for kind in ("[A-Z]", "[a-z]", "[0-9]"))


def _fingerprint(found: re.Match[str]) -> str:
    """Replace a long hexadecimal number, a key or a digest, so that equal ones stay equal."""
    return f"{REDACTED}-{hashlib.sha256(found[0].encode()).hexdigest()[:8]}"
