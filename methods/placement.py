"""Which rows of a model become NVFP4: where RoPE lies in each family, and the buffers that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

import torch
from kvc import PageBuffer
from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["CacheRows", "HotBuffer", "LayerBuffers", "LifeCycle", "place_layer", "row_ranges"]

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Int32Natural = Annotated[int, Field(ge=0, lt=1 << 31)]
QUANTIZED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
# What becomes NVFP4 in each family; a buffer of any other role is copied.
QUANTIZED_ROLES = {"gqa": ("key", "value"), "mla": ("key",), "deepseek_v4": ("compress",)}


def placement_error(argument: str, expected: str, actual: object) -> ValueError:
    return ValueError(f"kvc.methods.ColdPageCodec: {argument} must be {expected}, got {actual}")


class PlacementRules(Protocol):
    """What a configuration says about the rotary elements of keys."""

    @property
    def skip_rope_quantization(self) -> bool: ...
    @property
    def nvfp4_residual_dim(self) -> int: ...


class CacheRows(BaseModel):
    """The rows that a layer caches, and where RoPE lies in them.

    Attributes
    ----------
    family : {"gqa", "mla", "deepseek_v4"}
        ``"gqa"``: K and V rows of every KV head (roles ``key`` and ``value``), also MHA and MQA. ``"mla"``: one
        latent row a token (``key``). ``"deepseek_v4"``: compressed rows (``compress``). Buffers of other roles
        are copied.
    dtype : torch.dtype
        Of the elements: float16, bfloat16, float32 or float8_e4m3fn.
    rows : int
        Rows of a page in one buffer: KV heads times tokens.
    row_elements : int
        Elements of a row, a multiple of 16.
    rope_range : (int, int), optional
        (start, elements) that RoPE rotates, of keys. None: not known.
    draft : bool
        Rows of a draft model, for which a checkpoint has no scales.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    family: Literal["gqa", "mla", "deepseek_v4"]
    dtype: torch.dtype
    rows: Count
    row_elements: Count
    rope_range: tuple[Natural, Natural] | None = None
    draft: bool = False

    @model_validator(mode="after")
    def _check(self) -> CacheRows:
        if self.dtype not in QUANTIZED_DTYPES:
            raise placement_error("dtype", "float16, bfloat16, float32 or float8_e4m3fn", self.dtype)
        if self.row_elements % 16:
            raise placement_error("row_elements", "a multiple of 16", self.row_elements)
        if self.rope_range is not None and sum(self.rope_range) > self.row_elements:
            raise placement_error(
                "rope_range", f"inside a row of {self.row_elements} elements", self.rope_range
            )
        return self

    @classmethod
    def gqa(
        cls,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_page: int,
        dtype: torch.dtype,
        *,
        rotary_dim: int | None = None,
        draft: bool = False,
    ) -> CacheRows:
        """MHA, GQA or MQA: RoPE leads, `rotary_dim` elements wide (default: the whole row)."""
        rotary = head_dim if rotary_dim is None else rotary_dim
        rows = num_kv_heads * tokens_per_page
        return cls(
            family="gqa", dtype=dtype, rows=rows, row_elements=head_dim, rope_range=(0, rotary), draft=draft
        )

    @classmethod
    def mla(
        cls,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        tokens_per_page: int,
        dtype: torch.dtype,
        *,
        draft: bool = False,
    ) -> CacheRows:
        """MLA: RoPE trails the latent elements."""
        row = kv_lora_rank + qk_rope_head_dim
        rope = (kv_lora_rank, qk_rope_head_dim)
        return cls(
            family="mla", dtype=dtype, rows=tokens_per_page, row_elements=row, rope_range=rope, draft=draft
        )

    @classmethod
    def deepseek_v4(cls, rows_per_page: int, dtype: torch.dtype, *, draft: bool = False) -> CacheRows:
        """DeepSeek-V4's compressed rows: 512 elements, the last 64 with RoPE."""
        return cls(
            family="deepseek_v4",
            dtype=dtype,
            rows=rows_per_page,
            row_elements=512,
            rope_range=(448, 64),
            draft=draft,
        )

    @classmethod
    def from_model_config(
        cls, config: Any, tokens_per_page: int, dtype: torch.dtype, *, tensor_parallel_size: int = 1
    ) -> CacheRows:
        """Read family, widths and RoPE from a Hugging Face configuration.

        Parameters
        ----------
        config : mapping or object
            What ``config.json`` holds; of a model with several parts, the text part's is used.
        tokens_per_page : int
        dtype : torch.dtype
            Of the cache.
        tensor_parallel_size : int
            KV heads are divided by it, MLA rows are not.
        """
        get = _reader(config)
        for part in ("text_config", "llm_config"):
            if get(part) is not None:
                get = _reader(get(part))
        if get("model_type") == "deepseek_v4":
            if tokens_per_page % 4:
                raise placement_error(
                    "tokens_per_page", "a multiple of 4, DeepSeek-V4's compression", tokens_per_page
                )
            return cls.deepseek_v4(tokens_per_page // 4, dtype)
        if get("kv_lora_rank"):
            return cls.mla(get("kv_lora_rank"), get("qk_rope_head_dim") or 0, tokens_per_page, dtype)
        q_heads = get("num_attention_heads")
        head_dim = get("head_dim") or get("hidden_size") // q_heads
        heads = max(1, (get("num_key_value_heads") or q_heads) // tensor_parallel_size)
        rotary = _rotary_dim(get, head_dim)
        return cls(
            family="gqa",
            dtype=dtype,
            rows=heads * tokens_per_page,
            row_elements=head_dim,
            rope_range=None if rotary is None else (0, rotary),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer of a page."""
        return self.rows * self.row_elements * self.dtype.itemsize


def _reader(config: Any) -> Any:
    return config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)


def _rotary_dim(get: Any, head_dim: int) -> int | None:
    """Leading elements of a key that RoPE rotates; None when it differs between layers."""
    if get("rotary_dim") is not None:
        return int(get("rotary_dim"))
    parameters = get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return None
    for factor in (get("partial_rotary_factor"), get("rotary_pct"), parameters.get("partial_rotary_factor")):
        if factor is not None:
            return round(float(factor) * head_dim)
    return head_dim


class HotBuffer(BaseModel):
    """`nbytes` bytes at `offset` of every slot of pool `pool` of a hot group, and what they are.

    `role` is one of its layer's :attr:`CacheRows.family`, or any other name for what is copied.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str
    pool: Natural
    nbytes: Count
    offset: Natural = 0


class LayerBuffers(BaseModel):
    """The buffers of one layer in a page. `layer` is its number in the model; without `rows` all are copied."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: Natural
    buffers: Annotated[tuple[HotBuffer, ...], Field(min_length=1)]
    rows: CacheRows | None = None


class LifeCycle(BaseModel):
    """Layers whose pages are allocated, moved and dropped together.

    `id` is an int32 in C++ and in files. `hot_group` and `cold_group` say, independently of each other, whose slots its
    pages take on either side.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Int32Natural
    layers: Annotated[tuple[LayerBuffers, ...], Field(min_length=1)]
    hot_group: Natural = 0
    cold_group: Natural = 0


def row_ranges(rules: PlacementRules, rows: CacheRows, role: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The quantized and the residual range of a buffer that becomes NVFP4."""
    row, whole, none = rows.row_elements, (0, rows.row_elements), (0, 0)
    if role == "value" or not (rules.skip_rope_quantization or rules.nvfp4_residual_dim):
        return whole, none
    if rows.rope_range is None:
        raise NotImplementedError(
            "kvc.methods.ColdPageCodec: where RoPE lies in these rows is not known: give CacheRows.rope_range, or"
            " leave skip_rope_quantization and nvfp4_residual_dim off"
        )
    start, elements = rows.rope_range
    end = start + elements
    if elements == 0:
        return whole, none
    if rules.skip_rope_quantization:
        if elements == row:
            raise placement_error(
                "rope_range",
                f"narrower than the row of {row}: nothing is left to quantize",
                (start, elements),
            )
        if start > 0 and end < row:
            raise placement_error("rope_range", "at an end of the row, not in its middle", (start, elements))
        if start % 16 or end % 16:
            raise placement_error("rope_range", "bounded by multiples of 16", (start, elements))
        return ((end, row - end) if start == 0 else (0, start)), none
    width = rules.nvfp4_residual_dim
    first = start if start == 0 else end - width
    if width > elements or first % 16:
        raise placement_error(
            "rope_range", f"{width} or wider and bounded by multiples of 16", (start, elements)
        )
    return whole, (first, width)


def place_layer(
    rules: PlacementRules, layer: LayerBuffers, scales: Mapping[int, Mapping[str, float]]
) -> list[PageBuffer]:
    rows = layer.rows
    roles = [b.role for b in layer.buffers]
    if len(set(roles)) != len(roles):
        raise placement_error(f"roles of layer {layer.layer}", "different", roles)
    wanted = QUANTIZED_ROLES[rows.family] if rows else ()
    if missing := sorted(set(wanted) - set(roles)):
        assert rows is not None
        raise placement_error(
            f"roles of layer {layer.layer}", f"those of {rows.family} rows", f"no {', '.join(missing)}"
        )
    found = _global_scales(layer, scales)
    buffers = []
    for b in layer.buffers:
        if rows is None or b.role not in wanted:
            buffers.append(PageBuffer.copy(b.pool, b.nbytes, offset=b.offset))
            continue
        if b.nbytes != rows.nbytes:
            raise placement_error(
                f"{b.role} of layer {layer.layer}", f"{rows.nbytes} bytes, as its rows say", b.nbytes
            )
        quantized, residual = row_ranges(rules, rows, b.role)
        buffers.append(
            PageBuffer(
                b.pool,
                rows.rows,
                rows.row_elements,
                rows.dtype,
                offset=b.offset,
                quantized_range=quantized,
                residual_range=residual,
                global_scale=found.get(b.role, 1.0),
            )
        )
    return buffers


def _global_scales(layer: LayerBuffers, scales: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The global scale of each role, from what the checkpoint has for the layer."""
    found = scales.get(layer.layer)
    if not found or layer.rows is None or layer.rows.draft or layer.rows.family == "mla":
        return {}
    needed = {"key": "k", "value": "v"} if layer.rows.family == "gqa" else {"compress": "k"}
    if missing := [f"{name}_scale" for name in needed.values() if name not in found]:
        raise placement_error(
            f"the checkpoint's scales of layer {layer.layer}", "complete", f"no {', '.join(missing)}"
        )
    return {role: found[name] for role, name in needed.items()}
