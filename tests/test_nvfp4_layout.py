"""Page layouts: what is refused and how, what the ops are handed, sizes, descriptions, builders."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc import PageBuffer, PageLayout

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


def refused(kind: type[Exception], text: str, build: Callable[[], object]) -> None:
    with pytest.raises(kind, match=f"^{re.escape(f'kvc.PageLayout: {text}')}$"):
        build()


def nvfp4(**changes: Any) -> PageBuffer:
    arguments: dict[str, Any] = {"pool": 0, "rows": 4, "row_elements": 64, "dtype": F16} | changes
    return PageBuffer(**arguments)


BUFFER_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pool": -1}, ValueError, "pool must be an integer in [0, 2^31), got -1"),
    ({"pool": 2**31}, ValueError, "pool must be an integer in [0, 2^31), got 2147483648"),
    ({"pool": 0.0}, TypeError, "pool must be an integer, got 0.0"),
    ({"pool": True}, TypeError, "pool must be an integer, got True"),
    ({"rows": 0}, ValueError, "rows must be an integer in [1, 2^62), got 0"),
    ({"rows": 2**70}, ValueError, f"rows must be an integer in [1, 2^62), got {2**70}"),
    ({"rows": "4"}, TypeError, "rows must be an integer, got '4'"),
    ({"rows": None}, TypeError, "rows must be an integer, got None"),
    ({"rows": 2**29}, ValueError, "rows * (row_elements / 16) must be less than 2^31 groups, got 2147483648"),
    ({"row_elements": 24}, ValueError, "row_elements must be a multiple of 16, got 24"),
    ({"row_elements": -16}, ValueError, "row_elements must be an integer in [1, 2^62), got -16"),
    ({"row_elements": 64.0}, TypeError, "row_elements must be an integer, got 64.0"),
    (
        {"dtype": torch.int8},
        TypeError,
        "dtype must be float16, bfloat16, float32 or float8_e4m3fn, got torch.int8",
    ),
    ({"dtype": "float16"}, TypeError, "dtype must be a torch.dtype, got 'float16'"),
    ({"offset": 8}, ValueError, "offset must be a multiple of 16 bytes for an NVFP4 buffer, got 8"),
    ({"offset": -16}, ValueError, "offset must be an integer in [0, 2^62), got -16"),
    ({"offset": 2**62}, ValueError, f"offset must be an integer in [0, 2^62), got {2**62}"),
    ({"offset": False}, TypeError, "offset must be an integer, got False"),
    ({"transform": "fp4"}, ValueError, "transform must be 'nvfp4' or 'copy', got 'fp4'"),
    ({"transform": None}, TypeError, "transform must be a string, got None"),
    (
        {"quantized_range": 16},
        TypeError,
        "quantized_range must be a (start, elements) pair of integers, got 16",
    ),
    (
        {"quantized_range": (0, 16, 32)},
        ValueError,
        "quantized_range must be a (start, elements) pair of integers, got (0, 16, 32)",
    ),
    ({"quantized_range": (0, 16.0)}, TypeError, "quantized_range must be an integer, got 16.0"),
    (
        {"residual_range": "16"},
        TypeError,
        "residual_range must be a (start, elements) pair of integers, got '16'",
    ),
    (
        {"residual_range": None},
        TypeError,
        "residual_range must be a (start, elements) pair of integers, got None",
    ),
    ({"global_scale": "1"}, TypeError, "global_scale must be a real number, got '1'"),
    ({"global_scale": True}, TypeError, "global_scale must be a real number, got True"),
    ({"global_scale": torch.tensor(1.0)}, TypeError, "global_scale must be a real number, got tensor(1.)"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), BUFFER_ERRORS, ids=[t for _, _, t in BUFFER_ERRORS])
def test_bad_buffers(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    refused(kind, text, lambda: nvfp4(**changes))


@pytest.mark.parametrize("bad", [(8, 16), (0, 24), (-16, 32), (0, 0), (16, -16), (0, 80), (48, 32), (64, 16)])
def test_bad_quantized_ranges(bad: tuple[int, int]) -> None:
    expected = "a non-empty part of [0, 64), start and elements multiples of 16"
    text = f"quantized_range must be {expected}, got {bad}"
    refused(ValueError, text, lambda: nvfp4(quantized_range=bad))


@pytest.mark.parametrize(
    "bad", [(24, 16), (16, 8), (0, 16), (32, 32), (16, -16), (-16, 16), (48, 16), (16, 48)]
)
def test_bad_residual_ranges(bad: tuple[int, int]) -> None:
    expected = "inside the quantized [16, 48), start and elements multiples of 16"
    text = f"residual_range must be {expected}, got {bad}"
    refused(ValueError, text, lambda: nvfp4(quantized_range=(16, 32), residual_range=bad))


@pytest.mark.parametrize(
    ("scale", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (0, "0.0"),
        (-1.0, "-1.0"),
        (10**400, "inf"),
        (1e-300, "0.0"),
        (2.0**100 * (1 + 2.0**-23), str(2.0**100 * (1 + 2.0**-23))),
        (2.0**-100 * (1 - 2.0**-24), str(2.0**-100 * (1 - 2.0**-24))),
    ],
)
def test_bad_global_scales(scale: float, shown: str) -> None:
    text = f"global_scale must be in [2^-100, 2^100] after rounding to fp32, got {shown}"
    refused(ValueError, text, lambda: nvfp4(global_scale=scale))


def test_global_scale_is_kept_as_fp32() -> None:
    assert nvfp4(global_scale=0.1).global_scale == torch.tensor(0.1).item()
    assert nvfp4(global_scale=2.0**100 * (1 + 2.0**-30)).global_scale == 2.0**100
    assert nvfp4(global_scale=2.0**-100 * (1 - 2.0**-30)).global_scale == 2.0**-100
    assert nvfp4(global_scale=2).global_scale == 2.0


COPY_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"nbytes": 0}, ValueError, "nbytes must be an integer in [1, 2^62), got 0"),
    ({"nbytes": 2**62}, ValueError, f"nbytes must be an integer in [1, 2^62), got {2**62}"),
    ({"nbytes": 1.0}, TypeError, "nbytes must be an integer, got 1.0"),
    ({"offset": -1}, ValueError, "offset must be an integer in [0, 2^62), got -1"),
    ({"pool": True}, TypeError, "pool must be an integer, got True"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), COPY_ERRORS, ids=[t for _, _, t in COPY_ERRORS])
def test_bad_copies(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"pool": 0, "nbytes": 5} | changes
    refused(kind, text, lambda: PageBuffer.copy(**arguments))


def test_a_copy_has_no_ranges_and_no_scale() -> None:
    for changes, text in (
        ({"quantized_range": (0, 16)}, "quantized_range must be None for a copied buffer, got (0, 16)"),
        ({"residual_range": (0, 16)}, "residual_range must be (0, 0) for a copied buffer, got (0, 16)"),
        ({"global_scale": 2.0}, "global_scale must be 1 for a copied buffer, got 2.0"),
        ({"rows": 2**60}, f"rows * row_elements must be less than 2^62 bytes, got {2**67}"),
    ):
        refused(ValueError, text, partial(nvfp4, transform="copy", **changes))


def test_a_copy_may_have_any_dtype_and_offset() -> None:
    b = PageBuffer(1, 3, 7, torch.int64, offset=5, transform="copy")
    assert (b.nbytes, b.data_bytes, b.scale_bytes, b.lossless_bytes) == (168, 0, 0, 0)
    assert PageBuffer.copy(1, 168, offset=5).nbytes == 168


def test_buffers_are_values() -> None:
    b = nvfp4(quantized_range=[16, 32], residual_range=(7, 0))
    assert b == nvfp4(quantized_range=(16, 32))
    assert hash(b) == hash(nvfp4(quantized_range=(16, 32)))
    assert nvfp4().quantized_range == (0, 64)
    assert dataclasses.replace(b, offset=32).offset == 32
    assert dataclasses.replace(PageBuffer.copy(0, 5), pool=3) == PageBuffer.copy(3, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        b.rows = 5  # type: ignore[misc]
    untyped: Any = PageBuffer
    with pytest.raises(TypeError):
        untyped(0, 4, 64, F16, 0)


def test_buffer_sizes() -> None:
    b = nvfp4(rows=5, dtype=F32, quantized_range=(16, 32), residual_range=(32, 16))
    assert b.nbytes == 5 * 64 * 4
    assert b.data_bytes == 5 * 24
    assert b.scale_bytes == 5 * 3
    assert b.lossless_bytes == 5 * 32 * 4


LAYOUT_ERRORS: list[tuple[Any, type[Exception], str]] = [
    ([], ValueError, "layers must be at least one layer, got none"),
    (None, TypeError, "layers must be a sequence of layers, got NoneType"),
    (nvfp4(), TypeError, "layers must be a sequence of layers, got PageBuffer"),
    ([nvfp4()], TypeError, "layers[0] must be a sequence of PageBuffer, got PageBuffer"),
    ([[nvfp4()], []], ValueError, "layers[1] must be at least one buffer, got none"),
    ([[nvfp4(), None]], TypeError, "layers[0][1] must be a PageBuffer, got NoneType"),
    (
        [[nvfp4()], [nvfp4(offset=496)]],
        ValueError,
        "layers must be free of overlapping buffers,"
        " got bytes 0:512 of pool 0 in layers[0][0] and 496:1008 in layers[1][0]",
    ),
    (
        [[PageBuffer.copy(1, 9, offset=600), nvfp4(pool=1), PageBuffer.copy(1, 1, offset=608)]],
        ValueError,
        "layers must be free of overlapping buffers,"
        " got bytes 600:609 of pool 1 in layers[0][0] and 608:609 in layers[0][2]",
    ),
    (
        [[PageBuffer.copy(0, 2**62 - 1), PageBuffer.copy(1, 1)]],
        ValueError,
        f"layers must be less than 2^62 cold bytes, got {2**62}",
    ),
]


@pytest.mark.parametrize(("layers", "kind", "text"), LAYOUT_ERRORS, ids=[t for _, _, t in LAYOUT_ERRORS])
def test_bad_layouts(layers: Any, kind: type[Exception], text: str) -> None:
    refused(kind, text, lambda: PageLayout(layers))


def test_neighbours_share_a_pool() -> None:
    layout = PageLayout([[nvfp4(offset=512), nvfp4(), PageBuffer.copy(0, 3, offset=1024)], [nvfp4(pool=4)]])
    assert layout.num_pools == 5
    assert layout.hot_page_bytes == 3 * 512 + 3


def test_table_and_scales() -> None:
    layout = PageLayout(
        [
            [
                nvfp4(pool=3, offset=32, quantized_range=(16, 48), residual_range=(32, 16), global_scale=0.1),
                PageBuffer.copy(1, 2176, offset=5),
            ],
            [
                nvfp4(rows=7, row_elements=32, dtype=BF16, residual_range=(16, 0)),
                nvfp4(pool=1, offset=4096, dtype=F32),
                nvfp4(pool=2, dtype=E4M3, global_scale=4),
                PageBuffer(5, 3, 7, torch.int16, transform="copy"),
            ],
        ]
    )
    assert layout.table.tolist() == [
        [0, 3, 32, 0, 0, 4, 64, 16, 48, 32, 16, 0],
        [0, 1, 5, 1, 0, 0, 0, 0, 0, 0, 0, 2176],
        [1, 0, 0, 0, 1, 7, 32, 0, 32, 0, 0, 0],
        [1, 1, 4096, 0, 2, 4, 64, 0, 64, 0, 0, 0],
        [1, 2, 0, 0, 3, 4, 64, 0, 64, 0, 0, 0],
        [1, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 42],
    ]
    assert (layout.table.dtype, layout.table.device.type) == (torch.int64, "cpu")
    assert layout.table.is_contiguous()
    assert torch.equal(layout.scales, torch.tensor([0.1, 1.0, 1.0, 1.0, 4.0, 1.0]))
    assert (layout.scales.dtype, layout.scales.device.type) == (F32, "cpu")


def test_tables_ignore_the_default_device_and_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            layout = PageLayout([[nvfp4(global_scale=0.1)]])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (layout.table.device.type, layout.scales.device.type) == ("cpu", "cpu")
    assert layout.scales.dtype == F32


def test_layouts_are_values() -> None:
    a, b = (PageLayout.attention(2, 4, 64, 8, F16) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != PageLayout.attention(2, 4, 64, 8, BF16)
    assert a != a.layers
    assert PageLayout([list(layer) for layer in a.layers]) == a
    copy = pickle.loads(pickle.dumps(a))
    assert copy == a
    assert torch.equal(copy.table, a.table)


def test_repr_is_one_line() -> None:
    text = "<kvc.PageLayout: 36 layers, 72 buffers, hot 4718592 B -> cold 1327104 B (3.56x)>"
    assert repr(PageLayout.attention(36, 8, 128, 32, BF16)) == text
    assert (
        repr(PageLayout([[nvfp4()]]))
        == "<kvc.PageLayout: 1 layer, 1 buffer, hot 512 B -> cold 144 B (3.56x)>"
    )


def test_describe() -> None:
    layout = PageLayout(
        [
            [
                nvfp4(rows=5, quantized_range=(16, 48), residual_range=(48, 16), global_scale=0.5),
                PageBuffer.copy(1, 7, offset=3),
                nvfp4(pool=2, rows=5, row_elements=16, dtype=E4M3, offset=32),
            ],
            [nvfp4(pool=3)],
        ]
    )
    assert layout.describe() == "\n".join(
        [
            "kvc.PageLayout: 2 layers, 4 buffers, hot 1239 B -> cold 544 B (2.28x); ranges are start:stop",
            "layer 0: cold bytes 0:400",
            "  pool 0, hot bytes 0:640, nvfp4 of 5 x 64 float16, quantized 16:64, residual 48:64, global"
            " scale 0.5 -> data 0:160, scales 200:220, lossless 220:380",
            "  pool 1, hot bytes 3:10, copy of 7 B -> copy 385:392",
            "  pool 2, hot bytes 32:112, nvfp4 of 5 x 16 float8_e4m3fn, quantized 0:16, global scale 1"
            " -> data 160:200, scales 380:385",
            "  padding 392:400",
            "layer 1: cold bytes 400:544",
            "  pool 3, hot bytes 0:512, nvfp4 of 4 x 64 float16, quantized 0:64, global scale 1"
            " -> data 400:528, scales 528:544",
        ]
    )


@pytest.mark.parametrize(
    ("layout", "page_bytes", "parts"),
    [
        (
            PageLayout.attention(1, 4, 128, 5, F16),
            2880,
            ["data 0:1280, scales 2560:2720", "data 1280:2560, scales 2720:2880"],
        ),
        (
            PageLayout.attention(1, 1, 32, 5, F16),
            192,
            ["data 0:80, scales 160:170", "data 80:160, scales 170:180", "padding 180:192"],
        ),
        (PageLayout.attention(1, 1, 16, 64, BF16), 1152, []),
        (
            PageLayout.attention(1, 2, 256, 4, E4M3, rotary_dim=64, skip_rope_quantization=True),
            2528,
            ["data 0:768, scales 1792:1888, lossless 1888:2400", "data 768:1792, scales 2400:2528"],
        ),
        (PageLayout.attention(1, 2, 256, 4, E4M3, rotary_dim=64), 2304, []),
        (
            PageLayout.mla(1, 512, 64, 64, BF16, side_bytes=8448),
            29184,
            ["data 0:18432, scales 18432:20736", "copy 20736:29184"],
        ),
        (PageLayout.mla(1, 512, 64, 64, E4M3, skip_rope_quantization=True), 22528, []),
        (PageLayout.mla(61, 512, 64, 64, BF16, side_bytes=8448), 1780224, []),
        (
            PageLayout.deepseek_v4(1, 32, BF16, skip_rope_quantization=True, side_bytes=2176),
            14336,
            ["data 0:7168, scales 7168:8064, lossless 8064:12160", "copy 12160:14336"],
        ),
        (PageLayout.deepseek_v4(1, 32, E4M3, skip_rope_quantization=True, side_bytes=2176), 12288, []),
        (PageLayout.deepseek_v4(1, 32, E4M3, side_bytes=2176), 11392, []),
        (
            PageLayout.deepseek_v4(1, 32, BF16, residual_dim=64, side_bytes=2176),
            12544,
            ["data 0:9216, scales 9216:10368"],
        ),
        (PageLayout.attention(36, 8, 128, 32, BF16), 1327104, []),
        (PageLayout.attention(36, 8, 128, 32, E4M3), 1327104, []),
    ],
    ids=[
        "gqa",
        "padded",
        "one_group_rows",
        "fp8_skip",
        "fp8",
        "mla_side",
        "mla_skip",
        "deepseek_v3.2",
        "dsv4_skip",
        "dsv4_fp8_skip",
        "dsv4_fp8",
        "dsv4_residual",
        "qwen3_8b_bf16",
        "qwen3_8b_fp8",
    ],
)
def test_known_pages(layout: PageLayout, page_bytes: int, parts: list[str]) -> None:
    assert layout.cold_page_bytes == page_bytes
    text = layout.describe()
    assert all(part in text for part in parts)


def test_glm_5_2_page() -> None:
    """79 latent layers, 22 of them with an indexer's keys: not every layer has the same buffers."""
    layers = [[PageBuffer(i, 64, 576, E4M3)] for i in range(79)]
    for i in range(22):
        layers[i].append(PageBuffer.copy(79 + i, 64 * 132))
    layout = PageLayout(layers)
    assert (layout.hot_page_bytes, layout.cold_page_bytes) == (3098112, 1824000)


