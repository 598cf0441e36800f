"""The KV cache: block layout, number of blocks, buffer, prefault of its pages; temporary memory."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_kernels.kv_rows import GROUPED, MIXED, slot_elements
from vlm_worker.core.families import Family
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.cgroup import available_memory_bytes
from vlm_worker.types import ITEMSIZE, KIVI_GROUP, KVLayout, Narrow, Stage
from vlm_worker.wire.buffers import private_memory

logger = logging.getLogger(__name__)

DONTNEED: Final = 4
"""MADV_DONTNEED: the kernel drops these pages; a page of a file is read again on access."""
POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: prefaults pages for writing, and keeps their content."""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(start: int, num_bytes: int, advice: int) -> bool:
    """Call madvise(2) from `start`, the address of a page; False if it fails."""
    return bool(_madvise(start, num_bytes, advice) == 0)


PREFAULT_BYTES: Final = 128 << 20
"""Bytes that are prefaulted beyond the used part: enough for a burst of prompts."""
STEP_BYTES: Final = 2 << 20
"""Bytes per prefault: one huge page. It takes some tenths of a millisecond, up to 3 ms."""


class KVPrefault:
    """Prefaults pages of a KV cache before steps write to them. Only one thread uses it.

    The first axis of the cache is blocks. The cache must outlive this object.
    """

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._start, self._num_bytes = kv_cache.data_ptr(), kv_cache.nbytes
        self._block_bytes = kv_cache.nbytes // len(kv_cache)
        self._used_end = self._prefaulted_end = 0

    def use(self, block_ids: np.ndarray) -> None:
        """Record that blocks `[N]` are about to be written, which faults their pages in."""
        end = (int(block_ids.max(initial=-1)) + 1) * self._block_bytes
        self._used_end = max(self._used_end, end)

    def prefault_next(self) -> bool:
        """Prefault the next STEP_BYTES; False if enough is prefaulted, or the kernel refuses."""
        begin = max(self._prefaulted_end, self._used_end // STEP_BYTES * STEP_BYTES)
        if begin >= min(self._used_end + PREFAULT_BYTES, self._num_bytes):
            return False
        end = min(begin + STEP_BYTES, self._num_bytes)
        is_populated = advise(self._start + begin, end - begin, POPULATE_WRITE)
        self._prefaulted_end = end if is_populated else self._num_bytes
        return is_populated


FLOAT_BYTES: Final = 4


def step_bytes(text: Any, *, num_tokens: int, num_rows: int, element_bytes: int) -> int:
    """Estimate the temporary bytes of one step of a language model.

    `text` is transformers' config of the model. `num_rows` rows of logits are computed. An
    activation has `element_bytes`.
    """
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = (text.num_attention_heads + 2 * text.num_key_value_heads) * head_dim
    per_token = 4 * text.hidden_size + 2 * heads + 3 * text.intermediate_size
    logits = num_rows * text.vocab_size * (element_bytes + 2 * FLOAT_BYTES)
    return num_tokens * per_token * element_bytes + logits


def encode_bytes(vision: Any, family: Family, *, num_tokens: int, element_bytes: int) -> int:
    """Estimate the temporary bytes of one call of a vision tower for `num_tokens` visual tokens.

    `vision` is transformers' config of the tower. The call has at least the largest image. An
    activation has `element_bytes`.
    """
    largest = family.processor.largest
    num_patches = math.prod(largest.grid_thw)
    patches_per_token = math.ceil(num_patches / largest.num_tokens)
    num_patches = max(num_patches, num_tokens * patches_per_token)
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(
        width * getattr(vision, "mlp_ratio", 4)
    )
    # the patches of all images, joined or by windows, and these in the type of the model
    input_bytes = 2 * FLOAT_BYTES * family.processor.patch_dim
    return int(num_patches * (input_bytes + (8 * width + 3 * inner) * element_bytes))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkSizes:
    """The largest step and encoder call of a worker, and the bytes of the encoder cache's hot tier.

    A step has `num_tokens` tokens and `num_rows` rows of logits, an encoder call
    `num_visual_tokens`; one larger image is encoded alone.
    """

    num_tokens: int = 0
    num_rows: int = 0
    num_visual_tokens: int = 0
    embedding_cache_bytes: int = 0


def device_work_bytes(
    config: Any, family: Family, stages: Collection[Stage], sizes: WorkSizes, *, element_bytes: int
) -> int:
    """Estimate the bytes that a GPU needs beside weights and KV, as `vlm plan` does.

    They are the temporary memory of the work, and the hot tier of the encoder cache.
    """
    cache_bytes = 0 if set(stages) == {Stage.DECODE} else sizes.embedding_cache_bytes
    return cache_bytes + work_bytes(config, family, stages, sizes, element_bytes=element_bytes)


def work_bytes(
    config: Any, family: Family, stages: Collection[Stage], sizes: WorkSizes, *, element_bytes: int
) -> int:
    """Estimate the temporary bytes of one step and one encoder call, of those that `stages` run.

    `config` is transformers' config of the model. An activation has `element_bytes`.
    """
    num_bytes = 0
    if Stage.ENCODER in stages:
        num_bytes += encode_bytes(
            config.vision_config,
            family,
            num_tokens=sizes.num_visual_tokens,
            element_bytes=element_bytes,
        )
    if {Stage.PREFILL, Stage.DECODE} & set(stages):
        num_bytes += step_bytes(
            config.get_text_config(),
            num_tokens=sizes.num_tokens,
            num_rows=sizes.num_rows,
            element_bytes=element_bytes,
        )
    return num_bytes


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}

