"""Kernels for GPUs, in Triton: one file each, launched by the function of that name above.

    vlm_kernels.rms_norm(x, w)      definition, checks, then by the tensor's device:
        cpu     ─▶ cpu/norm.cpp
        cuda    ─▶ gpu/rms_norm.py      a short paper: mathematics, tiles, configs, kernel, launch
        other   ─▶ the definition, in torch

How to read one. A kernel is what one program does; a launch starts a grid of them, and
`tl.program_id` says which tile of the result is this one's. Arguments in capitals are compiled in.
Tensors come as pointers with strides in elements; a tile is loaded by an array of pointers, under a
mask for what lies outside (`other=` is read there instead). A variable is a tile in registers: its
sums are float32, and what is rounded when stands at the top of each file.

A launcher trusts its caller: shapes, types, strides and indices were checked before. Nothing is
tuned at run time; `configs.json` holds what `bench/gpu` found best per device and shape, DEFAULT is
for all others.

Legend of shape suffixes: T tokens, D head size or features, H heads, G query heads per KV head,
M N K rows, columns and inner axis of a product, P slots per KV block, N blocks of a cache, S
sequences, B blocks of one, C segments, I what is moved or merged, N what it becomes; a 1 is one
more (`cu_C1`: C + 1 edges). What differs in a file stands under its mathematics.
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
"""What kernels compute on."""


def serves(device: torch.device) -> bool:
    """Whether tensors on this device go to the kernels here."""
    return device.type == "cuda" and _can_launch()


def check_floats(name: str, x: torch.Tensor) -> None:
    """Raise ValueError where a kernel does not compute on such elements."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} is {x.dtype}: must be float32, float16 or bfloat16")


def num_processors(device: torch.device) -> int:
    """Programs that run side by side, at least; what splitting a short batch aims at."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory_bytes(device: torch.device) -> int:
    """That one program may have; the interpreter has as much as Hopper."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    # ROCm's properties do not tell it: AMD's GPUs have 64 KiB
    return int(getattr(properties, "shared_memory_per_block_optin", 64 << 10))


@functools.cache
def _can_launch() -> bool:
    """Asked once a process, so that the log says once what is missing."""
    missing = _missing()
    if missing is not None:
        logger.warning("%s: torch computes instead of our GPU kernels, slower", missing)
    return missing is None


def _missing() -> str | None:
    """What triton lacks here: it builds a launcher in C for each kernel, where it runs."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    compiler = os.environ.get("CC")  # noqa: TID251  as triton reads it
    if not (compiler or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler and finds neither gcc nor clang"
    return None
