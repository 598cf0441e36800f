"""`vlm plan`: reads files or a cluster, plans, and prints the report and the manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from vlm_cli import flags
from vlm_cli.access import open_cluster
from vlm_cli.offline import object_name, parse_service, read_objects
from vlm_cli.output import CliError, Format, emit
from vlm_cli.plan import manifest as manifests
from vlm_cli.plan import report
from vlm_cli.plan.facts import ITEM_BYTES, check_weights
from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.load import Load, parse_size
from vlm_cli.plan.manifest import Service
from vlm_cli.plan.model import read_model
from vlm_cli.plan.nodes import read_nodes
from vlm_cli.plan.speed import BANDWIDTH_SHARE, COMPUTE_SHARE, Device, parse_device
from vlm_cli.sections import show, to_data
from vlm_operator import names
from vlm_operator.api.enums import KvDType
from vlm_operator.cluster import VLM_NODE_CLASS, Manifest

_DETAILS = ("auto", "low", "high", "original")
NETWORK_GBIT = 10.0
DEFAULT_TOKENS = 200


async def plan(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model's directory, or its config.json.")
    ],
    nodes: Annotated[
        list[Path] | None,
        typer.Option(
            "-f", "--filename", metavar="PATH", help="VLMNodeClasses; without it, the cluster's."
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS=DEVICE", help="h100, l4, ... or TFLOPS:GBPS[:MEMORY]."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="Requests per second; without it, no pools.")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="WxH", help="An image of a request, in pixels; repeatable."),
    ] = None,
    image_share: Annotated[
        float | None, typer.Option(metavar="N", help="Share of requests with images; default 1.")
    ] = None,
    detail: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto or low; default auto.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Text tokens of a prompt; default 200.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer; default 200.")
    ] = None,
    ttft_ms: Annotated[
        int | None, typer.Option(min=1, help="Goal for TTFT at the 95th percentile.")
    ] = None,
    itl_ms: Annotated[
        int | None, typer.Option(min=1, help="Goal for ITL at the 95th percentile.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of weights; default: the checkpoint's.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of KV; default: that of the weights.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="auto, int8, int4, or by part; default auto."),
    ] = None,
    compute_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of peak compute that is reached.")
    ] = COMPUTE_SHARE,
    bandwidth_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of peak bandwidth that is reached.")
    ] = BANDWIDTH_SHARE,
    network_gbit: Annotated[
        float, typer.Option(min=0.001, help="Gbit/s between two pods.")
    ] = NETWORK_GBIT,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the VLMService; default: the directory.")
    ] = None,
    uri: Annotated[
        str | None, typer.Option(metavar="URI", help="Of the weights; default: pvc://NAME.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="Of an hf:// model.")
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Defaults of these flags, from a planned manifest."
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--manifest", metavar="FILE", help="Write the VLMService there.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print formulas.")] = False,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
    output: flags.Output = Format.TABLE,
) -> None:
    """Plan memory, topology, pools and cost of a model from its config.json; write its manifest.

    Raises:
        CliError: a file, field or flag is invalid, or no topology meets the goals.
    """
    classes = await _node_classes(nodes, kubeconfig, context)
    try:
        service, load = _again(again)
        service = _service(
            service, model, name=name, uri=uri, revision=revision, dtype=dtype,
            kv_dtype=kv_dtype, weights=weights,
        )  # fmt: skip
        load = _load(
            load, rate=rate, images=image, image_share=image_share, detail=detail,
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, ttft_ms=ttft_ms,
            itl_ms=itl_ms,
        )  # fmt: skip
        facts = read_model(model, dtype=service.dtype)
        facts.check_rounded(service.weights)
        found = report.plan(
            report.Request(
                facts=facts,
                nodes=read_nodes(classes, _devices(device or [])),
                load=load,
                service=service,
                shares=(compute_share, bandwidth_share),
                network_gbit=network_gbit,
            )
        )
    except PlanError as error:
        raise CliError(str(error)) from None
    if found.manifest is not None:
        parse_service(found.manifest, Path("the planned manifest"), None)
    if output is Format.TABLE:
        show(found.sections, explain=explain)
    else:
        emit(report.to_json(found, data=to_data(found.sections, explain=explain)), output)
    if not found.is_feasible:
        raise CliError(
            "no topology of these node classes meets the goals",
            "relax a goal, or add node classes; the table says what each topology misses",
        )
    _write(write, found.manifest)


async def _node_classes(
    paths: Sequence[Path] | None, kubeconfig: str | None, context: str | None
) -> list[Manifest]:
    if paths is None:
        async with open_cluster(kubeconfig, None, context) as access:
            return await access.cluster.list(VLM_NODE_CLASS)
    found: dict[str, Manifest] = {}
    for path in paths:
        for item in read_objects(path):
            if item.get("kind") == names.KIND_NODE_CLASS:
                found[object_name(item, path)] = item
    return list(found.values())


def _again(path: Path | None) -> tuple[Service | None, Load | None]:
    """Return what the manifest of an earlier plan was made for."""
    if path is None:
        return None, None
    services = [item for item in read_objects(path) if item.get("kind") == names.KIND_SERVICE]
    if len(services) != 1:
        raise PlanError(f"{path}: has {len(services)} VLMServices; --from reads one")
    return manifests.read_input(str(path), services[0])


def _service(before: Service | None, model: Path, **given: str | None) -> Service:
    """Return the service of the flags; what they leave out is as before, or by default."""
    for flag, choices in (
        ("dtype", tuple(ITEM_BYTES)),
        ("kv_dtype", tuple(kind.flag for kind in KvDType)),
    ):
        value = given[flag]
        if value is not None and value not in choices:
            option = flag.replace("_", "-")
            raise PlanError(f"--{option}: is {value!r}; there are {', '.join(choices)}")
    if given["weights"] is not None:
        check_weights(given["weights"])
    if before is None:
        directory = model.resolve() if model.is_dir() else model.resolve().parent
        default = given["name"] or _default_name(directory)
        before = Service(name=default, uri=f"pvc://{default}")
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    service = dataclasses.replace(before, **changed)
    service.check()
    return service


def _load(before: Load | None, *, images: Sequence[str] | None, **given: Any) -> Load | None:
    """Return the load of the flags; what they leave out is as before, or by default."""
    if before is None:
        if given["rate"] is None:
            return None
        before = Load(
            rate=given["rate"],
            images=(),
            image_share=1.0,
            low_detail=False,
            prompt_tokens=DEFAULT_TOKENS,
            output_tokens=DEFAULT_TOKENS,
            ttft_ms=None,
            itl_ms=None,
        )
    if (detail := given.pop("detail")) is not None:
        if detail not in _DETAILS:
            raise PlanError(f"--detail: is {detail!r}; there are {', '.join(_DETAILS)}")
        given["low_detail"] = detail == "low"
    if images is not None:
        given["images"] = tuple(parse_size(text) for text in images)
    return dataclasses.replace(before, **{k: v for k, v in given.items() if v is not None})


def _devices(texts: Sequence[str]) -> Mapping[str, Device]:
    devices = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise PlanError(f"--device: {text!r} names no class; write CLASS=DEVICE, as a=h100")
        devices[name] = parse_device(value)
    return devices


def _default_name(directory: Path) -> str:
    """Return the directory's name as a name of a VLMService, which begins with a letter."""
    found = manifests.slug(directory.name, longest=names.MAX_SERVICE_NAME - len("vlm-"))
    return found if found[:1].isalpha() else f"vlm-{found}".strip("-")


def _write(path: Path | None, manifest: Manifest | None) -> None:
    if path is None:
        return
    if manifest is None:
        raise CliError("there is no manifest without a load", "give --rate")
    try:
        path.write_text(yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None