KV_DTYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
FP8: Final = "fp8"
"""The value of `--kv-dtype` for `float8_e4m3fn`."""
MIXED_KV: Final = {
    "vision=int8": Narrow.VISION,
    "text=int8": Narrow.TEXT,
    "vision=kivi4": Narrow.VISION_KIVI4,
}
"""Values of `--kv-dtype` for few bits of one modality, beside the other in the type of `auto`."""
FP8_CAPABILITY: Final = (8, 9)

DEFAULT_PERCENT = {"cpu": 25, "cuda": 90}
DEFAULT_CPU_BYTES = 1 << 30  # bounds the default share of host memory


def make_kv_layout(
    text: Any, revision: str, *, dtype: torch.dtype, kv_dtype: str, block_size: int
) -> KVLayout:
    """Choose the KV layout of a language model with transformers' config `text`.

    `dtype` is that of the weights, `kv_dtype` that of the cache; `auto` is the former. If one
    modality alone is in few bits, `block_size` is that of its blocks.

    Raises:
        ModelConfigError: a setting is not supported.
    """
    types = {"auto": dtype_name(dtype), FP8: dtype_name(torch.float8_e4m3fn)}
    narrow = MIXED_KV.get(kv_dtype)
    name = types["auto"] if narrow else types.get(kv_dtype, kv_dtype)
    if name not in KV_DTYPES:
        choices = ", ".join((*DTYPES, FP8, *MIXED_KV))
        raise ModelConfigError(f"--kv-dtype={kv_dtype}: not built yet; choose auto, {choices}")
    if block_size < 1:
        raise ModelConfigError(f"--block-size={block_size}: must be at least 1")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if narrow:
        block_size = _wide_block_size(block_size, kv_dtype, name, head_dim=head_dim)
    return KVLayout(
        model_revision=revision,
        num_layers=text.num_hidden_layers,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=name,
        narrow=narrow,
    )


def _wide_block_size(block_size: int, kv_dtype: str, wide: str, *, head_dim: int) -> int:
    """Tokens of a wide block; `block_size` are those of a narrow one.

    Raises:
        ModelConfigError: no cache has blocks of these two kinds.
    """
    if KV_DTYPES[wide] not in MIXED.values():
        raise ModelConfigError(
            f"--kv-dtype={kv_dtype}: not built beside {wide}; set --dtype=bfloat16 or float32"
        )
    if MIXED_KV[kv_dtype].is_grouped:
        if block_size != KIVI_GROUP:
            raise ModelConfigError(
                f"--block-size={block_size}: with --kv-dtype={kv_dtype}, it must be {KIVI_GROUP}, "
                "the tokens that share a scale per channel"
            )
        if head_dim % 2:
            raise ModelConfigError(
                f"--kv-dtype={kv_dtype}: heads of {head_dim} are odd, two numbers share a byte; "
                "choose int8"
            )
        return block_size // (2 * ITEMSIZE[wide])
    if block_size % ITEMSIZE[wide]:
        raise ModelConfigError(
            f"--block-size={block_size}: with --kv-dtype={kv_dtype} and {wide}, it must be a "
            f"multiple of {ITEMSIZE[wide]}, the narrow tokens in the memory of a wide one"
        )
    return block_size // ITEMSIZE[wide]


