"""Sampling, logits to tokens: edits, temperature, top-k, top-p and min-p, then one draw per row.

One definition for all parameters of a row. With z the edited logits (`sampling_edits`), T the
temperature, u in [0, 1):

    w_i   = round(2^34 exp((z_i - max z) / T))      integers: sums do not depend on their order
    keep  i in top-k and top-p and min-p            by value: equal tokens are treated equally
    token = the first i, in the order of ids, with  w_0 + .. + w_i > u * (sum of all w)

The order is that of transformers' processors. A token 24 nats below the best has weight 0. u is a
function of (seed, index of the token in its answer), and the weights depend only on the row's
logits. An answer is therefore the same in any batch, on any worker, continued at any token. T = 0
selects the first of the largest logits. Log-probabilities are of z, before temperature and
truncation.

Shapes: R rows over V tokens, K the largest number of log-probabilities that a row requests. On
CPUs, C++ (`cpu/sampling.cpp`) reads bfloat16 directly, one thread per row; elsewhere the definition
(`sampling_reference`) computes. Both draw the same token, except if their exponentials round the
last bit of a weight differently.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vlm_kernels.cpu import native
from vlm_kernels.sampling_edits import pack_edits
from vlm_kernels.sampling_reference import (
    MAX_VOCABULARY,
    Sampled,
    Sampling,
    num_top,
    sample_reference,
)

SYMBOL = "triptych_sample"
_P, _N = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (_P, _N, _N, _N, _N, _P, _P, _P, _P, _P, _N, _P, _P, _P, _P, _N)
"""logits, stride, their type; R, V; rows; edits and their arrays; K, the results; threads"""

TYPES = (torch.float32, torch.bfloat16, torch.float16)

ROW = np.dtype(
    [("seed", np.uint64), ("index", np.int64)]
    + [(name, np.float32) for name in ("temperature", "top_p", "min_p")]
    + [(name, np.int32) for name in ("top_k", "num_logprobs", "edit")]
)
"""`struct SampledRow` of `cpu/sampling.cpp`."""

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "seed")
_LARGEST = float(np.finfo(np.float32).max)
_MOST = {"temperature": _LARGEST, "top_p": _LARGEST, "min_p": 1, "top_k": 2**31 - 1}
"""Maximum values of the parameters of a draw; the minimum is 0."""


def sample_tokens(logits_RV: torch.Tensor, params: Sampling) -> Sampled:
    """Choose a token per row, and its log-probabilities if the row requests them.

    Args:
        logits_RV: bfloat16, float32 or float16, V at most 2^19; rows may be strided. Unchanged.
        params: of the same R rows.

    Raises:
        ValueError: a shape, type, stride or parameter is wrong; the text says which.
    """
    _check(logits_RV, params)
    run = _kernel() if logits_RV.device.type == "cpu" else None
    if run is None or logits_RV.dtype == torch.float16:
        return sample_reference(logits_RV, params)
    rows, edits = _rows(params), pack_edits(params.edited) if params.edited else None
    num_rows, vocabulary = logits_RV.shape
    out = _results(num_rows, vocabulary, params.num_logprobs)
    run(
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        logits_RV.dtype == torch.bfloat16,
        num_rows,
        vocabulary,
        _address(rows),
        *((None,) * 4 if edits is None else map(_address, edits)),
        0 if out.top_ids is None else out.top_ids.shape[1],
        *map(_address, out),
        torch.get_num_threads(),
    )
    return out


def _rows(params: Sampling) -> np.ndarray | None:
    """The parameters as `ROW`; None if all rows are greedy and request nothing else."""
    if params.greedy and params.num_logprobs is None and not params.edited:
        return None
    rows = np.empty(len(params.index), ROW)
    for name in _DRAWN:
        rows[name] = params.columns[name]
    rows["index"] = params.index
    rows["num_logprobs"] = -1 if params.num_logprobs is None else params.num_logprobs
    rows["edit"] = -1
    rows["edit"][[one.row for one in params.edited]] = np.arange(len(params.edited))
    return rows


def _results(num_rows: int, vocabulary: int, num_logprobs: np.ndarray | None) -> Sampled:
    """Uninitialised results; the kernel writes every element."""
    token_ids = np.empty(num_rows, np.int64)
    if num_logprobs is None:
        return Sampled(token_ids)
    shape = num_rows, num_top(vocabulary, num_logprobs)
    return Sampled(
        token_ids,
        np.empty(num_rows, np.float32),
        np.empty(shape, np.int64),
        np.empty(shape, np.float32),
    )


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _check(logits_RV: torch.Tensor, params: Sampling) -> None:
    if logits_RV.dim() != 2 or logits_RV.dtype not in TYPES:
        raise ValueError(f"sample_tokens: logits are {logits_RV.dtype} {tuple(logits_RV.shape)}")
    num_rows, vocabulary = logits_RV.shape
    if not 0 < vocabulary <= MAX_VOCABULARY or not logits_RV[:1].is_contiguous():
        raise ValueError(
            f"sample_tokens: rows of {vocabulary} logits with stride {logits_RV.stride(1)}; must "
            f"be 1 to {MAX_VOCABULARY}, one behind the other"
        )
    per_row = {"index": params.index, "num_logprobs": params.num_logprobs}
    for name, values in {**params.columns, **per_row}.items():
        if values is not None and values.shape != (num_rows,):
            raise ValueError(f"sample_tokens: {name} is {values.shape}, not ({num_rows},)")
    if not params.greedy:
        _check_numbers(params)
    for one in params.edited:
        num_biases = len(one.edits.bias_ids), len(one.edits.bias_values)
        if not 0 <= one.row < num_rows or not 0 <= one.num_prompt <= len(one.token_ids):
            raise ValueError(
                f"sample_tokens: an edit of row {one.row} of {num_rows} has a prompt of "
                f"{one.num_prompt} of {len(one.token_ids)} tokens"
            )
        if num_biases[0] != num_biases[1]:
            raise ValueError(
                f"sample_tokens: an edit of row {one.row} has {num_biases[0]} tokens with "
                f"{num_biases[1]} biases"
            )


def _check_numbers(params: Sampling) -> None:
    """Raise ValueError for parameters out of bounds, which would leave no token, and for NaN."""
    for name, most in _MOST.items():
        values = params.columns[name]
        if not ((values >= 0) & (values <= most)).all():
            raise ValueError(
                f"sample_tokens: {name} is {values.min()} to {values.max()}; must be 0 to {most}"
            )


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    return native.function(SYMBOL, *ARGUMENTS)
