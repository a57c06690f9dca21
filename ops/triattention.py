"""TriAttention: how much future queries will attend to a cached key, from the key and statistics of queries.

A trained model's queries, before their rotation, stay close to a fixed mean in every frequency band of RoPE.
That mean, rotated to the positions to come, meets a cached key as it lies in the cache, rotated: no position of
the key and no inverse rotation is needed. :func:`mean_phase` averages the rotations that lie ahead,
:func:`triattention_score` scores every token of many requests and layers through their page tables. The rows it
returns are what :func:`kvc.radix_topk` selects from. `kvc.reference.triattention` is the executable specification.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._ops import call, ops

__all__ = ["mean_phase", "triattention_score"]

# Bound once: looking an overload up costs about as much as the argument checks.
_mean_phase = ops.mean_phase.default
_mean_phase_out = ops.mean_phase.out
_triattention_score = ops.triattention_score.default
_triattention_score_out = ops.triattention_score.out


def mean_phase(
    positions: Tensor, omega: Tensor, offsets: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Average the rotations of the positions ahead: mean over offsets of cos and sin of (position + o) * omega.

    Parameters
    ----------
    positions : Tensor
        int32 or int64 `[R]`: the position of each request's next query, counted in tokens ever seen, not in
        tokens still cached.
    omega : Tensor
        fp32 `[F]`: RoPE's angular frequencies, radians a token (`inv_freq` of a model).
    offsets : Tensor
        int64 `[O]`, one or more: how far ahead of the position to look. TriAttention takes 1, 2, 4, ... 65,536.
    cos, sin : Tensor, optional
        Where to write the results, both or neither. Any strides.

    Returns
    -------
    cos, sin : Tensor
        fp32 `[R, F]`. Within 1e-6 of float64 for positions up to 2^24.

    Raises
    ------
    ValueError
        A shape that is not as above, or no offsets.
    TypeError
        A dtype or device that is not as above.
    NotImplementedError
        A GPU this build has no code for.

    References
    ----------
    TriAttention, https://arxiv.org/abs/2604.04921, the average over future offsets. Angles are reduced in
    float64 where they arise: there is no table of positions, and no largest one.
    """
    if cos is None and sin is None:
        return call(_mean_phase, positions, omega, offsets)
    if cos is None or sin is None:
        missing = "cos" if cos is None else "sin"
        raise ValueError(f"kvc.mean_phase: {missing} must be given beside the other output, got None")
    call(_mean_phase_out, positions, omega, offsets, cos=cos, sin=sin)
    return cos, sin


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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Score the generated tokens of every request from their rotated keys, for an eviction to select from.

    With `g = h // (q_heads / kv_heads)` the KV head of query head h, and the request's mean phase `C, S`::

        a = freq_scale_sq * (q_mean_real * C - q_mean_imag * S)
        b = freq_scale_sq * (q_mean_real * S + q_mean_imag * C)
        c = freq_scale_sq * q_norm_excess
        score[t] = sum over f of  a*K[t, f] + b*K[t, f + F] + c*sqrt(K[t, f]^2 + K[t, f + F]^2)

    for the tokens `prompt_lengths[r] <= t < source_lengths[r]`. With `normalize`, the scores of one request,
    layer and query head become `(s - mean) / max(std, 1e-6)`, the population deviation over its scored tokens.

    Parameters
    ----------
    key_pools : sequence of Tensor
        One per layer to score, `[pages, kv_heads, tokens_per_page, D]` of bf16, fp16, fp32 or float8_e4m3fn
        with any strides and a contiguous last dimension: keys after RoPE, in which element f and f + D/2 are a
        pair. D is even, from 2 to 256. A `[pages, tokens, heads, D]` pool (NHD) is passed as ``pool.transpose(1,
        2)``, the keys of a pool that holds K and V as ``pool[:, 0]``. Layers share dtype, heads, page size
        and D; their page counts and strides may differ.
    page_table : Tensor
        int32 `[R, max_pages]`: entry c of a row is the page of tokens `[c * tokens_per_page, (c + 1) *
        tokens_per_page)`. Entries of other than scored tokens are not read.
    prompt_lengths, source_lengths : Tensor
        int32 `[R]`: the first token to score and the one behind the last. A source at or below the prompt
        means nothing to score.
    mean_cos, mean_sin : Tensor
        fp32 `[R, F]`, F = D/2: :func:`mean_phase` of each request's position.
    q_mean_real, q_mean_imag : Tensor
        fp32 `[L, q_heads, F]`: the mean of the layer's queries before RoPE, elements f and f + F.
    q_norm_excess : Tensor
        fp32 `[L, q_heads, F]`: the mean norm of those pairs minus the norm of their mean.
    freq_scale_sq : Tensor
        fp32 `[F]`: the square of the factor that RoPE scaling puts on cos and sin, 1 without scaling.
    mode : str
        `"union"`: one row, the maximum over all layers and query heads; always normalised.
        `"per_head"`: a row per KV head, the mean over layers of the maximum over the query heads it serves.
        `"per_layer_perhead"`: row `layer * kv_heads + g`, the maximum over the query heads that KV head g
        serves in that layer.
    normalize : bool
        Whether to normalise every (request, layer, query head); `"union"` always does.
    width : int
        Columns of the result. Of a longer range the first `width` columns are returned, with statistics over all
        of it.
    out : Tensor, optional
        Where to write the result. Any strides.

    Returns
    -------
    Tensor
        fp32 `[R, rows, width]`: column j is token `prompt_lengths[r] + j`, and -inf where that is not scored.
        Within `rtol = atol = 2e-3` of float64. Tokens with equal keys get equal bits, wherever they lie.

    Raises
    ------
    ValueError
        A shape, size, stride or mode that is not as above; in debug mode also negative prompts, sources past the
        page table and page ids out of range.
    TypeError
        A dtype or device that is not as above.
    NotImplementedError
        A GPU this build has no code for.

    Notes
    -----
    A token past the page table or on a page that a layer's pool lacks, and one whose score in a row is not
    finite (NaN or infinite keys), gets -inf in that row and no part in its statistics: `"union"` ignores it
    there, the mean of `"per_head"` becomes -inf. Rows of equal scores normalise to 0.

    On a GPU the keys are read once, and scores that are to be normalised reach memory at most once. Scratch
    memory comes from PyTorch's allocator:

    * sm_90 and sm_100, bf16, fp16 or e4m3 keys of head size 64, 96, 128 or 256 that begin at multiples of 16
      bytes: scores stay in shared memory, which `"union"` then needs no scratch beside. `"per_head"` takes
      4 * R * L * kv_heads * width bytes. What a row has too many columns for (about 2,500 for each of up to 8 thread
      blocks that share it, with 4 query heads a KV head) goes to memory once.
    * otherwise: 4 bytes for every request, layer, KV head and column, or query head in place of KV head if
      normalised; for `"union"` 4 * R * L * q_heads * width bytes, 352 MiB for 32 requests of 2,176 tokens, 36 layers
      and 32 query heads. Columns are rounded up to a multiple of 128 and are never more than the page table names
      tokens. Beside them 12 bytes for every request, layer, query head and frequency.

    The call never synchronises and can be captured in a CUDA graph; lengths and table are read on the device.
    On a GPU, rows whose scores spread beyond 1e18 cannot be normalised accurately: their deviation is no fp32 number.

    References
    ----------
    TriAttention, https://arxiv.org/abs/2604.04921; scores of rotated keys as in the authors' code,
    https://github.com/WeianMao/triattention, and in TensorRT-LLM's KV-cache compression.
    """
    arguments = (
        key_pools,
        page_table,
        prompt_lengths,
        source_lengths,
        mean_cos,
        mean_sin,
        q_mean_real,
        q_mean_imag,
        q_norm_excess,
        freq_scale_sq,
        mode,
        normalize,
        width,
    )
    if out is None:
        return call(_triattention_score, *arguments)
    call(_triattention_score_out, *arguments, out=out)
    return out
