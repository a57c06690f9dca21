"""Top-k selection as plain PyTorch, by a stable sort: what the kernels return, on CPU and CUDA tensors.

Arguments are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = float("-inf")


def radix_topk(scores: Tensor, lengths: Tensor, k: int, bases: Tensor | None = None) -> Tensor:
    """Indices of the k largest of `scores[row, :lengths[row]]`, lowest index first among equals, ascending,
    then -1."""
    return _largest(scores, lengths, lengths, k, bases)


def settle_ties(scores: Tensor, lengths: Tensor, provisional: Tensor, bases: Tensor | None = None) -> Tensor:
    """The same for as many scores as the provisional answer of each row names."""
    length = lengths.clamp(0, scores.shape[1])
    named = (provisional >= 0) & (provisional < length.unsqueeze(1))
    return _largest(scores, lengths, named.sum(1).minimum(length), provisional.shape[1], bases)


def _largest(scores: Tensor, lengths: Tensor, counts: Tensor, k: int, bases: Tensor | None) -> Tensor:
    """The `min(counts[row], k)` largest of each row in k columns."""
    rows, width = scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    column = torch.arange(width, device=scores.device)
    values = scores.float()  # whose comparison knows no sign of zero
    values = values.masked_fill(values.isnan() | (column >= lengths.unsqueeze(1)), LOWEST)
    # Columns behind a row's length are last among its lowest ones.
    winners = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    winners = winners.masked_fill(column[: winners.shape[1]] >= counts.unsqueeze(1), width).sort(dim=1).values
    ordinals = winners.int() if bases is None else winners.int() + bases.unsqueeze(1)
    out[:, : winners.shape[1]] = ordinals.masked_fill(winners == width, -1)
    return out
