"""Layers that stay torch's own on a GPU, compiled: each class once, before anything is served.

    a tower's layer             for any number of patches; of one picture, and of several
    a merger or a projector     likewise
    the MLP of a decoder layer  for one token, and for any number; where it is not fused already

    warm-up   what a class meets for the first time is compiled
    frozen    and from then on is computed as it is written

Layers of one class share what is compiled: weights are its arguments. Kernels are single operations
in it (`vlm_kernels.opaque`). Values are rounded where the modules round them, so that what is
compiled differs from them by the order of sums.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as shapes

from vlm_kernels import gpu
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
"""Ours and transformers', of the encoder."""

OPTIONS = {"emulate_precision_casts": True}
"""Of torch's compiler: what is fused rounds as it did apart."""


class CompiledLayers:
    """Layers of one class. While it is not frozen, one thread calls them.

    Args:
        layers: at least one.
        compiler: of a function; raises anything where it cannot, at the function's first call.
    """

    def __init__(self, layers: Sequence[nn.Module], compiler: Callable[..., Any]) -> None:
        self.name = type(layers[0]).__name__
        self._layers = layers
        self._plain: Callable[..., Any] = type(layers[0]).forward
        self._compiled = compiler(self._plain)
        self._use(self._warm)

    def freeze(self) -> None:
        """Compile nothing any more: a shape that was not met computes as it is written."""
        if self._compiled is not None:
            self._use(torch._dynamo.run(self._compiled))

    @property
    def is_compiled(self) -> bool:
        """Whether there is anything but what was written."""
        return self._compiled is not None

    def _warm(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            # else two sizes that are equal at first, of pictures and of weights, are one for ever
            with shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                return self._compiled(layer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  a compiler may raise anything
            logger.warning(
                "%s is not compiled by torch: computed as it is written, slower",
                self.name,
                extra={"error": repr(error)},
            )
        self._compiled = None
        for one in self._layers:
            del one.forward
        return self._plain(layer, *args, **kwargs)

    def _use(self, forward: Callable[..., Any]) -> None:
        for layer in self._layers:
            layer.forward = functools.partial(forward, layer)


def can_compile(device: torch.device) -> bool:
    """Whether compiled layers are worth their seconds at start, and their kernels stand alone."""
    return device.type == "cuda" and gpu.serves(device)


def compile_layers(
    model: nn.Module, compiler: Callable[..., Any] | None = None
) -> list[CompiledLayers]:
    """Have the layers of a model compiled at their next calls, until `freeze`."""
    compiler = compiler or functools.partial(
        torch.compile, fullgraph=True, dynamic=True, options=OPTIONS
    )
    by_class: dict[type, list[nn.Module]] = {}
    for layer in _found(model):
        by_class.setdefault(type(layer), []).append(layer)
    return [CompiledLayers(layers, compiler) for layers in by_class.values()]


def freeze(parts: Sequence[CompiledLayers]) -> None:
    """Serve with what is compiled by now; the log says what is."""
    for part in parts:
        part.freeze()
    if parts:
        logger.info(
            "layers compiled", extra={"classes": [part.name for part in parts if part.is_compiled]}
        )


def _found(parent: nn.Module) -> Iterator[nn.Module]:
    """The outermost: what is inside of one is compiled with it."""
    for child in parent.children():
        gated = isinstance(child, Mlp) and isinstance(child.up, GatedLinear)
        if gated or type(child).__name__ in CLASSES:
            yield child
        else:
            yield from _found(child)
