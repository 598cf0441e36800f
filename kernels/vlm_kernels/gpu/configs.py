"""The configuration of each launch: that of `configs.json`, or else the kernel's default.

    {"NVIDIA H200": {"paged_attention": {"d128/m16": {"TILE_N": 64, "num_warps": 4}}}}
     device           kernel               shape      replaces values of the default

The file is read once; `bench/gpu/run.py tune` writes it. There is no autotuning at run time: it
would lengthen the start, and two pods of one pool would compute in different orders.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import torch

PATH = Path(__file__).with_name("configs.json")

Config = Mapping[str, int]
Table = Mapping[str, Mapping[str, Mapping[str, Config]]]


def config(kernel: str, shape: str, device: torch.device, default: Config) -> Config:
    """Return tile sizes, warps and stages of one launch; `default` has those not in the table."""
    return {**default, **_table().get(_name(device), {}).get(kernel, {}).get(shape, {})}


@functools.cache
def _table() -> Table:
    table: Table = json.loads(PATH.read_text())
    return table


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
