"""Top-k selection as plain PyTorch: a stable sort. What the kernels return, on CPU and CUDA tensors.

Arguments are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def radix_topk(scores: Tensor, lengths: Tensor, k: int, bases: Tensor | None = None) -> Tensor:
    """Indices of the k largest of `scores[row, :lengths[row]]`, lowest index first among equals, ascending,
    then -1."""
    rows, width = scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    lowest = float("-inf")
    for row, length in enumerate(lengths.clamp(0, width).tolist()):
        values = scores[row, :length].float()
        order = values.masked_fill(values.isnan(), lowest).sort(descending=True, stable=True)
        winners = order.indices[:k].sort().values.int()
        out[row, : len(winners)] = winners if bases is None else winners + bases[row]
    return out


def settle_ties(scores: Tensor, lengths: Tensor, provisional: Tensor, bases: Tensor | None = None) -> Tensor:
    """:func:`radix_topk` of as many scores as the provisional answer of each row names."""
    width = scores.shape[1]
    out = torch.full(provisional.shape, -1, dtype=torch.int32, device=scores.device)
    for row, length in enumerate(lengths.clamp(0, width).tolist()):
        named = (provisional[row] >= 0) & (provisional[row] < length)
        mine = slice(row, row + 1)
        base = None if bases is None else bases[mine]
        count = int(named.sum())
        if count:
            out[mine, :count] = radix_topk(scores[mine], lengths[mine], count, base)
    return out
