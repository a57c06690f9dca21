"""Moving the tokens an eviction method keeps: move packing and in-place compaction of paged pools.

A method decides which tokens of a request stay; this module turns that decision into moves and carries them
out inside the pools, so that the pages behind the survivors can be freed. There are two plans:

* ordered: :func:`pack_move_sources`, then :func:`compact_pages_`. The kept tokens, then the protected tail,
  become one contiguous run in their old order. Every token behind the first hole moves.
* fill: :func:`pack_fill_moves`, then :func:`compact_pages_` with `destinations`, then once more for the tail.
  Only kept tokens that lie beyond the new end move, each into a hole: as many moves as tokens were evicted at
  most, instead of up to the whole budget. The tokens are no longer in index order.

The fill plan may be used where the position of a token is baked into its cached key, as RoPE bakes it: the
softmax is then a sum over an unordered set and attention does not care in which slot a token lies. It may not
be used where the slot itself means something: in the layers of a sliding window (the window is found by
index), where later decisions break ties by the lowest index or expect ascending ordinals, with positions that
are added per slot at attention time (ALiBi, relative bias), or where a causal mask is applied by slot among
the moved tokens. `kvc.reference.compaction` is the executable specification of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._ops import call, ops

__all__ = ["compact_pages_", "pack_fill_moves", "pack_move_sources"]

# Bound once: looking an overload up costs about as much as the argument checks.
_pack_move_sources = ops.pack_move_sources.default
_pack_move_sources_out = ops.pack_move_sources.out
_pack_fill_moves = ops.pack_fill_moves.default
_pack_fill_moves_out = ops.pack_fill_moves.out
_compact_pages_ = ops.compact_pages_.default


def pack_move_sources(
    kept: Tensor,
    valid_lengths: Tensor,
    dense_offsets: Tensor,
    swa_offsets: Tensor | None,
    window: int,
    num_layers: int,
    num_kv_heads: int,
    dense_total: int,
    swa_total: int,
    *,
    dense: Tensor | None = None,
    swa: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn kept ordinals into the `sources` of an order-preserving :func:`compact_pages_`.

    Move m of request r stands in column `offsets[r] + m`. Dense layers: the K kept tokens, then the tail, the
    tokens from `valid_lengths[r]` on. Sliding-window layers: the latest `window` tokens, then the tail.

    Parameters
    ----------
    kept : Tensor
        int32 `[requests, decision_rows, K]`, ascending token ordinals counted from the start of the request.
        One decision row feeds every head, `num_kv_heads` rows one each, and `num_layers * num_kv_heads` rows
        (row `layer * num_kv_heads + head`) every layer and head its own. A row may end in -1.
    valid_lengths : Tensor
        int32 `[requests]`, tokens a request had when the decision was taken; its tail begins here.
    dense_offsets : Tensor
        int32 `[requests + 1]`, cumulative: request r has `dense_offsets[r + 1] - dense_offsets[r]` moves, K
        plus its tail, or none.
    swa_offsets : Tensor, optional
        int32 `[requests + 1]`, the same for sliding-window layers: `window` plus the tail. None if there are
        none; `swa_total` is 0 then.
    window : int
        Tokens of the sliding window.
    num_layers, num_kv_heads : int
        Layers of the decision and KV heads of each.
    dense_total, swa_total : int
        Columns of the results, at least the last offset; further moves are dropped.
    dense, swa : Tensor, optional
        Where to write the results, both or neither. Any strides.

    Returns
    -------
    dense : Tensor
        int32 `[num_kv_heads, dense_total]`, or `[num_layers, num_kv_heads, dense_total]` with a decision row
        for every layer and head of several layers. Columns of no request hold -1.
    swa : Tensor
        int32 `[num_kv_heads, swa_total]`.

    Raises
    ------
    ValueError
        A shape or size that is not as above; in debug mode also offsets, lengths and ordinals out of range.
    TypeError
        A dtype or device that is not as above.

    References
    ----------
    Own formulation of the move lists in TensorRT-LLM's KV-cache compression
    (https://nvidia.github.io/TensorRT-LLM/features/kv-cache-compression.html).
    """
    arguments = (
        kept,
        valid_lengths,
        dense_offsets,
        swa_offsets,
        window,
        num_layers,
        num_kv_heads,
        dense_total,
        swa_total,
    )
    if dense is None and swa is None:
        return call(_pack_move_sources, *arguments)
    if dense is None or swa is None:
        missing = "dense" if dense is None else "swa"
        raise ValueError(f"kvc.pack_move_sources: {missing} must be given beside the other output, got None")
    call(_pack_move_sources_out, *arguments, dense=dense, swa=swa)
    return dense, swa


