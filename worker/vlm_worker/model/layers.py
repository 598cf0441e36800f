"""Layers as a few kernels, in place of transformers' modules: decoder layers of Llama's form.

    x ─▶ norm ─▶ q, k, v ─▶ rope ─▶ attention over KV blocks ─▶ o ─▶ + x
    x ─▶ norm ─▶ silu(gate) * up ─▶ down ─▶ + x

transformers computes a layer in some thirty small calls, which for the few rows of a decode step
cost as much as its products. The same values come out, up to the order of sums: each step here
rounds as the modules that it replaces. So do the MLPs of vision towers with quick GELU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vlm_kernels import rms_norm, rope
from vlm_kernels.packed_linear import Activation
from vlm_worker.model.attention import StepContext, paged_forward
from vlm_worker.model.linear import GatedLinear, JointLinear, activated_product, add_product

LAYERS = frozenset({"LlamaDecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"})
"""Classes of transformers that compute what `DecoderLayer` does; of Gemma 3, norms differ."""

NORMS = frozenset({"LlamaRMSNorm", "Qwen2RMSNorm", "Qwen2VLRMSNorm", "Qwen2_5_VLRMSNorm"})
"""Classes of transformers that compute what `Norm` does."""


def use_kernels(model: nn.Module) -> None:
    """Replace the decoder layers and norms that have kernels; the others stay transformers'."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_llama_layer(child):
                setattr(parent, name, DecoderLayer(child))
            elif _is_quick_gelu_mlp(child):
                setattr(parent, name, QuickGeluMlp(child))
            elif type(child).__name__ in NORMS:
                setattr(parent, name, Norm(child))


def _is_llama_layer(module: Any) -> bool:
    is_known = type(module).__name__ in LAYERS
    return is_known and type(module.mlp.act_fn).__name__ in {"SiLU", "SiLUActivation"}


def _is_quick_gelu_mlp(module: Any) -> bool:
    activation = {"VisionMlp": "act", "CLIPMLP": "activation_fn"}.get(type(module).__name__, "")
    return type(getattr(module, activation, None)).__name__ == "QuickGELUActivation"


class QuickGeluMlp(nn.Module):
    """The two products of a vision tower's layer, the activation inside the first."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = mlp.fc1, mlp.fc2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to the same shape."""
        y: torch.Tensor = self.fc2(activated_product(self.fc1, x, Activation.QUICK_GELU))
        return y


class Norm(nn.Module):
    """RMSNorm over the last axis; takes over the weight of the module that it replaces."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to the same shape."""
        return rms_norm(x.view(-1, x.shape[-1]), self.weight, eps=self.eps).view(x.shape)


class DecoderLayer(nn.Module):
    """One layer over packed tokens; takes over the weights of the layer that it replaces."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None)
        self.attention_norm = Norm(layer.input_layernorm)
        self.qkv = JointLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = attention.o_proj
        self.mlp_norm = Norm(layer.post_attention_layernorm)
        self.gate_up = GatedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
        **_unused: Any,
    ) -> torch.Tensor:
        """`[1, T, D]` to `[1, T, D]`, called as transformers' models call a layer."""
        x_TD = hidden_states[0]
        x_TD = add_product(self.o, self._attend(x_TD, position_embeddings, step), x_TD)
        return add_product(self.down, self.gate_up(self.mlp_norm(x_TD)), x_TD)[None]

    def _attend(
        self,
        x_TD: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
    ) -> torch.Tensor:
        """Attention's answer for each token, heads side by side."""
        parts = self.qkv(self.attention_norm(x_TD))
        q_THD, k_THD, v_THD = (x.unflatten(-1, (-1, self._head_dim)) for x in parts)
        cos_TD, sin_TD = (x[0] for x in position_embeddings)
        rope(q_THD, cos_TD, sin_TD)
        rope(k_THD, cos_TD, sin_TD)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        o, _ = paged_forward(
            self, q, k, v, None, scaling=self._scaling, step=step, sliding_window=self._window
        )
        return o[0].flatten(1)
