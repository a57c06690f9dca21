"""The nvfp4 ops against the reference, byte for byte, on every device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import emulate
import kvc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc import PageBuffer, PageLayout
from kvc.reference import nvfp4 as reference
from torch import Tensor

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
DTYPES = [F16, BF16, F32, E4M3]
CUDA = torch.cuda.is_available()


def dtype_name(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def same_bytes(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    differ = (raw(actual) != raw(expected)).nonzero()
    assert len(differ) == 0, f"{what}: {len(differ)} bytes differ, first at {differ[0].tolist()}"


def all_values(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a 16- or 8-bit type."""
    if dtype == E4M3:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(E4M3)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of very different magnitude, so that normal, subnormal, zero and saturated scales all occur."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x = x * torch.exp2(
        torch.randint(-16, 12, (rows, width // 16), generator=generator).float()
    ).repeat_interleave(16, 1)
    return x.clamp(-448, 448).to(dtype) if dtype == E4M3 else x.to(dtype)


def check_rows(x: Tensor, device: torch.device, **arguments: Any) -> None:
    actual = kvc.nvfp4_quantize(x.to(device), **arguments)
    expected = reference.nvfp4_quantize(x, **arguments)
    for name, a, e in zip(("data", "scales", "lossless"), actual, expected, strict=True):
        same_bytes(a, e, name)
    back = {k: v for k, v in arguments.items() if k != "quantized_range_elements"}
    same_bytes(
        kvc.nvfp4_dequantize(*actual, x.dtype, **back),
        reference.nvfp4_dequantize(*expected, x.dtype, **back),
        "decoded",
    )


class TestRows:
    @pytest.mark.parametrize("global_scale", [1.0, 0.25, 0.37, 3.0e4])
    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_ranges(self, device: torch.device, dtype: torch.dtype, global_scale: float) -> None:
        x = random_rows(331, 160, dtype, seed=1)
        for start, elements, residual_start, residual in [
            (0, -1, 0, 0),
            (0, 160, 0, 160),
            (16, 128, 32, 48),
            (64, -1, 144, 16),
            (0, 96, 0, 32),
            (144, 16, 0, 0),
        ]:
            check_rows(
                x,
                device,
                global_scale=global_scale,
                quantized_range_start=start,
                quantized_range_elements=elements,
                residual_start=residual_start,
                residual_elements=residual,
            )

    @pytest.mark.parametrize("dtype", [F16, BF16, E4M3], ids=dtype_name)
    def test_every_value_as_the_largest(self, device: torch.device, dtype: torch.dtype) -> None:
        values = all_values(dtype)
        members = torch.linspace(-1, 1, 15)
        x = torch.cat((values[:, None], (values.float()[:, None] * members).to(dtype)), 1)
        check_rows(x, device)

    @pytest.mark.parametrize("dtype", [F16, BF16, E4M3], ids=dtype_name)
    def test_every_value_under_every_scale(self, device: torch.device, dtype: torch.dtype) -> None:
        # 6 * s makes s the block scale, so that each value meets each of the 126 scales, ties included.
        values = all_values(dtype)
        values = values[values.float().isfinite()]
        values = torch.cat((values, values.new_zeros(-len(values) % 15)))
        scales = torch.arange(1, 127, dtype=torch.uint8).view(E4M3).float()
        chosen = scales if dtype == E4M3 or CUDA else scales[::6]
        for scale in chosen.tolist():
            largest = torch.tensor(6 * scale).to(dtype)
            x = torch.cat((values.view(-1, 15), largest.expand(len(values) // 15, 1)), 1)
            check_rows(x, device)

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_not_a_number(self, device: torch.device, dtype: torch.dtype) -> None:
        x = random_rows(64, 64, dtype, seed=2)
        x[3, 5] = float("nan")
        x[9, 60] = float("nan")
        if dtype != E4M3:
            x[5, 17] = float("inf")
            x[7, 32] = -float("inf")
        check_rows(x, device)
        check_rows(x, device, residual_elements=64)
        check_rows(x, device, global_scale=0.3)

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_every_scale_byte_decodes(self, device: torch.device, dtype: torch.dtype) -> None:
        scales = torch.arange(256, dtype=torch.int16).to(torch.uint8)[:, None]
        data = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).expand(
            256, 8
        )
        lossless = torch.empty(256, 0, dtype=dtype)
        for scale in (1.0, 0.3, 1000.0):
            actual = kvc.nvfp4_dequantize(
                data.to(device), scales.to(device), lossless.to(device), dtype, scale
            )
            same_bytes(actual, reference.nvfp4_dequantize(data, scales, lossless, dtype, scale))
        residual = torch.stack((scales, scales.flip(0)), -1).view(256, 2)
        args: Any = (residual, lossless, dtype, 1.0, 0, 0, 16)
        there: Any = (a.to(device) if isinstance(a, Tensor) else a for a in args)
        actual = kvc.nvfp4_dequantize(data.repeat(1, 2).to(device), *there)
        same_bytes(actual, reference.nvfp4_dequantize(data.repeat(1, 2), *args))

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    @pytest.mark.parametrize(
        "shape", [(16,), (1, 16), (5, 3, 48), (2, 3, 4, 32), (7, 2048), (0, 32), (3, 0, 32)], ids=str
    )
    def test_shapes(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape).to(dtype)
        check_rows(x, device)

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_views(self, device: torch.device, dtype: torch.dtype) -> None:
        base = random_rows(6 * 5 * 4, 96, dtype, seed=3).view(6, 5, 4, 96).to(device)
        flat = base.flatten()
        views = {
            "permuted": base.permute(2, 0, 1, 3),
            "sliced": base[:, 1:3],
            "columns": base[..., 16:64],
            "odd start": flat[1 : 1 + 48 * 32].view(32, 48),
            "odd stride": flat[: 33 * 100].view(33, 100)[:, 3:67],
            "expanded": base[0, 0, 0].expand(3, 4, 96),
        }
        for name, x in views.items():
            actual = kvc.nvfp4_quantize(x)
            for a, e in zip(actual, reference.nvfp4_quantize(x.contiguous()), strict=True):
                same_bytes(a, e, name)
            for a in actual:
                assert a.is_contiguous()

    def test_strided_parts(self, device: torch.device) -> None:
        x = random_rows(40, 64, BF16, seed=4)
        data, scales, lossless = reference.nvfp4_quantize(x, 1.0, 16, 32)

        def odd(t: Tensor) -> Tensor:
            wide = torch.zeros(2 * t.shape[0] + 1, t.shape[1] + 3, dtype=t.dtype, device=device)
            view = wide[1::2, 1 : 1 + t.shape[1]]
            view.copy_(t)
            return view

        actual = kvc.nvfp4_dequantize(odd(data), odd(scales), odd(lossless), BF16, 1.0, 16)
        same_bytes(actual, reference.nvfp4_dequantize(data, scales, lossless, BF16, 1.0, 16))

    def test_flushed_denormals_change_nothing(self) -> None:
        x = torch.cat((all_values(F16), all_values(F16).flip(0))).view(-1, 16)
        expected = [reference.nvfp4_quantize(x), reference.nvfp4_quantize(x, residual_elements=16)]
        decoded = reference.nvfp4_dequantize(*expected[1], F16, residual_elements=16)
        assert torch.set_flush_denormal(True)
        try:
            actual = [kvc.nvfp4_quantize(x), kvc.nvfp4_quantize(x, residual_elements=16)]
            again = kvc.nvfp4_dequantize(*expected[1], F16, residual_elements=16)
        finally:
            torch.set_flush_denormal(False)
        for a, e in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
            same_bytes(a, e)
        same_bytes(again, decoded)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_geometry(self, data: st.DataObject) -> None:
        sixteenths = st.integers(0, 12)
        width = data.draw(st.integers(1, 12))
        start = data.draw(st.integers(0, width - 1))
        elements = data.draw(st.integers(1, width - start))
        residual = data.draw(sixteenths.filter(lambda v: v <= elements))
        residual_start = start + data.draw(st.integers(0, elements - residual))
        rows = data.draw(st.integers(0, 300))
        dtype = data.draw(st.sampled_from(DTYPES))
        scale = data.draw(st.sampled_from([1.0, 2.0**-100, 2.0**100, 0.7]))
        device = torch.device("cuda" if CUDA and data.draw(st.booleans()) else "cpu")
        check_rows(
            random_rows(rows, 16 * width, dtype, seed=data.draw(st.integers(0, 99))),
            device,
            global_scale=scale,
            quantized_range_start=16 * start,
            quantized_range_elements=16 * elements,
            residual_start=16 * residual_start,
            residual_elements=16 * residual,
        )


def layouts() -> dict[str, PageLayout]:
    attention = PageLayout.attention
    side = PageBuffer.copy
    return {
        "gqa bf16": attention(3, 2, 128, 32, BF16),
        "gqa fp16 odd tokens": attention(2, 3, 64, 5, F16),
        "gqa fp8 skip rope": attention(2, 2, 128, 16, E4M3, rotary_dim=64, skip_rope_quantization=True),
        "gqa bf16 skip rope": attention(2, 2, 96, 7, BF16, rotary_dim=32, skip_rope_quantization=True),
        "gqa fp32 residual": attention(2, 1, 64, 9, F32, rotary_dim=64, residual_dim=32),
        "gqa bf16 residual": attention(2, 2, 64, 33, BF16, rotary_dim=64, residual_dim=64),
        "mla bf16": PageLayout.mla(2, 512, 64, 8, BF16, residual_dim=64, side_bytes=77),
        "mla fp8 skip": PageLayout.mla(3, 512, 64, 3, E4M3, skip_rope_quantization=True, side_bytes=64),
        "dsv4": PageLayout.mla(2, 448, 64, 32, BF16, residual_dim=64, side_bytes=2176),
        "one group": PageLayout([[PageBuffer(0, 1, 16, BF16)]]),
        "mixed dtypes in one pool of bytes": PageLayout(
            [
                [
                    PageBuffer(0, 3, 32, BF16, offset=16, global_scale=0.125),
                    side(0, 13, offset=211),
                    PageBuffer(0, 5, 16, F32, offset=224, residual_range=(0, 16)),
                ],
                [
                    side(1, 4097),
                    side(1, 1, offset=4099),
                    PageBuffer(0, 7, 48, E4M3, offset=544, quantized_range=(16, 16)),
                ],
            ]
        ),
        "large copy": PageLayout([[side(0, 70001, offset=1)]]),
    }


LAYOUTS = layouts()


def make_pools(
    layout: PageLayout, slots: int, device: torch.device, seed: int = 0, slack: int = 48
) -> list[Tensor]:
    """Byte pools (slots further apart than their size) with plausible numbers in every buffer."""
    buffers = [b for layer in layout.layers for b in layer]
    generator = torch.Generator().manual_seed(seed)
    pools = []
    for index in range(max(b.pool for b in buffers) + 1):
        mine = [b for b in buffers if b.pool == index]
        size = max((b.offset + b.nbytes for b in mine), default=16)
        stride = (size + 15) // 16 * 16 + slack
        pool = torch.randint(0, 256, (slots, stride), generator=generator, dtype=torch.uint8)
        for b in mine:
            if b.transform == "nvfp4":
                rows = random_rows(slots * b.rows, b.row_elements, b.dtype, seed + index)
                pool[:, b.offset : b.offset + b.nbytes] = rows.view(torch.uint8).view(slots, -1)
        pools.append(pool.to(device)[:, :size])
    return pools


def whole(pool: Tensor) -> Tensor:
    """The pool with the gaps between its slots."""
    return pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1), 0)


def stored(cold: Tensor) -> Tensor:
    """All bytes around a view of bytes."""
    return cold.as_strided((cold.untyped_storage().nbytes(),), (1,), 0)


def make_cold(
    layout: PageLayout, slots: int, device: torch.device | str, gap: int = 0, shift: int = 0
) -> Tensor:
    stride = layout.cold_page_bytes + gap
    storage = torch.full((slots * stride + shift + 64,), 0xA5, dtype=torch.uint8)
    storage = storage.pin_memory() if device == "pinned" else storage.to(device)
    return storage[shift : shift + slots * stride].view(slots, stride)[:, : layout.cold_page_bytes]


def decodes_like_the_reference(layout: PageLayout, pools: list[Tensor], cold: Tensor, pairs: Tensor) -> None:
    """Decode into the pools, where nothing but the named pages may change."""
    restored = [whole(p).cpu().clone() for p in pools]
    views = [r[:, : p.shape[1]] for r, p in zip(restored, pools, strict=True)]
    reference.decode_pages_(views, cold.cpu(), pairs.cpu(), layout)
    kvc.decode_pages_(pools, cold, pairs, layout.table, layout.scales)
    for index, (p, r) in enumerate(zip(pools, restored, strict=True)):
        same_bytes(whole(p), r, f"decoded pool {index}")


def round_trip(
    layout: PageLayout,
    device: torch.device,
    cold_device: torch.device | str,
    pairs_device: torch.device | str,
    gap: int,
    shift: int,
) -> None:
    hot_slots, cold_slots = 7, 9
    pools = make_pools(layout, hot_slots, device)
    before = [whole(p).clone() for p in pools]
    cold = make_cold(layout, cold_slots, cold_device, gap, shift)
    expected = make_cold(layout, cold_slots, "cpu", gap, shift)
    out = torch.tensor([[4, 6], [0, 2], [8, 2], [3, 0]], dtype=torch.int32)
    kvc.encode_pages_(cold, pools, out.to(pairs_device), layout.table, layout.scales)
    if device.type == "cuda":
        torch.cuda.synchronize()
    reference.encode_pages_(expected, [p.cpu() for p in pools], out, layout)
    same_bytes(stored(cold), stored(expected), "cold")
    for p, b in zip(pools, before, strict=True):
        same_bytes(whole(p), b, "encode wrote a pool")

    back = torch.tensor([[1, 4], [5, 8], [3, 3], [6, 4]], dtype=torch.int32)
    decodes_like_the_reference(layout, pools, cold, back.to(pairs_device))


class TestPages:
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_round_trip(self, device: torch.device, name: str) -> None:
        round_trip(LAYOUTS[name], device, device, "cpu", gap=0, shift=0)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_unaligned_cold_rows(self, device: torch.device, name: str) -> None:
        round_trip(LAYOUTS[name], device, device, device, gap=5, shift=1)
        round_trip(LAYOUTS[name], device, device, device, gap=8, shift=8)

    @pytest.mark.cuda
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_pinned_cold_rows(self, name: str) -> None:
        round_trip(LAYOUTS[name], torch.device("cuda"), "pinned", "cpu", gap=0, shift=0)
        round_trip(LAYOUTS[name], torch.device("cuda"), "pinned", "cuda", gap=3, shift=3)

    def test_typed_pools(self, device: torch.device) -> None:
        layout = PageLayout.attention(2, 2, 64, 8, BF16)
        shape = (5, 2, 8, 64)
        pools = [torch.randn(shape, device=device).to(BF16) for _ in range(4)]
        nhd = [p.transpose(1, 2).contiguous().transpose(1, 2) for p in pools]  # dense slots, other order
        cold, other = (
            torch.zeros(5, layout.cold_page_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        pairs = torch.tensor([[0, 4], [2, 1]], dtype=torch.int32)
        kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
        kvc.encode_pages_(other, [p.view(torch.int16) for p in pools], pairs, layout.table, layout.scales)
        same_bytes(other, cold)
        kvc.encode_pages_(other, nhd, pairs, layout.table, layout.scales)
        memory_order = [p.transpose(1, 2).contiguous().view(shape) for p in pools]
        kvc.encode_pages_(cold, memory_order, pairs, layout.table, layout.scales)
        same_bytes(other, cold)

    def test_strided_pairs(self, device: torch.device) -> None:
        layout = LAYOUTS["one group"]
        pools = make_pools(layout, 6, device)
        cold = make_cold(layout, 6, device)
        expected = make_cold(layout, 6, device)
        wide = torch.tensor([[9, 5, 9, 0], [9, 3, 9, 4]], dtype=torch.int32)
        kvc.encode_pages_(cold, pools, wide[:, 1::2], layout.table, layout.scales)
        kvc.encode_pages_(
            expected, pools, torch.tensor([[5, 0], [3, 4]], dtype=torch.int32), layout.table, layout.scales
        )
        same_bytes(cold, expected)
        kvc.encode_pages_(cold, pools, wide.to(device)[:, 1::2], layout.table, layout.scales)
        same_bytes(cold, expected)

    @pytest.mark.parametrize("gap", [1, 2, 4, 8, 16])
    def test_one_page_into_a_row_of_any_alignment(self, device: torch.device, gap: int) -> None:
        layout = LAYOUTS["gqa bf16"]
        pools = make_pools(layout, 3, device)
        expected = make_cold(layout, 4, "cpu", gap)
        pairs = torch.tensor([[3, 1]], dtype=torch.int32)
        reference.encode_pages_(expected, [p.cpu() for p in pools], pairs, layout)
        for where in {torch.device("cpu"), device}:
            cold = make_cold(layout, 4, device, gap)
            kvc.encode_pages_(cold, pools, pairs.to(where), layout.table, layout.scales)
            same_bytes(cold, expected)

    @pytest.mark.cuda
    @pytest.mark.parametrize("max_ctas", [0, 1, 3])
    def test_missing_pages_among_many(self, max_ctas: int) -> None:
        layout = PageLayout.attention(5, 2, 64, 32, BF16, rotary_dim=32, skip_rope_quantization=True)
        pools = make_pools(layout, 8, torch.device("cuda"))
        cold, expected = make_cold(layout, 64, "cuda"), make_cold(layout, 64, "cpu")
        pairs = torch.full((300, 2), -1, dtype=torch.int32)
        used = torch.tensor([0, 1, 7, 150, 151, 298])
        pairs[used, 0] = torch.tensor([3, 60, 5, 9, 2, 11], dtype=torch.int32)
        pairs[used, 1] = torch.tensor([1, 1, 7, 0, 2, 6], dtype=torch.int32)
        kvc.encode_pages_(cold, pools, pairs.cuda(), layout.table, layout.scales, max_ctas)
        reference.encode_pages_(expected, [p.cpu() for p in pools], pairs[used], layout)
        same_bytes(cold, expected)

    def test_a_table_of_another_width_is_never_known(self) -> None:
        call = good_call()
        kvc.encode_pages_(**call)
        with pytest.raises(ValueError, match=r"table must be PageLayout\.table"):
            kvc.encode_pages_(**(call | {"table": call["table"].view(-1, 6)}))

    def test_no_pages(self, device: torch.device) -> None:
        layout = LAYOUTS["gqa bf16"]
        pools = make_pools(layout, 2, device)
        cold = make_cold(layout, 2, device)
        before = cold.clone()
        none = torch.empty(0, 2, dtype=torch.int32)
        kvc.encode_pages_(cold, pools, none, layout.table, layout.scales)
        kvc.decode_pages_(pools, cold, none.to(device), layout.table, layout.scales)
        same_bytes(cold, before)

    @pytest.mark.parametrize("pages", [1, 257, 4096])
    def test_many_pages(self, device: torch.device, pages: int) -> None:
        layout = PageLayout([[PageBuffer(0, 2, 32, BF16, quantized_range=(16, 16)), PageBuffer.copy(1, 5)]])
        pools = make_pools(layout, pages, device)
        cold = make_cold(layout, pages, device)
        expected = make_cold(layout, pages, "cpu")
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
        pairs = torch.stack((torch.arange(pages, dtype=torch.int32), order), 1)
        kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
        reference.encode_pages_(expected, [p.cpu() for p in pools], pairs, layout)
        same_bytes(cold, expected)
        decodes_like_the_reference(layout, pools, cold, pairs.flip(1))
        decodes_like_the_reference(layout, pools, cold, pairs.flip(1).to(device))

    @pytest.mark.parametrize("layers", [1, 129, 700])
    def test_many_buffers(self, device: torch.device, layers: int) -> None:
        layout = PageLayout.attention(layers, 1, 32, 3, F16, rotary_dim=16, skip_rope_quantization=True)
        pools = make_pools(layout, 3, device)
        cold = make_cold(layout, 2, device)
        expected = make_cold(layout, 2, "cpu")
        pairs = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32)
        kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
        reference.encode_pages_(expected, [p.cpu() for p in pools], pairs, layout)
        same_bytes(cold, expected)
        decodes_like_the_reference(layout, pools, cold, pairs.flip(1))

    @pytest.mark.parametrize("shapes", [2, 7, 40])
    def test_buffers_of_many_shapes(self, device: torch.device, shapes: int) -> None:
        buffers = []
        for i in range(3 * shapes):
            kind = i % shapes  # far apart and near, with and without a lossless part, and copies between them
            rows, start = 1 + kind, 16 * (kind % 3)
            range_ = None if kind % 4 == 0 else (start, 32)
            buffers.append(PageBuffer(i, rows, 96, (BF16, E4M3)[kind % 2], quantized_range=range_))
            if kind % 5 == 0:
                buffers[-1] = PageBuffer.copy(i, 16 * rows + kind)
        layout = PageLayout([buffers[:shapes], buffers[shapes:]])
        pools = make_pools(layout, 5, device)
        cold = make_cold(layout, 4, device)
        expected = make_cold(layout, 4, "cpu")
        pairs = torch.tensor([[1, 2], [0, 4], [3, 0]], dtype=torch.int32)
        kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
        reference.encode_pages_(expected, [p.cpu() for p in pools], pairs, layout)
        same_bytes(cold, expected)
        decodes_like_the_reference(layout, pools, cold, pairs.flip(1))

    @settings(max_examples=40)
    @given(data=st.data())
    def test_any_layout(self, data: st.DataObject) -> None:
        device = torch.device("cuda" if CUDA and data.draw(st.booleans()) else "cpu")
        end = 0
        layers = []
        for _ in range(data.draw(st.integers(1, 3))):
            layer = []
            for _ in range(data.draw(st.integers(1, 3))):
                if data.draw(st.booleans()):
                    offset = end + data.draw(st.integers(0, 20))
                    layer.append(PageBuffer.copy(0, data.draw(st.integers(1, 5000)), offset=offset))
                else:
                    width = data.draw(st.integers(1, 9))
                    start = data.draw(st.integers(0, width - 1))
                    elements = data.draw(st.integers(1, width - start))
                    residual = data.draw(st.integers(0, elements))
                    residual_start = start + data.draw(st.integers(0, elements - residual))
                    layer.append(
                        PageBuffer(
                            0,
                            data.draw(st.integers(1, 70)),
                            16 * width,
                            data.draw(st.sampled_from(DTYPES)),
                            offset=(end + 15) // 16 * 16,
                            quantized_range=(16 * start, 16 * elements),
                            residual_range=(16 * residual_start, 16 * residual),
                            global_scale=data.draw(st.sampled_from([1.0, 0.6])),
                        )
                    )
                end = layer[-1].offset + layer[-1].nbytes
            layers.append(layer)
        round_trip(
            PageLayout(layers),
            device,
            device,
            "cpu",
            data.draw(st.integers(0, 17)),
            data.draw(st.integers(0, 17)),
        )


def good_call(device: torch.device | str = "cpu") -> dict[str, Any]:
    layout = PageLayout.attention(2, 2, 64, 8, BF16)
    return {
        "cold": torch.zeros(4, layout.cold_page_bytes, dtype=torch.uint8, device=device),
        "pools": [torch.randn(5, 2, 8, 64, device=device).to(BF16) for _ in range(4)],
        "pairs": torch.tensor([[0, 3], [2, 1]], dtype=torch.int32),
        "table": layout.table,
        "scales": layout.scales,
    }


def changed_table(**cells: int) -> Tensor:
    columns = (
        "layer pool offset transform dtype rows row_elements q_start q_elements r_start r_elements nbytes"
    )
    table = good_call()["table"].clone()
    for name, value in cells.items():
        table[1, columns.split().index(name)] = value
    return table


def with_pool(index: int, change: Any) -> Any:
    def build(call: dict[str, Any]) -> list[Tensor]:
        pools = list(call["pools"])
        pools[index] = change(pools[index])
        return pools

    return build


BAD_CALLS: list[tuple[str, Any, type[Exception], str]] = [
    ("cold", lambda c: c["cold"].to(torch.int16), TypeError, "cold must be torch.uint8, got torch.int16"),
    (
        "cold",
        lambda c: c["cold"][0],
        ValueError,
        "cold must be uint8 [slots, cold_page_bytes] with contiguous rows",
    ),
    (
        "cold",
        lambda c: c["cold"][:, :-1],
        ValueError,
        "cold must be 2304 bytes a row, as the table says, got 2303",
    ),
    (
        "cold",
        lambda c: c["cold"].t().contiguous().t(),
        ValueError,
        "cold must be uint8 [slots, cold_page_bytes]",
    ),
    ("cold", lambda c: c["cold"][:1].expand(4, -1), ValueError, "cold must be rows that do not overlap"),
    ("pools", lambda c: [], ValueError, "pools must be at least one tensor, got none"),
    ("pools", lambda c: c["pools"][:3], ValueError, "table (buffer 3) must be a pool index below 3, got 3"),
    (
        "pools",
        with_pool(1, lambda p: p.half()),
        TypeError,
        "pools[1] must be torch.bfloat16, its buffer's dtype",
    ),
    (
        "pools",
        with_pool(1, lambda p: p.double()),
        TypeError,
        "pools[1] must be torch.bfloat16, its buffer's dtype",
    ),
    (
        "pools",
        with_pool(2, lambda p: p[..., :32].contiguous()),
        ValueError,
        "pools[2] must be at least 2048 bytes a slot, got 1024",
    ),
    ("pools", with_pool(2, lambda p: p[..., ::2]), ValueError, "pools[2] must be contiguous within a slot"),
    (
        "pools",
        with_pool(0, lambda p: p[:1].expand(5, -1, -1, -1)),
        ValueError,
        "pools[0] must be slots that do not overlap",
    ),
    (
        "pools",
        with_pool(0, lambda p: p.new_zeros(())),
        ValueError,
        "pools[0] must be at least 1-D with dim 0 = slot",
    ),
    (
        "pools",
        with_pool(3, lambda p: p.new_zeros(5 * 1032).view(5, 1032)[:, 1:1025]),
        ValueError,
        "pools[3] must be 16-byte aligned",
    ),
    (
        "pools",
        with_pool(3, lambda p: p.new_zeros(5 * 1028).view(5, 1028)[:, :1024]),
        ValueError,
        "pools[3] must be a slot stride that is a multiple of 16 bytes, got 2056",
    ),
    ("pairs", lambda c: c["pairs"].long(), TypeError, "pairs must be torch.int32, got torch.int64"),
    ("pairs", lambda c: c["pairs"].flatten(), ValueError, "pairs must be int32 [n, 2]"),
    ("table", lambda c: c["table"].int(), TypeError, "table must be torch.int64, got torch.int32"),
    ("table", lambda c: c["table"][:, :5], ValueError, "table must be PageLayout.table, int64 [buffers, 12]"),
    ("table", lambda c: c["table"][:0], ValueError, "table must be PageLayout.table, int64 [buffers, 12]"),
    ("table", lambda c: changed_table(pool=-1), ValueError, "table (buffer 1) must be pool >= 0, got -1"),
    (
        "table",
        lambda c: changed_table(pool=4),
        ValueError,
        "table (buffer 1) must be a pool index below 4, got 4",
    ),
    ("table", lambda c: changed_table(layer=-1), ValueError, "table (buffer 1) must be layer >= 0, got -1"),
    (
        "table",
        lambda c: changed_table(layer=7),
        ValueError,
        "table (buffer 2) must be in ascending layer order, got 1",
    ),
    (
        "table",
        lambda c: changed_table(offset=8),
        ValueError,
        "table (buffer 1) must be an offset that is a multiple of 16, got 8",
    ),
    (
        "table",
        lambda c: changed_table(offset=16),
        ValueError,
        "pools[1] must be at least 2064 bytes a slot, got 2048",
    ),
    (
        "table",
        lambda c: changed_table(offset=2**63 - 1),
        ValueError,
        "table (buffer 1) must be offset in [0, 2^46]",
    ),
    (
        "table",
        lambda c: changed_table(transform=2),
        ValueError,
        "table (buffer 1) must be transform 0 (nvfp4) or 1 (copy), got 2",
    ),
    (
        "table",
        lambda c: changed_table(dtype=4),
        ValueError,
        "table (buffer 1) must be a dtype code in [0, 3]",
    ),
    (
        "table",
        lambda c: changed_table(rows=0),
        ValueError,
        "table (buffer 1) must be rows in [1, 2^46], got 0",
    ),
    ("table", lambda c: changed_table(rows=17), ValueError, "cold must be"),
    (
        "table",
        lambda c: changed_table(row_elements=24),
        ValueError,
        "table (buffer 1) must be multiples of 16",
    ),
    (
        "table",
        lambda c: changed_table(q_elements=0),
        ValueError,
        "table (buffer 1) must be a quantized range that covers part",
    ),
    (
        "table",
        lambda c: changed_table(q_start=16),
        ValueError,
        "table (buffer 1) must be a quantized range that covers part",
    ),
    (
        "table",
        lambda c: changed_table(r_elements=80),
        ValueError,
        "table (buffer 1) must be a residual range inside",
    ),
    ("scales", lambda c: c["scales"].double(), TypeError, "scales must be torch.float32, got torch.float64"),
    ("scales", lambda c: c["scales"][:3], ValueError, "scales must be PageLayout.scales, float32 [buffers]"),
    (
        "scales",
        lambda c: c["scales"] * 0,
        ValueError,
        "table (buffer 0) must be global_scale in [2^-100, 2^100]",
    ),
    (
        "scales",
        lambda c: c["scales"] * float("nan"),
        ValueError,
        "table (buffer 0) must be global_scale in [2^-100, 2^100]",
    ),
    ("max_ctas", lambda c: -1, ValueError, "max_ctas must be >= 0, got -1"),
]
# The call has 4 cold slots and 5 hot ones.
BAD_PAIRS: list[tuple[str, list[list[int]], str]] = [
    ("encode_pages_", [[0, 0], [1, 5]], "pairs[1] must be a source slot in [0, 5), got 5"),
    ("encode_pages_", [[4, 0]], "pairs[0] must be a destination slot in [0, 4), got 4"),
    ("encode_pages_", [[-1, 0]], "pairs[0] must be a destination slot in [0, 4), got -1"),
    (
        "encode_pages_",
        [[1, 0], [2, 3], [1, 4]],
        "pairs[2] must be a destination named once, got slot 1 again",
    ),
    ("decode_pages_", [[0, 0], [1, 4]], "pairs[1] must be a source slot in [0, 4), got 4"),
    ("decode_pages_", [[5, 0]], "pairs[0] must be a destination slot in [0, 5), got 5"),
    ("decode_pages_", [[-1, 0]], "pairs[0] must be a destination slot in [0, 5), got -1"),
    ("decode_pages_", [[4, 3], [4, 2]], "pairs[1] must be a destination named once, got slot 4 again"),
]


def refuse(op: str, call: dict[str, Any], kind: type[Exception], text: str) -> None:
    """Public function and op raise, and nothing is written."""
    tensors = [call["cold"], *call["pools"]]
    before = [t.clone() for t in tensors]
    with pytest.raises(kind) as caught:
        getattr(kvc, op)(**call)
    assert str(caught.value).startswith(f"kvc.{op}: {text}")
    with pytest.raises((kind, RuntimeError), match=rf"kvc\.{op}: "):
        getattr(torch.ops.kvc, op)(**call)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


class TestBadInput:
    @pytest.mark.parametrize("op", ["encode_pages_", "decode_pages_"])
    @pytest.mark.parametrize(
        ("argument", "change", "kind", "text"), BAD_CALLS, ids=lambda v: v if isinstance(v, str) else ""
    )
    def test_pages(
        self, device: torch.device, op: str, argument: str, change: Any, kind: type[Exception], text: str
    ) -> None:
        call = good_call(device)
        call[argument] = change(call)
        refuse(op, call, kind, text)

    @pytest.mark.parametrize(("op", "pairs", "text"), BAD_PAIRS)
    def test_pairs(self, device: torch.device, op: str, pairs: list[list[int]], text: str) -> None:
        call = good_call(device)
        call["pairs"] = torch.tensor(pairs, dtype=torch.int32)
        refuse(op, call, ValueError, text)

    @pytest.mark.parametrize("argument", ["cold", "pools", "pairs", "table", "scales"])
    def test_a_meta_tensor_among_real_ones(self, argument: str) -> None:
        call = good_call()
        before = call["cold"].clone()
        value = call[argument]
        wrong = [value[0], value[1].to("meta"), *value[2:]] if argument == "pools" else value.to("meta")
        with pytest.raises(TypeError, match=r"kvc.encode_pages_: \w+ must be on the device of \w+, got meta"):
            kvc.encode_pages_(**(call | {argument: wrong}))
        same_bytes(call["cold"], before)

    def test_arguments_of_another_python_type(self) -> None:
        wrong: Any = [1.0]
        with pytest.raises(TypeError, match=r"^kvc.nvfp4_quantize: x must be a Tensor, got None$"):
            kvc.nvfp4_quantize(None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^kvc.nvfp4_quantize: x must be a Tensor, got a list$"):
            kvc.nvfp4_quantize(wrong)
        with pytest.raises(TypeError, match=r"^kvc.encode_pages_: max_ctas must be a int, got a str$"):
            kvc.encode_pages_(**(good_call() | {"max_ctas": "many"}))

    @pytest.mark.parametrize(
        ("arguments", "kind", "text"),
        [
            (
                {"x": torch.zeros(3, 24)},
                ValueError,
                "x (its last dimension) must be a multiple of 16, got 24",
            ),
            ({"x": torch.zeros(())}, ValueError, "x must be at least 1-D, got a 0-D tensor"),
            ({"x": torch.zeros(3, 0)}, ValueError, "quantized_range_start must be in [0, 0), got 0"),
            (
                {"x": torch.zeros(32, 32).t()},
                ValueError,
                "x must be contiguous in its last dimension, got [32, 32]",
            ),
            (
                {"x": torch.zeros(3, 32, dtype=torch.int32)},
                TypeError,
                "x must be torch.float16, bfloat16, float32 or",
            ),
            ({"global_scale": 0.0}, ValueError, "global_scale must be in [2^-100, 2^100], got 0.0"),
            ({"global_scale": -1.0}, ValueError, "global_scale must be in [2^-100, 2^100], got -1.0"),
            ({"global_scale": float("nan")}, ValueError, "global_scale must be in [2^-100, 2^100], got nan"),
            ({"global_scale": 2.0**101}, ValueError, "global_scale must be in [2^-100, 2^100], got 2535"),
            (
                {"quantized_range_start": 8},
                ValueError,
                "quantized_range_start must be a multiple of 16, got 8",
            ),
            ({"quantized_range_start": 32}, ValueError, "quantized_range_start must be in [0, 32), got 32"),
            ({"quantized_range_start": -16}, ValueError, "quantized_range_start must be in [0, 32), got -16"),
            (
                {"quantized_range_elements": 0},
                ValueError,
                "quantized_range_elements must be in [16, 32] or -1, got 0",
            ),
            (
                {"quantized_range_elements": 48},
                ValueError,
                "quantized_range_elements must be in [16, 32] or -1, got 48",
            ),
            ({"residual_elements": 48}, ValueError, "residual_elements must be in [0, 32], got 48"),
            (
                {"residual_elements": 16, "residual_start": 8},
                ValueError,
                "residual_start must be a multiple of 16, got 8",
            ),
            (
                {"residual_elements": 32, "residual_start": 16},
                ValueError,
                "residual_start must be such that the residual",
            ),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_quantize(
        self, device: torch.device, arguments: dict[str, Any], kind: type[Exception], text: str
    ) -> None:
        call = {"x": torch.zeros(3, 32)} | arguments
        call["x"] = call["x"].to(device)
        with pytest.raises(kind) as caught:
            kvc.nvfp4_quantize(**call)
        assert str(caught.value).startswith(f"kvc.nvfp4_quantize: {text}")

    def test_dequantize(self, device: torch.device) -> None:
        data, scales, lossless = kvc.nvfp4_quantize(torch.zeros(3, 32, device=device))
        cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
            ((data.char(), scales, lossless, F32), TypeError, "data must be torch.uint8, got torch.int8"),
            ((data, scales.char(), lossless, F32), TypeError, "scales must be torch.uint8, got torch.int8"),
            ((data, scales, lossless, BF16), TypeError, "lossless must be torch.bfloat16, got torch.float32"),
            (
                (data, scales, lossless, torch.int32),
                TypeError,
                "dtype must be torch.float16, bfloat16, float32 or",
            ),
            (
                (data[:2], scales, lossless, F32),
                ValueError,
                "scales must be at least 1-D with the leading dimensions",
            ),
            (
                (data, scales[:, :1], lossless, F32),
                ValueError,
                "scales must be [..., (Q + P) / 16], got [3, 1]",
            ),
            (
                (data[:, :12], scales, lossless, F32),
                ValueError,
                "data must be [..., (Q + P) / 2], got [3, 12]",
            ),
            (
                (data, scales, lossless, F32, 1.0, 0, 0, 32),
                ValueError,
                "residual_elements must be in [0, 16], half of what",
            ),
        ]
        for arguments, kind, text in cases:
            with pytest.raises(kind) as caught:
                kvc.nvfp4_dequantize(*arguments)
            assert str(caught.value).startswith(f"kvc.nvfp4_dequantize: {text}"), str(caught.value)

    @pytest.mark.cuda
    def test_devices(self) -> None:
        host, device = good_call("cpu"), good_call("cuda")
        with pytest.raises(
            ValueError,
            match="cold must be a CUDA tensor or pinned host memory beside CUDA pools, got unpinned",
        ):
            kvc.encode_pages_(**(device | {"cold": host["cold"]}))
        with pytest.raises(TypeError, match=r"pools\[1\] must be a CUDA tensor, got cpu"):
            kvc.encode_pages_(**(device | {"pools": [device["pools"][0], *host["pools"][1:]]}))
        with pytest.raises(TypeError, match=r"pools\[0\] must be a CUDA tensor, got cpu"):
            kvc.encode_pages_(**(host | {"cold": device["cold"]}))
        with pytest.raises(TypeError, match="table must be a CPU tensor, got cuda:0"):
            kvc.encode_pages_(**(device | {"table": device["table"].cuda()}))
        with pytest.raises(TypeError, match="scales must be a CPU tensor, got cuda:0"):
            kvc.encode_pages_(**(device | {"scales": device["scales"].cuda()}))
        part = torch.zeros(4 * 2304 + 8192, dtype=torch.uint8)
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), 4096, 0)))
        try:
            with pytest.raises(ValueError, match="pinned host memory"):
                kvc.encode_pages_(**(device | {"cold": part[: 4 * 2304].view(4, 2304)}))
        finally:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(part.data_ptr())))

    @pytest.mark.cuda
    def test_device_pairs_out_of_range_are_skipped(self) -> None:
        call = good_call("cuda")
        expected = call["cold"].clone()
        kvc.encode_pages_(**(call | {"cold": expected, "pairs": torch.tensor([[3, 2]], dtype=torch.int32)}))
        wild = [[0, -1], [1, 5], [3, 2], [-7, 0], [4, 0], [2**31 - 1, 0], [0, -(2**31)]]
        kvc.encode_pages_(**(call | {"pairs": torch.tensor(wild, dtype=torch.int32, device="cuda")}))
        same_bytes(call["cold"], expected)

    @pytest.mark.cuda
    @pytest.mark.usefixtures("debug_mode")
    def test_debug_mode_reads_device_pairs(self) -> None:
        call = good_call("cuda")
        for pairs, text in [
            ([[0, 5]], r"pairs\[0\] must be a source slot"),
            ([[1, 0], [1, 1]], r"pairs\[1\] must be a destination named once"),
        ]:
            with pytest.raises(ValueError, match=text):
                kvc.encode_pages_(**(call | {"pairs": torch.tensor(pairs, dtype=torch.int32, device="cuda")}))
        assert int(call["cold"].sum()) == 0