def test_attention_builder() -> None:
    layout = PageLayout.attention(
        2, 4, 128, 16, BF16, rotary_dim=64, residual_dim=32, global_scales=[(0.5, 2), (1, 4)]
    )
    assert layout.layers == (
        (
            PageBuffer(0, 64, 128, BF16, residual_range=(0, 32), global_scale=0.5),
            PageBuffer(1, 64, 128, BF16, global_scale=2.0),
        ),
        (
            PageBuffer(2, 64, 128, BF16, residual_range=(0, 32)),
            PageBuffer(3, 64, 128, BF16, global_scale=4.0),
        ),
    )
    skip = PageLayout.attention(1, 4, 128, 16, BF16, rotary_dim=32, skip_rope_quantization=True)
    assert [b.quantized_range for b in skip.layers[0]] == [(32, 96), (0, 128)]


def test_unused_rotary_width_is_free() -> None:
    plain = PageLayout.attention(1, 4, 128, 16, BF16)
    assert PageLayout.attention(1, 4, 128, 16, BF16, rotary_dim=13) == plain
    assert PageLayout.attention(1, 4, 128, 16, BF16, rotary_dim=0, skip_rope_quantization=True) == plain
    assert PageLayout.attention(1, 4, 128, 16, BF16, residual_dim=128).layers[0][0].residual_range == (0, 128)


