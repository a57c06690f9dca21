"""Triton kernels of the TriAttention ops. setup.py compiles them ahead of time; triattention.cu launches them.

Scoring takes up to three kernels: `score` reads the keys of a piece of a request (some tokens, one layer, one KV head)
and writes raw scores and, when they are to be normalised, their partial moments; `moments` merges those of a row;
`reduce` takes maxima over rows and the mean over layers. Pieces, the table of pools and the folded coefficients come
from the kernel `prepare` of triattention.cu. Everything is added up in a fixed order.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ALIGNMENT = tl.constexpr(
    128
)  # tokens: column 0 of the scratch is the last multiple of it at or before the first token
POOL_FIELDS = tl.constexpr(5)  # address, pages, and the strides of pages, heads and tokens
LOWEST = tl.constexpr(float("-inf"))
QUARTER = tl.constexpr(1.5707963267948966)  # of a turn
QUARTER_REST = tl.constexpr(6.123233995736766e-17)  # what float64 leaves of it


@triton.jit
def _cos_sin(angle):
    """fp32 cos and sin of float64 angles: whole quarter turns off in float64, Taylor's series for what is left."""
    quarters = tl.floor(angle * (1.0 / QUARTER) + 0.5)
    # Arguments of fma that are no tensors would become fp32 first.
    most = tl.full([1, 1], QUARTER, dtype=tl.float64)
    rest = tl.full([1, 1], QUARTER_REST, dtype=tl.float64)
    x = tl.fma(-quarters, rest, tl.fma(-quarters, most, angle)).to(tl.float32)
    y = x * x
    sin = (((y * (1 / 362880) - 1 / 5040) * y + 1 / 120) * y - 1 / 6) * y * x + x
    cos = (((y * (1 / 40320) - 1 / 720) * y + 1 / 24) * y - 1 / 2) * y + 1
    quadrant = quarters.to(tl.int64) & 3
    odd = (quadrant & 1) == 1
    cosine = tl.where(odd, sin, cos)
    sine = tl.where(odd, cos, sin)
    return tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine), tl.where(quadrant >= 2, -sine, sine)