class TestOperators:
    def test_opcheck_rows(self, device: torch.device) -> None:
        for dtype in DTYPES:
            tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
            tests += ["test_schema"] if dtype != E4M3 else []
            x = random_rows(5, 64, dtype, seed=5).to(device)
            for arguments in [(), (0.5, 16, 32), (1.0, 0, -1, 16, 48)]:
                torch.library.opcheck(torch.ops.kvc.nvfp4_quantize.default, (x, *arguments), test_utils=tests)
                parts = torch.ops.kvc.nvfp4_quantize(x, *arguments)
                back = (*parts, dtype, *arguments[:2], *arguments[3:])
                torch.library.opcheck(torch.ops.kvc.nvfp4_dequantize.default, back, test_utils=tests)

    def test_opcheck_pages(self, device: torch.device) -> None:
        call = good_call(device)
        torch.library.opcheck(torch.ops.kvc.encode_pages_.default, (), call)
        torch.library.opcheck(torch.ops.kvc.decode_pages_.default, (), call)

    def test_compile(self, device: torch.device) -> None:
        call = good_call(device)
        cold, pools, pairs, table, scales = call.values()
        expected = cold.clone()
        restored = [p.clone() for p in pools]
        kvc.encode_pages_(expected, restored, pairs, table, scales)
        kvc.decode_pages_(restored, expected, torch.tensor([[3, 2]], dtype=torch.int32), table, scales)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def program(x: Tensor) -> Tensor:
            kvc.encode_pages_(cold, pools, pairs, table, scales)
            kvc.decode_pages_(pools, cold, pairs.new_tensor([[3, 2]]), table, scales)
            data, block_scales, lossless = kvc.nvfp4_quantize(x, quantized_range_start=16)
            return kvc.nvfp4_dequantize(data, block_scales, lossless, x.dtype, quantized_range_start=16) + 1

        x = torch.randn(4, 48, device=device)
        y = program(x)
        same_bytes(cold, expected)
        for p, r in zip(pools, restored, strict=True):
            same_bytes(p, r)
        parts = kvc.nvfp4_quantize(x, quantized_range_start=16)
        same_bytes(y, kvc.nvfp4_dequantize(*parts, x.dtype, quantized_range_start=16) + 1)

    def test_defaults_match_the_schema(self) -> None:
        x = torch.randn(2, 32)
        for a, e in zip(torch.ops.kvc.nvfp4_quantize(x), kvc.nvfp4_quantize(x), strict=True):
            same_bytes(a, e)


