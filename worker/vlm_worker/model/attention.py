"""Attention functions that transformers' modules call in place of their own.

    decoder(inputs_embeds [1, T, D], step=StepContext)     every layer passes on `step`
        └─ paged_forward     store K and V of the new tokens, attend over KV blocks
    with step_of_thread(step): any model                   not every model passes it on
        └─ unlisted_forward  the same
    vision tower(patches, grid)
        └─ varlen_forward    attend inside windows and frames, one call for all of them
    vision tower(planes)
        └─ planes_forward    attend inside images, one call for all of them

No mask is built: transformers skips masks for implementations without a mask function.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from vlm_kernels import (
    AttentionPlan,
    attention_mass,
    paged_attention,
    store_kv,
    varlen_attention,
)

PAGED = "triptych_paged"
UNLISTED = "triptych_unlisted"
VARLEN = "triptych_flash_varlen"  # "flash" in the name makes vision towers pass segment bounds
PLANES = "triptych_planes"


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """The attention that the rows of a step pay to the tokens of their one sequence, all layers.

    `mass` is float32 [N], to which each layer adds; `blocks` are those of the sequence, int32 [B].
    """

    mass: torch.Tensor
    blocks: np.ndarray

    def add(self, q_THD: torch.Tensor, kv_cache: torch.Tensor, layer: int, scale: float) -> None:
        num_tokens = len(self.mass)
        self.mass.add_(attention_mass(q_THD, kv_cache, layer, self.blocks, num_tokens, scale=scale))


@dataclasses.dataclass(slots=True)
class StepContext:
    """The values that all layers of a step share; `make_plan` runs once per window size.

    With an `observation`, the KV of the step's rows is in the cache, and layers do not store it.
    """

    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    make_plan: Callable[[int | None], AttentionPlan]
    observation: Observation | None = None
    plans: dict[int | None, AttentionPlan] = dataclasses.field(default_factory=dict)

    def plan(self, window: int | None) -> AttentionPlan:
        """The attention plan of layers with this sliding window, in tokens; None is no window."""
        if window not in self.plans:
            self.plans[window] = self.make_plan(window)
        return self.plans[window]


_step: contextvars.ContextVar[StepContext] = contextvars.ContextVar("step")


@contextlib.contextmanager
def step_of_thread(step: StepContext) -> Iterator[None]:
    """Let `unlisted_forward` find the step, in this thread."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def use_paged_attention(model: Any, *, packed_vision: bool | None) -> None:
    """Make the language model use KV blocks, and the tower the function for its input.

    `packed_vision` is None in an unlisted family: its tower stays as it is.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_forward)
    AttentionInterface.register(UNLISTED, unlisted_forward)
    AttentionInterface.register(VARLEN, varlen_forward)
    AttentionInterface.register(PLANES, planes_forward)
    # set after loading: from_pretrained would download a kernel for a name with "flash"
    if packed_vision is None:
        model.get_decoder().config._attn_implementation_internal = UNLISTED
        return
    model.get_decoder().config._attn_implementation_internal = PAGED
    model.config.vision_config._attn_implementation_internal = VARLEN if packed_vision else PLANES


def paged_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: StepContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer of one packed step; `[1, heads, T, head_dim]` in, `[1, T, heads, head_dim]` out."""
    assert attention_mask is None
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    if step.observation is None:
        store_kv(k_THD, v_THD, step.kv_cache, module.layer_idx, step.slot_mapping)
    else:
        assert softcap is None
        step.observation.add(q_THD, step.kv_cache, module.layer_idx, scaling)
    plan = step.plan(sliding_window)
    o_THD = paged_attention(
        q_THD, step.kv_cache, module.layer_idx, plan, scale=scaling, softcap=softcap
    )
    return o_THD[None], None


def unlisted_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `paged_forward`, called by any model within `step_of_thread`."""
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not built")
    return paged_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        step=_step.get(),
        sliding_window=sliding_window,
        softcap=softcap,
    )


def varlen_forward(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer of packed images; `[1, heads, T, head_dim]` in, `[1, T, heads, head_dim]` out."""
    assert attention_mask is None
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attention(q_THD, k_THD, v_THD, cu_seq_lens_q, scale=scaling)[None], None


def planes_forward(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer of images of one size; `[B, heads, T, D]` in, `[B, T, heads, D]` out."""
    assert attention_mask is None
    num_images, _, size, _ = query.shape
    q_THD, k_THD, v_THD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    cu = size * torch.arange(num_images + 1, dtype=torch.int32, device=query.device)
    o_THD = varlen_attention(q_THD, k_THD, v_THD, cu, scale=scaling)
    return o_THD.view(num_images, size, *o_THD.shape[1:]), None
