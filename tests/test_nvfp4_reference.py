"""The NVFP4 reference against a slow oracle in exact rational arithmetic.

The oracle knows formats only as (significant bits, finest quantum, largest value) and rounds `Fraction`s; it
shares no line with the reference.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc import PageBuffer, PageLayout
from kvc.reference import nvfp4 as reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
CANONICAL_NAN = {
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC00000,
    torch.float8_e4m3fn: 0x7F,
}
# Significant bits, exponent of the finest quantum, largest finite value.
FORMATS = {
    torch.float16: (11, -24, Fraction(65504)),
    torch.bfloat16: (8, -133, Fraction(255 << 120)),
    torch.float32: (24, -149, Fraction((2**24 - 1) << 104)),
    torch.float8_e4m3fn: (4, -9, Fraction(448)),
}
E2M1 = [Fraction(m, 2) for m in (0, 1, 2, 3, 4, 6, 8, 12)]
MIDPOINTS = [(a + b) / 2 for a, b in pairwise(E2M1)]
SCALES = [1.0, 0.5, 0.37, 3.0e-5, 1 / 3, 2.0**-100, 2.0**100]


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(BITS.get(t.dtype, torch.uint8))


def rounded(value: Fraction, dtype: torch.dtype) -> Fraction:
    """Nearest even in `dtype`; too large becomes the largest, which every later step saturates alike."""
    if value == 0:
        return value
    precision, finest, largest = FORMATS[dtype]
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - precision + 1, finest)
    magnitude = min(round(magnitude / quantum) * quantum, largest)
    return magnitude if value > 0 else -magnitude


def fl(value: Fraction) -> Fraction:
    return rounded(value, torch.float32)


def fp32(value: float) -> Fraction:
    return fl(Fraction(value))


def e4m3_float(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    magnitude = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return math.copysign(magnitude, -1.0 if byte & 0x80 else 1.0)


E4M3_BYTE = {Fraction(e4m3_float(byte)): byte for byte in range(0x7F)}


def oracle_encode(group: list[float], global_scale: float) -> tuple[int, list[int]]:
    if not all(map(math.isfinite, group)):
        return 0x7F, [0] * 16
    g = fp32(global_scale)
    amax = max(abs(Fraction(x)) for x in group)
    s = rounded(fl(fl(amax / 6) * fl(1 / g)), torch.float8_e4m3fn)
    if s == 0:
        return 0, [0] * 16
    r = fl(1 / fl(s * g))
    codes = []
    for x in group:
        y = fl(fl(fl(Fraction(x) * r) + 192) - 192)
        code = min(range(8), key=lambda c: (abs(E2M1[c] - min(abs(y), Fraction(6))), c % 2))
        codes.append(code | (8 if math.copysign(1.0, x) < 0 else 0))
    return E4M3_BYTE[s], codes


def oracle_value(code: int) -> float:
    return math.copysign(float(E2M1[code & 7]), -1.0 if code & 8 else 1.0)


def oracle_rest(group: list[float], scale: int, codes: list[int], global_scale: float) -> list[float]:
    """What the first component leaves over, as the second one's input."""
    s = e4m3_float(scale)
    if math.isnan(s):
        return [math.nan] * 16
    d = fl(Fraction(s) * fp32(global_scale))
    rest = []
    for x, code in zip(group, codes, strict=True):
        main = float(fl(E2M1[code & 7] * d))
        main = math.copysign(main, -1.0 if code & 8 else 1.0)
        e = fl(Fraction(x) - Fraction(main))
        # Equal values cancel to a zero whose sign floats know and fractions do not.
        rest.append(float(e) if e else x - main)
    return rest


def oracle_decode(components: list[tuple[int, int]], global_scale: float, dtype: torch.dtype) -> float:
    """(scale byte, code) of one element's components to its value; float64 holds these products and sums."""
    terms = [oracle_value(code) * e4m3_float(scale) for scale, code in components]
    total = sum(terms[1:], start=terms[0]) * float(fp32(global_scale))
    if math.isnan(total):
        return math.nan
    return math.copysign(float(rounded(fl(Fraction(total)), dtype)), total)