@pytest.mark.cuda
class TestCuda:
    @pytest.mark.parametrize("cold_device", ["cuda", "pinned"])
    def test_graph_replay_sees_new_contents(self, cold_device: str) -> None:
        layout = PageLayout.attention(3, 2, 64, 8, BF16, residual_dim=64)
        pools = make_pools(layout, 5, torch.device("cuda"))
        cold = make_cold(layout, 4, cold_device)
        pairs = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32, device="cuda")
        host_pairs = torch.tensor([[4, 1], [3, 0]], dtype=torch.int32)
        kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
            kvc.decode_pages_(pools, cold, host_pairs, layout.table, layout.scales)
        host_pairs.fill_(99)  # the graph keeps the values it was captured with
        pairs.copy_(torch.tensor([[0, 1], [1, 3]], dtype=torch.int32))
        fresh = make_pools(layout, 5, torch.device("cuda"), seed=7)
        for p, f in zip(pools, fresh, strict=True):
            p.copy_(f)
        expected, views = make_cold(layout, 4, "cpu"), [f.cpu().clone() for f in fresh]
        expected.copy_(cold)
        reference.encode_pages_(expected, views, pairs.cpu(), layout)
        reference.decode_pages_(views, expected, torch.tensor([[4, 1], [3, 0]], dtype=torch.int32), layout)
        graph.replay()
        torch.cuda.synchronize()
        same_bytes(cold, expected)
        for p, v in zip(pools, views, strict=True):
            same_bytes(p, v)

    def test_graph_with_large_metadata(self) -> None:
        layout = PageLayout.attention(400, 1, 16, 2, F16)
        pools = make_pools(layout, 3, torch.device("cuda"))
        cold = make_cold(layout, 3, "cuda")
        pairs = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
        for p in pools:
            p.copy_(p.flip(0).clone())
        for _ in range(3):
            graph.replay()
        expected = make_cold(layout, 3, "cpu")
        reference.encode_pages_(expected, [p.cpu() for p in pools], pairs, layout)
        same_bytes(cold, expected)

    def test_side_stream_waits_for_its_producer_only(self) -> None:
        layout = PageLayout.attention(2, 2, 128, 32, BF16)
        pools = make_pools(layout, 4, torch.device("cuda"))
        fresh = make_pools(layout, 4, torch.device("cuda"), seed=9)
        cold = make_cold(layout, 4, "pinned")
        pairs = torch.tensor([[i, 3 - i] for i in range(4)], dtype=torch.int32)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for p, f in zip(pools, fresh, strict=True):
                p.copy_(f, non_blocking=True)
            kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
            assert not stream.query(), "the op synchronised"
            pairs.fill_(0)
        stream.synchronize()
        expected = make_cold(layout, 4, "cpu")
        pairs = torch.tensor([[i, 3 - i] for i in range(4)], dtype=torch.int32)
        reference.encode_pages_(expected, [f.cpu() for f in fresh], pairs, layout)
        same_bytes(cold, expected)

    @pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
    def test_one_launch(self, launches: Any, dtype: torch.dtype) -> None:
        layout = PageLayout.attention(36, 2, 64, 8, dtype)
        pools = make_pools(layout, 64, torch.device("cuda"))
        cold = make_cold(layout, 64, "cuda")
        pairs = torch.stack((torch.arange(64), torch.arange(64).flip(0)), 1).int()
        for op, to, of in ((kvc.encode_pages_, cold, pools), (kvc.decode_pages_, pools, cold)):
            kernels = launches(lambda op=op, to=to, of=of: op(to, of, pairs, layout.table, layout.scales))
            assert len(kernels) == 1, kernels
            assert "move_pages_kernel" in kernels[0]

    def test_max_ctas_changes_no_byte(self) -> None:
        layout = LAYOUTS["dsv4"]
        pools = make_pools(layout, 20, torch.device("cuda"))
        pairs = torch.stack((torch.arange(20), torch.arange(20).flip(0)), 1).int()
        results = []
        for max_ctas in (0, 1, 3, 16, 10**6):
            cold = make_cold(layout, 20, "cuda")
            kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales, max_ctas)
            results.append(cold)
        for other in results[1:]:
            same_bytes(other, results[0])

    def test_pool_beyond_two_billion_elements(self) -> None:
        layout = PageLayout([[PageBuffer(0, 1024, 128, E4M3)]])
        slots = 2**31 // (1024 * 128) + 3
        pool = torch.zeros(slots, 1024, 128, dtype=torch.uint8, device="cuda").view(E4M3)
        rows = random_rows(2048, 128, E4M3, seed=11).view(2, 1024, 128)
        pool[-2:].copy_(rows.cuda())
        cold = make_cold(layout, 2, "cuda")
        kvc.encode_pages_(
            cold,
            [pool],
            torch.tensor([[0, slots - 1], [1, slots - 2]], dtype=torch.int32),
            layout.table,
            layout.scales,
        )
        expected = make_cold(layout, 2, "cpu")
        reference.encode_pages_(expected, [rows], torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), layout)
        same_bytes(cold, expected)
        # And the other way round: a cold tensor past 2^31 bytes.
        far = 2**31 // layout.cold_page_bytes + 3
        large = torch.zeros(far, layout.cold_page_bytes, dtype=torch.uint8, device="cuda")
        kvc.encode_pages_(
            large,
            [pool],
            torch.tensor([[far - 1, slots - 1]], dtype=torch.int32),
            layout.table,
            layout.scales,
        )
        same_bytes(large[-1], expected[0])

    def test_other_current_device(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        call = good_call("cuda:1")
        expected = good_call("cpu")["cold"].clone()
        kvc.encode_pages_(
            expected, [p.cpu() for p in call["pools"]], call["pairs"], call["table"], call["scales"]
        )
        with torch.cuda.device(0):
            kvc.encode_pages_(**call)
        same_bytes(call["cold"], expected)

    def test_repeats_are_bitwise_equal(self) -> None:
        layout = LAYOUTS["gqa bf16 residual"]
        pools = make_pools(layout, 8, torch.device("cuda"))
        pairs = torch.stack((torch.arange(8), torch.arange(8)), 1).int()
        first = make_cold(layout, 8, "cuda")
        kvc.encode_pages_(first, pools, pairs, layout.table, layout.scales)
        cold = make_cold(layout, 8, "cuda")
        for _ in range(200):
            cold.fill_(0xFF)
            kvc.encode_pages_(cold, pools, pairs, layout.table, layout.scales)
            assert torch.equal(cold, first)


class TestEmulated:
    """The page kernels on a CPU: what they move where, and no proof of the GPU."""

    LAUNCHES = (
        (
            r'void\* parameters\[\] = .*?"move_pages_kernel"\);',
            "emulate::run(grid.blocks, grid.warps * kWarp, [&] { kernel(h, inlined); });",
        ),
        (r"upload_kernel<<<.*?>>>\(scratch \+ done, .*?\);", "memcpy(scratch + done, payload.bytes, part);"),
        (
            r"kernel<<<blocks, (.*?), 0, stream>>>\(runs\);",
            r"emulate::run(blocks, \1, [&] { kernel(runs); });",
        ),
        (r"cudaFuncSetAttribute\([^;]*?\)(?=,)", "cudaSuccess"),
        (r"cudaGetLastError\(\)", "cudaSuccess"),
    )
    DEVICE = """#pragma once
namespace kvc {
extern int multiprocessors;
constexpr int kMaxDevices = 1;
struct DeviceFacts {
  int multiprocessors;
};
inline DeviceFacts device_facts(const char*, int, const void*) { return {multiprocessors}; }
inline void cuda_check(cudaError_t, const char*) {}
}  // namespace kvc
"""

    def test_against_the_cpu(self, tmp_path: Path) -> None:
        program = emulate.build(
            tmp_path,
            "nvfp4",
            "emulate_pages",
            compiled=["kernels/nvfp4/tiles_cpu.cpp"],
            replaced=self.LAUNCHES,
            headers={"common/device.h": self.DEVICE},
        )
        emulate.run(program, 1000, 1)
