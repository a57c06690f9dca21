"""Move packing and paged compaction as plain PyTorch: what the kernels return, on CPU and CUDA tensors.

Everything is written request by request, a later one over an earlier one. Arguments are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
) -> tuple[Tensor, Tensor]:
    """Kept ordinals `[R, rows, K]` to source tokens: `dense` (kept, then the tail) and `swa` (window, then
    the tail)."""
    kept_count = kept.shape[2]
    dense = _output(kept, num_layers, num_kv_heads, dense_total)
    swa = kept.new_full((num_kv_heads, swa_total), -1)
    for r, length in enumerate(valid_lengths):
        column, move = _moves(dense_offsets, r, dense_total)
        tail = length + (move - kept_count).int()
        rows = torch.where(move < kept_count, _pick(kept[r], move), tail)
        dense.flatten(0, -2)[:, column] = rows
        if swa_offsets is not None:
            column, move = _moves(swa_offsets, r, swa_total)
            swa[:, column] = length + (move - window).int()
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The kept tokens past `[base, base + K)` into the holes of that range, both ascending; then the tail."""
    kept_count = kept.shape[2]
    sources = _output(kept, num_layers, num_kv_heads, fill_total)
    destinations = torch.full_like(sources, -1)
    tail_sources = kept.new_full((num_kv_heads, tail_total), -1)
    outputs = sources.flatten(0, -2), destinations.flatten(0, -2)
    for r, (length, base) in enumerate(zip(valid_lengths.tolist(), bases.tolist(), strict=True)):
        end = base + kept_count
        moves_any = length > end
        for row, (source_row, destination_row) in enumerate(zip(*outputs, strict=True)):
            tokens = kept[r, row if kept.shape[1] > 1 else 0]
            movers = tokens[tokens.long() >= end] if moves_any else tokens[:0]
            place = torch.arange(base, end, device=kept.device)
            holes = place[~torch.isin(place, tokens.long())][: len(movers)].int()
            column, move = _moves(fill_offsets, r, fill_total)
            source_row[column], destination_row[column] = _pick(movers, move), _pick(holes, move)
        column, move = _moves(tail_offsets, r, tail_total)
        tail_sources[:, column] = length + move.int() if moves_any else -1
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
    """Token `sources` to `bases + i`, or to `destinations`, for every layer, head and request, through a
    scratch copy."""
    for layer, pool in enumerate(pool.view(torch.uint8) for pool in pools):
        plane = 0 if layer_map is None else int(layer_map[layer])
        if not 0 <= plane < (1 if layer_map is None else len(sources)):
            continue
        for head in range(pool.shape[2]):
            from_row = (sources if layer_map is None else sources[plane])[head].long()
            for r, pages in enumerate(page_table.long()):
                column, move = _moves(offsets, r, len(from_row))
                to = bases[r] + move
                if destinations is not None:
                    to = (destinations if layer_map is None else destinations[plane])[head, column].long()
                (from_page, from_slot), (to_page, to_slot) = _places(pool, pages, from_row[column], to)
                scratch = pool[from_page, :, head, from_slot].clone()
                pool[to_page, :, head, to_slot] = scratch


def _output(kept: Tensor, num_layers: int, num_kv_heads: int, total: int) -> Tensor:
    per_layer = num_layers > 1 and kept.shape[1] == num_layers * num_kv_heads
    return kept.new_full((num_layers, num_kv_heads, total) if per_layer else (num_kv_heads, total), -1)


def _moves(offsets: Tensor, r: int, total: int) -> tuple[Tensor, Tensor]:
    """Columns of request `r` inside a buffer of `total`, and the number of the move each of them is."""
    begin, end = offsets[r : r + 2].tolist()
    first, last = max(begin, 0), min(end, total)
    column = torch.arange(first, max(first, last), device=offsets.device)
    return column, column - begin


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """`values[..., index]`, and -1 past their end."""
    return torch.nn.functional.pad(values, (0, 1), value=-1)[..., index.clamp(max=values.shape[-1])]


def _places(
    pool: Tensor, pages: Tensor, *tokens: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(page, slot) of the moves whose source and destination both exist."""
    slots = pool.shape[3]
    good = torch.ones_like(tokens[0], dtype=torch.bool)
    for token in tokens:
        good &= (token >= 0) & (token < len(pages) * slots)
    for token in tokens:
        page = pages[torch.where(good, token, 0) // slots] if len(pages) else token
        good = good & (page >= 0) & (page < len(pool))
    source, destination = (token[good] for token in tokens)
    return (pages[source // slots], source % slots), (pages[destination // slots], destination % slots)