def check_kv_device(kv_dtype: str, device: torch.device) -> None:
    """Raise ModelConfigError if the device's kernels do not read a KV cache of this type."""
    if kv_dtype in MIXED_KV and device.type != "cpu":
        raise ModelConfigError(
            f"--kv-dtype={kv_dtype}: the GPU kernels do not read blocks of two kinds; "
            f"choose int8, which needs less memory"
        )
    if kv_dtype != FP8:
        return
    found = f"this is {device.type}"
    if gpu.serves(device):
        # triton's interpreter, which tests use, reads every type
        capability = FP8_CAPABILITY
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
        if capability >= FP8_CAPABILITY:
            return
        found = f"this GPU has {capability[0]}.{capability[1]}"
    raise ModelConfigError(
        f"--kv-dtype={FP8} needs a GPU of compute capability 8.9 or later, triton and a C "
        f"compiler; {found}. Choose int8, which has the same size"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in settings and layouts."""
    return str(dtype).removeprefix("torch.")


def num_kv_blocks(
    layout: KVLayout,
    device: torch.device,
    *,
    memory_bytes: int | None = None,
    memory_percent: int | None = None,
    reserved_bytes: int = 0,
    work_bytes: int = 0,
) -> int:
    """Choose the number of KV blocks, the null block included.

    Without `memory_bytes`, they get `memory_percent` of the available memory less `reserved_bytes`.
    Without `memory_percent`, it is 90 % on a GPU, and 25 % but at most 1 GiB on a CPU. In both
    cases, steps and encoder calls keep `work_bytes`.

    Raises:
        ModelConfigError: fewer than two blocks fit; the message has the numbers.
    """
    if memory_bytes is None:
        left = max(0, available_bytes(device) - reserved_bytes)
        percent = DEFAULT_PERCENT[device.type] if memory_percent is None else memory_percent
        memory_bytes = left * percent // 100
        if memory_percent is None and device.type == "cpu":
            memory_bytes = min(memory_bytes, DEFAULT_CPU_BYTES)
        if memory_bytes > left - work_bytes:
            memory_bytes = _left_for_kv(layout, left, work_bytes)
    num_blocks = memory_bytes // layout.block_bytes
    if num_blocks < 2:
        raise ModelConfigError(
            f"{memory_bytes} bytes hold {num_blocks} KV blocks of {layout.block_bytes} bytes; "
            f"give at least {2 * layout.block_bytes} with --kv-memory-bytes"
        )
    return num_blocks


def _left_for_kv(layout: KVLayout, left: int, work_bytes: int) -> int:
    """The bytes of `left` that steps and encoder calls do not need.

    Raises:
        ModelConfigError: fewer than two blocks fit.
    """
    kv_bytes = left - work_bytes
    if kv_bytes < 2 * layout.block_bytes:
        raise ModelConfigError(
            f"{left} bytes of the device are left, and steps, images and the encoder cache may "
            f"need {work_bytes}, so that 2 KV blocks of {layout.block_bytes} bytes do not fit: "
            "lower --max-batched-tokens, --max-requests or --embedding-cache-bytes, encode on "
            "other workers, or set --kv-memory-bytes, which ignores this estimate"
        )
    logger.info(
        "the KV cache is smaller than its share, because steps and images need memory",
        extra={"kv_bytes": kv_bytes, "work_bytes": work_bytes, "available_bytes": left},
    )
    return kv_bytes


def make_kv_cache(layout: KVLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Allocate the buffer `[num_blocks, layers, 2, kv_heads, block_size * head_dim]` of zeros.

    With int8 and float8, the scales follow the elements of the last axis (`vlm_kernels.kv_rows`).
    If one modality is narrow, its elements are the words of `vlm_kernels.mixed_blocks`.

    On a CPU, pages are allocated when blocks are written or prefaulted (`KVPrefault`), so an unused
    part of the cache costs only address space; `torch.zeros` would write all of it. The memory uses
    huge pages: attention reads blocks in any order, and is a sixth faster with fewer TLB misses.
    """
    dtype = KV_DTYPES[layout.dtype]
    if layout.narrow:
        kinds = GROUPED if layout.narrow.is_grouped else MIXED
        dtype = next(words for words, wide in kinds.items() if wide == dtype)
    inner = layout.block_size * slot_elements(dtype, layout.head_dim)
    shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, inner)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = private_memory(num_blocks * layout.block_bytes, huge=True)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def available_bytes(device: torch.device) -> int:
    """Bytes of available memory: of the GPU, else of container and machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # otherwise torch's cached memory counts as used
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()
