"""The KV cache: how a block lies in memory, how many fit, and the buffer that holds them."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

from vlm_kernels.kv_rows import slot_elements
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.container import available_memory_bytes
from vlm_worker.types import KVLayout

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}

DEFAULT_PERCENT = {"cpu": 25, "cuda": 90}
DEFAULT_CPU_BYTES = 1 << 30  # of host memory nobody means to give a quarter without saying so


def make_kv_layout(
    text: Any, revision: str, *, dtype: torch.dtype, kv_dtype: str, block_size: int
) -> KVLayout:
    """Of a language model.

    Args:
        text: transformers' config of it.
        revision: of the model.
        dtype: of its weights.
        kv_dtype: of the cache; `auto` is `dtype`.
        block_size: tokens of a block.

    Raises:
        ModelConfigError: a setting cannot be served.
    """
    name = dtype_name(dtype) if kv_dtype == "auto" else kv_dtype
    if name not in DTYPES:
        raise ModelConfigError(
            f"--kv-dtype={kv_dtype}: not built yet; choose auto, {', '.join(DTYPES)}"
        )
    if block_size < 1:
        raise ModelConfigError(f"--block-size={block_size}: must be at least 1")
    return KVLayout(
        model_revision=revision,
        num_layers=text.num_hidden_layers,
        num_kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        block_size=block_size,
        dtype=name,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and layouts call it."""
    return str(dtype).removeprefix("torch.")


def num_kv_blocks(
    layout: KVLayout,
    device: torch.device,
    *,
    memory_bytes: int | None = None,
    memory_percent: int | None = None,
    reserved_bytes: int = 0,
) -> int:
    """KV blocks, the null block included.

    Without `memory_bytes`, a share of what is left but for `reserved_bytes`; without
    `memory_percent` either, on a GPU 90 % of it, on a CPU 25 %, at most 1 GiB.

    Raises:
        ModelConfigError: not even two blocks fit, with the numbers.
    """
    if memory_bytes is None:
        memory_bytes = max(0, available_bytes(device) - reserved_bytes)
        percent = DEFAULT_PERCENT[device.type] if memory_percent is None else memory_percent
        memory_bytes = memory_bytes * percent // 100
        if memory_percent is None and device.type == "cpu":
            memory_bytes = min(memory_bytes, DEFAULT_CPU_BYTES)
    num_blocks = memory_bytes // layout.block_bytes
    if num_blocks < 2:
        raise ModelConfigError(
            f"{memory_bytes} bytes hold {num_blocks} KV blocks of {layout.block_bytes} bytes; "
            f"give at least {2 * layout.block_bytes} with --kv-memory-bytes"
        )
    return num_blocks


def make_kv_cache(layout: KVLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """The buffer, `[num_blocks, layers, 2, kv_heads, block_size * head_dim]`, all zeros.

    Of int8, scales lie behind the last axis' elements, as `vlm_kernels.kv_rows` says.

    On a CPU the system gives the memory page by page, as blocks are written or a little sooner
    (`kv_pages`): a large cache that is mostly unused costs little but address space. (`torch.zeros`
    would write all of it.) Huge pages are asked for: attention reads blocks in any order, a sixth
    faster where fewer pages are looked up.
    """
    inner = layout.block_size * slot_elements(DTYPES[layout.dtype], layout.head_dim)
    shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, inner)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=DTYPES[layout.dtype], device=device)
    num_bytes = num_blocks * layout.block_bytes
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=DTYPES[layout.dtype]).view(shape)


def available_bytes(device: torch.device) -> int:
    """Memory left: on a GPU what the driver says, else what container and machine leave."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else what torch keeps for later counts as taken
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()
