"""Top-k selection with ties settled: the same indices, in the same order, on every run and every device.

Selecting tokens to keep must not depend on which thread was first: ranks that share a decision would evict
different tokens, and a replay would not repeat. Both ops return the indices of the k largest scores of each
row in ascending order, and among equal scores the lowest index wins. :func:`radix_topk` selects by itself;
:func:`settle_ties` takes the answer of any other top-k and makes it this one. `kvc.reference.topk` is the
executable specification.
"""

from __future__ import annotations

from torch import Tensor

from ._ops import call, ops

__all__ = ["radix_topk", "settle_ties"]

# Bound once: looking an overload up costs about as much as the argument checks.
_radix_topk = ops.radix_topk.default
_radix_topk_out = ops.radix_topk.out
_settle_ties = ops.settle_ties.default
_settle_ties_out = ops.settle_ties.out


def radix_topk(
    scores: Tensor, lengths: Tensor, k: int, bases: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Select the k largest scores of each row: lowest index wins among equals, indices ascend.

    Parameters
    ----------
    scores : Tensor
        float32, float16 or bfloat16 `[rows, W]` with unit stride in dim 1; rows may be any distance apart.
        -0 equals +0, NaN counts as -inf, infinities are ordinary values.
    lengths : Tensor
        int32 `[rows]`: only the first `lengths[row]` scores of a row count, clamped to `[0, W]`. Read on the
        device.
    k : int
        Scores to select, at least 1; may exceed W.
    bases : Tensor, optional
        int32 `[rows]`, added to the indices of each row: the ordinal of its column 0.
    out : Tensor, optional
        int32 `[rows, k]`, where to write the result. Any strides; apart from the arguments.

    Returns
    -------
    Tensor
        int32 `[rows, k]`. A row of fewer than k scores ends in -1.

    Raises
    ------
    ValueError
        A shape, stride or size that is not as above.
    TypeError
        A dtype or device that is not as above.
    NotImplementedError
        A GPU this build has no code for.

    Notes
    -----
    The result is exact whatever the scores are: no buffer limits how many of them may tie or share leading
    bits. Which kernel runs depends on shapes only. The call never synchronises and can be captured in a CUDA
    graph; lengths may change between replays.

    References
    ----------
    Radix selection on GPUs: Alabi et al., "Fast k-selection algorithms for graphics processing units", ACM
    JEA 17 (2012); Zhang et al., "Parallel Top-K Algorithms on GPU", SC'23, section 3
    (https://doi.org/10.1145/3581784.3607062).
    """
    if out is None:
        return call(_radix_topk, scores, lengths, k, bases)
    call(_radix_topk_out, scores, lengths, k, bases, out=out)
    return out


def settle_ties(
    scores: Tensor,
    lengths: Tensor,
    provisional: Tensor,
    bases: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Turn any top-k's answer into that of :func:`radix_topk` in one read of the scores, with few exceptions.

    Parameters
    ----------
    scores : Tensor
        float32, float16 or bfloat16 `[rows, W]`, as for :func:`radix_topk`.
    lengths : Tensor
        int32 `[rows]`, clamped to `[0, W]`.
    provisional : Tensor
        int32 or int64 `[rows, k]`: column indices without `bases`, each at most once, in any order and with
        any choice among equal scores. -1 is no index, and an index outside the row counts as -1.
    bases : Tensor, optional
        int32 `[rows]`, added to the indices of each row of the result.
    out : Tensor, optional
        int32 `[rows, k]`, where to write the result. Any strides; apart from the arguments.

    Returns
    -------
    Tensor
        int32 `[rows, k]`, what ``radix_topk(scores, lengths, k, bases)`` returns, provided that the
        provisional scores are the largest ones. If they are not, or an index is repeated, the row holds
        indices of the row and -1, of no meaning.

    Raises
    ------
    ValueError
        A shape, stride or size that is not as above.
    TypeError
        A dtype or device that is not as above.
    NotImplementedError
        A GPU this build has no code for.

    Notes
    -----
    A top-k that ranks NaN above all numbers, as :func:`torch.topk` does, keeps the promise only for rows
    without NaN.

    References
    ----------
    The idea, a settling pass behind an unordered top-k: TensorRT-LLM's TriAttention
    (https://github.com/NVIDIA/TensorRT-LLM/pull/16957); the kernels are this project's.
    """
    if out is None:
        return call(_settle_ties, scores, lengths, provisional, bases)
    call(_settle_ties_out, scores, lengths, provisional, bases, out=out)
    return out
