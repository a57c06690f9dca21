"""A paged cache in memory that implements the engine's side of kvc.methods, and remembers every token it ever held.

A token's number is its logical position. It is written into the values, so that what a slot holds after rounds of
eviction can be read back; its keys stay in a log from which an oracle can score it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvc.methods import EngineFacts, LayerFacts, Resize
from torch import Tensor


def facts(
    layers: Sequence[LayerFacts] | None = None,
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    group: int = 2,
    device: torch.device | str = "cpu",
    **changes: Any,
) -> EngineFacts:
    """Facts of a small engine that everything is admitted to."""
    if layers is None:
        layers = [
            LayerFacts(index=i, num_kv_heads=num_kv_heads, head_dim=head_dim) for i in range(num_layers)
        ]
    values: dict[str, Any] = {
        "num_q_heads": num_kv_heads * group,
        "rotary_dim": head_dim,
        "dtype": torch.float32,
        "tokens_per_page": 4,
        "max_requests": 4,
        "max_seq_len": 4096,
        "logical_positions": True,
    }
    return EngineFacts(layers=tuple(layers), device=torch.device(device), **values | changes)


@dataclass(eq=False)
class PagedRequest:
    """A request: the fields a method reads, and the log of its tokens."""

    request_id: Any
    slot: int
    prompt_length: int
    length: int = 0
    tail: int = 0
    draft_tail: int = 0
    suspended: bool = False
    compressed: int = 0
    keys: list[Tensor] = field(default_factory=list)  # of each target layer, `[heads, tokens ever, head_dim]`


class Cache:
    """Pools and page tables of one model; pages are handed out in random order."""

    def __init__(
        self, layers: Sequence[LayerFacts], f: EngineFacts, pages: int, columns: int, seed: int
    ) -> None:
        self.layers, self.f = layers, f
        self.generator = torch.Generator().manual_seed(seed)
        self.pools: list[list[Tensor]] = []
        for i, layer in enumerate(layers):
            shape = (pages, layer.num_kv_heads, f.tokens_per_page, layer.head_dim)
            if i % 2:  # K and V as planes of one tensor in every second layer, NHD in memory
                memory = torch.full((shape[0], 2, shape[2], shape[1], shape[3]), -1.0, dtype=f.dtype)
                self.pools.append([memory.to(f.device).transpose(2, 3)])
            else:
                self.pools.append(
                    [torch.full(shape, -1.0, dtype=f.dtype).to(f.device).unsqueeze(1) for _ in "kv"]
                )
        self.page_table = torch.full((f.max_requests, columns), -1, dtype=torch.int32, device=f.device)
        self.free = torch.randperm(pages, generator=self.generator).tolist()
        self.pages: dict[int, list[int]] = {slot: [] for slot in range(f.max_requests)}
        self.released: list[tuple[list[int], torch.cuda.Event | None]] = []

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, `[pages, heads, tokens, D]`."""
        pools = self.pools[layer]
        return (pools[0][:, 0], pools[0][:, 1]) if len(pools) == 1 else (pools[0][:, 0], pools[1][:, 0])

    def resize(self, slot: int, capacity: int) -> list[int]:
        """Hold `capacity` tokens; returns the pages given up."""
        owned, wanted = self.pages[slot], -(-capacity // self.f.tokens_per_page)
        while len(owned) < wanted:
            owned.append(self.free.pop())
        given = owned[wanted:]
        del owned[wanted:]
        row = owned + [-1] * (self.page_table.shape[1] - len(owned))
        staged = torch.tensor(row, dtype=torch.int32, pin_memory=self.page_table.is_cuda)
        self.page_table[slot].copy_(staged, non_blocking=True)
        return given

    def places(self, slot: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        pages = self.page_table[slot].long()
        tokens = tokens.to(pages.device)
        return pages[tokens // self.f.tokens_per_page], tokens % self.f.tokens_per_page

    def write(self, slot: int, first: int, numbers: Tensor, keys: Sequence[Tensor]) -> None:
        """Tokens `numbers` into the slots from `first` on."""
        page, place = self.places(slot, torch.arange(first, first + len(numbers)))
        code = torch.stack([numbers // 128, numbers % 128], dim=-1).to(self.f.device, self.f.dtype)
        for layer, rows in enumerate(keys):
            k, v = self.planes(layer)
            k[page, :, place] = rows.to(k.device, k.dtype).transpose(0, 1)
            v[page, :, place, :2] = code[:, None].expand(-1, v.shape[1], -1)

    def read(self, slot: int, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Token numbers `[heads, n]` and keys `[heads, n, D]` of the slots `[first, end)`."""
        page, place = self.places(slot, torch.arange(first, end))
        k, v = self.planes(layer)
        code = v[page, :, place, :2].float().cpu()
        return (code[..., 0] * 128 + code[..., 1]).long().T, k[page, :, place].transpose(0, 1).cpu()


class PagedEngine:
    """Implements :class:`kvc.methods.Engine`; tokens come with random keys unless given."""

    def __init__(self, f: EngineFacts, columns: int = 64, seed: int = 0) -> None:
        self.facts = f
        pages = columns * f.max_requests
        self.target = Cache(f.layers, f, pages, columns, seed)
        self.draft = Cache(f.draft_layers, f, pages, columns, seed + 1) if f.draft_layers else None
        self.generator = torch.Generator().manual_seed(seed)
        self.running: list[PagedRequest] = []
        self.changes: list[Resize] = []
        self.resize_error: Exception | None = None

    @property
    def caches(self) -> list[Cache]:
        return [self.target] + ([self.draft] if self.draft else [])

    def admit(self, name: Any, prompt: int, keys: Sequence[Tensor] | None = None) -> PagedRequest:
        taken = {request.slot for request in self.running}
        slot = min(set(range(self.facts.max_requests)) - taken)
        request = PagedRequest(name, slot, prompt)
        request.keys = [
            torch.empty(layer.num_kv_heads, 0, layer.head_dim, dtype=self.facts.dtype)
            for layer in self.facts.layers
        ]
        self.running.append(request)
        self.append(request, prompt, keys)
        return request

    def append(
        self,
        request: PagedRequest,
        count: int,
        keys: Sequence[Tensor] | None = None,
        tail: int = 0,
        draft_tail: int = 0,
    ) -> None:
        """`count` more confirmed tokens, and tails of unconfirmed ones behind them."""
        known = request.keys[0].shape[1]
        logical = request.length + request.compressed
        assert known >= logical
        numbers = torch.arange(logical, logical + count + max(tail, draft_tail))
        fresh = [
            torch.randn(layer.num_kv_heads, len(numbers), layer.head_dim, generator=self.generator)
            for layer in self.facts.layers
        ]
        if keys is not None:
            for new, given in zip(fresh, keys, strict=True):
                new[:, :count] = given
        # Keys as the pool will hold them: an oracle must see the same numbers.
        fresh = [rows.to(self.facts.dtype) for rows in fresh]
        request.keys = [
            torch.cat([old[:, :logical], new], 1) for old, new in zip(request.keys, fresh, strict=True)
        ]
        first = request.length
        request.length, request.tail, request.draft_tail = first + count, tail, draft_tail
        for cache, end in zip(self.caches, (count + tail, count + draft_tail), strict=False):
            cache.resize(request.slot, first + end)
            rows = fresh
            if cache is self.draft:
                rows = [torch.randn(y.num_kv_heads, len(numbers), y.head_dim) for y in cache.layers]
            cache.write(request.slot, first, numbers[:end], [r[:, :end] for r in rows])

    def finish(self, request: PagedRequest) -> None:
        for cache in self.caches:
            cache.free += cache.resize(request.slot, 0)
        self.running.remove(request)

    def resize(self, changes: Sequence[Resize], after: torch.cuda.Event | None) -> None:
        if self.resize_error is not None:
            raise self.resize_error
        assert (after is None) == (self.facts.device.type == "cpu")
        for change in changes:
            request: Any = change.request
            cache = self.target if change.cache == "target" else self.draft
            assert cache is not None
            given = cache.resize(request.slot, change.capacity)
            assert len(given) == change.freed_pages
            cache.released.append((given, after))
            cache.free += given
            request.length, request.compressed = change.length, change.compressed
        self.changes += changes
