"""Triton kernels of settle_ties. setup.py compiles them ahead of time; settle.cu launches them.

A provisional answer names every score above the pivot, which is the least named one, and some of those equal to
it. Wanted are the former, and as many of the latter as were named, lowest index first. A row is cut into chunks,
each of them a program's:

1. classify reads the scores, once. Not knowing the pivot, it finds the least named score of its chunk and the
   greatest score below that, and writes for each score whether it is one of them, or above, or neither.
2. emit takes the pivot and a chunk's first column of the result from all chunks of the row, and writes indices.
   If the pivot is the chunk's least named score, those equal to it are ties. Otherwise the pivot is less, all
   from the least named score on are winners, and the greatest below are ties if they equal the pivot: no score
   that is not named lies above the pivot.

Positions count from the 16-byte boundary at or before the row, so that loads are aligned whatever the row is:
column c is position lead + c.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

CHUNK = 8192  # positions of a program
GROUP = tl.constexpr(
    4
)  # positions that share a byte of classes, one bit each of its low and of its high half
RECORD = tl.constexpr(
    8
)  # int32 per chunk: least named, its count, greatest below, counts of the three classes


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
def _sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def settle_classify_kernel(
    scores,  # [rows, width]
    lengths,  # int32 [rows]
    provisional,  # int32 [rows, k], or int64 as pairs
    classes,  # int8 [rows, chunks * CHUNK / GROUP]
    records,  # int32 [rows, chunks, RECORD]
    width,
    row_stride,
    lead,
    k,
    step,  # int32 of an index
    chunks,
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    row = tl.program_id(0)
    offset, lead, length = _row(row, lengths, width, row_stride, lead, VECTOR)
    end = length.to(tl.int64) + lead
    for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
        first = tl.cast(chunk, tl.int64) * CHUNK
        if first < end:
            memory = tl.multiple_of(scores + (offset - lead + first), 16)
            local = tl.arange(0, CHUNK)
            # NaN of a row becomes -inf; what is not of the row becomes NaN, and neither equal nor below.
            if (first >= lead) & (first + CHUNK <= end):
                value = tl.maximum(tl.load(memory + local).to(tl.float32), float("-inf"))
            else:
                inside = (local >= (lead - first).to(tl.int32)) & (local < (end - first).to(tl.int32))
                value = tl.load(memory + local, mask=inside, other=0).to(tl.float32)
                value = tl.where(inside, tl.maximum(value, float("-inf")), float("nan"))

            least_here = tl.full([BLOCK], float("inf"), tl.float32)
            count_here = tl.zeros([BLOCK], tl.int32)
            shift = (first - lead).to(tl.int32)
            named_row = provisional + tl.cast(row, tl.int64) * k * step
            for begin in range(0, k, BLOCK):
                place = tl.arange(0, BLOCK)
                there = place < tl.minimum(k - begin, BLOCK).to(tl.int32)
                at = named_row + tl.cast(begin, tl.int64) * step + place * step
                index = tl.load(at, mask=there, other=-1)
                high = tl.load(at + (step - 1), mask=there, other=-1)
                position = index - shift
                named = (index >= 0) & (index < length) & (position >= 0) & (position < CHUNK)
                named &= (step == 1) | (high == 0)
                score = tl.load(memory + position, mask=named, other=float("inf")).to(tl.float32)
                score = tl.maximum(score, float("-inf"))
                count = tl.where(score < least_here, 0, count_here)
                least_here = tl.minimum(least_here, score)
                count_here = count + (named & (score == least_here)).to(tl.int32)
            least, least_count = tl.reduce((least_here, count_here), 0, _least)

            value = tl.reshape(value, [CHUNK // GROUP, GROUP])
            greatest = tl.max(tl.max(tl.where(value < least, value, float("-inf")), axis=1), axis=0)
            mark = tl.where(least == float("-inf"), float("nan"), greatest)  # nothing is below -inf
            lane = tl.arange(0, GROUP)[None, :]
            low = tl.where((value > least) | (value == mark), 1 << lane, 0)
            high = tl.where(value >= least, 16 << lane, 0)
            bits = tl.sum(low | high, axis=1)
            number = tl.cast(row, tl.int64) * chunks + chunk
            group = tl.arange(0, CHUNK // GROUP)
            tl.store(classes + number * (CHUNK // GROUP) + group, bits.to(tl.int8))

            # Ones of three kinds, counted in a byte each, then in two halves.
            ones = (bits & (bits >> 4)) | ((bits & 0xF0) << 4) | ((bits & ~(bits >> 4) & 15) << 16)
            ones = (ones & 0x555555) + ((ones >> 1) & 0x555555)
            ones = (ones & 0x333333) + ((ones >> 2) & 0x333333)
            ones = tl.sum(tl.reshape(ones, [CHUNK // GROUP // SUM, SUM]), axis=0)
            both, greatest_count = tl.reduce(((ones & 0xFF) | ((ones << 8) & 0xFF0000), ones >> 16), 0, _sums)
            record = records + number * RECORD
            tl.store(record, least.to(tl.int32, bitcast=True))
            tl.store(record + 1, least_count)
            tl.store(record + 2, greatest.to(tl.int32, bitcast=True))
            tl.store(record + 3, both & 0xFFFF)
            tl.store(record + 4, (both >> 16) - (both & 0xFFFF))
            tl.store(record + 5, greatest_count)


@triton.jit
def _low_halves(bytes):
    """The low halves of four bytes, side by side."""
    bits = bytes & 0x0F0F0F0F
    bits = (bits | (bits >> 4)) & 0x00FF00FF
    return (bits | (bits >> 8)) & 0xFFFF


@triton.jit
def _count(bits):
    """Ones among 16 bits."""
    bits = (bits & 0x5555) + ((bits >> 1) & 0x5555)
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits & 0x0F0F) + ((bits >> 4) & 0x0F0F)
    return (bits + (bits >> 8)) & 0x1F


@triton.jit
def settle_emit_kernel(
    lengths,  # int32 [rows]
    bases,  # int32 [rows], read if there are some
    classes,  # int32 [rows, chunks * CHUNK / 16], four groups each
    records,  # int32 [rows, chunks, RECORD]
    out,  # int32 [rows, k]
    width,
    row_stride,
    lead,
    k,
    chunks,
    with_bases,
    vector,  # elements of 16 bytes
    CHUNK: tl.constexpr,
    RECORDS: tl.constexpr,
):
    row = tl.program_id(0)
    _, lead, length = _row(row, lengths, width, row_stride, lead, vector)
    used = ((length.to(tl.int64) + lead + CHUNK - 1) // CHUNK).to(tl.int32)
    out_row = out + row.to(tl.int64) * k
    base = -lead
    if with_bases != 0:
        base += tl.load(bases + row)

    row_records = records + row.to(tl.int64) * chunks * RECORD
    pivot = tl.full([], float("inf"), tl.float32)
    for begin in range(0, used, RECORDS):
        c = begin + tl.arange(0, RECORDS)
        least = tl.load(row_records + c * RECORD, mask=c < used, other=0x7F800000)
        pivot = tl.minimum(pivot, tl.min(least.to(tl.float32, bitcast=True)))

    for chunk in range(tl.program_id(1), tl.maximum(used, 1), tl.num_programs(1)):
        words = tl.arange(0, CHUNK // 16)
        number = row.to(tl.int64) * chunks + chunk
        word = tl.load(classes + number * (CHUNK // 16) + words, mask=chunk < used, other=0)

        kept_ties = tl.cast(0, tl.int32)  # of the row
        above_total = tl.cast(0, tl.int32)
        ties_total = tl.cast(0, tl.int32)
        above_before = tl.cast(0, tl.int32)
        ties_before = tl.cast(0, tl.int32)
        for begin in range(0, used, RECORDS):
            c = begin + tl.arange(0, RECORDS)
            record = row_records + c * RECORD
            there = c < used
            holds = tl.load(record, mask=there, other=0).to(tl.float32, bitcast=True) == pivot
            least_count = tl.load(record + 1, mask=there, other=0)
            touches = tl.load(record + 2, mask=there, other=0).to(tl.float32, bitcast=True) == pivot
            above = tl.load(record + 3, mask=there, other=0)
            equal = tl.load(record + 4, mask=there, other=0)
            below = tl.load(record + 5, mask=there, other=0)
            kept_ties += tl.sum(tl.where(holds, least_count, 0))
            above += tl.where(holds, 0, equal)
            ties = tl.where(holds, equal, tl.where(touches, below, 0))
            above_total += tl.sum(above)
            ties_total += tl.sum(ties)
            above_before += tl.sum(tl.where(c < chunk, above, 0))
            ties_before += tl.sum(tl.where(c < chunk, ties, 0))

        if chunk < used:
            record = row_records + tl.cast(chunk, tl.int64) * RECORD
            holds = tl.load(record).to(tl.float32, bitcast=True) == pivot
            touches = tl.load(record + 2).to(tl.float32, bitcast=True) == pivot
            low = _low_halves(word)
            named = _low_halves(word >> 4)
            above = tl.where(holds, low & named, named)
            tie = tl.where(holds, named & ~low, tl.where(touches, low & ~named, 0))
            counts = _count(above) | (_count(tie) << 16)
            before = tl.cumsum(counts) - counts
            tie_rank = ties_before + (before >> 16)
            at = above_before + (before & 0xFFFF) + tl.minimum(tie_rank, kept_ties)
            tie = tl.where(tie_rank < kept_ties, tie, 0)
            rest = above | tie
            ordinal = (tl.cast(chunk, tl.int64) * CHUNK).to(tl.int32) + base + words * 16
            room = tl.minimum(k, 2147483647).to(tl.int32)
            for _turn in range(tl.max(_count(rest))):
                bit = rest & -rest
                is_tie = (tie & bit) != 0
                kept = (rest != 0) & (~is_tie | (tie_rank < kept_ties))
                lane = (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                tl.store(out_row + at, ordinal + lane, mask=kept & (at < room))
                at += kept.to(tl.int32)
                tie_rank += is_tie.to(tl.int32)
                rest = rest ^ bit

        total = above_total + tl.minimum(ties_total, kept_ties)
        step = tl.maximum(used, 1).to(tl.int64) * RECORDS
        for padding in range(total + tl.cast(chunk, tl.int64) * RECORDS, k, step):
            column = padding + tl.arange(0, RECORDS)
            tl.store(out_row + column, -1, mask=column < k)


def _classify(dtype: str, vector: int) -> dict[str, Any]:
    return {
        "kernel": settle_classify_kernel,
        "signature": {
            "scores": dtype,
            **dict.fromkeys(("lengths", "provisional"), "*i32"),
            "classes": "*i8",
            "records": "*i32",
            "width": "i32",
            "row_stride": "i64",
            "lead": "i32",
            "k": "i64",
            **dict.fromkeys(("step", "chunks"), "i32"),
        },
        "constants": {"VECTOR": vector, "CHUNK": CHUNK, "BLOCK": 1024, "SUM": 256},
        "warps": 8,
    }


# What kernels/common/aot.py compiles: signatures in argument order, constants by name.
AOT = {
    "settle_classify_float": _classify("*fp32", 4),
    "settle_classify_half": _classify("*fp16", 8),
    "settle_classify_bfloat16": _classify("*bf16", 8),
    "settle_emit": {
        "kernel": settle_emit_kernel,
        "signature": {
            **dict.fromkeys(("lengths", "bases", "classes", "records", "out"), "*i32"),
            "width": "i32",
            "row_stride": "i64",
            "lead": "i32",
            "k": "i64",
            **dict.fromkeys(("chunks", "with_bases", "vector"), "i32"),
        },
        "constants": {"CHUNK": CHUNK, "RECORDS": 128},
        "warps": 4,
    },
}