def test_latent_builders() -> None:
    layout = PageLayout.mla(2, 512, 64, 32, F16, residual_dim=48, side_bytes=7)
    assert layout.layers == (
        (PageBuffer(0, 32, 576, F16, residual_range=(528, 48)), PageBuffer.copy(2, 7)),
        (PageBuffer(1, 32, 576, F16, residual_range=(528, 48)), PageBuffer.copy(3, 7)),
    )
    skip = PageLayout.mla(1, 512, 64, 32, F16, skip_rope_quantization=True)
    assert skip.layers == ((PageBuffer(0, 32, 576, F16, quantized_range=(0, 512)),),)
    assert PageLayout.mla(1, 120, 8, 4, F16).layers[0][0].row_elements == 128
    assert PageLayout.mla(1, 128, 0, 4, F16, skip_rope_quantization=True).layers[0][0].quantized_range == (
        0,
        128,
    )
    assert PageLayout.deepseek_v4(3, 8, BF16, residual_dim=64, side_bytes=9) == PageLayout.mla(
        3, 448, 64, 8, BF16, residual_dim=64, side_bytes=9
    )


def attention(**changes: Any) -> PageLayout:
    arguments: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim": 128,
        "tokens_per_page": 16,
        "dtype": BF16,
    } | changes
    return PageLayout.attention(**arguments)


