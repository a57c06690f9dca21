"""NVFP4 rows and cold pages as plain PyTorch, byte for byte what the kernels return, on CPU and CUDA tensors.

Every tensor operation on fp32 is one IEEE rounding. Arguments are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..nvfp4 import PageBuffer, PageLayout

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NAN_SCALE = 0x7F
CANONICAL_NAN = {
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
}


def nvfp4_quantize(
    x: Tensor,
    global_scale: float = 1.0,
    quantized_range_start: int = 0,
    quantized_range_elements: int = -1,
    residual_start: int = 0,
    residual_elements: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[..., R]` to data `[..., (Q + P) / 2]`, scales `[..., (Q + P) / 16]`, lossless `[..., R - Q]`."""
    start = quantized_range_start
    stop = x.shape[-1] if quantized_range_elements < 0 else start + quantized_range_elements
    groups = x[..., start:stop].float().unflatten(-1, (-1, 16))
    g = torch.tensor(global_scale, dtype=torch.float32, device=x.device)

    scale1, code1 = _encode_groups(groups, g)
    rest = groups - _e2m1_value(code1) * (_e4m3_value(scale1) * g)
    scale2, code2 = _encode_groups(rest, g)

    stored = _stored(groups.shape[-2], start, residual_start, residual_elements, x.device)
    scales = torch.stack((scale1, scale2), -1).flatten(-2)[..., stored]
    codes = torch.stack((code1, code2), -2).flatten(-3, -2)[..., stored, :]
    data = (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(-2)
    return data, scales, torch.cat((x[..., :start], x[..., stop:]), -1)


def nvfp4_dequantize(
    data: Tensor,
    scales: Tensor,
    lossless: Tensor,
    dtype: torch.dtype,
    global_scale: float = 1.0,
    quantized_range_start: int = 0,
    residual_start: int = 0,
    residual_elements: int = 0,
) -> Tensor:
    """Data, scales and lossless elements back to rows `[..., R]` of `dtype`."""
    start = quantized_range_start
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).unflatten(-1, (-1, 16))
    terms = _e2m1_value(codes) * _e4m3_value(scales)

    groups = scales.shape[-1] - residual_elements // 16
    stored = _stored(groups, start, residual_start, residual_elements, data.device)
    # A component that is not stored is -0, the one addend that keeps the sign of a zero.
    both = terms.new_full((*scales.shape[:-1], 2 * groups, 16), -0.0)
    both[..., stored, :] = terms
    main, residual = both.unflatten(-2, (groups, 2)).unbind(-2)

    g = torch.tensor(global_scale, dtype=torch.float32, device=data.device)
    row = _round(((main + residual) * g).flatten(-2), dtype)
    return torch.cat((lossless[..., :start], row, lossless[..., start:]), -1)


def encode_pages_(cold: Tensor, pools: Sequence[Tensor], pairs: Tensor, layout: PageLayout) -> None:
    """Hot slots `pairs[:, 1]` to cold slots `pairs[:, 0]`; pairs with a slot out of range are skipped."""
    hot = [_slot_bytes(pool) for pool in pools]
    dst, src = _in_range(pairs, cold.shape[0], _slots(hot, layout))
    records = []
    for layer in layout.layers:
        data, scales_and_lossless, copied = [], [], []
        for b in layer:
            source = hot[b.pool][:, b.offset : b.offset + b.nbytes][src.to(hot[b.pool].device)]
            if b.transform == "copy":
                copied.append(source)
                continue
            rows = source.view(b.dtype).unflatten(-1, (b.rows, b.row_elements))
            packed, scales, lossless = nvfp4_quantize(
                rows, b.global_scale, *(b.quantized_range or (0, 0)), *b.residual_range
            )
            data.append(packed.flatten(1))
            scales_and_lossless += [scales.flatten(1), lossless.flatten(1).view(torch.uint8)]
        record = torch.cat(data + scales_and_lossless + copied, 1)
        records.append(torch.nn.functional.pad(record, (0, -record.shape[1] % 16)))
    cold[dst.to(cold.device)] = torch.cat(records, 1).to(cold.device)


