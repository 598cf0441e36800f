"""Rounds and packs the linear layers of the parts that `--weights` names.

    encoder   the children of the encoder ─┐
    merger      └─ one module in them      │  each part of one type: the model's, int8 or int4
    layers    the language model           │
    head      its head ────────────────────┘

A head that shares its weights with a large embedding table stays as it is. On a CPU, the inputs of
int8 layers are rounded, too: by the largest value of each row, or by scales from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vlm_kernels import gpu
from vlm_kernels.packed_weights import InputScale
from vlm_worker.core.activation_scales import ScaleFile
from vlm_worker.core.families import FamilySpec
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.gpu.layers import quantise_linears
from vlm_worker.model.linear import GatedLinear, JointLinear, Packing, can_pack, pack_linears
from vlm_worker.weights import Part, names_parts, rounded_types


def pack(
    model: Any,
    spec: FamilySpec,
    report: Callable[[int, int], None],
    *,
    packed_weights: bool,
    weights: str,
    scales: ScaleFile | None = None,
) -> Packing:
    """Pack the linear layers for this CPU, and round the parts that `weights` names.

    Args:
        model: on its device. Parts that are not loaded have no parameters.
        spec: of the model's family.
        report: called with the bytes of the weights that were read, and of all.
        packed_weights: as of `load_model`.
        weights: as of `load_model`.
        scales: of the inputs of int8 layers. Layers of parts without scales have one for each row.

    Raises:
        ModelConfigError: the family, the device or the type of the model does not allow it.
    """
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    try:
        named = rounded_types(weights, spec.int8)
    except ValueError as error:
        raise ModelConfigError(f"--weights={weights}: {error}") from None
    modules = _modules(model, spec)
    if scales is not None:
        _check_scales(scales, named, device)
    types = {part: named[part] for part in named if _is_loaded(modules[part])}
    if types and gpu.serves(device):
        packing = Packing(backend="triton")
        for kind in sorted(set(types.values())):
            parts = _of_type(modules, types, kind)
            packing = quantise_linears(model, parts, weights=kind, packing=packing)
        return _with_head(packing, model, spec, weights)
    if "int4" in types.values():
        raise ModelConfigError(
            f"--weights={weights} needs a GPU, triton and a C compiler, because of int4; this is "
            f"{device.type}"
        )
    if types:
        if dtype != torch.bfloat16 or device.type != "cpu" or not packed_weights:
            raise ModelConfigError(
                f"--weights={weights} needs --dtype=bfloat16 and --packed-weights=auto on a CPU, "
                f"triton and a C compiler on a GPU; this is {device.type}, "
                f"{str(dtype).removeprefix('torch.')} and {'auto' if packed_weights else 'off'}"
            )
        int8 = _of_type(modules, types, "int8")
        inputs = {} if scales is None else _inputs(model, spec, scales, types)
        packing = pack_linears(model, int8=int8, inputs=inputs, progress=report)
        return _with_head(packing, model, spec, weights)
    if packed_weights and can_pack(dtype, device):
        return pack_linears(model, progress=report)
    return Packing()


def linears_of(model: Any, spec: FamilySpec) -> dict[Part, dict[str, nn.Module]]:
    """The linear layers of each part that is loaded, by their names in the model, before packing.

    Layers with the same input count as one.
    """
    joined = JointLinear, GatedLinear
    inner = {id(one) for each in model.modules() if isinstance(each, joined) for one in each.parts}
    linears: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, joined) or (type(module) is nn.Linear and id(module) not in inner)
    }
    found: dict[Part, dict[str, nn.Module]] = {}
    for part, modules in _modules(model, spec).items():
        inside = {id(one) for module in modules for one in module.modules()}
        of_part = {name: linear for name, linear in linears.items() if id(linear) in inside}
        if of_part:
            found[part] = of_part
    return found


def num_inputs(linear: nn.Module) -> int:
    """The inputs of a layer of `linears_of`."""
    one: Any = linear.parts[0] if isinstance(linear, JointLinear | GatedLinear) else linear
    return int(one.in_features)


def _check_scales(scales: ScaleFile, named: Mapping[Part, str], device: torch.device) -> None:
    """Raise ModelConfigError if nothing reads these scales."""
    if gpu.serves(device):
        raise ModelConfigError(
            f"--activation-scales={scales.path}: int8 layers on a GPU do not round what they "
            "multiply, so they have no scale of it; remove --activation-scales, or choose "
            "--device=cpu"
        )
    scales.check_parts(part for part, kind in named.items() if kind == "int8")


def _inputs(
    model: Any, spec: FamilySpec, scales: ScaleFile, types: Mapping[Part, str]
) -> dict[nn.Module, InputScale]:
    """The scale of each layer in int8 whose part has scales."""
    found: dict[nn.Module, InputScale] = {}
    for part, linears in linears_of(model, spec).items():
        for name, linear in linears.items() if part in types else ():
            one = scales.scale_of(part, name, inputs=num_inputs(linear))
            if one is not None:
                found[linear] = InputScale(one.scale, one.zero)
    return found


def _modules(model: Any, spec: FamilySpec) -> dict[Part, list[nn.Module]]:
    """The modules of each part."""
    children = [getattr(model.model, name) for name in spec.encoder_children]
    merger = [model.model.get_submodule(spec.merger)] if _is_loaded(children[:1]) else []
    return {
        "encoder": _without(children, merger),
        "merger": merger,
        "layers": [getattr(model.model, name) for name in spec.lm_children],
        "head": [getattr(model, spec.head)],
    }


def _is_loaded(modules: Sequence[nn.Module]) -> bool:
    """Whether this role has loaded the part: parts that it has not have no parameters."""
    return any(next(module.parameters(), None) is not None for module in modules)


def _of_type(
    modules: Mapping[Part, Sequence[nn.Module]], types: Mapping[Part, str], kind: str
) -> list[nn.Module]:
    return [module for part in types if types[part] == kind for module in modules[part]]


def _without(parents: Sequence[nn.Module], excluded: Sequence[nn.Module]) -> list[nn.Module]:
    """The descendants of `parents`, and they themselves, that contain nothing of `excluded`."""
    inner = {id(module) for one in excluded for module in one.modules()}
    modules = [module for parent in parents for module in parent.modules()]
    return [one for one in modules if inner.isdisjoint(map(id, one.modules()))]


def _with_head(packing: Packing, model: Any, spec: FamilySpec, weights: str) -> Packing:
    """Return `packing`; raise ModelConfigError if a head that `weights` names is not rounded."""
    named = names_parts(weights) and "head" in rounded_types(weights, spec.int8)
    if named and type(getattr(model, spec.head)) is nn.Linear:
        raise ModelConfigError(
            f"--weights={weights}: the head shares its weights with the embedding table, whose "
            "rows are not rounded; remove head="
        )
    return packing
