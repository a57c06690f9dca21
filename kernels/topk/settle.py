"""Triton kernels of settle_ties. setup.py compiles them ahead of time; settle.cu launches them.

A provisional answer names the scores above the pivot, which is the least named one, and some of those equal to
it. Wanted are the former, and as many of the latter as were named, lowest index first. A row is cut into
chunks, each of them a program's:

1. mark sets a bit for every named score of a row. Where that is cheaper, every classify program reads the whole
   provisional row and marks its chunk by itself.
2. classify reads the scores, once. Not knowing the pivot, it keeps what decides whatever the pivot is: the
   least named score of the chunk and the greatest other one, how many equal them, and a bit for each that does.
   That suffices, since no other score is above the pivot.
3. emit takes the pivot and a chunk's first column of the result from all chunks of the row, and writes indices.

Positions count from the 16-byte boundary at or before the row, so that loads are aligned whatever the row is:
column c is position lead + c.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

CHUNK = 8192  # positions of a program
GROUP = tl.constexpr(4)  # positions that share a byte of classes: named in the low half, equal in the high one
STATISTICS = tl.constexpr(8)  # int32 per chunk: named; least, its count; greatest, its count; three to spare


@triton.jit
def _row(row, lengths, width, row_stride, lead, vector):
    """Elements from the first row to this one, its lead, and its length."""
    offset = tl.cast(row, tl.int64) * row_stride
    length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), width)
    return offset, ((lead + offset) % vector).to(tl.int32), length


@triton.jit
def _mark(words, first, last, provisional, row, k, step, lead, length, BLOCK: tl.constexpr):
    """Sets the bits of the named positions in [first, last), of which `words` begins with the first."""
    named_row = provisional + tl.cast(row, tl.int64) * k * step
    for begin in range(0, k, BLOCK):
        at = tl.cast(begin, tl.int64) + tl.arange(0, BLOCK)
        index = tl.load(named_row + at * step, mask=at < k, other=-1)
        high = tl.load(named_row + at * step + (step - 1), mask=at < k, other=-1)
        named = (index >= 0) & (index < length) & ((step == 1) | (high == 0))
        position = index.to(tl.int64) + lead - first
        named &= (position >= 0) & (position < last - first)
        bit = tl.full([BLOCK], 1, tl.int32) << (position % 32).to(tl.int32)
        tl.atomic_or(words + position // 32, bit, mask=named, sem="relaxed")


@triton.jit
def settle_mark_kernel(
    lengths,  # int32 [rows]
    provisional,  # int32 [rows, k], or int64 as pairs
    words,  # int32 [rows, row_words]
    width,
    row_stride,
    lead,
    k,
    step,  # int32 of an index
    row_words,
    vector,  # elements of 16 bytes
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    _, lead, length = _row(row, lengths, width, row_stride, lead, vector)
    row_of_words = words + row.to(tl.int64) * row_words
    for begin in range(0, row_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        tl.store(row_of_words + word, 0, mask=word < row_words)
    tl.debug_barrier()
    last = row_words.to(tl.int64) * 32
    _mark(row_of_words, 0, last, provisional, row, k, step, lead, length, BLOCK)


@triton.jit
def _least_and_greatest(a, b, c, d):
    return tl.minimum(a, c), tl.maximum(b, d)


@triton.jit
def _sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def settle_classify_kernel(
    scores,  # [rows, width]
    lengths,  # int32 [rows]
    provisional,  # int32 [rows, k], or int64 as pairs
    words,  # int32 [rows, chunks * CHUNK / 32]
    classes,  # int8 [rows, chunks * CHUNK / GROUP]
    statistics,  # int32 [rows, chunks, STATISTICS]
    width,
    row_stride,
    lead,
    k,
    step,
    chunks,
    marked,
    VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    offset, lead, length = _row(row, lengths, width, row_stride, lead, VECTOR)
    end = length.to(tl.int64) + lead
    for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
        first = tl.cast(chunk, tl.int64) * CHUNK
        if first < end:
            memory = tl.multiple_of(scores + (offset - lead + first), 16)
            local = tl.arange(0, CHUNK)
            if (first >= lead) & (first + CHUNK <= end):
                value = tl.load(memory + local).to(tl.float32)
            else:
                inside = (local >= lead - first) & (local < end - first)
                value = tl.load(memory + local, mask=inside, other=0).to(tl.float32)

            number = tl.cast(row, tl.int64) * chunks + chunk
            mine = words + number * (CHUNK // 32)
            if marked == 0:
                tl.store(mine + tl.arange(0, CHUNK // 32), 0)
                tl.debug_barrier()
                _mark(mine, first, first + CHUNK, provisional, row, k, step, lead, length, BLOCK)
                tl.debug_barrier()
            group = tl.arange(0, CHUNK // GROUP)
            word = tl.load(mine + group // (32 // GROUP), cache_modifier=".cg")
            named_bits = (word >> (group % (32 // GROUP) * GROUP)) & 15

            lane = tl.arange(0, GROUP)
            named = ((named_bits[:, None] >> lane[None, :]) & 1) != 0
            position = first + (group * GROUP)[:, None] + lane[None, :]
            other = (position >= lead) & (position < end) & ~named
            value = tl.reshape(value, [CHUNK // GROUP, GROUP])
            value = tl.where(value == value, value, float("-inf"))  # NaN
            low = tl.where(named, value, float("inf"))
            high = tl.where(other, value, float("-inf"))
            least, greatest = tl.reduce(
                (tl.reshape(low, [CHUNK]), tl.reshape(high, [CHUNK])), 0, _least_and_greatest
            )
            least_here = named & (value == least)
            greatest_here = other & (value == greatest)
            equal_bits = tl.sum((least_here | greatest_here).to(tl.int32) << lane[None, :], axis=1)
            tl.store(classes + number * (CHUNK // GROUP) + group, (named_bits | (equal_bits << GROUP)).to(tl.int8))

            counts = named.to(tl.int32) + (least_here.to(tl.int32) << 16)
            both, greatest_count = tl.reduce(
                (tl.reshape(counts, [CHUNK]), tl.reshape(greatest_here.to(tl.int32), [CHUNK])), 0, _sums
            )
            record = statistics + number * STATISTICS
            tl.store(record, both & 0xFFFF)
            tl.store(record + 1, least.to(tl.int32, bitcast=True))
            tl.store(record + 2, both >> 16)
            tl.store(record + 3, greatest.to(tl.int32, bitcast=True))
            tl.store(record + 4, greatest_count)


@triton.jit
def _bits(nibble):
    return (nibble & 1) + ((nibble >> 1) & 1) + ((nibble >> 2) & 1) + ((nibble >> 3) & 1)


@triton.jit
def settle_emit_kernel(
    lengths,  # int32 [rows]
    bases,  # int32 [rows], read if there are some
    classes,  # int8 [rows, chunks * CHUNK / GROUP]
    statistics,  # int32 [rows, chunks, STATISTICS]
    out,  # int32 [rows, k]
    width,
    row_stride,
    lead,
    k,
    chunks,
    with_bases,
    vector,
    CHUNK: tl.constexpr,
    RECORDS: tl.constexpr,
):
    row = tl.program_id(0)
    _, lead, length = _row(row, lengths, width, row_stride, lead, vector)
    end = length.to(tl.int64) + lead
    used = ((end + CHUNK - 1) // CHUNK).to(tl.int32)
    out_row = out + row.to(tl.int64) * k
    base = -lead
    if with_bases != 0:
        base += tl.load(bases + row)

    records = statistics + row.to(tl.int64) * chunks * STATISTICS
    pivot = tl.full([], float("inf"), tl.float32)
    for begin in range(0, used, RECORDS):
        c = begin + tl.arange(0, RECORDS)
        least = tl.load(records + c.to(tl.int64) * STATISTICS + 1, mask=c < used, other=0)
        least = tl.where(c < used, least.to(tl.float32, bitcast=True), float("inf"))
        pivot = tl.minimum(pivot, tl.min(least))

    for chunk in range(tl.program_id(1), tl.maximum(used, 1), tl.num_programs(1)):
        ties = tl.cast(0, tl.int32)  # to keep in this row
        total = tl.cast(0, tl.int32)
        above_before = tl.cast(0, tl.int32)
        ties_before = tl.cast(0, tl.int32)
        for begin in range(0, used, RECORDS):
            c = begin + tl.arange(0, RECORDS)
            record = records + c.to(tl.int64) * STATISTICS
            named = tl.load(record, mask=c < used, other=0)
            least = tl.load(record + 1, mask=c < used, other=0).to(tl.float32, bitcast=True)
            least_count = tl.load(record + 2, mask=c < used, other=0)
            greatest = tl.load(record + 3, mask=c < used, other=0).to(tl.float32, bitcast=True)
            greatest_count = tl.load(record + 4, mask=c < used, other=0)
            tied = tl.where(least == pivot, least_count, 0)
            others = tl.where(greatest == pivot, greatest_count, 0)
            ties += tl.sum(tied)
            total += tl.sum(named)
            above_before += tl.sum(tl.where(c < chunk, named - tied, 0))
            ties_before += tl.sum(tl.where(c < chunk, tied + others, 0))

        if chunk < used:
            record = records + tl.cast(chunk, tl.int64) * STATISTICS
            least = tl.load(record + 1).to(tl.float32, bitcast=True)
            greatest = tl.load(record + 3).to(tl.float32, bitcast=True)
            number = row.to(tl.int64) * chunks + chunk
            group = tl.arange(0, CHUNK // GROUP)
            bits = tl.load(classes + number * (CHUNK // GROUP) + group).to(tl.int32)
            named = bits & 15
            equal = (bits >> 4) & 15
            tied = tl.where(least == pivot, equal & named, 0)
            tie = tied | tl.where(greatest == pivot, equal & ~named, 0)
            above = named & ~tied
            counts = _bits(above) | (_bits(tie) << 16)
            before = tl.cumsum(counts) - counts
            rank = above_before + (before & 0xFFFF)
            tie_rank = ties_before + (before >> 16)
            # Wraps around where the ordinal does.
            ordinal = (tl.cast(chunk, tl.int64) * CHUNK).to(tl.int32) + base + group * GROUP
            for lane in tl.static_range(GROUP):
                is_above = (above >> lane) & 1
                is_tie = (tie >> lane) & 1
                kept = (is_above != 0) | ((is_tie != 0) & (tie_rank < ties))
                at = rank + tl.minimum(tie_rank, ties)
                tl.store(out_row + at, ordinal + lane, mask=kept & (at < k))
                rank += is_above
                tie_rank += is_tie

        step = tl.maximum(used, 1).to(tl.int64) * RECORDS
        for padding in range(total + tl.cast(chunk, tl.int64) * RECORDS, k, step):
            column = padding + tl.arange(0, RECORDS)
            tl.store(out_row + column, -1, mask=column < k)


def _pointers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*i32")


def _classify(dtype: str, vector: int) -> dict[str, Any]:
    return {
        "kernel": settle_classify_kernel,
        "signature": {
            "scores": dtype,
            **_pointers("lengths", "provisional", "words"),
            "classes": "*i8",
            "statistics": "*i32",
            "width": "i32",
            "row_stride": "i64",
            "lead": "i32",
            "k": "i64",
            **dict.fromkeys(("step", "chunks", "marked"), "i32"),
        },
        "constants": {"VECTOR": vector, "CHUNK": CHUNK, "BLOCK": 1024},
        "warps": 8,
    }


# What kernels/common/aot.py compiles: signatures in argument order, constants by name.
AOT = {
    "settle_mark": {
        "kernel": settle_mark_kernel,
        "signature": {
            **_pointers("lengths", "provisional", "words"),
            "width": "i32",
            "row_stride": "i64",
            "lead": "i32",
            "k": "i64",
            **dict.fromkeys(("step", "row_words", "vector"), "i32"),
        },
        "constants": {"BLOCK": 2048},
        "warps": 16,
    },
    "settle_classify_float": _classify("*fp32", 4),
    "settle_classify_half": _classify("*fp16", 8),
    "settle_classify_bfloat16": _classify("*bf16", 8),
    "settle_emit": {
        "kernel": settle_emit_kernel,
        "signature": {
            **_pointers("lengths", "bases"),
            "classes": "*i8",
            **_pointers("statistics", "out"),
            "width": "i32",
            "row_stride": "i64",
            "lead": "i32",
            "k": "i64",
            **dict.fromkeys(("chunks", "with_bases", "vector"), "i32"),
        },
        "constants": {"CHUNK": CHUNK, "RECORDS": 128},
        "warps": 8,
    },
}
