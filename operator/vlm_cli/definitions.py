"""Generates the CustomResourceDefinitions from `api`, for `make crds` and `vlm doctor`. Pure.

pydantic's JSON schema becomes the structural schema of a CustomResourceDefinition:

    pydantic                          Kubernetes
    $ref into $defs                   the definition itself; the field's description has precedence
    anyOf [T, null]                   T: a field is absent, never null
    default, example, restarts        sentences in the description, which `kubectl explain` shows
    pattern that a rule contains      only the rule, because its message has the fix
    title, propertyNames, x-triptych  dropped

Defaults are never schema defaults. So an absent field stays absent in the stored object, and does
not conflict with Git or an autoscaler.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from pydantic import BaseModel

from vlm_operator import names
from vlm_operator.api.base import KEY_RESTARTS, KEY_UNSET, Rule
from vlm_operator.api.kinds import (
    VLMNodeClassSpec,
    VLMNodeClassStatus,
    VLMPoolSpec,
    VLMPoolStatus,
)
from vlm_operator.api.service import VLMServiceSpec
from vlm_operator.api.status import VLMServiceStatus

_RESTARTS = {"pods": "Restarts: pods.", "gateway": "Restarts: the gateway.", "none": ""}
_DROPPED = frozenset(
    {"title", "default", "example", "propertyNames", "$defs", KEY_RESTARTS, KEY_UNSET}
)
_READY = '.status.conditions[?(@.type=="Ready")]'
_AGE = ("Age", "date", ".metadata.creationTimestamp", 0)

NAME_RULE = Rule(
    name="name",
    holds=f"self.metadata.name.size() <= {names.MAX_SERVICE_NAME} && "
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    message=f"the name is at most {names.MAX_SERVICE_NAME} characters of a-z, 0-9 and -, "
    "and starts with a letter: Services are named after it",
    at=".metadata.name",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind: its names, its types, and its columns in `kubectl get`.

    Attributes:
        columns: (name, type, JSON path, priority); priority 1 is shown by `-o wide`.
    """

    kind: str
    plural: str
    short: str
    namespaced: bool
    description: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[tuple[str, str, str, int], ...]
    rules: tuple[Rule, ...] = ()
    scale: bool = False

    @property
    def file_name(self) -> str:
        """Name of the file in crds/."""
        return f"{names.GROUP}_{self.plural}.yaml"


KINDS = (
    Kind(
        kind=names.KIND_SERVICE,
        plural=names.PLURAL_SERVICE,
        short="vlm",
        namespaced=True,
        description="One vision-language model, served by pools of pods behind an "
        "OpenAI-compatible gateway.",
        spec=VLMServiceSpec,
        status=VLMServiceStatus,
        rules=(NAME_RULE,),
        columns=(
            ("Ready", "string", f"{_READY}.status", 0),
            ("Model", "string", ".spec.model.uri", 0),
            ("Enc", "string", ".status.summary.encoder", 0),
            ("Pre", "string", ".status.summary.prefill", 0),
            ("Dec", "string", ".status.summary.decode", 0),
            ("TTFT-P95", "string", ".status.summary.ttftP95", 0),
            ("KV%", "string", ".status.summary.kvOccupancyPercent", 0),
            ("URL", "string", ".status.url", 0),
            _AGE,
            ("Stage", "string", ".status.summary.dominantStage", 1),
            ("Cost/h", "string", ".status.summary.costPerHour", 1),
            ("Reason", "string", f"{_READY}.reason", 1),
        ),
    ),
    Kind(
        kind=names.KIND_POOL,
        plural=names.PLURAL_POOL,
        short="vlmp",
        namespaced=True,
        description="The number of replicas of one role of a VLMService. Written by the operator; "
        "scale it with kubectl scale, an HPA or KEDA where the service says mode External.",
        spec=VLMPoolSpec,
        status=VLMPoolStatus,
        scale=True,
        columns=(
            ("Role", "string", ".spec.role", 0),
            ("Desired", "integer", ".spec.replicas", 0),
            ("Current", "integer", ".status.replicas", 0),
            ("Ready", "integer", ".status.readyReplicas", 0),
            ("Mode", "string", ".spec.mode", 0),
            _AGE,
        ),
    ),
    Kind(
        kind=names.KIND_NODE_CLASS,
        plural=names.PLURAL_NODE_CLASS,
        short="vlmnc",
        namespaced=False,
        description="A type of node: where it is, what it has, what it costs, how fast it is.",
        spec=VLMNodeClassSpec,
        status=VLMNodeClassStatus,
        columns=(
            ("Accelerator", "string", ".spec.accelerator.resourceName", 0),
            ("Nodes", "integer", ".status.nodes", 0),
            ("InUse", "integer", ".status.inUse", 0),
            ("Cost/h", "string", ".spec.cost.perHour", 0),
            _AGE,
        ),
    ),
)