def pack_fill_moves(
    kept: Tensor,
    valid_lengths: Tensor,
    bases: Tensor,
    fill_offsets: Tensor,
    tail_offsets: Tensor,
    num_layers: int,
    num_kv_heads: int,
    fill_total: int,
    tail_total: int,
    *,
    sources: Tensor | None = None,
    destinations: Tensor | None = None,
    tail_sources: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan the fewest moves that bring K survivors into `[bases[r], bases[r] + K)`, giving up their order.

    A kept token inside that range stays; the j-th kept token behind it goes to the j-th hole in it, both
    ascending. Run ``compact_pages_(pools, table, sources, fill_offsets, bases, destinations=destinations)``
    first and ``compact_pages_(pools, table, tail_sources, tail_offsets, bases + K)`` second. The module's
    documentation says when the order may be given up.

    Parameters
    ----------
    kept : Tensor
        int32 `[requests, decision_rows, K]`, as for :func:`pack_move_sources`. Kept tokens below `bases[r]`
        stay where they are and free no slot.
    valid_lengths : Tensor
        int32 `[requests]`. A request with `valid_lengths[r] <= bases[r] + K` moves nothing: its columns are
        all -1, those of its tail included.
    bases : Tensor
        int32 `[requests]`, first token that may be evicted: usually the length of the prompt.
    fill_offsets : Tensor
        int32 `[requests + 1]`, cumulative, with `min(K, valid_lengths[r] - bases[r] - K)` columns or more for
        request r. Moves that do not fit are dropped; debug mode raises then.
    tail_offsets : Tensor
        int32 `[requests + 1]`, cumulative: the tokens behind `valid_lengths[r]`.
    num_layers, num_kv_heads : int
        Layers of the decision and KV heads of each.
    fill_total, tail_total : int
        Columns of the results, at least the last offset.
    sources, destinations, tail_sources : Tensor, optional
        Where to write the results, all or none. Any strides.

    Returns
    -------
    sources, destinations : Tensor
        int32, both `[num_kv_heads, fill_total]`, or `[num_layers, num_kv_heads, fill_total]` with a decision
        row for every layer and head of several layers. -1 where there is no move.
    tail_sources : Tensor
        int32 `[num_kv_heads, tail_total]`.

    Raises
    ------
    ValueError
        A shape or size that is not as above; in debug mode also offsets, lengths, bases and ordinals out of
        range.
    TypeError
        A dtype or device that is not as above.

    References
    ----------
    The idea, filling holes instead of shifting: the authors' vLLM code of TriAttention
    (https://github.com/WeianMao/triattention); the plan by ranks is this project's own.
    """
    arguments = (
        kept,
        valid_lengths,
        bases,
        fill_offsets,
        tail_offsets,
        num_layers,
        num_kv_heads,
        fill_total,
        tail_total,
    )
    outputs = {"sources": sources, "destinations": destinations, "tail_sources": tail_sources}
    missing = [name for name, output in outputs.items() if output is None]
    if len(missing) == len(outputs):
        return call(_pack_fill_moves, *arguments)
    if sources is None or destinations is None or tail_sources is None:
        error = f"{missing[0]} must be given beside the other outputs, got None"
        raise ValueError(f"kvc.pack_fill_moves: {error}")
    call(_pack_fill_moves_out, *arguments, **outputs)
    return sources, destinations, tail_sources


def compact_pages_(
    pools: Sequence[Tensor],
    page_table: Tensor,
    sources: Tensor,
    offsets: Tensor,
    bases: Tensor,
    layer_map: Tensor | None = None,
    destinations: Tensor | None = None,
) -> None:
    """Move tokens inside paged pools, in place: source i of request r to token `bases[r] + i`.

    Every layer, head and plane of a move is copied. Sources of a request must strictly increase and lie at or
    behind their destination (`bases[r] + i <= source_i`); then the result is that of a copy through a scratch
    buffer, and bytes that are no destination keep their values. Tokens that already lie where they belong are
    not read.

    Parameters
    ----------
    pools : sequence of Tensor
        One per layer, written: `[pages, planes, heads, tokens_per_page, D]` of any dtype, with any strides
        that give every element its own memory and a contiguous last dimension. K and V of a layer are two
        planes or two entries; a `[pages, tokens, heads, D]` pool (NHD) is passed as ``pool.transpose(1,
        2).unsqueeze(1)``, MLA latents with one plane and one head. Everything but the number of heads may
        differ between layers.
    page_table : Tensor
        int32 `[requests, max_pages]`: entry c of a row is the page of tokens `[c * tokens_per_page, (c + 1) *
        tokens_per_page)`. Columns behind the tokens in use may hold anything.
    sources : Tensor
        int32 `[heads, total]`, or `[S, heads, total]` beside `layer_map`: token indices counted from the
        start of the request. -1 is skipped.
    offsets : Tensor
        int32 `[requests + 1]`, cumulative: the columns of request r are `[offsets[r], offsets[r + 1])`.
    bases : Tensor
        int32 `[requests]`: first destination of each request. Ignored beside `destinations`.
    layer_map : Tensor, optional
        int32 `[layers]`: the plane of `sources` (and `destinations`) each pool follows.
    destinations : Tensor, optional
        int32 of the shape of `sources`: the token each source goes to, in any order. Within one request, head
        and source plane no destination may be named twice or be a source. A move with a -1 is skipped.

    Raises
    ------
    ValueError
        A shape or stride that is not as above; in debug mode also offsets, tokens, pages or an order that are
        not, naming request, layer, head and index. Nothing has been written then.
    TypeError
        A dtype or device that is not as above.
    NotImplementedError
        A GPU this build has no code for.

    Notes
    -----
    Requests of one call must not share a page that any of them writes. Values on the device are not checked
    unless `kvc.set_debug(True)`: a source, destination, page or `layer_map` entry out of range skips its
    moves, decreasing offsets mean no moves, and no memory outside the pools is touched. The call allocates
    nothing, never synchronises and can be captured in a CUDA graph. A kernel launch takes up to 240
    pools of one geometry: one shape but for the pages, one set of strides, one alignment.

    References
    ----------
    The contract follows TensorRT-LLM's sparse KV-cache compaction
    (https://github.com/NVIDIA/TensorRT-LLM/pull/16836); the kernel and the order-free form are this
    project's.
    """
    call(_compact_pages_, pools, page_table, sources, offsets, bases, layer_map, destinations)