@triton.jit
def mean_phase_kernel(
    positions,  # int32 [requests, words]: int32 or, in two words, int64
    omega,  # fp32 [bands]
    offsets,  # int64 [count]
    cosine,
    sine,
    words,
    bands,
    count,
    blocks,  # programs per request
    cos_row,
    cos_column,
    sin_row,
    sin_column,
    BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = (tl.program_id(0) // blocks).to(tl.int64)
    f = tl.program_id(0) % blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    position = tl.load(positions + request * words).to(tl.int64)
    if words == 2:
        position = (position & 0xFFFFFFFF) | (tl.load(positions + request * 2 + 1).to(tl.int64) << 32)
    frequency = tl.load(omega + f, mask=f < bands, other=0).to(tl.float64)
    cos_sum = tl.zeros([BLOCK_F], dtype=tl.float64)
    sin_sum = tl.zeros([BLOCK_F], dtype=tl.float64)
    for first in range(0, count, BLOCK_O):
        o = first + tl.arange(0, BLOCK_O)
        ahead = position + tl.load(offsets + o, mask=o < count, other=0)
        angle = ahead.to(tl.float64)[:, None] * frequency[None, :]
        cos, sin = _cos_sin(angle)
        counts = (o < count)[:, None]
        cos_sum += tl.sum(tl.where(counts, cos, 0.0).to(tl.float64), axis=0)
        sin_sum += tl.sum(tl.where(counts, sin, 0.0).to(tl.float64), axis=0)
    column = f.to(tl.int64)
    tl.store(
        cosine + request * cos_row + column * cos_column, (cos_sum / count).to(tl.float32), mask=f < bands
    )
    tl.store(sine + request * sin_row + column * sin_column, (sin_sum / count).to(tl.float32), mask=f < bands)


@triton.jit
def _load_keys(pointers, mask, KEY: tl.constexpr):
    """Keys as fp32, exactly. In bits, because no GPU has every one of these types."""
    bits = tl.load(pointers, mask=mask, other=0)
    if KEY == "fp32":
        value = bits
    elif KEY == "fp16":
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KEY == "bf16":
        value = (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        byte = bits.to(tl.uint8, bitcast=True).to(tl.uint32)
        magnitude = byte & 0x7F
        # Exponent and mantissa at fp32's places are 2^120 too small, also where the exponent is 0.
        value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        value = tl.where((byte & 0x80) != 0, -value, value)
    return value


@triton.jit
def _split(x):
    """What a tensor core sees of fp32 as TF32, and the rest. Not for infinity, whose rest is NaN, as its score."""
    high = (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _multiply(x, y, y_rest, total, SPLIT: tl.constexpr):
    """total + x @ (y + y_rest) in TF32, to fp32's accuracy. Without SPLIT, x is no wider than TF32."""
    if SPLIT:
        high, low = _split(x)
        total = tl.dot(low, y, total, input_precision="tf32")
        total = tl.dot(high, y_rest, total, input_precision="tf32")
        total = tl.dot(high, y, total, input_precision="tf32")
    else:
        total = tl.dot(x, y_rest, total, input_precision="tf32")
        total = tl.dot(x, y, total, input_precision="tf32")
    return total


@triton.jit
def _load_weights(pointers, f, member, bands):
    """a, b and c of BLOCK_H heads for the bands `f`, transposed and split."""
    used = member[:, None] & (f < bands)[None, :]
    a, a_rest = _split(tl.trans(tl.load(pointers + f[None, :], mask=used, other=0.0)))
    b, b_rest = _split(tl.trans(tl.load(pointers + (bands + f)[None, :], mask=used, other=0.0)))
    c, c_rest = _split(tl.trans(tl.load(pointers + (2 * bands + f)[None, :], mask=used, other=0.0)))
    return a, a_rest, b, b_rest, c, c_rest


@triton.jit
def _add_bands(
    total, pointers, good, f, bands, a, a_rest, b, b_rest, c, c_rest, KEY: tl.constexpr, HUGE: tl.constexpr
):
    """total + the share of the bands `f` in the scores of BLOCK_T tokens and BLOCK_H heads.

    With HUGE also where the square of a key is no float; equal bits elsewhere.
    """
    mask = good[:, None] & (f < bands)[None, :]
    real = _load_keys(pointers + f[None, :], mask, KEY)
    imag = _load_keys(pointers + (bands + f)[None, :], mask, KEY)
    if HUGE:
        huge = tl.maximum(tl.abs(real), tl.abs(imag)) > 1.0e18
        down = tl.where(huge, 5.421010862427522e-20, 1.0)  # 2^-64
        up = tl.where(huge, 1.8446744073709552e19, 1.0)
        norm = tl.sqrt(tl.fma(real * down, real * down, imag * down * (imag * down))) * up
    else:
        norm = tl.sqrt(tl.fma(real, real, imag * imag))
    total = _multiply(real, a, a_rest, total, KEY == "fp32")
    total = _multiply(imag, b, b_rest, total, KEY == "fp32")
    return _multiply(norm, c, c_rest, total, True)


@triton.jit
def _merge(count, mean, m2, other_count, other_mean, other_m2):
    """Moments of two samples in one, after Chan, Golub and LeVeque."""
    total = count + other_count
    weight = other_count / tl.maximum(total, 1.0)
    delta = other_mean - mean
    merged = tl.where(count > 0, mean + delta * weight, other_mean)
    spread = tl.where((count > 0) & (other_count > 0), delta * delta * (count * weight), 0.0)
    return total, tl.where(other_count > 0, merged, mean), m2 + other_m2 + spread


@triton.jit
def score_kernel(
    pools,  # int64 [layers, POOL_FIELDS]
    pieces,  # int32 [pieces, 4]: request (-1: none), first token, end, token of column 0
    coefficients,  # fp32 [requests, layers, q_heads, 3, bands]: a, b and c
    page_table,  # int32 [requests, page_table_stride]
    prompt_lengths,  # int32 [requests]
    scores,  # fp32 [requests, layers, q_heads or kv_heads, columns]
    moments,  # fp32 [pieces, 3, layers * q_heads]: count, mean, sum of squared deviations
    page_table_stride,
    columns,
    layers,
    kv_heads,
    group,  # query heads per KV head
    bands,
    tokens_per_page,
    width,
    normalize,
    KEY: tl.constexpr,
    VECTOR: tl.constexpr,  # every row of keys begins at a multiple of so many elements
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PARTS: tl.constexpr,  # 1 or 2 times BLOCK_F bands
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0) % kv_heads
    layer = tl.program_id(0) // kv_heads % layers
    piece = (tl.program_id(0) // kv_heads // layers).to(tl.int64)
    request = tl.load(pieces + piece * 4).to(tl.int64)
    if request >= 0:
        begin = tl.load(pieces + piece * 4 + 1)
        end = tl.load(pieces + piece * 4 + 2)
        base = tl.load(pieces + piece * 4 + 3)
        stored = tl.load(prompt_lengths + request).to(tl.int64) + width  # tokens before it have a column
        pool = pools + layer * POOL_FIELDS
        pages = tl.load(pool + 1)
        page_stride = tl.load(pool + 2)
        head_stride = tl.load(pool + 3)
        token_stride = tl.load(pool + 4)
        if KEY == "fp32":
            keys = tl.load(pool).to(tl.pointer_type(tl.float32))
        elif KEY == "e4m3":
            keys = tl.load(pool).to(tl.pointer_type(tl.int8))
        else:
            keys = tl.load(pool).to(tl.pointer_type(tl.int16))
        keys = tl.multiple_of(keys, 16 if VECTOR > 1 else 1)
        half = bands
        if VECTOR > 1:
            half = tl.multiple_of(bands // VECTOR * VECTOR, VECTOR)
        f = tl.arange(0, BLOCK_F)
        heads = tl.arange(0, BLOCK_H)
        q_heads = group * kv_heads
        for index in range((group + BLOCK_H - 1) // BLOCK_H):
            first_head = index * BLOCK_H
            last_head = tl.minimum(group, first_head + BLOCK_H)
            row = kv_head * group + first_head
            member = heads < last_head - first_head
            weights = coefficients + ((request * layers + layer) * q_heads + row) * 3 * half
            weights = tl.multiple_of(weights, 16 if VECTOR > 1 else 4)
            weights = weights + (heads * 3 * half)[:, None]
            a, a_rest, b, b_rest, c, c_rest = _load_weights(weights, f, member, half)
            if PARTS == 2:
                more_a, more_a_rest, more_b, more_b_rest, more_c, more_c_rest = _load_weights(
                    weights, BLOCK_F + f, member, half
                )
            count = tl.zeros([BLOCK_H], dtype=tl.float32)
            mean = tl.zeros([BLOCK_H], dtype=tl.float32)
            m2 = tl.zeros([BLOCK_H], dtype=tl.float32)
            for start in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
                token = start + tl.arange(0, BLOCK_T)
                place = token // tokens_per_page
                page = tl.load(page_table + request * page_table_stride + place, mask=token < end, other=-1)
                good = (page >= 0) & (page < pages)
                slot = token - place * tokens_per_page
                shift = (
                    page.to(tl.int64) * page_stride + slot.to(tl.int64) * token_stride + kv_head * head_stride
                )
                shift = tl.multiple_of(shift, [VECTOR])
                pointers = keys + shift[:, None]
                tile = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
                tile = _add_bands(tile, pointers, good, f, half, a, a_rest, b, b_rest, c, c_rest, KEY, False)
                if PARTS == 2:
                    tile = _add_bands(
                        *(tile, pointers, good, BLOCK_F + f, half),
                        *(more_a, more_a_rest, more_b, more_b_rest, more_c, more_c_rest, KEY, False),
                    )
                there = good[:, None] & member[None, :]
                finite = there & (tl.abs(tile) < float("inf"))
                if KEY == "bf16" or KEY == "fp32":
                    lost = tl.sum(tl.sum((there & ~finite).to(tl.int32), axis=1), axis=0)
                    if lost > 0:
                        tile = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
                        tile = _add_bands(
                            tile, pointers, good, f, half, a, a_rest, b, b_rest, c, c_rest, KEY, True
                        )
                        if PARTS == 2:
                            tile = _add_bands(
                                *(tile, pointers, good, BLOCK_F + f, half),
                                *(more_a, more_a_rest, more_b, more_b_rest, more_c, more_c_rest, KEY, True),
                            )
                        finite = there & (tl.abs(tile) < float("inf"))
                tile = tl.where(finite, tile, LOWEST)
                column = (token - base).to(tl.int64)
                written = (token < end) & (token < stored)
                if normalize != 0:
                    tile_rows = ((request * layers + layer) * q_heads + row + heads).to(tl.int64) * columns
                    use_tile = written[:, None] & member[None, :]
                    tl.store(scores + (tile_rows[None, :] + column[:, None]), tile, mask=use_tile)
                    # About the lowest score of the tile, so that equal scores deviate by exactly 0.
                    number = tl.sum(finite.to(tl.float32), axis=0)
                    lowest = tl.min(tl.where(finite, tile, float("inf")), axis=0)
                    lowest = tl.where(number > 0, lowest, 0.0)
                    above = tl.where(finite, tile - lowest[None, :], 0.0)
                    off = tl.sum(above, axis=0) / tl.maximum(number, 1.0)
                    deviation = tl.where(finite, above - off[None, :], 0.0)
                    spread = tl.sum(deviation * deviation, axis=0)
                    count, mean, m2 = _merge(count, mean, m2, number, lowest + off, spread)
                else:
                    best_row = ((request * layers + layer) * kv_heads + kv_head).to(tl.int64) * columns
                    best = tl.max(tile, axis=1)
                    if index > 0:
                        best = tl.maximum(
                            best, tl.load(scores + (best_row + column), mask=written, other=LOWEST)
                        )
                    tl.store(scores + (best_row + column), best, mask=written)
            if normalize != 0:
                rows = (layers * q_heads).to(tl.int64)
                to = piece * 3 * rows + layer * q_heads + row + heads
                tl.store(moments + to, count, mask=member)
                tl.store(moments + rows + to, mean, mask=member)
                tl.store(moments + 2 * rows + to, m2, mask=member)


@triton.jit
def moments_kernel(
    moments,  # fp32 [pieces, 3, rows]
    first_pieces,  # int32 [requests + 1]
    normals,  # fp32 [requests, 2, rows]: mean, 1 / max(deviation, 1e-6)
    rows,
    blocks,  # programs per request
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    count = tl.zeros([BLOCK_R], dtype=tl.float32)
    mean = tl.zeros([BLOCK_R], dtype=tl.float32)
    m2 = tl.zeros([BLOCK_R], dtype=tl.float32)
    end = tl.load(first_pieces + request + 1)
    for first in range(tl.load(first_pieces + request), end, BLOCK_P):
        piece = first + tl.arange(0, BLOCK_P)
        mask = (piece < end)[:, None] & (row < rows)[None, :]
        pointers = moments + (piece.to(tl.int64) * 3 * rows)[:, None] + row[None, :]
        n = tl.load(pointers, mask=mask, other=0.0)
        means = tl.load(pointers + rows, mask=mask, other=0.0)
        spreads = tl.load(pointers + 2 * rows, mask=mask, other=0.0)
        number = tl.sum(n, axis=0)
        lowest = tl.min(tl.where(n > 0, means, float("inf")), axis=0)
        lowest = tl.where(number > 0, lowest, 0.0)
        above = tl.where(n > 0, means - lowest[None, :], 0.0)
        off = tl.sum(n * above, axis=0) / tl.maximum(number, 1.0)
        deviation = above - off[None, :]
        spread = tl.sum(tl.where(n > 0, spreads + n * deviation * deviation, 0.0), axis=0)
        count, mean, m2 = _merge(count, mean, m2, number, lowest + off, spread)
    variance = m2 / tl.maximum(count, 1.0)
    inverse = 1.0 / tl.maximum(tl.sqrt_rn(variance), 1e-6)
    known = (tl.abs(mean) < float("inf")) & (variance < float("inf"))  # beyond fp32 everything is the mean
    to = normals + request * 2 * rows + row
    tl.store(to, tl.where(known, mean, 0.0), mask=row < rows)
    tl.store(to + rows, tl.where(known, inverse, 0.0), mask=row < rows)


@triton.jit
def reduce_kernel(
    scores,  # fp32 [requests, score_rows, columns]
    normals,  # fp32 [requests, 2, score_rows]
    prompt_lengths,  # int32 [requests]
    source_lengths,  # int32 [requests]
    out,
    out_request,
    out_row,
    out_column,
    columns,
    tokens,  # that the page table can name
    score_rows,
    inner,  # rows that a maximum is taken over
    planes,  # maxima that a mean is taken over
    plane_rows,  # rows between them
    out_rows,
    width,
    blocks,  # programs per row of the result
    normalize,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr = False,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0) // blocks
    request = (line // out_rows).to(tl.int64)
    row = line % out_rows
    prompt = tl.load(prompt_lengths + request).to(tl.int64)
    source = tl.load(source_lengths + request).to(tl.int64)
    first = tl.maximum(prompt, 0)
    last = tl.minimum(tl.minimum(source, tokens), prompt + width)
    # Blocks begin at multiples of ALIGNMENT tokens, as the columns of the scratch do.
    start = prompt - (prompt & (ALIGNMENT - 1)) + (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C
    token = start + tl.arange(0, BLOCK_C)
    valid = (token >= first) & (token < last)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    if (start < last) & (start + BLOCK_C > first):
        column = tl.multiple_of(start - (first - (first & (ALIGNMENT - 1))), BLOCK_C) + tl.arange(0, BLOCK_C)
        length = tl.multiple_of(columns // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        for plane in range(planes):
            best = tl.full([BLOCK_C], LOWEST, dtype=tl.float32)
            for i in range(0, inner, BLOCK_R):
                step = i + tl.arange(0, BLOCK_R)
                member = step < inner
                score_row = plane * plane_rows + row * inner + step
                from_row = (request * score_rows + score_row) * length
                pointers = scores + (from_row[:, None] + column[None, :])
                # Columns that are not valid hold anything; rows are that long.
                value = tl.load(pointers, mask=member[:, None], other=LOWEST)
                if normalize != 0:
                    normal = normals + request * 2 * score_rows + score_row
                    mean = tl.load(normal, mask=member, other=0.0)
                    inverse = tl.load(normal + score_rows, mask=member, other=0.0)
                    z = (value - mean[:, None]) * inverse[:, None]
                    value = tl.where(value > LOWEST, z, LOWEST)
                best = tl.maximum(best, tl.max(value, axis=0))
            total += best
    j = token - prompt
    result = tl.where(valid, total / planes, LOWEST)
    to = out + request * out_request + row.to(tl.int64) * out_row + j * out_column
    tl.store(to, result, mask=(j >= 0) & (j < width))


def _score(key: str, vector: int, bands: int) -> dict[str, object]:
    """A scorer of up to so many bands, from keys of so many elements at a time."""
    wide = bands > 64  # fewer tokens at a time, as shared memory is short
    return {
        "kernel": score_kernel,
        "signature": {
            "pools": "*i64",
            "pieces": "*i32",
            "coefficients": "*fp32",
            **dict.fromkeys(("page_table", "prompt_lengths"), "*i32"),
            **dict.fromkeys(("scores", "moments"), "*fp32"),
            **dict.fromkeys(("page_table_stride", "columns"), "i64"),
            **dict.fromkeys(
                ("layers", "kv_heads", "group", "bands", "tokens_per_page", "width", "normalize"), "i32"
            ),
        },
        "aligned": ("coefficients", "scores"),
        "constants": {
            "KEY": key,
            "VECTOR": vector,
            "BLOCK_T": 32 if wide else 64,
            "BLOCK_F": min(bands, 64),
            "PARTS": 2 if wide else 1,
            "BLOCK_H": 8,
            "STAGES": 1 if bands > 32 and key == "fp32" else 2,
        },
        "warps": 2 if wide else 4,
        "registers": 168 if wide else 128,
    }


# What kernels/common/aot.py compiles: signatures in argument order, constants by name. The scorer comes for each key
# dtype with rows of 16-byte vectors and up to 32, 64 or 128 bands, and with rows that may begin anywhere.
AOT = {
    "mean_phase": {
        "kernel": mean_phase_kernel,
        "signature": {
            "positions": "*i32",
            "omega": "*fp32",
            "offsets": "*i64",
            **dict.fromkeys(("cosine", "sine"), "*fp32"),
            **dict.fromkeys(("words", "bands", "count", "blocks"), "i32"),
            **dict.fromkeys(("cos_row", "cos_column", "sin_row", "sin_column"), "i64"),
        },
        "constants": {"BLOCK_O": 32, "BLOCK_F": 16},
        "warps": 4,
    },
    **{
        f"triattention_{key}_{bands}": _score(key, vector, bands)
        for (key, vector), bands in itertools.product(
            {"bf16": 8, "fp16": 8, "fp32": 4, "e4m3": 16}.items(), (32, 64, 128)
        )
    },
    **{f"triattention_{key}_any": _score(key, 1, 128) for key in ("bf16", "fp16", "fp32", "e4m3")},
    "triattention_moments": {
        "kernel": moments_kernel,
        "signature": {
            "moments": "*fp32",
            "first_pieces": "*i32",
            "normals": "*fp32",
            **dict.fromkeys(("rows", "blocks"), "i32"),
        },
        "constants": {"BLOCK_P": 16, "BLOCK_R": 64},
        "warps": 4,
    },
    "triattention_reduce": {
        "kernel": reduce_kernel,
        "signature": {
            **dict.fromkeys(("scores", "normals"), "*fp32"),
            **dict.fromkeys(("prompt_lengths", "source_lengths"), "*i32"),
            "out": "*fp32",
            **dict.fromkeys(("out_request", "out_row", "out_column", "columns", "tokens"), "i64"),
            **dict.fromkeys(("score_rows", "inner", "planes", "plane_rows", "out_rows"), "i32"),
            **dict.fromkeys(("width", "blocks", "normalize"), "i32"),
        },
        "aligned": ("scores",),
        "constants": {"BLOCK_R": 64, "BLOCK_C": 32},
        "warps": 4,
    },
}