def crd(kind: Kind) -> dict[str, Any]:
    """Return the CustomResourceDefinition of one kind."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short],
                "categories": ["inference"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root(kind)},
                    "subresources": _subresources(kind),
                    "additionalPrinterColumns": [_column(*column) for column in kind.columns],
                }
            ],
        },
    }


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of one model."""
    schema = model.model_json_schema(by_alias=True)
    result: dict[str, Any] = _convert(schema, schema.get("$defs", {}))
    return result


def sentences(node: dict[str, Any]) -> str:
    """Return a field's text: its description, default, example and what a change restarts."""
    default = node.get(KEY_UNSET) or _in_words(node.get("default"))
    if isinstance(node.get("default"), dict):
        default = ""  # the fields of the object have their own defaults
    parts = [
        node.get("description", ""),
        f"Default: {default}." if default else "",
        f"E.g. {_as_typed(node['example'])}." if "example" in node else "",
        _RESTARTS.get(node.get(KEY_RESTARTS, "none"), ""),
    ]
    return " ".join(part for part in parts if part)


def flatten(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a node without $ref and without null; the field's keys override its type's keys."""
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return flatten({**target, **siblings}, definitions)
    branches = [branch for branch in node.get("anyOf", []) if branch != {"type": "null"}]
    if len(branches) == 1:
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return flatten({**branches[0], **rest}, definitions)
    return node


def _root(kind: Kind) -> dict[str, Any]:
    root: dict[str, Any] = {
        "type": "object",
        "description": kind.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # NAME_RULE refers to metadata.name; Kubernetes allows no other schema of metadata.
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": structural(kind.spec),
            "status": structural(kind.status),
        },
    }
    if kind.rules:
        root["x-kubernetes-validations"] = [rule.schema() for rule in kind.rules]
    return root


def _subresources(kind: Kind) -> dict[str, Any]:
    status: dict[str, Any] = {"status": {}}
    if kind.scale:
        status["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return status


def _column(name: str, type_: str, path: str, priority: int) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": type_, "jsonPath": path}
    if priority:
        column["priority"] = priority
    return column


def _convert(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = flatten(node, definitions)
    result = {key: value for key, value in node.items() if key not in _DROPPED}
    if description := sentences(node):
        result["description"] = description
    rules = result.get("x-kubernetes-validations", [])
    if any("pattern" in result and result["pattern"] in rule["rule"] for rule in rules):
        del result["pattern"]  # the rule checks the same and has a message
    if result.get("additionalProperties") is False:
        del result["additionalProperties"]
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            # kubectl explain prints the description of the list or map, not of its items.
            result[key] = _convert(result[key], definitions)
            result[key].pop("description", None)
    if "properties" in result:
        result["properties"] = {
            name: _convert(child, definitions) for name, child in result["properties"].items()
        }
    return result


def _as_typed(example: Any) -> str:
    """Write an example as YAML; a quantity with a fraction is quoted, or YAML reads a float."""
    quoted = isinstance(example, str) and re.fullmatch(r"\d+\.\d+", example)
    return f'"{example}"' if quoted else _in_words(example)


def _in_words(value: Any) -> str:
    """Write a default or an example as YAML's flow style would."""
    if value is None or value in ([], {}):
        return ""
    return value if isinstance(value, str) else json.dumps(value)