def decode_pages_(pools: Sequence[Tensor], cold: Tensor, pairs: Tensor, layout: PageLayout) -> None:
    """Cold slots `pairs[:, 1]` to hot slots `pairs[:, 0]`; pairs with a slot out of range are skipped."""
    hot = [_slot_bytes(pool) for pool in pools]
    dst, src = _in_range(pairs, _slots(hot, layout), cold.shape[0])
    pages = cold[src.to(cold.device)].to(hot[0].device)
    cursor = 0

    def take(nbytes: int) -> Tensor:
        nonlocal cursor
        cursor += nbytes
        return pages[:, cursor - nbytes : cursor].clone(memory_format=torch.contiguous_format)

    for layer in layout.layers:
        quantized = [b for b in layer if b.transform == "nvfp4"]
        data = [take(b.data_bytes) for b in quantized]
        scales_and_lossless = [(take(b.scale_bytes), take(b.lossless_bytes)) for b in quantized]
        for b, packed, (scales, lossless) in zip(quantized, data, scales_and_lossless, strict=True):
            start, elements = b.quantized_range or (0, 0)
            rows = nvfp4_dequantize(
                packed.unflatten(1, (b.rows, -1)),
                scales.unflatten(1, (b.rows, -1)),
                lossless.flatten().view(b.dtype).view(len(pages), b.rows, b.row_elements - elements),
                b.dtype,
                b.global_scale,
                start,
                *b.residual_range,
            )
            _store(hot[b.pool], dst, b, rows.flatten(1).view(torch.uint8))
        for b in layer:
            if b.transform == "copy":
                _store(hot[b.pool], dst, b, take(b.nbytes))
        take(-cursor % 16)


def _encode_groups(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 groups `[..., 16]` to E4M3 scale bytes `[...]` and E2M1 codes `[..., 16]`."""
    # Divisors are tensors: CUDA divides by a Python number through its reciprocal.
    one, six = torch.ones_like(g), torch.full_like(g, 6.0)
    scale = _e4m3(x.abs().amax(-1) / six * (one / g))
    s = _e4m3_value(scale)
    y = x * (one / (s * g))
    y = y + 192 - 192
    code = _e2m1(y.abs()) | x.signbit().to(torch.uint8) << 3

    bad = ~x.isfinite().all(-1, keepdim=True)
    scale = scale.unsqueeze(-1)
    code = code.masked_fill(bad | (scale == 0), 0)
    return scale.masked_fill(bad, NAN_SCALE).squeeze(-1), code


def _e2m1(a: Tensor) -> Tensor:
    """Codes 0 to 7 of non-negative fp32 values: the midpoints below, each going to its even neighbour."""
    above = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    return torch.stack(above).sum(0, dtype=torch.uint8)


def _e2m1_value(codes: Tensor) -> Tensor:
    return torch.tensor(E2M1, dtype=torch.float32, device=codes.device)[codes.int()]


def _e4m3(a: Tensor) -> Tensor:
    """Bytes of non-negative fp32 values, nearest even; the conversion itself gives NaN above 464."""
    return a.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _e4m3_value(scales: Tensor) -> Tensor:
    """fp32 `[..., 1]` of E4M3 bytes `[...]`."""
    return scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)


def _round(v: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to `dtype`, nearest even, saturating; NaN as the canonical one."""
    bits, nan = CANONICAL_NAN[dtype]
    largest = torch.finfo(dtype).max
    rounded = v.clamp(-largest, largest).to(dtype)
    return rounded.view(bits).masked_fill(v.isnan(), nan).view(dtype)


def _stored(
    groups: int, start: int, residual_start: int, residual_elements: int, device: torch.device
) -> Tensor:
    """bool `[2 * groups]`: which of every group's (main, residual) components exist."""
    position = start + 16 * torch.arange(groups, device=device) - residual_start
    residual = (position >= 0) & (position < residual_elements)
    return torch.stack((torch.ones_like(residual), residual), -1).flatten()


def _slot_bytes(pool: Tensor) -> Tensor:
    """The pool's own memory as uint8 `[slots, bytes of a slot]`, whatever the order of its inner dims."""
    size = pool.element_size()
    shape = (pool.shape[0], math.prod(pool.shape[1:]) * size)
    memory = torch.empty(0, dtype=torch.uint8, device=pool.device)
    return memory.set_(
        pool.untyped_storage(), pool.storage_offset() * size, shape, (pool.stride(0) * size, 1)
    )


def _slots(hot: Sequence[Tensor], layout: PageLayout) -> int:
    """Slots that every pool of the layout has."""
    return min(hot[b.pool].shape[0] for layer in layout.layers for b in layer)


def _in_range(pairs: Tensor, dst_slots: int, src_slots: int) -> tuple[Tensor, Tensor]:
    dst, src = pairs.long().unbind(1)
    kept = (dst >= 0) & (dst < dst_slots) & (src >= 0) & (src < src_slots)
    return dst[kept], src[kept]


def _store(hot: Tensor, dst: Tensor, b: PageBuffer, value: Tensor) -> None:
    hot[:, b.offset : b.offset + b.nbytes][dst.to(hot.device)] = value
