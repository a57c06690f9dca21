"""Triton kernels of settle_ties. setup.py compiles them ahead of time; settle.cu launches them.

A provisional answer names every score above the pivot, which is the least named one, and some of those equal to
it. Wanted are the former, and as many of the latter as were named, lowest index first.

1. pivot gathers the named scores, parts of a row side by side: the least of them, and how many equal it.
2. classify reads the scores, once, a chunk of a row in each program: is each above the pivot, or equal to it?
3. emit takes a tile's first column of the result from the counts of all chunks of its row, and writes indices.

Positions count from the 16-byte boundary at or before the row, so that loads are aligned whatever the row is:
column c is position lead + c.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = 4096  # positions that a program classifies
TILE = 2 * CHUNK  # positions whose indices a program writes
PARTS = tl.constexpr(8)  # at most so many programs share the provisional answer of a row
# Positions that share a word of classes: above the pivot in its low half, equal in its high one.
GROUP = tl.constexpr(16)


@triton.jit
def _row(row, lengths, width, row_stride, lead, vector):
    """Elements from the first row to this one, its lead, and its length."""
    offset = tl.cast(row, tl.int64) * row_stride
    length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), width)
    return offset, ((lead + offset) % vector).to(tl.int32), length


@triton.jit
def _least(a, a_count, b, b_count):
    least = tl.minimum(a, b)
    return least, tl.where(a == least, a_count, 0) + tl.where(b == least, b_count, 0)


@triton.jit
def settle_pivot_kernel(
    scores,  # [rows, width]
    lengths,  # int32 [rows]
    provisional,  # int32 [rows, k], or int64 as pairs
    leasts,  # int32 [rows, PARTS, 2]: least named score, its count
    width,
    row_stride,
    k,
    share,  # provisional columns of a part
    step,  # int32 of an index
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    part = tl.program_id(1)
    offset, _, length = _row(row, lengths, width, row_stride, 0, 1)
    least_here = tl.full([BLOCK], float("inf"), tl.float32)
    count_here = tl.zeros([BLOCK], tl.int32)
    last = tl.minimum((part + 1) * share, k)
    for begin in range(part * share, last, BLOCK):
        place = tl.arange(0, BLOCK)
        there = place < tl.minimum(last - begin, BLOCK).to(tl.int32)
        at = provisional + (row.to(tl.int64) * k + begin) * step + place * step
        index = tl.load(at, mask=there, other=-1)
        high = tl.load(at + (step - 1), mask=there, other=-1)
        named = (index >= 0) & (index < length) & ((step == 1) | (high == 0))
        score = tl.load(scores + offset + index, mask=named, other=float("inf")).to(tl.float32)
        score = tl.maximum(score, float("-inf"))  # NaN becomes -inf
        count = tl.where(score < least_here, 0, count_here)
        least_here = tl.minimum(least_here, score)
        count_here = count + (named & (score == least_here)).to(tl.int32)
    least, count = tl.reduce((least_here, count_here), 0, _least)
    record = leasts + (row.to(tl.int64) * PARTS + part) * 2
    tl.store(record, least.to(tl.int32, bitcast=True))
    tl.store(record + 1, count)


@triton.jit
def _pivot(leasts, row, parts):
    """The least named score of a row, and how many equal it."""
    part = tl.arange(0, PARTS)
    record = leasts + (tl.cast(row, tl.int64) * PARTS + part) * 2
    least = tl.load(record, mask=part < parts, other=0x7F800000).to(tl.float32, bitcast=True)
    count = tl.load(record + 1, mask=part < parts, other=0)
    pivot = tl.min(least)
    return pivot, tl.sum(tl.where(least == pivot, count, 0))


@triton.jit
def settle_classify_kernel(
    scores,  # [rows, width]
    lengths,  # int32 [rows]
    leasts,  # int32 [rows, PARTS, 2]
    classes,  # int32 [rows, chunks * CHUNK / GROUP]
    counts,  # int32 [rows, chunks]: scores above the pivot, those equal to it in the upper half
    width,
    row_stride,
    lead,
    parts,
    chunks,
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0)
    row = number // chunks
    first = (number % chunks).to(tl.int64) * CHUNK
    offset, shift, length = _row(row, lengths, width, row_stride, lead, VECTOR)
    end = length.to(tl.int64) + shift
    if first < end:
        memory = tl.multiple_of(scores + (offset - shift + first), 16)
        local = tl.arange(0, CHUNK)
        # NaN of a row becomes -inf; what is not of the row becomes NaN, and neither above nor equal.
        if (first >= shift) & (first + CHUNK <= end):
            value = tl.maximum(tl.load(memory + local).to(tl.float32), float("-inf"))
        else:
            inside = (local >= (shift - first).to(tl.int32)) & (local < (end - first).to(tl.int32))
            value = tl.load(memory + local, mask=inside, other=0).to(tl.float32)
            value = tl.where(inside, tl.maximum(value, float("-inf")), float("nan"))
        pivot, _count = _pivot(leasts, row, parts)
        value = tl.reshape(value, [CHUNK // GROUP, GROUP])
        lane = tl.arange(0, GROUP)[None, :]
        word = tl.where(value > pivot, 1 << lane, 0) | tl.where(value == pivot, 65536 << lane, 0)
        word = tl.sum(word, axis=1)
        tl.store(classes + number.to(tl.int64) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP), word)
        tl.store(counts + number, tl.sum(_ones(word), axis=0))


@triton.jit
def _ones(word):
    """Ones of both halves of words, in theirs."""
    word = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word & 0x0F0F0F0F) + ((word >> 4) & 0x0F0F0F0F)
    return (word + (word >> 8)) & 0x001F001F


@triton.jit
def _place_of(bits, number):
    """Where among 16 bits the one with this number is; 0 is the first."""
    place = number * 0
    for step in tl.static_range(4):
        half = 8 >> step
        low = bits & ((1 << half) - 1)
        ones = _ones(low)
        beyond = number >= ones
        number = tl.where(beyond, number - ones, number)
        bits = tl.where(beyond, bits >> half, low)
        place += tl.where(beyond, half, 0)
    return place


@triton.jit
def _sums(a, b, c, d, e, v, w, x, y, z):
    return a + v, b + w, c + x, d + y, e + z


@triton.jit
def settle_emit_kernel(
    lengths,  # int32 [rows]
    bases,  # int32 [rows], read if there are some
    leasts,  # int32 [rows, PARTS, 2]
    classes,  # int32 [rows, chunks * CHUNK / GROUP]
    counts,  # int32 [rows, chunks]
    out,  # int32 [rows, k]
    width,
    row_stride,
    lead,
    k,
    parts,
    chunks,
    with_bases,
    vector,  # elements of 16 bytes
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles = chunks // (TILE // CHUNK)
    number = tl.program_id(0)
    row = number // tiles
    tile = number % tiles
    # Loaded before it is known whether the length reaches here.
    place = tl.arange(0, TILE // GROUP)
    word = tl.load(classes + number.to(tl.int64) * (TILE // GROUP) + place)
    _pivot_of_row, ties = _pivot(leasts, row, parts)  # to keep
    _, shift, length = _row(row, lengths, width, row_stride, lead, vector)
    used = ((length.to(tl.int64) + shift + CHUNK - 1) // CHUNK).to(tl.int32)
    used_tiles = tl.maximum((used + (TILE // CHUNK - 1)) // (TILE // CHUNK), 1)
    if tile < used_tiles:
        above_total = tl.cast(0, tl.int32)
        equal_total = tl.cast(0, tl.int32)
        above_before = tl.cast(0, tl.int32)
        equal_before = tl.cast(0, tl.int32)
        equal_through = tl.cast(0, tl.int32)
        for begin in range(0, used, BLOCK):
            c = begin + tl.arange(0, BLOCK)
            both = tl.load(counts + row.to(tl.int64) * chunks + c, mask=c < used, other=0)
            above = both & 0xFFFF
            equal = both >> 16
            earlier = c < tile * (TILE // CHUNK)
            above_earlier = tl.where(earlier, above, 0)
            equal_earlier = tl.where(earlier, equal, 0)
            equal_so_far = tl.where(c < (tile + 1) * (TILE // CHUNK), equal, 0)
            sums = tl.reduce((above, equal, above_earlier, equal_earlier, equal_so_far), 0, _sums)
            above_total += sums[0]
            equal_total += sums[1]
            above_before += sums[2]
            equal_before += sums[3]
            equal_through += sums[4]

        first = tile.to(tl.int64) * TILE
        word = tl.where(place < (used - tile * (TILE // CHUNK)) * (CHUNK // GROUP), word, 0)
        ones = _ones(word)
        before = tl.cumsum(ones) - ones
        tie = equal_before + (before >> 16)
        equal = (word >> 16) & 0xFFFF
        if ties < equal_through:  # not all of these are kept
            left = ties - tie
            some = (1 << _place_of(equal, tl.maximum(left, 0))) - 1
            equal = tl.where(left >= (ones >> 16), equal, equal & some)
        kept = (word & 0xFFFF) | equal

        # The ordinal wraps around where that of the contract does.
        ordinal = (first - shift).to(tl.int32) + place * GROUP
        if with_bases != 0:
            ordinal += tl.load(bases + row)
        out_row = out + row.to(tl.int64) * k
        column = above_before + (before & 0xFFFF) + tl.minimum(tie, ties)
        room = tl.minimum(k, 2147483647).to(tl.int32)
        for _turn in range(tl.max(_ones(kept))):
            bit = kept & -kept
            lane = (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(out_row + column, ordinal + lane, mask=(kept != 0) & (column < room))
            column += 1
            kept ^= bit

        end = above_total + tl.minimum(equal_total, ties)
        for padding in range(end + tile.to(tl.int64) * BLOCK, k, used_tiles.to(tl.int64) * BLOCK):
            behind = padding + tl.arange(0, BLOCK)
            tl.store(out_row + behind, -1, mask=behind < k)


def _scores(dtype: str) -> dict[str, str]:
    return {"scores": dtype, "lengths": "*i32"}


def _pivots(dtype: str) -> dict[str, Any]:
    return {
        "kernel": settle_pivot_kernel,
        "signature": {
            **_scores(dtype),
            **dict.fromkeys(("provisional", "leasts"), "*i32"),
            "width": "i32",
            **dict.fromkeys(("row_stride", "k", "share"), "i64"),
            "step": "i32",
        },
        "constants": {"BLOCK": 1024},
        "warps": 4,
    }


def _classify(dtype: str, vector: int) -> dict[str, Any]:
    return {
        "kernel": settle_classify_kernel,
        "signature": {
            **_scores(dtype),
            "leasts": "*i32",
            **dict.fromkeys(("classes", "counts"), "*i32"),
            "width": "i32",
            "row_stride": "i64",
            **dict.fromkeys(("lead", "parts", "chunks"), "i32"),
        },
        "constants": {"VECTOR": vector, "CHUNK": CHUNK},
        "warps": 4,
    }


# What kernels/common/aot.py compiles: signatures in argument order, constants by name.
AOT = {
    "settle_pivot_float": _pivots("*fp32"),
    "settle_pivot_half": _pivots("*fp16"),
    "settle_pivot_bfloat16": _pivots("*bf16"),
    "settle_classify_float": _classify("*fp32", 4),
    "settle_classify_half": _classify("*fp16", 8),
    "settle_classify_bfloat16": _classify("*bf16", 8),
    "settle_emit": {
        "kernel": settle_emit_kernel,
        "signature": {
            **dict.fromkeys(("lengths", "bases", "leasts", "classes", "counts", "out"), "*i32"),
            "width": "i32",
            "row_stride": "i64",
            "lead": "i32",
            "k": "i64",
            **dict.fromkeys(("parts", "chunks", "with_bases", "vector"), "i32"),
        },
        "constants": {"CHUNK": CHUNK, "TILE": TILE, "BLOCK": 64},
        "warps": 2,
    },
}
