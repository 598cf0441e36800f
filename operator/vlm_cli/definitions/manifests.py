"""Generates the three CustomResourceDefinitions from `api`, so that they always agree with it."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel

from vlm_cli.definitions.schema import structural
from vlm_operator import names
from vlm_operator.api.base import Rule
from vlm_operator.api.kinds import (
    VLMNodeClassSpec,
    VLMNodeClassStatus,
    VLMPoolSpec,
    VLMPoolStatus,
)
from vlm_operator.api.service import VLMServiceSpec
from vlm_operator.api.status import VLMServiceStatus

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
