"""Sampling, logits to tokens: edits, temperature, top-k, top-p and min-p, then one draw per row.

One definition for all parameters of a row. With z the edited logits (`sampling_edits`), T the
temperature, u in [0, 1):

    w_i   = round(2^34 exp((z_i - max z) / T))      integers: sums do not depend on their order
    keep  i in the mask, then top-k and top-p and min-p     by value: equal tokens alike
    token = the first i, in the order of ids, with  w_0 + .. + w_i > u * (sum of all w)

The order is that of transformers' processors. A token 24 nats below the best has weight 0. u is a
function of (seed, index of the token in its answer), and the weights depend only on the row's
logits. An answer is therefore the same in any batch, on any worker, continued at any token. T = 0
selects the first of the largest logits. Log-probabilities are of z, before the mask, temperature
and truncation. With a mask, max z and all filters are those of its tokens.

Shapes: R rows over V tokens, K the largest number of log-probabilities that a row requests. On
CPUs, C++ (`cpu/sampling.cpp`) reads bfloat16 directly, one thread per row; elsewhere
`sample_reference` computes. Both draw the same token, except if their exponentials round the last
bit of a weight differently.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vlm_kernels.cpu import native
from vlm_kernels.sampling_edits import EditedRow, edit_logits, pack_edits

NOT_FINITE = -1
"""The token of a row whose logits contain NaN or infinity, before or after its edits, and of a row
whose mask has no token."""

MAX_VOCABULARY = 1 << 19
"""Maximum vocabulary: float64 holds every sum of its weights exactly."""

_ONE = 2.0**34
# Rows are drawn in parts of at most this many weights: on a CPU, a part stays in the cache.
_PART_CPU, _PART_DEVICE = 1 << 19, 1 << 26
# A nucleus is searched in this many of the likeliest tokens, then in all.
_NUCLEUS_WIDTH = 64


class Masks(Protocol):
    """Sets of tokens that rows may get."""

    @property
    def rows(self) -> np.ndarray:
        """int32 `[R]`: the row's set, an index in M; -1 if the row may get any token."""

    def words(self) -> np.ndarray:
        """uint32 `[M, ceil(V / 32)]`, C-contiguous: bit `i % 32` of word `i // 32` is token i.

        The first call may wait until they are computed.
        """


class Sampling(Protocol):
    """The parameters of all rows, as arrays `[R]`."""

    @property
    def greedy(self) -> bool:
        """Whether every temperature is 0."""

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """The parameters of a draw, by name.

        temperature: float32; 0 is greedy
        top_p: float32; 1 keeps all tokens
        top_k: int32; 0 keeps all tokens
        min_p: float32; 0 keeps all tokens
        seed: uint64
        """

    @property
    def index(self) -> np.ndarray:
        """int64: index of the token in its answer."""

    @property
    def num_logprobs(self) -> np.ndarray | None:
        """Integers, -1 if the row requests none; None if no row requests any."""

    @property
    def edited(self) -> Sequence[EditedRow]:
        """The rows whose logits are edited."""

    @property
    def masks(self) -> Masks | None:
        """None if each row may get any token."""


