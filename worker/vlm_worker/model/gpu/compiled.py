"""Compiles the layers that torch computes on a GPU, once per class, during warm-up.

    a tower's layer             for any number of patches; of one image, and of several
    a merger or a projector     for any number of patches; of one image, and of several
    the MLP of a decoder layer  for one token, and for any number; if it is not fused already

    warm-up   a new shape is compiled
    frozen    a new shape runs the module's own forward

Layers of one class share compiled code: weights are its arguments. Our kernels are opaque
operations in it (`vlm_kernels.opaque`). Compiled code rounds where the modules round, so results
differ only by the order of sums.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as shapes

from vlm_worker.model.layers import Mlp
from vlm_worker.model.linear import GatedLinear

logger = logging.getLogger(__name__)

CLASSES = frozenset(
    {
        *("VisionBlock", "CLIPEncoderLayer", "SiglipEncoderLayer"),
        *("PatchMerger", "Qwen2_5_VLPatchMerger"),
        *("LlavaMultiModalProjector", "Gemma3MultiModalProjector"),
    }
)
"""Classes of the encoder that are compiled, ours and transformers'."""

OPTIONS = {"emulate_precision_casts": True}
"""Options of torch's compiler: fused operations round like separate ones."""


class CompiledLayers:
    """Layers of one class. Until it is frozen, only one thread may call them.

    Args:
        layers: at least one.
        compiler: returns the compiled form of a function; may raise anything at the first call.
    """

    def __init__(self, layers: Sequence[nn.Module], compiler: Callable[..., Any]) -> None:
        self.name = type(layers[0]).__name__
        self._layers = layers
        self._plain: Callable[..., Any] = type(layers[0]).forward
        self._compiled = compiler(self._plain)
        self._use(self._warm)

    def freeze(self) -> None:
        """Stop compiling: a new shape runs the module's own forward."""
        if self._compiled is not None:
            self._use(torch._dynamo.run(self._compiled))

    @property
    def is_compiled(self) -> bool:
        """Whether the compiler has not failed for this class."""
        return self._compiled is not None

    def _warm(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            # otherwise two sizes that are equal in the first call are assumed to be equal always
            with shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                return self._compiled(layer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  a compiler may raise anything
            logger.warning(
                "%s is not compiled by torch: computed as it is written, slower",
                self.name,
                extra={"error": repr(error)},
            )
        self._compiled = None
        for compiled in self._layers:
            del compiled.forward
        return self._plain(layer, *args, **kwargs)

    def _use(self, forward: Callable[..., Any]) -> None:
        for layer in self._layers:
            layer.forward = functools.partial(forward, layer)


def compile_layers(
    model: nn.Module, compiler: Callable[..., Any] | None = None
) -> list[CompiledLayers]:
    """Compile the layers of a model at their next calls, until `freeze`.

    Args:
        model: its layers are changed in place.
        compiler: see `CompiledLayers`; None is `torch.compile`.
    """
    compiler = compiler or functools.partial(
        torch.compile, fullgraph=True, dynamic=True, options=OPTIONS
    )
    by_class: dict[type, list[nn.Module]] = {}
    for layer in _layers_to_compile(model):
        by_class.setdefault(type(layer), []).append(layer)
    return [CompiledLayers(layers, compiler) for layers in by_class.values()]


def freeze(parts: Sequence[CompiledLayers]) -> None:
    """Freeze all classes, and log those that are compiled."""
    for part in parts:
        part.freeze()
    if parts:
        logger.info(
            "layers compiled", extra={"classes": [part.name for part in parts if part.is_compiled]}
        )


def _layers_to_compile(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost layers to compile; their children are compiled with them."""
    for child in parent.children():
        gated = isinstance(child, Mlp) and isinstance(child.up, GatedLinear)
        if gated or type(child).__name__ in CLASSES:
            yield child
        else:
            yield from _layers_to_compile(child)
