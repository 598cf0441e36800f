"""Checks the YAML that pages show: manifests, parts of a manifest, settings of other programs.

`kind_of(document)` names the checker; a document without one raises ValueError.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate

from docpages.commands import KINDS_WITH_FIELDS
from vlm_cli.definitions import crd
from vlm_cli.simulator.hardware import Hardware, read_hardware
from vlm_operator import names
from vlm_operator.api.parse import parse

Document = dict[str, Any]

# Kinds of CRDs that others define; our test has no schema of them.
FOREIGN = {
    ("cert-manager.io/v1", "Certificate"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
}
UID = "00000000-0000-0000-0000-000000000000"


def check(document: Document) -> None:
    """Check one YAML document of a page.

    Raises:
        ValueError: a field does not exist or has a wrong value, or nothing knows the document.
    """
    if "kind" in document:
        _manifest(document)
        return
    for keys, checker in PARTS:
        if set(document) <= keys:
            checker(document)
            return
    raise ValueError(f"no checker for a document with {', '.join(sorted(document))}")


def has_field(path: str) -> bool:
    """Whether one of our kinds has the field `spec.a.b[]`; `*` is any role, or any key."""
    return any(
        _has(_strict_schema(kind), path) for kind in ("vlmservice", "vlmpool", "vlmnodeclass")
    )


def _has(schema: Document, path: str) -> bool:
    part, _, rest = path.replace("[]", "").partition(".")
    node = schema.get("items", schema)
    below = node.get("properties", {})
    if part in ("*", "ROLE"):
        inner = next(iter(below.values()), None)
    else:
        inner = below.get(part) or node.get("additionalProperties") or None
    if inner is None or inner is True:
        return inner is True or bool(node.get("x-kubernetes-preserve-unknown-fields"))
    return not rest or _has(inner, rest)


def _manifest(document: Document) -> None:
    group = document["apiVersion"].partition("/")[0]
    if group == names.GROUP:
        _fields(document["kind"].lower(), document)
        if {"model", "pools"} <= set(document["spec"]):
            meta = {"namespace": "default", **document["metadata"], "uid": UID, "generation": 1}
            parse({**document, "metadata": meta})
    elif (document["apiVersion"], document["kind"]) not in FOREIGN:
        try:
            kubernetes_validate.validate(document, "1.34", strict=True)
        except kubernetes_validate.ValidationError as error:
            raise ValueError(str(error)) from error
        except kubernetes_validate.SchemaNotFoundError as error:
            raise ValueError(f"no schema of {document['kind']}") from error


def _fields(kind: str, document: Document) -> None:
    """Every field exists and has its type; required ones may be missing."""
    validator = jsonschema.Draft202012Validator(_strict_schema(kind))
    for error in validator.iter_errors(document):
        raise ValueError(f"{error.json_path}: {error.message}")


@functools.cache
def _strict_schema(kind: str) -> Document:
    (version,) = crd(KINDS_WITH_FIELDS[kind])["spec"]["versions"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items() if key != "required"}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def _spec(document: Document) -> None:
    _fields("vlmservice", {"apiVersion": "", "kind": "", "spec": document})


def _with_spec(document: Document) -> None:
    _spec(document["spec"])


def _pool(document: Document) -> None:
    _spec({"pools": {"decode": document}})


def _hardware(document: Document) -> None:
    read_hardware(document)


def _differences(document: Document) -> None:
    for item in document["ignoreDifferences"]:
        if item["group"] != names.GROUP:
            raise ValueError(f"we have no group {item['group']}")
        if unknown := set(item["managedFieldsManagers"]) - set(_managers()):
            raise ValueError(f"we write no fields as {', '.join(unknown)}")


def _managers() -> tuple[str, ...]:
    return tuple(str(getattr(names, n)) for n in dir(names) if "MANAGER" in n)


def _scrape(document: Document) -> None:
    """Labels and ports of pods that the operator gives them."""
    known = {getattr(names, n) for n in dir(names) if n.startswith("LABEL_")}
    sources = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-z0-9]', '_', label)}" for label in known}
    for name in set(re.findall(r"__meta_kubernetes_pod_label_\w+", str(document))) - sources:
        raise ValueError(f"our pods have no label {name}")


@functools.cache
def _spec_keys() -> frozenset[str]:
    return frozenset(_strict_schema("vlmservice")["properties"]["spec"]["properties"])


PARTS: tuple[tuple[frozenset[str], Callable[[Document], None]], ...] = (
    (frozenset({"spec"}), _with_spec),
    (frozenset({"podTemplate"}), _pool),
    (_spec_keys(), _spec),
    (frozenset({"ignoreDifferences"}), _differences),
    (frozenset({"scrape_configs"}), _scrape),
    (frozenset(Hardware.__dataclass_fields__), _hardware),
)
