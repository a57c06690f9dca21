"""NVFP4 rows and the cold-page codec.

A *hot* page lies in the pools an attention kernel reads; a *cold* page is one opaque block of fixed size in
which rows are stored as NVFP4: E2M1 values of four bits with one E4M3 scale for every 16 of them, 0.5625
bytes per element. :class:`PageLayout` says which bytes of a hot page become what in the cold one; the
functions of this module convert rows and pages. `kvc.reference.nvfp4` is the executable specification of
both.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from ._ops import call, ops

__all__ = [
    "PageBuffer",
    "PageLayout",
    "decode_pages_",
    "encode_pages_",
    "nvfp4_dequantize",
    "nvfp4_quantize",
]

# Bound once: looking an overload up costs about as much as the argument checks.
_nvfp4_quantize = ops.nvfp4_quantize.default
_nvfp4_dequantize = ops.nvfp4_dequantize.default
_encode_pages_ = ops.encode_pages_.default
_decode_pages_ = ops.decode_pages_.default

GROUP_ELEMENTS = 16
_DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float8_e4m3fn: 3}


def _error(argument: str, expected: str, actual: object, kind: type[Exception] = ValueError) -> Exception:
    return kind(f"kvc.PageLayout: {argument} must be {expected}, got {actual}")


def _integer(argument: str, value: object, low: int, bits: int) -> int:
    number = _any_integer(argument, value)
    if not low <= number < 1 << bits:
        raise _error(argument, f"an integer in [{low}, 2^{bits})", number)
    return number


def _any_integer(argument: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _error(argument, "an integer", repr(value), TypeError)
    return operator.index(value)


def _boolean(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _error(argument, "True or False", repr(value), TypeError)
    return value


def _pair(argument: str, value: object, expected: str) -> Sequence[object]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise _error(argument, expected, repr(value), TypeError)
    if len(value) != 2:
        raise _error(argument, expected, repr(value))
    return value


def _range(argument: str, value: object) -> tuple[int, int]:
    start, elements = _pair(argument, value, "a (start, elements) pair of integers")
    return _any_integer(argument, start), _any_integer(argument, elements)


def _global_scale(argument: str, value: object) -> float:
    """`value` rounded to fp32, the precision in which it is applied."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _error(argument, "a real number", repr(value), TypeError)
    try:
        rounded = ctypes.c_float(float(value)).value
    except OverflowError:
        rounded = float("inf")
    if not 2.0**-100 <= rounded <= 2.0**100:
        raise _error(argument, "in [2^-100, 2^100] after rounding to fp32", rounded)
    return rounded