def expected_tensor(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    exact = bits(torch.tensor(values, dtype=torch.float64).to(dtype))
    nan = torch.tensor([math.isnan(v) for v in values])
    return exact.masked_fill(nan, CANONICAL_NAN[dtype])


def oracle_row(
    row: list[float], global_scale: float, quantized: tuple[int, int], residual: tuple[int, int]
) -> tuple[bytes, bytes]:
    """Packed data and scales of one row."""
    data, scales = bytearray(), bytearray()
    for at in range(quantized[0], sum(quantized), 16):
        group = row[at : at + 16]
        for component in range(1 + (residual[0] <= at < sum(residual))):
            scale, codes = oracle_encode(group, global_scale)
            scales.append(scale)
            data += bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
            if component == 0:
                group = oracle_rest(group, scale, codes, global_scale)
    return bytes(data), bytes(scales)


def check_rows(
    x: torch.Tensor,
    global_scale: float = 1.0,
    quantized: tuple[int, int] | None = None,
    residual: tuple[int, int] = (0, 0),
) -> None:
    """Rows `[n, R]` through both directions of the reference, every byte against the oracle."""
    start, elements = quantized or (0, x.shape[-1])
    data, scales, lossless = reference.nvfp4_quantize(x, global_scale, start, elements, *residual)
    rows = x.double().tolist()
    packed = [oracle_row(row, global_scale, (start, elements), residual) for row in rows]
    assert data.tolist() == [list(d) for d, _ in packed]
    assert scales.tolist() == [list(s) for _, s in packed]
    kept = torch.cat((bits(x)[:, :start], bits(x)[:, start + elements :]), 1)
    assert torch.equal(bits(lossless), kept)

    back = reference.nvfp4_dequantize(data, scales, lossless, x.dtype, global_scale, start, *residual)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    values = []
    for d, s in packed:
        codes = [code for byte in d for code in (byte & 15, byte >> 4)]
        at = 0
        for position in range(start, start + elements, 16):
            count = 1 + (residual[0] <= position < sum(residual))
            values += [
                oracle_decode(
                    [(s[at + c], codes[16 * (at + c) + i]) for c in range(count)], global_scale, x.dtype
                )
                for i in range(16)
            ]
            at += count
    expected = bits(x).clone()
    expected[:, start : start + elements] = expected_tensor(values, x.dtype).view(-1, elements)
    assert torch.equal(bits(back), expected)


def neighbours(value: float, dtype: torch.dtype) -> list[float]:
    """`value` and its two neighbours in `dtype`; the value must be exact in it."""
    t = torch.tensor([value]).to(dtype)
    assert t.item() == value
    pattern = bits(t).item()
    return [bits(t).clone().fill_(pattern + step).view(dtype).item() for step in (-1, 0, 1)]


def exact_in(value: float, dtype: torch.dtype) -> bool:
    return torch.tensor([value]).to(dtype).item() == value


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_midpoints(dtype: torch.dtype) -> None:
    groups = []
    for scale in (1.0, 0.125, 1.125, 1.875, 2.0**-6, 2.0**-9, 240.0):
        for midpoint in (float(m) * scale for m in MIDPOINTS):
            if exact_in(midpoint, dtype) and exact_in(6 * scale, dtype):
                near = neighbours(midpoint, dtype)
                groups.append([6 * scale, *near, *(-x for x in near), *[0.0] * 9])
    assert len(groups) >= 20
    check_rows(torch.tensor(groups, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=dtype_id)
def test_exact_quotient_without_global_scale(dtype: torch.dtype) -> None:
    """The promise of step 4: every finite value gets the code of its real quotient by the scale."""
    everything = torch.arange(2 ** (8 * dtype.itemsize - 1)).to(BITS.get(dtype, torch.uint8)).view(dtype)
    magnitudes = everything[everything.float().isfinite()].double()
    for byte in (*range(1, 20), *range(0x38, 0x40), *range(0x77, 0x7F)):
        scale = e4m3_float(byte)
        x = magnitudes[magnitudes <= 6 * scale]
        top = torch.tensor(6 * scale, dtype=torch.float64).to(dtype).double()
        if top == 0 or reference._e4m3(top.float() / torch.tensor(6.0)).item() != byte:
            continue
        x = torch.cat((x, x.new_zeros(-len(x) % 15))).view(-1, 15)
        x = torch.cat((x, top.expand(len(x), 1)), 1)
        data, scales, _ = reference.nvfp4_quantize(x.to(dtype))
        assert (scales == byte).all()
        # Products of a midpoint and a scale are exact in float64; odd midpoints go up, even ones down.
        code = torch.zeros(x.shape, dtype=torch.int64)
        for i, midpoint in enumerate(MIDPOINTS):
            code += (x >= float(midpoint) * scale) if i % 2 else (x > float(midpoint) * scale)
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
        assert torch.equal(codes.long(), code)


@pytest.mark.parametrize("global_scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_random_groups(dtype: torch.dtype, global_scale: float) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(12, 64, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-12, 12, (12, 1), generator=generator)
    if dtype in (torch.float32, torch.bfloat16):
        x *= global_scale
    x = x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x.clamp(-60000, 60000)
    check_rows(x.to(dtype), global_scale, (16, 48), (32, 16))


def test_midpoints_under_a_global_scale_are_ties_within_2_to_minus_17() -> None:
    g = 0.37
    d = float(fl(fp32(g) * 1))
    row = [6 * d, *(float(m) * d * (1 + sign * 2.0**-20) for m in MIDPOINTS for sign in (-1, 1)), 0.0]
    x = torch.tensor([row], dtype=torch.float32)
    check_rows(x, g)
    data, _, _ = reference.nvfp4_quantize(x, g)
    codes = torch.stack((data & 15, data >> 4), -1).flatten().tolist()
    assert codes == [7, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 0]


@pytest.mark.parametrize(
    ("amax", "global_scale", "scale"),
    [
        ("0x1.3c1432p+6", "0x1.252cb4p+3", 1.375),
        ("0x1.6b8174p+5", "0x1.982590p+2", 1.125),
        ("0x1.097a80p+5", "0x1.2a14c6p+2", 1.125),
    ],
)
def test_block_scale_near_a_tie_needs_every_rounding(amax: str, global_scale: str, scale: float) -> None:
    """amax / (6 G), (amax / 6) / G and amax * fl(1 / 6) * fl(1 / G) would all give the neighbouring scale."""
    x = torch.tensor([[float.fromhex(amax), *[0.0] * 15]])
    g = float.fromhex(global_scale)
    check_rows(x, g)
    assert e4m3_float(int(reference.nvfp4_quantize(x, g)[1])) == scale


@pytest.mark.parametrize(
    ("value", "global_scale", "code"),
    [
        ("0x1.d99a58p-2", 0.37, 3),
        ("0x1.d999cap+0", 0.37, 7),
        ("0x1.555802p-4", 1 / 3, 1),
        ("0x1.797bc6p-16", 3.0e-5, 2),
    ],
)
def test_quotient_near_a_snap_needs_the_reciprocal(value: str, global_scale: float, code: int) -> None:
    """Dividing by d instead of multiplying with fl(1 / d) would give the neighbouring code."""
    x = torch.tensor([[float.fromhex(value), 6 * float(fp32(global_scale)), *[0.0] * 14]])
    check_rows(x, global_scale)
    data, scales, _ = reference.nvfp4_quantize(x, global_scale)
    assert scales.item() == 0x38
    assert int(data[0, 0]) & 15 == code


INF, NAN = math.inf, math.nan
TINY = 6 * 2.0**-10
SPECIAL_GROUPS = {
    "zeros": [0.0] * 16,
    "negative_zeros": [-0.0] * 16,
    "signed_zeros_beside_a_value": [1.0, *[-0.0, 0.0] * 7, -0.0],
    "nan": [1.0, NAN, *[-2.0] * 14],
    "negative_nan": [-NAN, *[1.0] * 15],
    "inf": [*[1.0] * 15, INF],
    "negative_inf": [*[-0.0] * 15, -INF],
    "largest_that_vanishes": [TINY, *[-TINY] * 15],
    "just_above_vanishing": [TINY * (1 + 2.0**-7), *[-TINY] * 15],
    "smallest_scale": [6 * 2.0**-9, *[-(2.0**-9), 2.0**-10] * 7, 0.0],
    "subnormal_scale_tie_down": [6 * 2.5 * 2.0**-9, *[0.01, -0.02, 0.005] * 5],
    "subnormal_scale_tie_up": [6 * 3.5 * 2.0**-9, *[0.01, -0.02, 0.005] * 5],
    "largest_subnormal_scale": [6 * 7.5 * 2.0**-9, *[0.01, -0.02, 0.005] * 5],
    "largest_scale": [2688.0, *[-2688.0, 1344.0, 224.0] * 5],
    "scale_tie_below_saturation": [2784.0, *[-2688.0, 1344.0, 224.0] * 5],
    "saturated": [60000.0, -60000.0, *[2689.0, -2500.0] * 7],
    "fp32_extremes": [3.4028234e38, -3.4028234e38, *[1e30, -1e-30] * 7],
    "fp32_subnormals": [*[1e-45, -1e-45] * 8],
}


@pytest.mark.parametrize("residual", [(0, 0), (0, 16)], ids=["single", "residual"])
@pytest.mark.parametrize("name", SPECIAL_GROUPS)
def test_special_groups(name: str, residual: tuple[int, int]) -> None:
    group = SPECIAL_GROUPS[name]
    for dtype in DTYPES:
        x = torch.tensor([group], dtype=torch.float32).to(dtype)
        for global_scale in SCALES:
            check_rows(x, global_scale, residual=residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_bad_values_poison_their_group_only(dtype: torch.dtype) -> None:
    x = torch.ones(3, 48).to(dtype)
    x.view(BITS.get(dtype, torch.uint8))[1, 20] = -1 if dtype != torch.float8_e4m3fn else 0xFF
    data, scales, lossless = reference.nvfp4_quantize(x)
    assert scales.tolist() == [[0x23] * 3, [0x23, 0x7F, 0x23], [0x23] * 3]
    assert data[1, 8:16].tolist() == [0] * 8
    back = reference.nvfp4_dequantize(data, scales, lossless, dtype)
    nan = bits(back) == CANONICAL_NAN[dtype]
    assert nan[1, 16:32].all()
    assert nan.sum() == 16


@pytest.mark.parametrize("global_scale", [1.0, 0.37, 2.0**100])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_decode_of_every_scale_and_code(dtype: torch.dtype, global_scale: float) -> None:
    """All 256 scale bytes, negative and NaN ones too, times all 16 codes, alone and as one of two."""
    data = torch.tensor(
        [[low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2), strict=True)]]
    )
    data = data.to(torch.uint8).expand(256, 8)
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(256, 1)
    none = torch.empty(256, 0, dtype=dtype)
    got = reference.nvfp4_dequantize(data, scales, none, dtype, global_scale)
    values = [oracle_decode([(s, c)], global_scale, dtype) for s in range(256) for c in range(16)]
    assert torch.equal(bits(got).flatten(), expected_tensor(values, dtype))

    second = (scales.flip(0).int() * 7 % 256).to(torch.uint8)
    both = (torch.cat((data, data.flip(1)), 1), torch.cat((scales, second), 1))
    got = reference.nvfp4_dequantize(*both, none, dtype, global_scale, 0, 0, 16)
    codes = both[0][0, 8:].tolist()
    swapped = [code for byte in codes for code in (byte & 15, byte >> 4)]
    values = [
        oracle_decode([(s, c), (int(second[s]), swapped[c])], global_scale, dtype)
        for s in range(256)
        for c in range(16)
    ]
    assert torch.equal(bits(got).flatten(), expected_tensor(values, dtype))


def test_decode_keeps_the_sign_of_zero() -> None:
    data = torch.tensor([[0x80] * 8], dtype=torch.uint8)
    none = torch.empty(1, 0)
    for scale, negative in ((0x38, [False, True]), (0xB8, [True, False]), (0x00, [False, True])):
        scales = torch.tensor([[scale]], dtype=torch.uint8)
        row = reference.nvfp4_dequantize(data, scales, none, torch.float32)
        assert (row == 0).all()
        assert row.signbit().tolist() == [negative * 8]


def test_block_scale_conversion_around_every_tie() -> None:
    values = sorted(E4M3_BYTE)
    points = [*values, *((a + b) / 2 for a, b in pairwise(values))]
    points += [Fraction(448 + n) for n in (1, 15, 16, 17, 31, 32, 33, 1000)]
    around = torch.tensor([float(p) for p in points])
    up = torch.nextafter(around, torch.tensor(math.inf))
    down = torch.nextafter(around, torch.tensor(0.0))
    x = torch.cat((around, up, down))
    expected = [E4M3_BYTE[rounded(Fraction(v), torch.float8_e4m3fn)] for v in x.tolist()]
    assert reference._e4m3(x).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rounding_to_the_destination(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    pattern = torch.randint(-(2**31), 2**31, (3000,), generator=generator).to(torch.int32)
    x = pattern.view(torch.float32)
    near_one = torch.randn(1000, generator=generator) * 2.0 ** torch.randint(
        -20, 20, (1000,), generator=generator
    )
    edges = torch.tensor([65503.9, 65504.0, 65519.0, 65520.0, 447.9, 463.9, 464.0, 480.0, 2.0**-10, 2.0**-25])
    x = torch.cat((x[x.isfinite()], near_one, edges, -edges, torch.tensor([0.0, -0.0, math.nan])))
    values = [v if math.isnan(v) else float(rounded(Fraction(v), dtype)) for v in x.tolist()]
    values = [v if math.isnan(v) else math.copysign(v, x) for v, x in zip(values, x.tolist(), strict=True)]
    assert torch.equal(bits(reference._round(x, dtype)), expected_tensor(values, dtype))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    group=st.lists(st.floats(width=32), min_size=16, max_size=16),
    scale=st.floats(min_value=2.0**-100, max_value=2.0**100, width=32),
    residual=st.booleans(),
)
def test_any_fp32_group(group: list[float], scale: float, residual: bool) -> None:
    check_rows(torch.tensor([group], dtype=torch.float32), scale, residual=(0, 16 * residual))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    group=st.lists(st.integers(0, 2**16 - 1), min_size=32, max_size=32),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    scale=st.sampled_from(SCALES),
)
def test_any_16_bit_group(group: list[int], dtype: torch.dtype, scale: float) -> None:
    raw = struct.unpack("<32h", struct.pack("<32H", *group))
    check_rows(torch.tensor([raw], dtype=torch.int16).view(dtype), scale, residual=(16, 16))


def test_global_scale_is_rounded_to_fp32() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    exact = struct.unpack("f", struct.pack("f", 0.1))[0]
    assert exact != 0.1
    for a, b in zip(reference.nvfp4_quantize(x, 0.1), reference.nvfp4_quantize(x, exact), strict=True):
        assert torch.equal(a, b)


def test_default_dtype_changes_nothing() -> None:
    x = torch.randn(4096, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    expected = reference.nvfp4_quantize(x, 0.3, 0, 64, 0, 64)
    back = reference.nvfp4_dequantize(*expected, torch.float32, 0.3, 0, 0, 64)
    torch.set_default_dtype(torch.float64)
    try:
        got = reference.nvfp4_quantize(x, 0.3, 0, 64, 0, 64)
        same = reference.nvfp4_dequantize(*expected, torch.float32, 0.3, 0, 0, 64)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(same, back)


def test_byte_order_of_a_row() -> None:
    """Groups of 1.0, 2.0 (two components, nothing left over) and 4.0 between lossless ends."""
    row = torch.cat([torch.full((16,), v) for v in (9.0, 6.0, 12.0, 24.0, 7.0)]).view(1, 80)
    row[0, 17] = -1.0
    data, scales, lossless = reference.nvfp4_quantize(row, 1.0, 16, 48, 32, 16)
    assert scales.tolist() == [[0x38, 0x40, 0x00, 0x48]]
    assert data.tolist() == [[0xA7, *[0x77] * 7, *[0x77] * 8, *[0] * 8, *[0x77] * 8]]
    assert lossless.tolist() == [[9.0] * 16 + [7.0] * 16]


def test_two_components_are_worth_it() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    single = reference.nvfp4_dequantize(*reference.nvfp4_quantize(x), torch.bfloat16)
    both = reference.nvfp4_dequantize(
        *reference.nvfp4_quantize(x, 1.0, 0, -1, 0, 512), torch.bfloat16, 1.0, 0, 0, 512
    )
    single_error = (single.float() - x.float()).pow(2).mean().sqrt().item()
    both_error = (both.float() - x.float()).pow(2).mean().sqrt().item()
    assert 0.08 < single_error < 0.11
    assert both_error < single_error / 8


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_second_trip_changes_nothing(dtype: torch.dtype) -> None:
    """With normal block scales and no global scale: the same bytes from the second trip on."""
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    first = reference.nvfp4_quantize(x)
    assert (first[1] >= 0x08).all()
    once = reference.nvfp4_dequantize(*first, dtype)
    second = reference.nvfp4_quantize(once)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(bits(reference.nvfp4_dequantize(*second, dtype)), bits(once))


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (32,), (2, 3, 1, 48)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    data, scales, lossless = reference.nvfp4_quantize(x, 1.0, 16)
    outer, width = shape[:-1], shape[-1]
    assert data.shape == (*outer, (width - 16) // 2)
    assert scales.shape == (*outer, (width - 16) // 16)
    assert lossless.shape == (*outer, 16)
    back = reference.nvfp4_dequantize(data, scales, lossless, torch.float32, 1.0, 16)
    assert back.shape == shape
    assert torch.equal(back[..., :16], x[..., :16])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_strided_rows(dtype: torch.dtype) -> None:
    base = torch.randn(6, 5, 100, generator=torch.Generator().manual_seed(5)).to(dtype)
    view = base.transpose(0, 1)[:, ::2, 3:83]
    dense = reference.nvfp4_quantize(view.contiguous(), 1.0, 16, 48, 48, 16)
    strided = reference.nvfp4_quantize(view, 1.0, 16, 48, 48, 16)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(dense, strided, strict=True))


def oracle_page(layout: PageLayout, slots: list[list[bytes]], slot: int) -> bytes:
    """The cold page of hot slot `slot`, byte by byte; `slots[pool][slot]` are raw bytes."""
    page = bytearray()
    for layer in layout.layers:
        data, rest, copied = bytearray(), bytearray(), bytearray()
        for b in layer:
            raw = slots[b.pool][slot][b.offset : b.offset + b.nbytes]
            if b.transform == "copy":
                copied += raw
                continue
            assert b.quantized_range is not None
            row_bytes = b.row_elements * b.dtype.itemsize
            before, after = (at * b.dtype.itemsize for at in (b.quantized_range[0], sum(b.quantized_range)))
            scales, lossless = bytearray(), bytearray()
            for at in range(0, len(raw), row_bytes):
                row = torch.frombuffer(bytearray(raw[at : at + row_bytes]), dtype=torch.uint8).view(b.dtype)
                packed = oracle_row(
                    row.double().tolist(), b.global_scale, b.quantized_range, b.residual_range
                )
                data += packed[0]
                scales += packed[1]
                lossless += raw[at : at + before] + raw[at + after : at + row_bytes]
            rest += scales + lossless
        page += data + rest + copied
        page += bytes(-len(page) % 16)
    return bytes(page)


def random_pool(slots: int, stride: int, nbytes: int, seed: int) -> torch.Tensor:
    """Finite and not so finite halves: uint8 `[slots, nbytes]` in rows `stride` bytes apart."""
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randn(slots, -(-stride // 2), generator=generator).half()
    halves[torch.rand(halves.shape, generator=generator) < 0.01] = math.nan
    return halves.view(torch.uint8)[:, :stride].contiguous()[:, :nbytes]


MIXED = PageLayout(
    [
        [
            PageBuffer(
                0, 3, 64, torch.float16, quantized_range=(16, 32), residual_range=(32, 16), global_scale=0.3
            ),
            PageBuffer.copy(2, 5, offset=3),
            PageBuffer(1, 5, 16, torch.float8_e4m3fn, offset=16),
        ],
        [PageBuffer.copy(2, 1, offset=1)],
        [
            PageBuffer(1, 1, 32, torch.float32, offset=112, quantized_range=(0, 16)),
            PageBuffer(0, 2, 48, torch.bfloat16, offset=384, residual_range=(0, 48)),
        ],
    ]
)


def mixed_pools() -> list[torch.Tensor]:
    return [random_pool(4, 592, 592, 0), random_pool(5, 272, 240, 1), random_pool(4, 13, 9, 2)]


def test_pages_against_the_format() -> None:
    pools = mixed_pools()
    raw = [[bytes(slot) for slot in pool.numpy()] for pool in pools]
    memory = torch.full((6, MIXED.cold_page_bytes + 3), 0xA5, dtype=torch.uint8)
    cold = memory[:, 1:-2]
    pairs = torch.tensor([[4, 2], [0, 3], [5, 2], [1, 0]], dtype=torch.int32)
    reference.encode_pages_(cold, pools, pairs, MIXED)
    written = set()
    for dst, src in pairs.tolist():
        assert bytes(cold[dst].numpy()) == oracle_page(MIXED, raw, src)
        written.add(dst)
    assert (memory[:, [0, -2, -1]] == 0xA5).all()
    assert (memory[[slot for slot in range(6) if slot not in written]] == 0xA5).all()


def test_decoded_pages_rebuild_their_buffers_and_nothing_else() -> None:
    pools = mixed_pools()
    cold = torch.zeros(2, MIXED.cold_page_bytes, dtype=torch.uint8)
    reference.encode_pages_(cold, pools, torch.tensor([[1, 3]], dtype=torch.int32), MIXED)
    fresh = [torch.full_like(pool, 0x5A) for pool in pools]
    untouched = [torch.ones(pool.shape, dtype=torch.bool) for pool in pools]
    reference.decode_pages_(fresh, cold, torch.tensor([[2, 1]], dtype=torch.int32), MIXED)
    for layer in MIXED.layers:
        for b in layer:
            span = slice(b.offset, b.offset + b.nbytes)
            untouched[b.pool][2, span] = False
            source, result = pools[b.pool][3, span].clone(), fresh[b.pool][2, span].clone()
            if b.transform == "nvfp4":
                run, residual = b.quantized_range or (0, 0), b.residual_range
                rows = source.view(b.dtype).view(b.rows, b.row_elements)
                packed = reference.nvfp4_quantize(rows, b.global_scale, *run, *residual)
                rows = reference.nvfp4_dequantize(*packed, b.dtype, b.global_scale, run[0], *residual)
                source = rows.flatten().view(torch.uint8)
            assert torch.equal(result, source)
    for pool, mask in zip(fresh, untouched, strict=True):
        assert (pool[mask] == 0x5A).all()


def test_pairs_out_of_range_and_empty_pairs_do_nothing() -> None:
    layout = PageLayout([[PageBuffer(0, 2, 16, torch.float16)]])
    pool = torch.randn(3, 2, 16).half()
    cold = torch.full((2, layout.cold_page_bytes), 0xA5, dtype=torch.uint8)
    bad = torch.tensor([[-1, 0], [2, 0], [0, -1], [0, 3]], dtype=torch.int32)
    before = pool.clone()
    for pairs in (bad, bad[:0]):
        reference.encode_pages_(cold, [pool], pairs, layout)
        reference.decode_pages_([pool], cold, pairs.flip(1), layout)
    assert (cold == 0xA5).all()
    assert torch.equal(pool, before)


def test_pools_of_other_dtypes_and_permuted_slots() -> None:
    layout = PageLayout.attention(1, 2, 16, 3, torch.bfloat16)
    key = torch.randn(4, 3, 2, 16).bfloat16()
    value = torch.randn(4, 2, 3, 16).bfloat16()
    pairs = torch.tensor([[0, 1]], dtype=torch.int32)
    cold = torch.zeros(3, 1, layout.cold_page_bytes, dtype=torch.uint8).unbind(1)[0]
    reference.encode_pages_(cold, [key, value], pairs, layout)
    same = torch.zeros_like(cold)
    # Bytes are taken in memory order: neither a permuted view nor another dtype is another page.
    reference.encode_pages_(same, [key.transpose(1, 2), value.view(torch.int32)], pairs, layout)
    assert torch.equal(cold, same)


@pytest.mark.parametrize(
    ("layout", "page_bytes"),
    [
        (PageLayout.attention(1, 4, 128, 5, torch.float16), 2880),
        (PageLayout.attention(1, 1, 32, 5, torch.float16), 192),
        (
            PageLayout.attention(
                1, 2, 256, 4, torch.float8_e4m3fn, rotary_dim=64, skip_rope_quantization=True
            ),
            2528,
        ),
        (PageLayout.mla(1, 512, 64, 64, torch.bfloat16, side_bytes=8448), 29184),
        (PageLayout.deepseek_v4(1, 32, torch.bfloat16, skip_rope_quantization=True, side_bytes=2176), 14336),
        (PageLayout.deepseek_v4(2, 32, torch.bfloat16, residual_dim=64, side_bytes=2176), 2 * 12544),
    ],
    ids=["gqa", "padded", "fp8_skip", "mla", "dsv4_skip", "dsv4_residual"],
)
def test_model_pages(layout: PageLayout, page_bytes: int) -> None:
    """Whole pages of model shapes: the size is the published one, and encoding fills exactly that."""
    assert layout.cold_page_bytes == page_bytes
    pools: list[torch.Tensor] = [torch.empty(0)] * layout.num_pools
    for layer in layout.layers:
        for b in layer:
            pools[b.pool] = random_pool(2, b.nbytes, b.nbytes, b.pool)
    cold = torch.full((1, page_bytes), 0xA5, dtype=torch.uint8)
    pairs = torch.tensor([[0, 1]], dtype=torch.int32)
    reference.encode_pages_(cold, pools, pairs, layout)
    if layout.hot_page_bytes <= 4096:
        raw = [[bytes(slot) for slot in pool.numpy()] for pool in pools]
        assert bytes(cold[0].numpy()) == oracle_page(layout, raw, 1)
    before = [pool.clone() for pool in pools]
    reference.decode_pages_(pools, cold, torch.tensor([[0, 0]], dtype=torch.int32), layout)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[1], old[1])
        assert not torch.equal(pool[0], old[0])
