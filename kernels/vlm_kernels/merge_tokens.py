"""Merge tokens:  y_n = sum_i w_i x_(s_i) / sum_i w_i      over the sources i of kept token n.

Shapes: T visual tokens, D features, N kept tokens, I sources; kept token n has the sources
`[edges_n, edges_(n+1))`. The caller decides which tokens to merge. With one source each, this is a
gather of the best tokens. With several, it merges similar tokens (ToMe, arXiv 2210.09461; w is the
number of tokens that a token already represents). Triton on GPUs, elsewhere torch.
"""

from __future__ import annotations

import torch

from vlm_kernels import gpu


def merge_tokens_reference(
    x_TD: torch.Tensor,
    sources_I: torch.Tensor,
    edges_N1: torch.Tensor,
    weights_I: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: token by token, in float32."""
    edges = edges_N1.tolist()
    y_ND = x_TD.new_empty((len(edges) - 1, x_TD.shape[1]))
    for n in range(len(edges) - 1):
        of_token = slice(edges[n], edges[n + 1])
        rows = x_TD[sources_I[of_token]].float()
        w = torch.ones(len(rows)) if weights_I is None else weights_I[of_token].float()
        y_ND[n] = ((w[:, None] * rows).sum(0) / w.sum()).to(y_ND.dtype)
    return y_ND


def merge_tokens(
    x_TD: torch.Tensor,
    sources_I: torch.Tensor,
    edges_N1: torch.Tensor,
    weights_I: torch.Tensor | None = None,
) -> torch.Tensor:
    """Average groups of tokens.

    Args:
        x_TD: rows may be strided; the inner axis has stride 1.
        sources_I: int64 on the CPU, rows of x.
        edges_N1: int64 on the CPU, strictly increasing from 0 to I.
        weights_I: float32 on the CPU, positive; None is a plain mean.

    Returns:
        `[N, D]`, every element written.

    Raises:
        ValueError: a source is not a row, edges do not increase, or a shape, type or stride is
            wrong.
    """
    _check(x_TD, sources_I, edges_N1, weights_I)
    counts = edges_N1.diff()
    w = torch.ones(len(sources_I)) if weights_I is None else weights_I
    total = torch.zeros(len(counts)).index_add_(0, _owners(counts), w)
    share = (w / total[_owners(counts)]).to(x_TD.device)
    sources = sources_I.to(x_TD.device)
    if gpu.serves(x_TD.device):
        from vlm_kernels.gpu.merge_tokens import merge_tokens as launch

        return launch(x_TD, sources, edges_N1.to(x_TD.device), share)
    y_ND = torch.zeros(len(counts), x_TD.shape[1], device=x_TD.device)
    rows = x_TD[sources].float() * share[:, None]
    return y_ND.index_add_(0, _owners(counts).to(x_TD.device), rows).to(x_TD.dtype)


def _owners(counts: torch.Tensor) -> torch.Tensor:
    """The kept token of each source."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def _check(
    x_TD: torch.Tensor,
    sources_I: torch.Tensor,
    edges_N1: torch.Tensor,
    weights_I: torch.Tensor | None,
) -> None:
    if x_TD.dim() != 2 or x_TD.stride(1) != 1 or not x_TD.is_floating_point():
        raise ValueError(
            f"merge_tokens: x is {x_TD.dtype} {tuple(x_TD.shape)} with strides {x_TD.stride()}"
        )
    if gpu.serves(x_TD.device):
        gpu.check_floats("merge_tokens: x", x_TD)
    for name, x in (("sources", sources_I), ("edges", edges_N1)):
        if x.dtype != torch.int64 or x.dim() != 1 or x.device.type != "cpu":
            raise ValueError(
                f"merge_tokens: {name} are {x.dtype} {tuple(x.shape)} on {x.device}: must be int64 "
                f"in one axis, on the CPU"
            )
    if len(sources_I) and not 0 <= sources_I.min() <= sources_I.max() < len(x_TD):
        raise ValueError(f"merge_tokens: a source is not in 0 to {len(x_TD) - 1}")
    rises = len(edges_N1) > 0 and bool((edges_N1.diff() > 0).all())
    if not rises or edges_N1[0] != 0 or edges_N1[-1] != len(sources_I):
        raise ValueError(f"merge_tokens: edges must rise from 0 to {len(sources_I)}, each by some")
    if weights_I is not None and (
        weights_I.shape != sources_I.shape
        or weights_I.dtype != torch.float32
        or weights_I.device.type != "cpu"
        or not bool((weights_I > 0).all())
    ):
        raise ValueError("merge_tokens: weights must be positive float32, one per source")
