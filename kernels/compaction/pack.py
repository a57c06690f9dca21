"""Triton kernels of the packing ops. setup.py compiles them ahead of time; pack.cu launches them.

A program fills columns of one request in one output row, so that its kept tokens and its offsets are loaded
at the same time. Programs behind those of the last request clear the columns that no request owns. Offsets
that decrease may make requests overlap: a column then belongs to the last request that covers it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024
THREADS = 128
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _first_column_behind(offsets, request, requests, CHUNK: tl.constexpr):
    """The lowest column that a request from `request` on owns."""
    lowest = LAST
    for first in range(request, requests, CHUNK):
        r = first + tl.arange(0, CHUNK)
        begin = tl.load(offsets + r, mask=r < requests, other=0)
        end = tl.load(offsets + r + 1, mask=r < requests, other=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(end > begin, begin, LAST)))
    return lowest


@triton.jit
def _free_of_later(column, offsets, request, requests):
    """Which columns no request from `request` on owns."""
    free = column == column
    for r in range(request, requests):
        free &= (column < tl.load(offsets + r)) | (column >= tl.load(offsets + r + 1))
    return free


@triton.jit
def _owned(column, begin, end, behind, total, offsets, request, requests):
    """Which columns of [begin, end) to write: inside the output and of no later request, the first of which
    is `behind`."""
    mask = (column >= 0) & (column >= begin) & (column < end) & (column < total)
    if behind < end:
        mask &= _free_of_later(column, offsets, request + 1, requests)
    return mask


@triton.jit
def _clear(output, offsets, requests, total, part, parts, BLOCK: tl.constexpr):
    """-1 into the columns of [0, total) that no request owns; this is part `part` of `parts`."""
    ordered = 1
    for first in range(0, requests, BLOCK):
        r = first + tl.arange(0, BLOCK)
        begin = tl.load(offsets + r, mask=r < requests, other=0)
        end = tl.load(offsets + r + 1, mask=r < requests, other=0)
        ordered = tl.minimum(ordered, tl.min((end >= begin).to(tl.int32)))
    begin = tl.load(offsets)
    end = tl.load(offsets + requests)
    start = tl.cast(0, tl.int64)
    if (ordered == 1) & (begin <= 0):  # most often nothing is left to clear
        start = tl.minimum(tl.maximum(end, 0), total).to(tl.int64)
    for first in range(start + part * BLOCK, total, parts * BLOCK):
        column = first + tl.arange(0, BLOCK)
        if ordered == 1:  # noqa: SIM108  (a branch, not a select of both)
            free = (column < begin) | (column >= end)
        else:
            free = _free_of_later(column, offsets, 0, requests)
        tl.store(output + column, -1, mask=free & (column < total))


@triton.jit
def _other_rounds(begin, end, total, block, blocks, BLOCK: tl.constexpr):
    """Moves of a request that other rounds than the first of this program's block handle, as a range."""
    step = blocks.to(tl.int64) * BLOCK
    moves = tl.minimum(end, total).to(tl.int64) - begin
    first = block.to(tl.int64) * BLOCK + step
    if begin < 0:  # rounds in front of the output
        first += tl.maximum(-begin.to(tl.int64) // step - 2, 0) * step
    return first, moves, step


@triton.jit
def pack_move_sources_kernel(
    kept,  # int32 [requests, decision_rows, kept_count]
    valid_lengths,  # int32 [requests]
    dense_offsets,  # int32 [requests + 1]
    swa_offsets,  # int32 [requests + 1]
    dense,  # int32 [dense_rows, dense_total]
    swa,  # int32 [swa_rows, swa_total]
    requests,
    decision_rows,
    kept_count,
    window,
    dense_rows,
    dense_total,
    swa_rows,
    swa_total,
    blocks,  # programs per request and row
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    for row in range(tl.program_id(1), dense_rows + swa_rows, tl.num_programs(1)):
        offsets = dense_offsets
        output = dense + tl.cast(row, tl.int64) * dense_total
        total = dense_total
        leading = kept_count
        back = kept_count
        if row >= dense_rows:
            offsets = swa_offsets
            output = swa + tl.cast(row - dense_rows, tl.int64) * swa_total
            total = swa_total
            leading = 0
            back = window
        if request >= requests:
            part = tl.program_id(0) - requests * blocks
            _clear(output, offsets, requests, total, part, tl.num_programs(0) - requests * blocks, BLOCK)
        else:
            decision = row if decision_rows > 1 else 0
            kept_row = kept + (request.to(tl.int64) * decision_rows + decision) * kept_count
            move = block * BLOCK + tl.arange(0, BLOCK)
            token = tl.load(kept_row + move, mask=move < leading, other=0)
            begin = tl.load(offsets + request)
            end = tl.load(offsets + request + 1)
            tail = tl.load(valid_lengths + request) - back
            behind = _first_column_behind(offsets, request + 1, requests, 128)

            column = move.to(tl.int64) + begin
            token = tl.where(move < leading, token, tail + move)
            mask = _owned(column, begin, end, behind, total, offsets, request, requests)
            tl.store(output + column, token, mask=mask)

            first, moves, step = _other_rounds(begin, end, total, block, blocks, BLOCK)
            for start in range(first, moves, step):
                far = start + tl.arange(0, BLOCK)
                token = tl.load(kept_row + far, mask=far < leading, other=0)
                token = tl.where(far < leading, token, tail + far.to(tl.int32))
                column = far + begin
                mask = _owned(column, begin, end, behind, total, offsets, request, requests)
                tl.store(output + column, token, mask=mask)


@triton.jit
def pack_fill_moves_kernel(
    kept,  # int32 [requests, decision_rows, kept_count]
    valid_lengths,  # int32 [requests]
    bases,  # int32 [requests]
    fill_offsets,  # int32 [requests + 1]
    tail_offsets,  # int32 [requests + 1]
    sources,  # int32 [fill_rows, fill_total]
    destinations,  # int32 [fill_rows, fill_total]
    tail_sources,  # int32 [tail_rows, tail_total]
    requests,
    decision_rows,
    kept_count,
    fill_rows,
    fill_total,
    tail_rows,
    tail_total,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0)
    for row in range(tl.program_id(1), fill_rows + tail_rows, tl.num_programs(1)):
        if request >= requests:
            part = request - requests
            parts = tl.num_programs(0) - requests
            if row < fill_rows:
                shift = tl.cast(row, tl.int64) * fill_total
                _clear(sources + shift, fill_offsets, requests, fill_total, part, parts, BLOCK)
                _clear(destinations + shift, fill_offsets, requests, fill_total, part, parts, BLOCK)
            else:
                output = tail_sources + tl.cast(row - fill_rows, tl.int64) * tail_total
                _clear(output, tail_offsets, requests, tail_total, part, parts, BLOCK)
        else:
            length = tl.load(valid_lengths + request)
            base = tl.load(bases + request).to(tl.int64)
            limit = base + kept_count
            if row < fill_rows:
                decision = row if decision_rows > 1 else 0
                kept_row = kept + (request.to(tl.int64) * decision_rows + decision) * kept_count
                # Kept tokens ascend: some below the range, those that stay, the movers, and maybe -1.
                below = tl.zeros([COUNT], dtype=tl.int32)
                inside = tl.zeros([COUNT], dtype=tl.int32)
                behind_range = tl.zeros([COUNT], dtype=tl.int32)
                for first in range(0, kept_count, COUNT):
                    k = first + tl.arange(0, COUNT)
                    token = tl.load(kept_row + k, mask=k < kept_count, other=-1).to(tl.int64)
                    below += ((token >= 0) & (token < base)).to(tl.int32)
                    inside += ((token >= base) & (token < limit)).to(tl.int32)
                    behind_range += (token >= limit).to(tl.int32)
                first_stay = tl.sum(below)
                stay = tl.sum(inside)
                movers = tl.where(length > limit, tl.sum(behind_range), 0)

                begin = tl.load(fill_offsets + request)
                end = tl.load(fill_offsets + request + 1)
                behind = _first_column_behind(fill_offsets, request + 1, requests, 128)
                shift = tl.cast(row, tl.int64) * fill_total
                moves = tl.minimum(end, fill_total).to(tl.int64) - begin
                start = tl.maximum(-begin.to(tl.int64), 0)
                for first in range(start, moves, BLOCK):
                    move = first + tl.arange(0, BLOCK)
                    moved = move < movers
                    # The token that stays i-th has base + i - (its token) holes before it; hole j is behind
                    # those that have at most j. Their number is found by bisection.
                    low = tl.zeros([BLOCK], dtype=tl.int32)
                    high = low + stay
                    span = stay
                    while span > 0:
                        middle = (low + high) // 2
                        search = moved & (low < high)
                        token = tl.load(kept_row + first_stay + middle, mask=search, other=0)
                        passed = search & (token - base - middle <= move)
                        high = tl.where(search & (token - base - middle > move), middle, high)
                        low = tl.where(passed, middle + 1, low)
                        span = span // 2
                    column = move + begin
                    mask = _owned(column, begin, end, behind, fill_total, fill_offsets, request, requests)
                    token = tl.load(kept_row + first_stay + stay + move, mask=moved & mask, other=-1)
                    hole = tl.where(moved, base + move + low, -1).to(tl.int32)
                    tl.store(sources + shift + column, token, mask=mask)
                    tl.store(destinations + shift + column, hole, mask=mask)
            else:
                begin = tl.load(tail_offsets + request)
                end = tl.load(tail_offsets + request + 1)
                behind = _first_column_behind(tail_offsets, request + 1, requests, 128)
                output = tail_sources + tl.cast(row - fill_rows, tl.int64) * tail_total
                moves = tl.minimum(end, tail_total).to(tl.int64) - begin
                start = tl.maximum(-begin.to(tl.int64), 0)
                for first in range(start, moves, BLOCK):
                    move = first + tl.arange(0, BLOCK)
                    column = move + begin
                    token = tl.where(length > limit, length + move.to(tl.int32), -1)
                    mask = _owned(column, begin, end, behind, tail_total, tail_offsets, request, requests)
                    tl.store(output + column, token, mask=mask)


# What kernels/common/aot.py compiles: signatures in argument order, constants by name.
AOT = {
    "pack_move_sources": {
        "kernel": pack_move_sources_kernel,
        "signature": {
            **dict.fromkeys(
                ("kept", "valid_lengths", "dense_offsets", "swa_offsets", "dense", "swa"), "*i32"
            ),
            **dict.fromkeys(("requests", "decision_rows", "kept_count", "window"), "i32"),
            **dict.fromkeys(("dense_rows", "dense_total", "swa_rows", "swa_total", "blocks"), "i32"),
        },
        "constants": {"BLOCK": BLOCK},
        "warps": THREADS // 32,
    },
    "pack_fill_moves": {
        "kernel": pack_fill_moves_kernel,
        "signature": {
            **dict.fromkeys(("kept", "valid_lengths", "bases", "fill_offsets", "tail_offsets"), "*i32"),
            **dict.fromkeys(("sources", "destinations", "tail_sources"), "*i32"),
            **dict.fromkeys(("requests", "decision_rows", "kept_count"), "i32"),
            **dict.fromkeys(("fill_rows", "fill_total", "tail_rows", "tail_total"), "i32"),
        },
        "constants": {"BLOCK": 256, "COUNT": 2048},
        "warps": 8,
    },
}
