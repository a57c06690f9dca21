"""Cold pages for an engine: which rows of a model become NVFP4, and the codec bound to its pools.

The engine says what a slot of its pools holds (:class:`LifeCycle`); the model's family says where its rotary
elements lie (:class:`CacheRows`); :class:`ColdPageConfig` says what to do with both. The layouts, and with them
the bytes of a cold page, follow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from kvc import PageLayout, decode_pages_, encode_pages_
from pydantic import model_validator
from torch import Tensor

from .config import KvCacheCompressionConfig
from .engine import Engine, EngineFacts, LayerFacts, PagedCache
from .manager import KVCacheCompressionManager
from .modelopt import load_kv_scales
from .placement import (
    QUANTIZED_ROLES,
    CacheRows,
    HotBuffer,
    LayerBuffers,
    LifeCycle,
    place_layer,
    placement_error,
    row_ranges,
)

if TYPE_CHECKING:
    from kvc._codec import Codec

__all__ = ["ColdPageCodec", "ColdPageConfig", "ColdPageManager"]


class ColdPageConfig(KvCacheCompressionConfig):
    """NVFP4 for pages that leave the GPU.

    Attributes
    ----------
    quant : {"nvfp4"}
        The format of quantized rows.
    skip_rope_quantization : bool
        Keep the rotary elements of keys as they are. Refused where that cannot be expressed: rows that are
        rotated whole, a rotary range in the middle of a row, one that ends at no multiple of 16.
    nvfp4_residual_dim : {0, 64}
        Store that many rotary elements of a key in two NVFP4 components: the first ones of a row that begins with
        RoPE, the last ones of one that ends with it. Not beside `skip_rope_quantization`. Beside FP8 rows this
        takes more bytes than keeping them.
    scale_checkpoint_path : Path, optional
        A ModelOpt checkpoint whose ``k_scale`` and ``v_scale`` become the global scales, see
        :func:`kvc.methods.load_kv_scales`. MLA rows and draft caches keep scale 1.
    """

    changes_physical_kv_length: ClassVar[bool] = False

    quant: Literal["nvfp4"] = "nvfp4"
    skip_rope_quantization: bool = False
    nvfp4_residual_dim: Literal[0, 64] = 0
    scale_checkpoint_path: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> ColdPageConfig:
        if self.skip_rope_quantization and self.nvfp4_residual_dim:
            raise ValueError(
                "nvfp4_residual_dim must be 0 beside skip_rope_quantization: both are about RoPE"
            )
        return self

    def supports_block_reuse(self) -> bool:
        return True

    def supports_speculative_decoding(self) -> bool:
        return True

    def reasons_against(self, facts: EngineFacts) -> list[str]:
        reasons = super().reasons_against(facts)
        for layer in (*facts.layers, *facts.draft_layers):
            try:
                if (rows := _rows_of(layer, facts, draft=False)) is not None:
                    for role in QUANTIZED_ROLES[rows.family]:
                        row_ranges(self, rows, role)
            except (ValueError, NotImplementedError) as error:
                reasons.append(f"layer {layer.index}: {error}")
        return reasons

    def create_manager(self, facts: EngineFacts) -> ColdPageManager:
        return ColdPageManager(self, facts)


class ColdPageCodec:
    """Encodes pages of an engine's pools into cold pages, and back. Bound once, immutable afterwards.

    Parameters
    ----------
    config : ColdPageConfig
    pools : sequence of sequences of Tensor
        The pools of every hot group, as :func:`kvc.encode_pages_` takes them. All on one device.
    life_cycles : sequence of LifeCycle
        What the slots hold.
    scales : mapping, optional
        What :func:`kvc.methods.load_kv_scales` returned for the configuration's checkpoint; read now by default.

    Attributes
    ----------
    life_cycles : dict[int, LifeCycle]
    layouts : dict[int, PageLayout]
        By life cycle.
    device : torch.device

    Raises
    ------
    ValueError
        A description that contradicts itself or the pools, a placement that the configuration asks for and the
        format cannot express, or cold pages of different sizes in one cold group.
    NotImplementedError
        The configuration depends on RoPE and where it lies is not known.
    FileNotFoundError
        The checkpoint holds no tensors.
    """

    def __init__(
        self,
        config: ColdPageConfig,
        pools: Sequence[Sequence[Tensor]],
        life_cycles: Sequence[LifeCycle],
        *,
        scales: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        if not life_cycles or not pools or not all(pools):
            raise placement_error("pools and life_cycles", "non-empty", "none")
        self.config = config
        self.pools = tuple(tuple(group) for group in pools)
        self.device = self.pools[0][0].device
        for g, group in enumerate(self.pools):
            for i, pool in enumerate(group):
                if pool.device != self.device:
                    raise placement_error(f"pools[{g}][{i}]", f"on {self.device}", pool.device)
        scales = _scales_of(config) if scales is None else scales
        self.life_cycles: dict[int, LifeCycle] = {}
        self.layouts: dict[int, PageLayout] = {}
        for cycle in life_cycles:
            if cycle.id in self.life_cycles:
                raise placement_error("life_cycles", "of different ids", f"{cycle.id} twice")
            if cycle.hot_group >= len(self.pools):
                raise placement_error(
                    f"hot_group of life cycle {cycle.id}", f"below {len(self.pools)}", cycle.hot_group
                )
            layout = PageLayout([place_layer(config, layer, scales) for layer in cycle.layers])
            if layout.num_pools > len(self.pools[cycle.hot_group]):
                got = f"pool {layout.num_pools - 1} of {len(self.pools[cycle.hot_group])}"
                raise placement_error(f"buffers of life cycle {cycle.id}", "in pools of its hot group", got)
            self.life_cycles[cycle.id], self.layouts[cycle.id] = cycle, layout
        for cycle in life_cycles:
            sizes = {
                self.layouts[c.id].cold_page_bytes for c in life_cycles if c.cold_group == cycle.cold_group
            }
            if len(sizes) > 1:
                raise placement_error(
                    f"life cycles of cold group {cycle.cold_group}", "of one cold page size", sorted(sizes)
                )
        self._batching = {
            c.id: min(
                other.id
                for other in life_cycles
                if (other.hot_group, other.cold_group) == (c.hot_group, c.cold_group)
                and self.layouts[other.id] == self.layouts[c.id]
            )
            for c in life_cycles
        }
        self._check_pools()

    def _check_pools(self) -> None:
        """An encode of no pages has every check of the op."""
        nothing = torch.empty(0, 2, dtype=torch.int32)
        for cycle, layout in self.layouts.items():
            cold = torch.empty(0, layout.cold_page_bytes, dtype=torch.uint8, device=self.device)
            self._encode(cycle, cold, nothing, 0)

    def _cycle(self, life_cycle: int) -> LifeCycle:
        if life_cycle not in self.life_cycles:
            raise placement_error("life_cycle", f"one of {sorted(self.life_cycles)}", life_cycle)
        return self.life_cycles[life_cycle]

    def cold_page_bytes(self, life_cycle: int) -> int:
        """Bytes of every cold page of a life cycle.

        Parameters
        ----------
        life_cycle : int

        Returns
        -------
        int

        Raises
        ------
        ValueError
            There is no such life cycle.
        """
        return self.layouts[self._cycle(life_cycle).id].cold_page_bytes

    def hot_page_bytes(self, life_cycle: int) -> int:
        """Bytes that a hot page of a life cycle has in the pools.

        Parameters
        ----------
        life_cycle : int

        Returns
        -------
        int
            The sum over the buffers of its layers.

        Raises
        ------
        ValueError
            There is no such life cycle.
        """
        return self.layouts[self._cycle(life_cycle).id].hot_page_bytes

    def hot_slots(self, hot_group: int) -> int:
        """Slots that every pool of a hot group has.

        Parameters
        ----------
        hot_group : int
            Index into the pools that the codec was bound to.

        Returns
        -------
        int
        """
        return min(pool.shape[0] for pool in self.pools[hot_group])

    def batching_id(self, life_cycle: int) -> int:
        """The smallest life cycle whose pages may be moved in one call with this one's.

        They share hot and cold group and have equal layouts.

        Parameters
        ----------
        life_cycle : int

        Returns
        -------
        int

        Raises
        ------
        ValueError
            There is no such life cycle.
        """
        return self._batching[self._cycle(life_cycle).id]

    def encode(self, life_cycle: int, cold: Tensor, pairs: Tensor, max_ctas: int = 0) -> None:
        """Write hot pages into cold slots: :func:`kvc.encode_pages_` with this life cycle's pools and layout.

        Enqueued on the current stream of the pools' device; the host does not wait.

        Parameters
        ----------
        life_cycle : int
        cold : Tensor
            uint8 ``[slots, cold_page_bytes]``, written: on the pools' device, or pinned host memory beside CUDA pools.
        pairs : Tensor
            int32 ``[n, 2]`` of (cold slot, hot slot), on the CPU or the pools' device. A hot slot may repeat, a cold
            one may not.
        max_ctas : int
            Most thread blocks of the transfer; 0 for the op's default.

        Raises
        ------
        ValueError
            There is no such life cycle; a shape, slot or size that is not as above; unpinned memory beside CUDA pools.
            Nothing has been written.
        TypeError
            A dtype or device that is not as above.
        """
        self._encode(self._cycle(life_cycle).id, cold, pairs, max_ctas)

    def _encode(self, life_cycle: int, cold: Tensor, pairs: Tensor, max_ctas: int) -> None:
        layout, pools = self.layouts[life_cycle], self.pools[self.life_cycles[life_cycle].hot_group]
        encode_pages_(cold, pools, pairs, layout.table, layout.scales, max_ctas)

    def decode(self, life_cycle: int, cold: Tensor, pairs: Tensor, max_ctas: int = 0) -> None:
        """Rebuild hot pages: :func:`kvc.decode_pages_` with this life cycle's pools and layout.

        Enqueued on the current stream of the pools' device; the host does not wait.

        Parameters
        ----------
        life_cycle : int
        cold : Tensor
            uint8 ``[slots, cold_page_bytes]``, as :meth:`encode` wrote it.
        pairs : Tensor
            int32 ``[n, 2]`` of (hot slot, cold slot), on the CPU or the pools' device. A cold slot may repeat, a hot
            one may not.
        max_ctas : int
            Most thread blocks of the transfer; 0 for the op's default.

        Raises
        ------
        ValueError, TypeError
            As for :meth:`encode`.
        """
        cycle = self._cycle(life_cycle)
        layout, pools = self.layouts[cycle.id], self.pools[cycle.hot_group]
        decode_pages_(pools, cold, pairs, layout.table, layout.scales, max_ctas)

    def encode_many(self, cold: Mapping[int, Tensor], pairs: Mapping[int, Tensor], max_ctas: int = 0) -> int:
        """Encode pages of several life cycles, those that may share a call in one.

        Parameters
        ----------
        cold : mapping of int to Tensor
            By cold group, uint8 ``[slots, cold_page_bytes]``.
        pairs : mapping of int to Tensor
            By life cycle, int32 ``[n, 2]`` of (cold slot, hot slot).
        max_ctas : int
            As for :func:`kvc.encode_pages_`.

        Returns
        -------
        int
            How many calls it took.

        Raises
        ------
        KeyError
            `cold` lacks a cold group that `pairs` needs.
        ValueError, TypeError
            As for :meth:`encode`; calls before the failing one have been made.
        """
        batches = self._batches(pairs)
        for cycle, batch in batches.items():
            self._encode(cycle, cold[self.life_cycles[cycle].cold_group], batch, max_ctas)
        return len(batches)

    def decode_many(self, cold: Mapping[int, Tensor], pairs: Mapping[int, Tensor], max_ctas: int = 0) -> int:
        """Decode pages of several life cycles, those that may share a call in one.

        Parameters
        ----------
        cold : mapping of int to Tensor
            By cold group, uint8 ``[slots, cold_page_bytes]``.
        pairs : mapping of int to Tensor
            By life cycle, int32 ``[n, 2]`` of (hot slot, cold slot).
        max_ctas : int
            As for :func:`kvc.decode_pages_`.

        Returns
        -------
        int
            How many calls it took.

        Raises
        ------
        KeyError, ValueError, TypeError
            As for :meth:`encode_many`.
        """
        batches = self._batches(pairs)
        for cycle, batch in batches.items():
            self.decode(cycle, cold[self.life_cycles[cycle].cold_group], batch, max_ctas)
        return len(batches)

    def _batches(self, pairs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        batches: dict[int, list[Tensor]] = {}
        for cycle in sorted(pairs):
            batches.setdefault(self.batching_id(cycle), []).append(pairs[cycle])
        return {cycle: torch.cat(parts) for cycle, parts in batches.items()}

    def native(self, max_ctas: int = 0) -> Codec:
        """The same codec for a C++ engine, bound to the same pools; layer group ids are those of the life cycles.

        ``native().capsule()`` is a capsule named ``kvc.ColdPageCodec`` that holds a ``ColdPageCodec*`` of
        ``kvc/cold_page_codec.h``. The pools must outlive it: C++ does not see that a tensor dies.

        Parameters
        ----------
        max_ctas : int
            Most thread blocks of each of its transfers; 0 for the op's default.

        Returns
        -------
        kvc._codec.Codec
            Configured.

        Raises
        ------
        ImportError
            kvc was built for another version of Python, without pybind11, or without CUDA beside CUDA pools.
        """
        try:
            from kvc._codec import Codec
        except ModuleNotFoundError as error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise ImportError(
                f"kvc was built without pybind11 or not for Python {version}: {error}"
            ) from error
        name = "libkvc_codec_cuda.so" if self.device.type == "cuda" else "libkvc_codec.so"
        codec = Codec(str(Path(__file__).parent.parent / "lib" / name), "nvfp4", max_ctas)
        codec.configure(
            [
                (
                    [_pool_of(pool) for pool in group],
                    [
                        (
                            cycle.id,
                            self.layouts[cycle.id].table.tolist(),
                            self.layouts[cycle.id].scales.tolist(),
                        )
                        for cycle in self.life_cycles.values()
                        if cycle.hot_group == g
                    ],
                )
                for g, group in enumerate(self.pools)
            ]
        )
        return codec


def _scales_of(config: ColdPageConfig) -> dict[int, dict[str, float]]:
    return load_kv_scales(config.scale_checkpoint_path) if config.scale_checkpoint_path else {}


def _pool_of(pool: Tensor) -> tuple[int, int, int, int]:
    slot_bytes = pool[0].numel() * pool.element_size()
    return pool.data_ptr(), pool.shape[0], slot_bytes, pool.stride(0) * pool.element_size()


def _rows_of(layer: LayerFacts, facts: EngineFacts, draft: bool) -> CacheRows | None:
    """The rows of an engine's layer; None for what is copied."""
    if layer.kind == "other":
        return None
    rotary = facts.rotary_dim or 0
    if layer.kind == "mla":
        return CacheRows.mla(layer.head_dim - rotary, rotary, facts.tokens_per_page, facts.dtype, draft=draft)
    return CacheRows.gqa(
        layer.num_kv_heads, layer.head_dim, facts.tokens_per_page, facts.dtype, rotary_dim=rotary, draft=draft
    )


