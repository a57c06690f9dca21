"""TriAttention scoring as plain PyTorch in float64: what the kernels approach, on CPU and CUDA tensors.

Request by request and layer by layer. Arguments are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOWEST = float("-inf")


def mean_phase(positions: Tensor, omega: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the offsets of cos and sin of `(position + offset) * omega`: two fp32 `[R, F]`."""
    angle = (positions.long()[:, None] + offsets)[:, :, None] * omega.double()
    return angle.cos().mean(1).float(), angle.sin().mean(1).float()


def triattention_score(
    key_pools: Sequence[Tensor],
    page_table: Tensor,
    prompt_lengths: Tensor,
    source_lengths: Tensor,
    mean_cos: Tensor,
    mean_sin: Tensor,
    q_mean_real: Tensor,
    q_mean_imag: Tensor,
    q_norm_excess: Tensor,
    freq_scale_sq: Tensor,
    mode: str,
    normalize: bool,
    width: int,
) -> Tensor:
    """Selection rows fp32 `[R, rows, width]`; column j is token `prompt + j`, -inf where there is no score."""
    layers, heads, slots = len(key_pools), key_pools[0].shape[1], key_pools[0].shape[2]
    rows = {"union": 1, "per_head": heads, "per_layer_perhead": layers * heads}[mode]
    result = mean_cos.new_full((len(page_table), rows, width), LOWEST)
    for r, (prompt, source) in enumerate(zip(prompt_lengths.tolist(), source_lengths.tolist(), strict=True)):
        first, last = max(prompt, 0), min(source, page_table.shape[1] * slots)
        token = torch.arange(first, max(first, last), device=page_table.device)
        page = page_table[r][token // slots]
        phase = torch.complex(mean_cos[r].double(), mean_sin[r].double())
        scores = torch.stack(
            [
                _layer_scores(
                    pool,
                    page,
                    token % slots,
                    freq_scale_sq
                    * torch.complex(q_mean_real[layer].double(), q_mean_imag[layer].double())
                    * phase,
                    freq_scale_sq * q_norm_excess[layer].double(),
                )
                for layer, pool in enumerate(key_pools)
            ]
        )
        if normalize or mode == "union":
            scores = _normalised(scores)
        group = scores.unflatten(1, (heads, -1)).amax(2)  # [L, heads, tokens]
        if mode == "union":
            row = group.amax((0, 1))[None]
        else:
            row = group.mean(0) if mode == "per_head" else group.flatten(0, 1)
        columns = row[:, : max(0, width - (first - prompt))]
        result[r, :, first - prompt :][:, : columns.shape[1]] = columns.float()
    return result


def _layer_scores(pool: Tensor, page: Tensor, slot: Tensor, query: Tensor, norm_weight: Tensor) -> Tensor:
    """Raw scores `[q_heads, tokens]` of one layer; -inf for a bad page or a score that is no finite fp32."""
    good = (page >= 0) & (page < len(pool))
    heads, bands = pool.shape[1], pool.shape[3] // 2
    keys = torch.zeros(len(page), heads, 2 * bands, dtype=torch.float64, device=pool.device)
    as_bytes = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool  # float8 has no indexing
    keys[good] = as_bytes[page[good].long(), :, slot[good]].view(pool.dtype).double()
    real, imag = keys[..., :bands], keys[..., bands:]
    norm = real.hypot(imag)
    a, b, c = (x.unflatten(0, (heads, -1)) for x in (query.real, query.imag, norm_weight))
    scores = sum(
        torch.einsum("gjf,tgf->gjt", weight, part) for weight, part in ((a, real), (b, imag), (c, norm))
    )
    assert isinstance(scores, Tensor)
    scores = scores.flatten(0, 1)
    return torch.where(good & scores.float().isfinite(), scores, LOWEST)


def _normalised(scores: Tensor) -> Tensor:
    """`(s - mean) / max(std, 1e-6)` along the last dimension, over what is not -inf."""
    valid = scores.isfinite()
    count = valid.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(valid, scores, 0).sum(-1, keepdim=True) / count
    deviation = (torch.where(valid, scores - mean, 0).square().sum(-1, keepdim=True) / count).sqrt()
    return (scores - mean) / deviation.clamp(min=1e-6)
