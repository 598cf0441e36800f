"""Shows what the operator would do with a manifest: runs its code without a cluster."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vlm_cli.output import CliError, Format, console, emit, plain_table
from vlm_cli.preview import Row, children, preview
from vlm_operator import names
from vlm_operator.api import VLMService, parse
from vlm_operator.cluster import Manifest
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.observe import node_class
from vlm_operator.reconcile.decisions import Options
from vlm_operator.state import NodeClassState

_UID = "00000000-0000-0000-0000-000000000000"  # placeholder: no cluster assigns one


@dataclasses.dataclass(frozen=True)
class Documents:
    """Content of a file: services in its order, and node classes by name."""

    services: tuple[VLMService, ...]
    node_classes: Mapping[str, NodeClassState]


async def show_rehearsal(old: Path, new: Path, *, worker_image: str | None, form: Format) -> None:
    """Print the steps of a rollout from one manifest to another.

    Raises:
        CliError: a file cannot be read, has not exactly one service, or has an invalid one.
    """
    before, after = read_documents(old), read_documents(new)
    first, second = _only(before, old), _only(after, new)
    options = _options(worker_image)
    classes = {**before.node_classes, **after.node_classes}
    try:
        rows = preview(first, second, classes, options)
    except SpecError as error:
        raise CliError(str(error), f"correct {new}") from error
    if form is not Format.TABLE:
        emit([_plain(row) for row in rows], form)
        return
    roles = [role for role in Role if any(role in row.counts for row in rows)]
    moving = {role for role in roles if any(row.counts.get(role, (0, 0))[0] for row in rows)}
    table = plain_table("#", *(role.value.upper() for role in roles), "WAITS FOR")
    for number, row in enumerate(rows, start=1):
        cells = (_cell(row.counts.get(role, (0, 0)), moves=role in moving) for role in roles)
        table.add_row(str(number), *cells, row.awaits or "nothing: done")
    console().print(table)
    automatic = [
        role.value
        for role, pool in second.spec.pools.present.items()
        if pool.scaling.mode != "Manual"
    ]
    if automatic:
        listed = ", ".join(automatic)
        console().print(f"Sizes of {listed} are counted as minReplicas: live ones may be larger.")


def _cell(counts: tuple[int, int], *, moves: bool) -> str:
    """Format a role's old and new pods; if its revision does not change, only their number."""
    was, now = counts
    if not moves:
        return str(now)
    told = (f"{was} old" if was else "", f"{now} new" if now else "")
    return ", ".join(filter(None, told)) or "0"


async def show_children(manifest: Path, *, worker_image: str | None, namespace: str | None) -> None:
    """Print every object of a manifest's services as YAML for `kubectl apply`.

    The objects have no owner references, because only a cluster assigns the service's uid.

    Raises:
        CliError: the file cannot be read, has no service, or has an invalid one.
    """
    found = read_documents(manifest, namespace=namespace)
    if not found.services:
        raise CliError(f"there is no VLMService in {manifest}", "its kind is VLMService")
    try:
        objects = [
            item
            for service in found.services
            for item in children(service, found.node_classes, _options(worker_image))
        ]
    except SpecError as error:
        raise CliError(str(error), f"correct {manifest}") from error
    for item in objects:
        item["metadata"].pop("ownerReferences", None)
    yaml.safe_dump_all(objects, sys.stdout, sort_keys=False, allow_unicode=True)


def read_documents(path: Path, *, namespace: str | None = None) -> Documents:
    """Read VLMServices and VLMNodeClasses; other kinds are ignored.

    `path` is a file, a folder of YAML files, or `-` for standard input.

    Raises:
        CliError: the file cannot be read, is not YAML, or has an invalid VLMService.
    """
    documents = [item for text in _texts(path) for item in _parsed(text, path)]
    services: list[VLMService] = []
    classes: dict[str, NodeClassState] = {}
    for item in documents:
        name = _name(item, path)
        if item.get("kind") == names.KIND_NODE_CLASS:
            classes[name] = node_class(item)
        if item.get("kind") == names.KIND_SERVICE:
            services.append(_service(item, path, namespace))
    return Documents(tuple(services), classes)


def _texts(path: Path) -> list[str]:
    try:
        if str(path) == "-":
            return [sys.stdin.read()]
        return [
            file.read_text() for file in (sorted(path.glob("*.y*ml")) if path.is_dir() else [path])
        ]
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(text: str, path: Path) -> list[Manifest]:
    try:
        return [item for item in yaml.safe_load_all(text) if isinstance(item, dict)]
    except yaml.YAMLError as error:
        raise CliError(f"{path} is not YAML: {error}") from error


def _name(item: Manifest, path: Path) -> str:
    meta = item.get("metadata")
    if not isinstance(meta, dict) or not isinstance(meta.get("name"), str):
        raise CliError(f"{path}: an object has no metadata.name", "give it one")
    return str(meta["name"])


def _service(item: Manifest, path: Path, namespace: str | None) -> VLMService:
    meta = {"namespace": namespace or "default", **item["metadata"], "uid": _UID, "generation": 1}
    if namespace is not None:
        meta["namespace"] = namespace
    try:
        return parse({**item, "metadata": meta})
    except SpecError as error:
        raise CliError(f"{path}: {error}") from error


def _only(found: Documents, path: Path) -> VLMService:
    if len(found.services) != 1:
        count = len(found.services)
        raise CliError(f"{path} has {count} VLMServices", "a rollout needs a file with one")
    return found.services[0]


def _options(worker_image: str | None) -> Options:
    return Options() if worker_image is None else Options(worker_image=worker_image)


def _plain(row: Row) -> dict[str, Any]:
    pools: Sequence[tuple[Role, tuple[int, int]]] = sorted(row.counts.items())
    return {
        "roles": {role.value: {"old": was, "new": now} for role, (was, now) in pools},
        "waitsFor": row.awaits,
    }