class ColdPageManager(KVCacheCompressionManager):
    """Cold pages as a compression method: binding an engine gives it :attr:`codec`; the hooks do nothing.

    The target's layers are hot group 0 and a draft's hot group 1. Layers of one cache that look back equally far
    are one life cycle with a cold group of its own, numbered in the order target before draft, full attention
    before windows.
    """

    config: ColdPageConfig
    codec: ColdPageCodec

    def __init__(self, config: ColdPageConfig, facts: EngineFacts) -> None:
        super().__init__(config, facts)
        self._scales = _scales_of(config)

    def _bind(self, engine: Engine) -> None:
        pools: list[list[Tensor]] = []
        cycles: list[LifeCycle] = []
        for draft, layers, cache in (
            (False, self.facts.layers, engine.target),
            (True, self.facts.draft_layers, engine.draft),
        ):
            if not layers:
                continue
            if cache is None or len(cache.pools) != len(layers):
                got = "none" if cache is None else len(cache.pools)
                raise placement_error("the engine's pools", f"those of {len(layers)} layers", got)
            pools.append([pool for tensors in cache.pools for pool in _slot_pools(tensors)])
            for window in sorted({layer.window for layer in layers}, key=lambda w: w or 0):
                described = self._describe(layers, cache, window, draft)
                number = len(cycles)
                cycles.append(
                    LifeCycle(id=number, layers=described, hot_group=len(pools) - 1, cold_group=number)
                )
        self.codec = ColdPageCodec(self.config, pools, cycles, scales=self._scales)

    def _describe(
        self, layers: Sequence[LayerFacts], cache: PagedCache, window: int | None, draft: bool
    ) -> tuple[LayerBuffers, ...]:
        described = []
        first = 0
        for layer, tensors in zip(layers, map(_slot_pools, cache.pools), strict=True):
            if layer.window == window:
                rows = _rows_of(layer, self.facts, draft)
                described.append(LayerBuffers(layer=layer.index, buffers=_planes(tensors, first), rows=rows))
            first += len(tensors)
        return tuple(described)


def _slot_pools(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A layer's pools; one whose planes lie apart, as FlashAttention's do, is a pool for each plane."""
    pools: list[Tensor] = []
    for tensor in tensors:
        if tensor.dim() != 5 or not tensor.numel():
            raise placement_error(
                "the engine's pools",
                "[pages, planes, kv_heads, tokens_per_page, head_dim] and not empty",
                list(tensor.shape),
            )
        adjacent = tensor.stride(1) == tensor[0, 0].numel()
        pools += [tensor] if adjacent else tensor.split(1, dim=1)
    return pools


def _planes(tensors: Sequence[Tensor], first: int) -> tuple[HotBuffer, ...]:
    """The planes of a layer, K then V, as buffers of pools `first` and on."""
    buffers: list[HotBuffer] = []
    for i, pool in enumerate(tensors):
        planes, nbytes = pool.shape[1], pool[0, 0].numel() * pool.element_size()
        for plane in range(planes):
            number = len(buffers)
            role = ("key", "value")[number] if number < 2 else f"plane {number}"
            buffers.append(HotBuffer(role=role, pool=first + i, nbytes=nbytes, offset=plane * nbytes))
    return tuple(buffers)