def mla(**changes: Any) -> PageLayout:
    arguments: dict[str, Any] = {
        "num_layers": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "tokens_per_page": 16,
        "dtype": BF16,
    } | changes
    return PageLayout.mla(**arguments)


def deepseek_v4(**changes: Any) -> PageLayout:
    arguments: dict[str, Any] = {"num_layers": 2, "rows_per_page": 32, "dtype": BF16} | changes
    return PageLayout.deepseek_v4(**arguments)


SKIP = {"skip_rope_quantization": True}
BUILDER_ERRORS: list[tuple[Callable[..., PageLayout], dict[str, Any], type[Exception], str]] = [
    (attention, {"num_layers": 0}, ValueError, "num_layers must be an integer in [1, 2^20), got 0"),
    (
        attention,
        {"num_layers": 2**62},
        ValueError,
        f"num_layers must be an integer in [1, 2^20), got {2**62}",
    ),
    (attention, {"num_kv_heads": -4}, ValueError, "num_kv_heads must be an integer in [1, 2^31), got -4"),
    (attention, {"num_kv_heads": 2.0}, TypeError, "num_kv_heads must be an integer, got 2.0"),
    (attention, {"tokens_per_page": 0}, ValueError, "tokens_per_page must be an integer in [1, 2^31), got 0"),
    (attention, {"tokens_per_page": True}, TypeError, "tokens_per_page must be an integer, got True"),
    (attention, {"head_dim": 100}, ValueError, "head_dim must be a multiple of 16, got 100"),
    (attention, {"head_dim": 0}, ValueError, "head_dim must be an integer in [1, 2^32), got 0"),
    (
        attention,
        {"dtype": torch.uint8},
        TypeError,
        "dtype must be float16, bfloat16, float32 or float8_e4m3fn, got torch.uint8",
    ),
    (attention, {"rotary_dim": 144}, ValueError, "rotary_dim must be at most head_dim (128), got 144"),
    (attention, {"rotary_dim": -16}, ValueError, "rotary_dim must be an integer in [0, 2^31), got -16"),
    (
        attention,
        {"skip_rope_quantization": 1},
        TypeError,
        "skip_rope_quantization must be True or False, got 1",
    ),
    (
        attention,
        SKIP,
        ValueError,
        "rotary_dim must be below the row's 128 elements for skip_rope_quantization, got 128",
    ),
    (
        attention,
        SKIP | {"rotary_dim": 40},
        ValueError,
        "rotary_dim must be a multiple of 16 for skip_rope_quantization, got 40",
    ),
    (
        attention,
        SKIP | {"rotary_dim": 64, "residual_dim": 16},
        ValueError,
        "residual_dim must be 0 beside skip_rope_quantization, got 16",
    ),
    (
        attention,
        {"residual_dim": 24},
        ValueError,
        "residual_dim must be a multiple of 16 up to rotary_dim (128), got 24",
    ),
    (
        attention,
        {"rotary_dim": 64, "residual_dim": 80},
        ValueError,
        "residual_dim must be a multiple of 16 up to rotary_dim (64), got 80",
    ),
    (attention, {"residual_dim": -16}, ValueError, "residual_dim must be an integer in [0, 2^31), got -16"),
    (attention, {"global_scales": 2.0}, TypeError, "global_scales must be a sequence of pairs, got 2.0"),
    (attention, {"global_scales": [(1, 1)]}, ValueError, "global_scales must be 2 pairs, got 1"),
    (
        attention,
        {"global_scales": [(1, 1), (1, 1, 1)]},
        ValueError,
        "global_scales[1] must be a (K, V) pair of scales, got (1, 1, 1)",
    ),
    (
        attention,
        {"global_scales": [(1, 0), (1, 1)]},
        ValueError,
        "global_scales[0] must be in [2^-100, 2^100] after rounding to fp32, got 0.0",
    ),
    (mla, {"num_layers": 0}, ValueError, "num_layers must be an integer in [1, 2^20), got 0"),
    (mla, {"kv_lora_rank": 0}, ValueError, "kv_lora_rank must be an integer in [1, 2^31), got 0"),
    (
        mla,
        {"kv_lora_rank": 500},
        ValueError,
        "kv_lora_rank + qk_rope_head_dim must be a multiple of 16, got 564",
    ),
    (mla, {"qk_rope_head_dim": -64}, ValueError, "qk_rope_head_dim must be an integer in [0, 2^31), got -64"),
    (
        mla,
        SKIP | {"kv_lora_rank": 504, "qk_rope_head_dim": 72},
        ValueError,
        "qk_rope_head_dim must be a multiple of 16 for skip_rope_quantization, got 72",
    ),
    (
        mla,
        SKIP | {"residual_dim": 64},
        ValueError,
        "residual_dim must be 0 beside skip_rope_quantization, got 64",
    ),
    (
        mla,
        {"residual_dim": 80},
        ValueError,
        "residual_dim must be a multiple of 16 up to qk_rope_head_dim (64), got 80",
    ),
    (mla, {"residual_dim": 16.0}, TypeError, "residual_dim must be an integer, got 16.0"),
    (mla, {"side_bytes": -1}, ValueError, "side_bytes must be an integer in [0, 2^62), got -1"),
    (mla, {"side_bytes": 2**62}, ValueError, f"side_bytes must be an integer in [0, 2^62), got {2**62}"),
    (
        mla,
        {"side_bytes": 2**61},
        ValueError,
        f"layers must be less than 2^62 cold bytes, got {2**62 + 2 * 16 * 324}",
    ),
    (
        mla,
        {"skip_rope_quantization": None},
        TypeError,
        "skip_rope_quantization must be True or False, got None",
    ),
    (deepseek_v4, {"rows_per_page": 0}, ValueError, "rows_per_page must be an integer in [1, 2^31), got 0"),
    (
        deepseek_v4,
        {"residual_dim": 80},
        ValueError,
        "residual_dim must be a multiple of 16 up to qk_rope_head_dim (64), got 80",
    ),
]


