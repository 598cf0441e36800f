"""Kernels for GPUs, in Triton: one file each, launched by the function of that name above.

    vlm_kernels.rms_norm(x, w)      definition, checks, then by the tensor's device:
        cpu     ─▶ cpu/norm.cpp
        cuda    ─▶ gpu/rms_norm.py      mathematics, tiles, configurations, kernel, launch
        other   ─▶ the definition, in torch

How to read one. A kernel is the code of one program. A launch starts a grid of programs, and
`tl.program_id` is the tile of the result that a program computes. Arguments in capitals are
constants of the compiled kernel. Tensors are pointers with strides in elements. A tile is loaded
through an array of pointers; outside of the mask, `other=` is used. A variable is a tile in
registers, and its sums are float32. Each file describes its roundings at the top.

A launcher trusts its caller to check shapes, types, strides and indices. Nothing is tuned at run
time: `configs.json` has the best configurations that `bench/gpu` found per device and shape, and
DEFAULT is for all others.

Legend of shape suffixes: T tokens, D head size or features, H heads, G query heads per KV head,
M N K rows, columns and inner axis of a product, P slots per KV block, N blocks of a cache, S
sequences, B blocks of one sequence, C segments, I inputs and N outputs of a move or a merge; a 1 is
one more (`cu_C1`: C + 1 edges). Each file describes its exceptions under its mathematics.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil

import torch

logger = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Types of elements that the kernels support."""


def serves(device: torch.device) -> bool:
    """Whether these kernels compute tensors on this device."""
    return device.type == "cuda" and _can_launch()


def check_floats(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if the kernels do not support the type of x."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} is {x.dtype}: must be float32, float16 or bfloat16")


def num_processors(device: torch.device) -> int:
    """Return the programs that run at the same time, at least: short batches are split for it."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory_bytes(device: torch.device) -> int:
    """Return the limit of one program; that of the interpreter is Hopper's."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    # ROCm's properties do not have it: AMD's GPUs have 64 KiB
    return int(getattr(properties, "shared_memory_per_block_optin", 64 << 10))


@functools.cache
def _can_launch() -> bool:
    """Check once per process, and log once what is missing."""
    missing = _missing()
    if missing is not None:
        logger.warning("%s: torch computes instead of our GPU kernels, slower", missing)
    return missing is None


def _missing() -> str | None:
    """Return what triton lacks on this machine: it compiles a launcher in C for each kernel."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    compiler = os.environ.get("CC")  # noqa: TID251  as triton reads it
    if not (compiler or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler and finds neither gcc nor clang"
    return None
