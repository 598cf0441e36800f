"""`vlm render`: prints the objects of a manifest without a cluster. Reads manifests from files."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml

from vlm_cli import flags
from vlm_cli.output import CliError
from vlm_cli.preview import children
from vlm_operator import names
from vlm_operator.api import VLMService, parse
from vlm_operator.cluster import Manifest
from vlm_operator.errors import SpecError
from vlm_operator.observe import node_class
from vlm_operator.reconcile.decisions import Options
from vlm_operator.state import NodeClassState

_UID = "00000000-0000-0000-0000-000000000000"  # placeholder: no cluster assigns one


@dataclasses.dataclass(frozen=True)
class Documents:
    """Content of a file: services in its order, and node classes by name."""

    path: Path
    services: tuple[VLMService, ...]
    node_classes: Mapping[str, NodeClassState]

    @property
    def service(self) -> VLMService:
        """The only service.

        Raises:
            CliError: the file has none, or several.
        """
        if len(self.services) != 1:
            problem = f"{self.path} has {len(self.services)} VLMServices"
            raise CliError(problem, "write one, and its VLMNodeClasses")
        return self.services[0]


async def render(
    manifest: Annotated[
        Path,
        typer.Option("-f", "--filename", metavar="PATH", help="A file or folder; - reads stdin."),
    ],
    worker_image: flags.WorkerImage = None,
    gateway_image: flags.GatewayImage = None,
    namespace: flags.Namespace = None,
) -> None:
    """Print the objects that the operator makes of a manifest, as YAML, without a cluster.

    The objects have no owner references, because only a cluster assigns the service's uid.

    Raises:
        CliError: the file cannot be read, has no service, or has an invalid one.
    """
    documents = read_documents(manifest, namespace=namespace)
    if not documents.services:
        raise CliError(f"there is no VLMService in {manifest}", "its kind is VLMService")
    try:
        options = operator_options(worker_image, gateway_image)
        objects = [
            item
            for service in documents.services
            for item in children(service, documents.node_classes, options)
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
    services: list[VLMService] = []
    classes: dict[str, NodeClassState] = {}
    for item in read_objects(path):
        name = object_name(item, path)
        if item.get("kind") == names.KIND_NODE_CLASS:
            classes[name] = node_class(item)
        if item.get("kind") == names.KIND_SERVICE:
            services.append(parse_service(item, path, namespace))
    return Documents(path, tuple(services), classes)


def read_objects(path: Path) -> list[Manifest]:
    """Return all objects of a file, of a folder of YAML files, or of standard input (`-`).

    Raises:
        CliError: the file cannot be read, or is not YAML.
    """
    return [item for text in _texts(path) for item in _parsed(text, path)]


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


def object_name(item: Manifest, path: Path) -> str:
    """Return metadata.name; raises CliError if there is none."""
    meta = item.get("metadata")
    if not isinstance(meta, dict) or not isinstance(meta.get("name"), str):
        raise CliError(f"{path}: an object has no metadata.name", "give it one")
    return str(meta["name"])


def parse_service(item: Manifest, path: Path, namespace: str | None) -> VLMService:
    """Convert a VLMService that has no cluster; raises CliError if it is invalid."""
    meta = {"namespace": namespace or "default", **item["metadata"], "uid": _UID, "generation": 1}
    if namespace is not None:
        meta["namespace"] = namespace
    try:
        return parse({**item, "metadata": meta})
    except SpecError as error:
        raise CliError(f"{path}: {error}") from error


def operator_options(worker_image: str | None, gateway_image: str | None) -> Options:
    return Options(
        worker_image=Options.worker_image if worker_image is None else worker_image,
        gateway_image=Options.gateway_image if gateway_image is None else gateway_image,
    )