@dataclass(frozen=True)
class PageBuffer:
    """One run of bytes of a hot page's slot and what a cold page makes of it. Immutable.

    Parameters
    ----------
    pool : int
        Index into the list of pools given to :func:`encode_pages_` and :func:`decode_pages_`.
    rows : int
        Rows of the buffer, one behind the other: usually KV heads times tokens of a page.
    row_elements : int
        Elements of a row; for NVFP4 a multiple of 16.
    dtype : torch.dtype
        What the hot rows hold: float16, bfloat16, float32 or float8_e4m3fn. A copied buffer may have any
        dtype.
    offset : int
        First byte of the buffer, counted from the start of a slot; for NVFP4 a multiple of 16.
    transform : {"nvfp4", "copy"}
        ``"copy"`` stores the bytes unchanged; it takes no ranges and no scale.
    quantized_range : (int, int), optional
        (start, elements) of the part of every row that becomes NVFP4, two multiples of 16. The elements
        outside are stored unchanged. Default: the whole row.
    residual_range : (int, int)
        (start, elements) of the part of the quantized range stored in two NVFP4 components, main and
        residual: 1.125 bytes per element with an error about ten times smaller. The start is ignored when
        there are no elements.
    global_scale : float
        Multiplier applied on decode, in [2^-100, 2^100]; kept rounded to fp32. With 1, elements beyond 2688
        saturate and groups of 16 with no magnitude above 6 * 2^-10 become zero.

    Raises
    ------
    ValueError
        A number out of range or not the multiple it must be, an unknown `transform`.
    TypeError
        An argument of the wrong type, a dtype with no NVFP4 conversion.

    Notes
    -----
    The attributes hold what will be used: ranges as tuples, (0, 0) where there is none.
    """

    pool: int
    rows: int
    row_elements: int
    dtype: torch.dtype
    _: KW_ONLY
    offset: int = 0
    transform: str = "nvfp4"
    quantized_range: tuple[int, int] | None = None
    residual_range: tuple[int, int] = (0, 0)
    global_scale: float = 1.0

    def __post_init__(self) -> None:
        pool = _integer("pool", self.pool, 0, 31)
        rows = _integer("rows", self.rows, 1, 62)
        row_elements = _integer("row_elements", self.row_elements, 1, 62)
        offset = _integer("offset", self.offset, 0, 62)
        residual = _range("residual_range", self.residual_range)
        global_scale = _global_scale("global_scale", self.global_scale)
        if not isinstance(self.dtype, torch.dtype):
            raise _error("dtype", "a torch.dtype", repr(self.dtype), TypeError)
        if not isinstance(self.transform, str):
            raise _error("transform", "a string", repr(self.transform), TypeError)
        if self.transform not in ("nvfp4", "copy"):
            raise _error("transform", "'nvfp4' or 'copy'", repr(self.transform))
        quantized = (0, row_elements if self.transform == "nvfp4" else 0)
        if self.quantized_range is not None:
            quantized = _range("quantized_range", self.quantized_range)

        # Frozen: the one place that stores the arguments in their final form.
        for name, value in (
            ("pool", pool),
            ("rows", rows),
            ("row_elements", row_elements),
            ("offset", offset),
            ("quantized_range", quantized),
            ("residual_range", residual if residual[1] else (0, 0)),
            ("global_scale", global_scale),
        ):
            object.__setattr__(self, name, value)
        if self.transform == "copy":
            self._check_copy(quantized)
        else:
            self._check_nvfp4(quantized)

    def _check_copy(self, quantized: tuple[int, int]) -> None:
        if quantized != (0, 0):
            raise _error("quantized_range", "None for a copied buffer", quantized)
        if self.residual_range != (0, 0):
            raise _error("residual_range", "(0, 0) for a copied buffer", self.residual_range)
        if self.global_scale != 1.0:
            raise _error("global_scale", "1 for a copied buffer", self.global_scale)
        if self.nbytes >= 1 << 62:
            raise _error("rows * row_elements", "less than 2^62 bytes", self.nbytes)

    def _check_nvfp4(self, quantized: tuple[int, int]) -> None:
        if self.dtype not in _DTYPE_CODES:
            raise _error("dtype", "float16, bfloat16, float32 or float8_e4m3fn", self.dtype, TypeError)
        if self.row_elements % GROUP_ELEMENTS:
            raise _error("row_elements", "a multiple of 16", self.row_elements)
        groups = self.rows * (self.row_elements // GROUP_ELEMENTS)
        if groups >= 1 << 31:
            raise _error("rows * (row_elements / 16)", "less than 2^31 groups", groups)
        if self.offset % GROUP_ELEMENTS:
            raise _error("offset", "a multiple of 16 bytes for an NVFP4 buffer", self.offset)
        start, elements = quantized
        if (
            start % GROUP_ELEMENTS
            or elements % GROUP_ELEMENTS
            or start < 0
            or elements <= 0
            or start + elements > self.row_elements
        ):
            row = f"a non-empty part of [0, {self.row_elements}), start and elements multiples of 16"
            raise _error("quantized_range", row, quantized)
        first, count = self.residual_range
        if (
            first % GROUP_ELEMENTS
            or count % GROUP_ELEMENTS
            or count < 0
            or (count > 0 and not start <= first <= first + count <= start + elements)
        ):
            part = f"inside the quantized [{start}, {start + elements}), start and elements multiples of 16"
            raise _error("residual_range", part, (first, count))

    @classmethod
    def copy(cls, pool: int, nbytes: int, *, offset: int = 0) -> PageBuffer:
        """A buffer of `nbytes` bytes that the cold page stores unchanged, at any `offset`."""
        nbytes = _integer("nbytes", nbytes, 1, 62)
        return cls(pool, 1, nbytes, torch.uint8, offset=offset, transform="copy")

    @property
    def nbytes(self) -> int:
        """Bytes of the hot buffer."""
        return self.rows * self.row_elements * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Block scales in the cold page, one byte each: `rows * (Q + P) / 16`."""
        _, quantized = self.quantized_range or (0, 0)
        return self.rows * (quantized + self.residual_range[1]) // GROUP_ELEMENTS

    @property
    def data_bytes(self) -> int:
        """Packed E2M1 values in the cold page: `rows * (Q + P) / 2`."""
        return self.scale_bytes * (GROUP_ELEMENTS // 2)

    @property
    def lossless_bytes(self) -> int:
        """Bytes of the elements outside the quantized range: `rows * (R - Q) * itemsize`, or 0 for a copy."""
        if self.transform == "copy":
            return 0
        _, quantized = self.quantized_range or (0, 0)
        return self.rows * (self.row_elements - quantized) * self.dtype.itemsize


class _Section(NamedTuple):
    """Bytes [start, stop) of the cold page and the buffer of the layer they belong to."""

    buffer: int
    name: str
    start: int
    stop: int


def _sections(layer: Sequence[PageBuffer], start: int) -> Iterator[_Section]:
    """The parts of a layer whose record begins at byte `start`, in cold order; the last is its padding."""
    order = [(i, "data", b.data_bytes) for i, b in enumerate(layer) if b.transform == "nvfp4"]
    for i, b in enumerate(layer):
        if b.transform == "nvfp4":
            order += [(i, "scales", b.scale_bytes), (i, "lossless", b.lossless_bytes)]
    order += [(i, "copy", b.nbytes) for i, b in enumerate(layer) if b.transform == "copy"]
    for i, name, nbytes in order:
        yield _Section(i, name, start, start + nbytes)
        start += nbytes
    yield _Section(-1, "padding", start, start + -start % 16)


class PageLayout:
    """What a hot page consists of and where its parts lie in the cold page (format version 1).

    For each layer in order the cold page holds the `data` of every NVFP4 buffer, then for each of these its
    `scales` followed by its `lossless` bytes, then every copied buffer, then zeros up to a multiple of 16
    bytes.

    Parameters
    ----------
    layers : sequence of sequences of PageBuffer
        The buffers of each layer. Neither list may be empty, and buffers that share a pool may not overlap in
        it.

    Attributes
    ----------
    layers : tuple[tuple[PageBuffer, ...], ...]
    num_pools : int
        Length of the shortest list of pools that has every pool named.
    hot_page_bytes, cold_page_bytes : int
        Bytes of a page: what its buffers name, and the size of its block in a cold tensor.
    table : Tensor
        int64, CPU, `[num_buffers, 12]`: the buffers in order, as the ops read them. Its columns may change.
    scales : Tensor
        fp32, CPU, `[num_buffers]`: the global scales, 1 for a copied buffer.

    Raises
    ------
    ValueError
        An empty list, overlapping buffers, or a cold page of 2^62 bytes or more.
    TypeError
        Anything but a sequence of sequences of :class:`PageBuffer`.

    Examples
    --------
    >>> layout = PageLayout.attention(36, 8, 128, 32, torch.bfloat16)
    >>> layout
    <kvc.PageLayout: 36 layers, 72 buffers, hot 4718592 B -> cold 1327104 B (3.56x)>
    """

    def __init__(self, layers: Sequence[Sequence[PageBuffer]]) -> None:
        self.layers = _checked_layers(layers)
        buffers = [b for layer in self.layers for b in layer]
        _check_disjoint(self.layers)
        self.num_pools = 1 + max(b.pool for b in buffers)
        self.hot_page_bytes = sum(b.nbytes for b in buffers)
        self.cold_page_bytes = 0
        for layer in self.layers:
            *_, padding = _sections(layer, self.cold_page_bytes)
            self.cold_page_bytes = padding.stop
        if self.cold_page_bytes >= 1 << 62:
            raise _error("layers", "less than 2^62 cold bytes", self.cold_page_bytes)
        rows = [_table_row(i, b) for i, layer in enumerate(self.layers) for b in layer]
        # Explicitly on the CPU: a default device must not catch them.
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.scales = torch.tensor([b.global_scale for b in buffers], dtype=torch.float32, device="cpu")

    @classmethod
    def attention(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_page: int,
        dtype: torch.dtype,
        *,
        rotary_dim: int | None = None,
        skip_rope_quantization: bool = False,
        residual_dim: int = 0,
        global_scales: Sequence[tuple[float, float]] | None = None,
    ) -> PageLayout:
        """MHA, GQA or MQA: K of layer l in pool 2l and V in pool 2l + 1, both at offset 0.

        Each buffer has `num_kv_heads * tokens_per_page` rows of `head_dim` elements, in any order of the two.

        Parameters
        ----------
        num_layers, num_kv_heads, head_dim, tokens_per_page : int
            `head_dim` is a multiple of 16.
        dtype : torch.dtype
            What the pools hold: float16, bfloat16, float32 or float8_e4m3fn.
        rotary_dim : int, optional
            Leading elements of a K row that carry RoPE. Default: all of them.
        skip_rope_quantization : bool
            Keep those elements of K as they are. `rotary_dim` must then be a multiple of 16 below `head_dim`.
        residual_dim : int
            Leading elements of a K row, at most `rotary_dim`, stored in two components; a multiple of 16, and
            0 beside `skip_rope_quantization`.
        global_scales : sequence of (float, float), optional
            One (K, V) pair of multipliers applied on decode per layer, such as a checkpoint's `k_scale` and
            `v_scale`.

        Raises
        ------
        ValueError, TypeError
            Arguments out of range or of the wrong type.
        """
        num_layers = _integer("num_layers", num_layers, 1, 20)
        num_kv_heads = _integer("num_kv_heads", num_kv_heads, 1, 31)
        tokens_per_page = _integer("tokens_per_page", tokens_per_page, 1, 31)
        head_dim = _row_elements("head_dim", head_dim)
        rotary = head_dim if rotary_dim is None else _integer("rotary_dim", rotary_dim, 0, 31)
        if rotary > head_dim:
            raise _error("rotary_dim", f"at most head_dim ({head_dim})", rotary)
        residual_dim = _check_rope(skip_rope_quantization, residual_dim, "rotary_dim", rotary, head_dim)
        key_range = (rotary, head_dim - rotary) if skip_rope_quantization else (0, head_dim)

        if global_scales is None:
            global_scales = [(1.0, 1.0)] * num_layers
        elif isinstance(global_scales, (str, bytes)) or not isinstance(global_scales, Sequence):
            raise _error("global_scales", "a sequence of pairs", repr(global_scales), TypeError)
        elif len(global_scales) != num_layers:
            raise _error("global_scales", f"{num_layers} pairs", len(global_scales))

        rows = num_kv_heads * tokens_per_page
        layers = []
        for i, pair in enumerate(global_scales):
            name = f"global_scales[{i}]"
            key_scale, value_scale = (
                _global_scale(name, g) for g in _pair(name, pair, "a (K, V) pair of scales")
            )
            key = PageBuffer(
                2 * i,
                rows,
                head_dim,
                dtype,
                quantized_range=key_range,
                residual_range=(0, residual_dim),
                global_scale=key_scale,
            )
            layers.append([key, PageBuffer(2 * i + 1, rows, head_dim, dtype, global_scale=value_scale)])
        return cls(layers)

    @classmethod
    def mla(
        cls,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        tokens_per_page: int,
        dtype: torch.dtype,
        *,
        skip_rope_quantization: bool = False,
        residual_dim: int = 0,
        side_bytes: int = 0,
    ) -> PageLayout:
        """MLA: latent rows of layer l in pool l, their RoPE part trailing; side bytes in pool num_layers + l.

        Parameters
        ----------
        num_layers, kv_lora_rank, qk_rope_head_dim, tokens_per_page : int
            A row has `kv_lora_rank + qk_rope_head_dim` elements, a multiple of 16; a page has one row per
            token.
        dtype : torch.dtype
            What the latent rows hold: float16, bfloat16, float32 or float8_e4m3fn.
        skip_rope_quantization : bool
            Keep the trailing `qk_rope_head_dim` elements, then a multiple of 16, as they are.
        residual_dim : int
            Trailing elements, at most `qk_rope_head_dim`, stored in two components; a multiple of 16, and 0
            beside `skip_rope_quantization`.
        side_bytes : int
            Bytes of a page, such as an indexer's keys, that are copied from pool `num_layers + l`. 0: no such
            pool.

        Raises
        ------
        ValueError, TypeError
            Arguments out of range or of the wrong type.
        """
        num_layers = _integer("num_layers", num_layers, 1, 20)
        kv_lora_rank = _integer("kv_lora_rank", kv_lora_rank, 1, 31)
        rotary = _integer("qk_rope_head_dim", qk_rope_head_dim, 0, 31)
        tokens_per_page = _integer("tokens_per_page", tokens_per_page, 1, 31)
        side_bytes = _integer("side_bytes", side_bytes, 0, 62)
        row = _row_elements("kv_lora_rank + qk_rope_head_dim", kv_lora_rank + rotary)
        residual_dim = _check_rope(skip_rope_quantization, residual_dim, "qk_rope_head_dim", rotary, row)

        layers = []
        for i in range(num_layers):
            latent = PageBuffer(
                i,
                tokens_per_page,
                row,
                dtype,
                quantized_range=(0, kv_lora_rank if skip_rope_quantization else row),
                residual_range=(row - residual_dim, residual_dim),
            )
            layers.append([latent, PageBuffer.copy(num_layers + i, side_bytes)] if side_bytes else [latent])
        return cls(layers)

    @classmethod
    def deepseek_v4(
        cls,
        num_layers: int,
        rows_per_page: int,
        dtype: torch.dtype,
        *,
        skip_rope_quantization: bool = False,
        residual_dim: int = 0,
        side_bytes: int = 0,
    ) -> PageLayout:
        """DeepSeek-V4's compressed rows: 512 elements, the last 64 with RoPE. Otherwise as :meth:`mla`.

        Parameters
        ----------
        num_layers : int
        rows_per_page : int
            Compressed rows of a page: its tokens divided by the compression ratio.
        dtype : torch.dtype
            What the rows hold: float16, bfloat16, float32 or float8_e4m3fn.
        skip_rope_quantization : bool
            Keep the last 64 elements as they are.
        residual_dim : int
            Trailing elements, at most 64, stored in two components. Beside FP8 rows this takes more bytes
            than keeping them (72 against 64).
        side_bytes : int
            Bytes of a page that are copied from pool `num_layers + l`.
        """
        return cls.mla(
            num_layers,
            448,
            64,
            _integer("rows_per_page", rows_per_page, 1, 31),
            dtype,
            skip_rope_quantization=skip_rope_quantization,
            residual_dim=residual_dim,
            side_bytes=side_bytes,
        )

    def describe(self) -> str:
        """The layout to the byte, for people: hot and cold ranges of every buffer as start:stop."""
        lines = [f"{self._summary()}; ranges are start:stop"]
        start = 0
        for i, layer in enumerate(self.layers):
            sections = list(_sections(layer, start))
            lines.append(f"layer {i}: cold bytes {start}:{sections[-1].stop}")
            for j, b in enumerate(layer):
                cold = [
                    f"{s.name} {s.start}:{s.stop}" for s in sections if s.buffer == j and s.stop > s.start
                ]
                hot = f"  pool {b.pool}, hot bytes {b.offset}:{b.offset + b.nbytes}"
                lines.append(f"{hot}, {_describe_rows(b)} -> {', '.join(cold)}")
            padding = sections[-1]
            if padding.stop > padding.start:
                lines.append(f"  padding {padding.start}:{padding.stop}")
            start = padding.stop
        return "\n".join(lines)

    def _summary(self) -> str:
        layers, buffers = len(self.layers), sum(map(len, self.layers))
        ratio = self.hot_page_bytes / self.cold_page_bytes
        return (
            f"kvc.PageLayout: {layers} layer{'s' * (layers != 1)}, {buffers} buffer{'s' * (buffers != 1)}, "
            f"hot {self.hot_page_bytes} B -> cold {self.cold_page_bytes} B ({ratio:.2f}x)"
        )

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def __eq__(self, other: object) -> bool:
        return self.layers == other.layers if isinstance(other, PageLayout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.layers)


def _describe_rows(b: PageBuffer) -> str:
    if b.transform == "copy":
        return f"copy of {b.nbytes} B"
    (start, elements), (first, count) = b.quantized_range or (0, 0), b.residual_range
    text = f"nvfp4 of {b.rows} x {b.row_elements} {str(b.dtype).removeprefix('torch.')}"
    text += f", quantized {start}:{start + elements}"
    if count:
        text += f", residual {first}:{first + count}"
    return f"{text}, global scale {b.global_scale:g}"


def _table_row(layer: int, b: PageBuffer) -> list[int]:
    if b.transform == "copy":
        return [layer, b.pool, b.offset, 1, *[0] * 7, b.nbytes]
    ranges = (*(b.quantized_range or (0, 0)), *b.residual_range)
    return [layer, b.pool, b.offset, 0, _DTYPE_CODES[b.dtype], b.rows, b.row_elements, *ranges, 0]


def _checked_layers(layers: Sequence[Sequence[PageBuffer]]) -> tuple[tuple[PageBuffer, ...], ...]:
    if not isinstance(layers, Sequence):
        raise _error("layers", "a sequence of layers", type(layers).__name__, TypeError)
    if not layers:
        raise _error("layers", "at least one layer", "none")
    for i, layer in enumerate(layers):
        if not isinstance(layer, Sequence):
            raise _error(f"layers[{i}]", "a sequence of PageBuffer", type(layer).__name__, TypeError)
        if not layer:
            raise _error(f"layers[{i}]", "at least one buffer", "none")
        for j, b in enumerate(layer):
            if not isinstance(b, PageBuffer):
                raise _error(f"layers[{i}][{j}]", "a PageBuffer", type(b).__name__, TypeError)
    return tuple(tuple(layer) for layer in layers)


def _check_disjoint(layers: tuple[tuple[PageBuffer, ...], ...]) -> None:
    spans = sorted(
        (b.pool, b.offset, b.offset + b.nbytes, f"layers[{i}][{j}]")
        for i, layer in enumerate(layers)
        for j, b in enumerate(layer)
    )
    for (pool, start, stop, name), (next_pool, next_start, next_stop, next_name) in pairwise(spans):
        if pool == next_pool and next_start < stop:
            both = (
                f"bytes {start}:{stop} of pool {pool} in {name} and {next_start}:{next_stop} in {next_name}"
            )
            raise _error("layers", "free of overlapping buffers", both)


def _row_elements(argument: str, value: object) -> int:
    elements = _integer(argument, value, 1, 32)
    if elements % GROUP_ELEMENTS:
        raise _error(argument, "a multiple of 16", elements)
    return elements


def _check_rope(skip: object, residual: object, argument: str, rotary: int, row: int) -> int:
    """Check what a builder was told about a row's rotary part; return the residual's width."""
    skip = _boolean("skip_rope_quantization", skip)
    width = _integer("residual_dim", residual, 0, 31)
    if width % GROUP_ELEMENTS or width > rotary:
        raise _error("residual_dim", f"a multiple of 16 up to {argument} ({rotary})", width)
    if skip and width:
        raise _error("residual_dim", "0 beside skip_rope_quantization", width)
    if skip and rotary % GROUP_ELEMENTS:
        raise _error(argument, "a multiple of 16 for skip_rope_quantization", rotary)
    if skip and rotary == row:
        raise _error(argument, f"below the row's {row} elements for skip_rope_quantization", rotary)
    return width


def nvfp4_quantize(
    x: Tensor,
    global_scale: float = 1.0,
    quantized_range_start: int = 0,
    quantized_range_elements: int = -1,
    residual_start: int = 0,
    residual_elements: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows to NVFP4, keeping the elements outside one range of every row unchanged.

    Parameters
    ----------
    x : Tensor
        `[..., R]`, float16, bfloat16, float32 or float8_e4m3fn, CPU or CUDA. The last dimension is
        contiguous, the others may have any strides, and the address any alignment. R is a multiple of 16.
    global_scale : float
        Multiplier G applied on decode, in [2^-100, 2^100] after rounding to fp32.
    quantized_range_start, quantized_range_elements : int
        The elements [Q0, Q0 + Q) of every row that become NVFP4, multiples of 16 with Q > 0; -1 is the rest
        of the row.
    residual_start, residual_elements : int
        The elements [P0, P0 + P) inside that range, counted from the start of the row, that are stored in two
        components; multiples of 16. P0 is ignored when P is 0.

    Returns
    -------
    data : Tensor
        uint8 `[..., (Q + P) / 2]`: E2M1 codes, element 2i in the low half of byte i. A group of 16 takes 8
        bytes, one with two components 16: main, then residual.
    scales : Tensor
        uint8 `[..., (Q + P) / 16]`: the groups' E4M3 block scales, main then residual where there are two.
    lossless : Tensor
        `x.dtype` `[..., R - Q]`: the elements before the range, then those after it.

    Raises
    ------
    ValueError
        Shape, range, multiple or `global_scale` as above not met.
    TypeError
        A dtype or device that is not supported.
    NotImplementedError
        A GPU this build has no code for.

    Notes
    -----
    A group with a NaN or an infinity gets the scale byte 0x7F and decodes to NaN. Magnitudes saturate at
    2688 G. All backends return the same bytes; `kvc.reference.nvfp4` states them. No gradient is defined.

    References
    ----------
    E2M1 and E4M3: OCP Microscaling Formats (MX) Specification v1.0. Groups of 16 under E4M3 scales: NVIDIA,
    "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference" (2025). A second component for what
    the first leaves over: ARCQuant, arXiv:2601.07475. The rounding of quotients is this project's own.
    """
    return call(
        _nvfp4_quantize,
        x,
        global_scale,
        quantized_range_start,
        quantized_range_elements,
        residual_start,
        residual_elements,
    )


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
    """Rebuild the rows that :func:`nvfp4_quantize` made `data`, `scales` and `lossless` of.

    Parameters
    ----------
    data : Tensor
        uint8 `[..., (Q + P) / 2]`, packed E2M1 codes.
    scales : Tensor
        uint8 `[..., (Q + P) / 16]`, E4M3 block scales. Negative ones count as such; 0x7F and 0xFF are NaN.
    lossless : Tensor
        `dtype` `[..., R - Q]`, also when R = Q and it is empty.
    dtype : torch.dtype
        Of the result: float16, bfloat16, float32 or float8_e4m3fn.
    global_scale, quantized_range_start, residual_start, residual_elements
        As they were given to :func:`nvfp4_quantize`.

    Returns
    -------
    Tensor
        `dtype` `[..., R]`. Values are rounded once, to nearest even; finite ones saturate at the largest
        finite value of `dtype`, and a NaN scale gives the canonical NaN.

    Raises
    ------
    ValueError
        Shapes that do not belong together, a range or `global_scale` out of bounds.
    TypeError
        A dtype or device that is not supported, `lossless.dtype` other than `dtype`.
    NotImplementedError
        A GPU this build has no code for.

    Notes
    -----
    The inputs may start at any address and have any outer strides.

    References
    ----------
    As for :func:`nvfp4_quantize`.
    """
    return call(
        _nvfp4_dequantize,
        data,
        scales,
        lossless,
        dtype,
        global_scale,
        quantized_range_start,
        residual_start,
        residual_elements,
    )


def encode_pages_(
    cold: Tensor,
    pools: Sequence[Tensor],
    pairs: Tensor,
    table: Tensor,
    scales: Tensor,
    max_ctas: int = 0,
) -> None:
    """Write hot pages into cold slots, quantizing on the way.

    Parameters
    ----------
    cold : Tensor
        uint8 `[slots, cold_page_bytes]`, written. Rows are contiguous, may be further apart than their size
        and need no alignment. A CPU tensor beside CPU pools; beside CUDA pools a CUDA tensor or a pinned CPU
        tensor, which the kernel writes directly.
    pools : sequence of Tensor
        The hot pools, of any dtype and all on one device; dim 0 counts slots, and the bytes of a slot are
        contiguous. A pool with NVFP4 buffers has an address and a slot stride that are multiples of 16 bytes.
    pairs : Tensor
        int32 `[n, 2]` of (cold slot, hot slot), on the CPU, where it may be reused once the call returns, or
        on the pools' device. A hot slot may repeat, a cold one may not.
    table, scales : Tensor
        :attr:`PageLayout.table` and :attr:`PageLayout.scales`.
    max_ctas : int
        Most thread blocks to occupy, so that a transfer can run beside a model; 0 leaves the choice to the
        kernel.

    Raises
    ------
    ValueError
        A shape, stride, alignment, slot or table that is not as above, unpinned `cold` beside CUDA pools, a
        negative `max_ctas`. Nothing has been written then.
    TypeError
        A dtype or device that is not as above.
    NotImplementedError
        A GPU this build has no code for.

    Notes
    -----
    Every byte of a cold slot is written, padding included: equal pages have equal bytes. Slots of device
    `pairs` cannot be checked without waiting for the device; pairs out of range are skipped unless
    `kvc.set_debug(True)`. The call never synchronises and can be captured in a CUDA graph.

    References
    ----------
    The scheme, pages quantized by the copy that moves them: TensorRT-LLM's cold-page quantization
    (https://nvidia.github.io/TensorRT-LLM/features/kv-cache-compression.html). The format of a cold page is
    described at :class:`PageLayout`, the numerics at :func:`nvfp4_quantize`.
    """
    call(_encode_pages_, cold, pools, pairs, table, scales, max_ctas)


def decode_pages_(
    pools: Sequence[Tensor],
    cold: Tensor,
    pairs: Tensor,
    table: Tensor,
    scales: Tensor,
    max_ctas: int = 0,
) -> None:
    """Rebuild hot pages from cold slots.

    Parameters
    ----------
    pools : sequence of Tensor
        The hot pools, written; as for :func:`encode_pages_`.
    cold : Tensor
        uint8 `[slots, cold_page_bytes]`, as for :func:`encode_pages_`; a pinned CPU tensor is read by the
        kernel directly.
    pairs : Tensor
        int32 `[n, 2]` of (hot slot, cold slot), on the CPU or on the pools' device. A cold slot may repeat, a
        hot one may not.
    table, scales : Tensor
        :attr:`PageLayout.table` and :attr:`PageLayout.scales`, those the pages were encoded with.
    max_ctas : int
        Most thread blocks to occupy; 0 leaves the choice to the kernel.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As :func:`encode_pages_`.

    Notes
    -----
    Bytes of a slot that no buffer names keep their values, and so do slots no pair names. The padding of a
    cold page is not read.

    References
    ----------
    As for :func:`encode_pages_`.
    """
    call(_decode_pages_, pools, cold, pairs, table, scales, max_ctas)