class Sampled(NamedTuple):
    """Tokens `[R]` int64, or `NOT_FINITE`; the other fields are set if a row requests them.

    `logprobs` `[R]` float32 is that of these tokens. `top_ids` and `top_logprobs` `[R, K]` have the
    best first; equal ones are ordered by id. Rows that request none, or have none, hold NaN and 0.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


def sample_reference(logits_RV: torch.Tensor, params: Sampling) -> Sampled:
    """The definition: as `sample_tokens`, for any floating type."""
    logits_RV = logits_RV.float()
    if params.edited:
        logits_RV = edit_logits(logits_RV, params.edited)
    # if a row contains NaN or infinity, its sum is not finite
    finite = torch.isfinite(logits_RV.sum(dim=-1))
    allowed_RV = logits_RV
    if params.masks is not None:
        allowed_RV = _masked(logits_RV, params.masks)
        finite &= allowed_RV.amax(dim=-1) > -torch.inf
    chosen = allowed_RV.argmax(dim=-1)
    if not params.greedy:
        part = _PART_CPU if logits_RV.device.type == "cpu" else _PART_DEVICE
        drawn = np.flatnonzero(params.columns["temperature"] > 0)
        step = max(1, part // logits_RV.shape[-1])
        for at in (drawn[i : i + step] for i in range(0, len(drawn), step)):
            rows = torch.from_numpy(at).to(logits_RV.device)
            chosen[rows] = _draw(allowed_RV[rows], params, at)
    token_ids = torch.where(finite, chosen, NOT_FINITE).cpu().numpy()
    if params.num_logprobs is None:
        return Sampled(token_ids)
    return _with_logprobs(token_ids, logits_RV, params.num_logprobs)


def _masked(logits_RV: torch.Tensor, masks: Masks) -> torch.Tensor:
    """A copy of the logits with minus infinity for the tokens that a row may not get."""
    words = torch.from_numpy(masks.words().view(np.int32)).to(logits_RV.device)
    at = np.flatnonzero(masks.rows >= 0)
    rows = torch.from_numpy(at).to(logits_RV.device)
    words = words[torch.from_numpy(masks.rows[at].astype(np.int64)).to(logits_RV.device)]
    bits = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    is_allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits_RV.shape[-1]]
    masked_RV = logits_RV.clone()
    masked_RV[rows] = logits_RV[rows].masked_fill_(~is_allowed, -torch.inf)
    return masked_RV


def uniform(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from (seed, index), float64: two rounds of SplitMix64 over both words."""
    mixed = _splitmix(_splitmix(seed.astype(np.uint64)) ^ index.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def weigh(logits_RV: torch.Tensor, params: Sampling, at: np.ndarray) -> torch.Tensor:
    """The weights w of the rows `at`, int64, from their edited logits; 0 for excluded tokens.

    Intermediate weights are float32, which represents each of them exactly.
    """
    columns = {name: column[at] for name, column in params.columns.items()}
    temperature = torch.from_numpy(columns["temperature"]).to(logits_RV.device)[:, None]
    best = logits_RV.amax(dim=-1, keepdim=True)
    weights_RV = ((logits_RV - best) / temperature).exp_().mul_(_ONE).round_().nan_to_num_()
    _keep_top_k(weights_RV, logits_RV, columns["top_k"])
    _keep_likely(weights_RV, columns["top_p"], columns["min_p"])
    return weights_RV.to(torch.int64)


def _draw(logits_RV: torch.Tensor, params: Sampling, at: np.ndarray) -> torch.Tensor:
    """Draw the tokens of the rows `at` from their edited logits."""
    sums_RV = weigh(logits_RV, params, at).cumsum_(dim=-1)
    drawn = uniform(params.columns["seed"][at], params.index[at])
    draws = torch.from_numpy(drawn).to(sums_RV.device)
    level = (draws[:, None] * sums_RV[:, -1:].double()).long()
    place = torch.searchsorted(sums_RV, level, right=True)
    return place[:, 0].clamp_(max=logits_RV.shape[-1] - 1)  # for a row that is not finite


def _keep_top_k(weights_RV: torch.Tensor, logits_RV: torch.Tensor, top_k: np.ndarray) -> None:
    """Set the weight of tokens below the k-th best logit to 0."""
    at = np.flatnonzero((top_k > 0) & (top_k < logits_RV.shape[-1]))
    if not len(at):
        return
    rows = torch.from_numpy(at).to(logits_RV.device)
    rank = torch.from_numpy(top_k[at].astype(np.int64) - 1).to(logits_RV.device)[:, None]
    asked = logits_RV[rows]
    least = asked.topk(int(top_k[at].max()), dim=-1).values.gather(-1, rank)
    weights_RV[rows] = weights_RV[rows].masked_fill_(asked < least, 0)


def _keep_likely(weights_RV: torch.Tensor, top_p: np.ndarray, min_p: np.ndarray) -> None:
    """Set the weight of tokens outside the nucleus, or below min-p, to 0."""
    nucleus = np.flatnonzero(top_p < 1)
    if not len(nucleus) and not min_p.any():
        return
    least = torch.from_numpy(min_p.astype(np.float32) * np.float32(_ONE)).to(weights_RV.device)
    if len(nucleus):
        rows = torch.from_numpy(nucleus).to(weights_RV.device)
        share = torch.from_numpy(top_p[nucleus].astype(np.float64)).to(weights_RV.device)
        least[rows] = torch.maximum(least[rows], _least_in_nucleus(weights_RV[rows], share))
    weights_RV.masked_fill_(weights_RV < least[:, None], 0)


def _least_in_nucleus(weights_RV: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Per row, the smallest weight in the smallest set of best tokens with `share` of the total."""
    limit = share * weights_RV.sum(dim=-1, dtype=torch.int64).double()
    width = min(_NUCLEUS_WIDTH, weights_RV.shape[-1])
    least, reached = _least_within(weights_RV.topk(width, dim=-1).values, limit)
    if not reached.all():
        wide = torch.nonzero(~reached)[:, 0]
        least[wide], _ = _least_within(_descending(weights_RV[wide]), limit[wide])
    return least


def _least_within(ordered: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last weight needed to reach the limit, and whether the weights, best first, reach it."""
    sums = ordered.to(torch.int64).cumsum(dim=-1).double()
    before = sums - ordered.double()
    size = (before < limit[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ordered.gather(-1, size - 1)[:, 0], sums[:, -1] >= limit


def _descending(values: torch.Tensor) -> torch.Tensor:
    """Each row sorted, the largest first. On a CPU, numpy does so several times faster."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def num_top(vocabulary: int, num_logprobs: np.ndarray) -> int:
    """K: the largest number that a row requests."""
    return min(int(num_logprobs.max(initial=0)), vocabulary)


def _with_logprobs(
    token_ids: np.ndarray, logits_RV: torch.Tensor, num_logprobs: np.ndarray
) -> Sampled:
    """Results with log-probabilities of the edited logits, before temperature and truncation."""
    at = np.flatnonzero((num_logprobs >= 0) & (token_ids != NOT_FINITE))
    rows = torch.from_numpy(at).to(logits_RV.device)
    logprobs_RV = torch.log_softmax(logits_RV[rows], dim=-1)
    most, num_rows = num_top(logits_RV.shape[-1], num_logprobs), len(token_ids)
    logprobs = np.full(num_rows, np.nan, np.float32)
    top_ids = np.zeros((num_rows, most), np.int64)
    top_logprobs = np.full((num_rows, most), np.nan, np.float32)
    chosen = torch.from_numpy(token_ids[at]).to(logits_RV.device)
    best = _best(logits_RV[rows], most)
    logprobs[at] = logprobs_RV.gather(-1, chosen[:, None])[:, 0].cpu().numpy()
    top_ids[at] = best.cpu().numpy()
    top_logprobs[at] = logprobs_RV.gather(-1, best).cpu().numpy()
    return Sampled(token_ids, logprobs, top_ids, top_logprobs)


def _best(logits_RV: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of each row's best tokens; equal ones are ordered by id, via distinct int64 keys."""
    bits = (logits_RV + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits_RV.shape[-1] - 1
    keys = (ordered << 32) | (last - torch.arange(last + 1, device=logits_RV.device))
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def _splitmix(state: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea, Flood 2014); arithmetic is modulo 2**64."""
    with np.errstate(over="ignore"):
        z = state + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


SYMBOL = "triptych_sample"
_P, _N = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (_P, _N, _N, _N, _N, _P, _P, _P, _P, _P, _P, _N, _P, _P, _P, _P, _N)
"""logits, stride, their type; R, V; rows; edits and their arrays; masks; K, the results; threads"""

TYPES = (torch.float32, torch.bfloat16, torch.float16)

ROW = np.dtype(
    [("seed", np.uint64), ("index", np.int64)]
    + [(name, np.float32) for name in ("temperature", "top_p", "min_p")]
    + [(name, np.int32) for name in ("top_k", "num_logprobs", "edit", "mask")],
    align=True,
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
    words = None if params.masks is None else params.masks.words()
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
        _address(words),
        0 if out.top_ids is None else out.top_ids.shape[1],
        *map(_address, out),
        torch.get_num_threads(),
    )
    return out


def _rows(params: Sampling) -> np.ndarray | None:
    """The parameters as `ROW`; None if all rows are greedy and request nothing else."""
    if params.greedy and params.num_logprobs is None and not params.edited and params.masks is None:
        return None
    rows = np.zeros(len(params.index), ROW)
    for name in _DRAWN:
        rows[name] = params.columns[name]
    rows["index"] = params.index
    rows["num_logprobs"] = -1 if params.num_logprobs is None else params.num_logprobs
    rows["edit"] = -1
    rows["edit"][[one.row for one in params.edited]] = np.arange(len(params.edited))
    rows["mask"] = -1 if params.masks is None else params.masks.rows
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
    if params.masks is not None:
        _check_masks(params.masks, num_rows, vocabulary)
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


def _check_masks(masks: Masks, num_rows: int, vocabulary: int) -> None:
    words = masks.words()
    shape = len(words), -(-vocabulary // 32)
    is_whole = words.dtype == np.uint32 and words.shape == shape and words.flags.c_contiguous
    if not is_whole or masks.rows.shape != (num_rows,):
        raise ValueError(
            f"sample_tokens: masks are {words.dtype} {words.shape} of rows {masks.rows.shape}; "
            f"must be uint32 {shape} of ({num_rows},)"
        )
    if num_rows and not -1 <= masks.rows.min() <= masks.rows.max() < len(words):
        raise ValueError(
            f"sample_tokens: rows have masks {masks.rows.min()} to {masks.rows.max()} "
            f"of {len(words)}"
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