@pytest.mark.parametrize(("build", "changes", "kind", "text"), BUILDER_ERRORS)
def test_bad_builder_arguments(
    build: Callable[..., PageLayout], changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    refused(kind, text, lambda: build(**changes))


def test_huge_but_legal_sizes_stay_exact() -> None:
    rows = 2**31 - 1
    layout = PageLayout([[PageBuffer(i, rows, 16, F32) for i in range(3)], [PageBuffer.copy(3, 2**60)]])
    assert layout.hot_page_bytes == 3 * rows * 64 + 2**60
    assert layout.cold_page_bytes == -(-3 * rows * 9 // 16) * 16 + 2**60
    assert layout.table[3, 11].item() == 2**60


@st.composite
def buffers(draw: st.DrawFn, pool: int) -> PageBuffer:
    if draw(st.booleans()):
        return PageBuffer.copy(pool, draw(st.integers(1, 99)), offset=draw(st.integers(0, 99)))
    groups = draw(st.integers(1, 6))
    first = draw(st.integers(0, groups - 1))
    count = draw(st.integers(1, groups - first))
    residual_first = draw(st.integers(first, first + count))
    residual_count = draw(st.integers(0, first + count - residual_first))
    return PageBuffer(
        pool,
        draw(st.integers(1, 9)),
        16 * groups,
        draw(st.sampled_from([F16, BF16, F32, E4M3])),
        offset=16 * draw(st.integers(0, 9)),
        quantized_range=(16 * first, 16 * count),
        residual_range=(16 * residual_first, 16 * residual_count),
    )


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_size_formula_and_tiling(data: st.DataObject, shape: list[int]) -> None:
    """The contract's size, and a description whose cold ranges cover the page once without a gap."""
    pools = iter(range(100))
    layers = [[data.draw(buffers(next(pools))) for _ in range(n)] for n in shape]
    layout = PageLayout(layers)
    expected = 0
    for layer in layers:
        size = 0
        for b in layer:
            if b.transform == "copy":
                size += b.nbytes
                continue
            assert b.quantized_range is not None
            q, p = b.quantized_range[1], b.residual_range[1]
            size += b.rows * (q + p) // 2 + b.rows * (q + p) // 16
            size += b.rows * (b.row_elements - q) * b.dtype.itemsize
        expected += (size + 15) // 16 * 16
    assert layout.cold_page_bytes == expected

    text = layout.describe()
    spans = sorted(
        (int(start), int(stop))
        for start, stop in re.findall(r"(?:data|scales|lossless|copy|padding) (\d+):(\d+)", text)
    )
    assert spans[0][0] == 0
    assert spans[-1][1] == expected
    assert all(a[1] == b[0] for a, b in pairwise(spans))
