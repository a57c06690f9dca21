"""The GPU side of TriAttention's eviction round: score, select, pack, compact, for all requests that are due.

Every tensor is allocated once, for the most requests a round can have, and a round uses views of them. What differs
from round to round are numbers in one small int32 table, which a single copy brings to the device. Everything after
it is the same each time: on a GPU it is captured in CUDA graphs when the round is made, and replayed.

There is a graph for every power of two of requests, and one for the most: a round takes the next larger one and gives
the requests it lacks no tokens, so nothing is captured while requests wait. The graphs hold the addresses of pools,
page tables and statistics, none of which may move, and share one memory pool for what the ops allocate inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from ctypes import Array, c_int32
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from struct import pack_into
from typing import Any, Literal, TypeAlias

import kvc
import torch
from kvc._ops import debugging
from torch import Tensor

from .engine import LayerFacts, PagedCache

__all__ = ["DueRequest", "EvictionRound", "RoundShape"]

Step = Callable[[], Any]
INT32 = torch.int32


# The numbers of one request that a round needs: its slot, then prompt, source, compressed, tail and draft tail in
# tokens. A plain tuple: making named ones takes a tenth of the host's time for a round.
DueRequest: TypeAlias = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class RoundShape:
    """Sizes that hold for every round of an engine.

    `width` is the most decode tokens a request may have, `requests` the most of a round; `max_tails` belong to
    the target and the draft cache.
    """

    mode: Literal["union", "per_head", "per_layer_perhead"]
    normalize: bool
    fill: bool
    budget: int
    width: int
    requests: int
    max_tails: tuple[int, int]
    device: torch.device


@dataclass(frozen=True)
class Statistics:
    """The calibration on the device: query statistics fp32 `[L, q_heads, F]` of the scored layers, then
    `freq_scale_sq` and `omega` fp32 `[F]`, `offsets` int64 `[O]`."""

    q_mean_real: Tensor
    q_mean_imag: Tensor
    q_norm_excess: Tensor
    freq_scale_sq: Tensor
    omega: Tensor
    offsets: Tensor


class EvictionRound:
    """One engine's rounds.

    Parameters
    ----------
    shape : RoundShape
        Sizes.
    statistics : Statistics
        The calibration.
    caches : sequence of (PagedCache, layers)
        The target's, then the draft's if there is one, with what the engine said of their layers.
    """

    def __init__(
        self,
        shape: RoundShape,
        statistics: Statistics,
        caches: Sequence[tuple[PagedCache, Sequence[LayerFacts]]],
    ) -> None:
        self.shape = shape
        self._statistics = statistics
        target, layers = caches[0]
        dense = [i for i, layer in enumerate(layers) if layer.window is None]
        self._keys = [target.pools[i][0].select(1, 0) for i in dense]
        heads = layers[dense[0]].num_kv_heads
        self._rows = {"union": 1, "per_head": heads, "per_layer_perhead": len(dense) * heads}[shape.mode]
        self._caches = [
            CacheMoves(shape, len(dense), heads, tail, cache, of)
            for (cache, of), tail in zip(caches, shape.max_tails, strict=False)
        ]
        self._table_rows = COMMON_ROWS + sum(cache.table_rows for cache in self._caches)
        n = shape.requests
        self._table = self._empty(self._table_rows * (n + 1)).zero_()
        self._phase = self._empty(2 * n * statistics.omega.numel(), torch.float32)
        self._scores = self._empty(n * self._rows * shape.width, torch.float32)
        self._row_values = self._empty(2 * n * self._rows if self._rows > 1 else 0)
        self._kept = self._empty(n * self._rows * shape.budget)
        self._programs: dict[int, Program] = {}
        self._staging: deque[Staging] = deque()
        self._staged: Staging | None = None

    def _empty(self, count: int, dtype: torch.dtype = INT32) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.shape.device)

    def stage(self, due: Sequence[DueRequest]) -> None:
        """Bring the numbers of a round to the device, without waiting for it."""
        budget, size = self.shape.budget, self._size(len(due))
        slots, prompts, sources, compressed, *tails = zip(*due, strict=True)
        lengths = [source - prompt for source, prompt in zip(sources, prompts, strict=True)]
        nothing = [0] * (size + 1 - len(due))
        values = [*slots, *nothing]
        values += [source + lost for source, lost in zip(sources, compressed, strict=True)]
        values += nothing
        for row in (sources, prompts, lengths):
            values += row
            values += nothing
        values += [prompt + budget for prompt in prompts]
        values += nothing
        for cache, tail in zip(self._caches, tails, strict=False):
            cache.stage(values, prompts, lengths, tail, size)
        self._staged = staging = self._free_staging()
        pack_into(f"{len(values)}i", staging.numbers, 0, *values)
        if staging.memory is not self._table:
            self._table.copy_(staging.memory, non_blocking=True)

    def decide(self, n: int) -> None:
        """Score and select for the `n` requests staged, and plan their moves; the caches stay as they are.

        A captured round does that in :meth:`move`: its arguments have met every check when it was captured.
        """
        program = self._program(n)
        if program.graph is None or debugging():
            for step in program.decide:
                step()

    def move(self, n: int) -> torch.cuda.Event | None:
        """Carry the plan of :meth:`decide` out; the event, None on a CPU, comes after everything."""
        program, device = self._program(n), self.shape.device
        if program.graph is None or debugging():
            for step in program.move:
                step()
        else:
            program.graph.replay()
        after = None
        if device.type == "cuda":
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(device))
        if self._staged is not None:
            self._staged.after = after
            self._staging.append(self._staged)
            self._staged = None
        return after

    def _free_staging(self) -> Staging:
        """Memory that no round in flight still reads."""
        waiting = self._staging
        if waiting and (waiting[0].after is None or waiting[0].after.query()):
            return waiting.popleft()
        memory = self._table
        if memory.device.type == "cuda":
            memory = torch.empty(memory.shape, dtype=INT32, pin_memory=True)
        return Staging(memory, (c_int32 * memory.numel()).from_address(memory.data_ptr()))

    def kept(self, n: int) -> Tensor:
        """The last decision, int32 `[n, rows, budget]`: ascending token indices before the moves."""
        return self._kept[: n * self._rows * self.shape.budget].view(n, self._rows, -1)

    def rehearse(self) -> None:
        """Run rounds that move nothing, so that kernels get loaded and wrong arguments raise now; then capture."""
        self._table.zero_()
        if self.shape.device.type != "cuda":
            self._run(self._program(1))
            return
        self._staging += [self._free_staging() for _ in range(2)]
        sizes = {self._size(n) for n in range(1, self.shape.requests + 1)}
        programs = [self._program(size) for size in sorted(sizes, reverse=True)]
        for program in programs:
            self._run(program)
        if debugging():  # reads values back, which no graph can
            return
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.shape.device)
        for program in programs:
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(self.shape.device),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self._run(program)
            graph.replay()  # the first one is slow
            program.graph = graph

    def _run(self, program: Program) -> None:
        for step in (*program.decide, *program.move):
            step()

    def _size(self, n: int) -> int:
        """Requests of the program that serves `n`."""
        return min(1 << (n - 1).bit_length(), self.shape.requests)

    def _program(self, n: int) -> Program:
        size = self._size(n)
        if (program := self._programs.get(size)) is None:
            program = self._programs[size] = self._make_program(size)
        return program

    def _make_program(self, n: int) -> Program:
        shape, given = self.shape, self._statistics
        table = self._table[: self._table_rows * (n + 1)].view(self._table_rows, n + 1)
        slots, logical, sources, prompts, lengths, kept_ends = (table[i, :n] for i in range(COMMON_ROWS))
        cos, sin = self._phase[: 2 * n * given.omega.numel()].view(2, n, -1)
        scores = self._scores[: n * self._rows * shape.width].view(n, self._rows, -1)
        kept = self.kept(n)
        plans, first = [], COMMON_ROWS
        for cache in self._caches:
            numbers = table[first : first + cache.table_rows]
            plans.append(cache.plan(n, numbers, slots, sources, prompts, kept_ends, kept))
            first += cache.table_rows
        score = partial(
            kvc.triattention_score,
            self._keys,
            self._caches[0].tables(n),
            prompts,
            sources,
            cos,
            sin,
            given.q_mean_real,
            given.q_mean_imag,
            given.q_norm_excess,
            given.freq_scale_sq,
            shape.mode,
            shape.normalize,
            shape.width,
            out=scores,
        )
        decide: list[Step] = [plan.snapshot for plan in plans]
        decide += [partial(kvc.mean_phase, logical, given.omega, given.offsets, cos=cos, sin=sin), score]
        bases = prompts
        if self._rows > 1:  # one length and one base for each row of a request
            per_row = self._row_values[: 2 * n * self._rows].view(2, n, self._rows)
            decide.append(partial(per_row.copy_, table[3:5, :n, None]))
            bases, lengths = per_row.flatten(1)
        decide.append(
            partial(
                kvc.radix_topk, scores.flatten(0, 1), lengths, shape.budget, bases, out=kept.flatten(0, 1)
            )
        )
        decide += chain.from_iterable(plan.pack for plan in plans)
        return Program(decide, [*chain.from_iterable(plan.move for plan in plans)])


@dataclass
class Program:
    """What a round of so many requests does, and the graph of it."""

    decide: list[Step]
    move: list[Step]
    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class Staging:
    """Host memory for the numbers of one round, as a tensor and as numbers, and the end of the round that used it
    last."""

    memory: Tensor
    numbers: Array[c_int32]
    after: torch.cuda.Event | None = None


# Rows of the staged table: slot, logical length, source length, prompt, decode length, prompt + budget.
COMMON_ROWS = 6


@dataclass(frozen=True)
class Plan:
    """What a round of n requests does in one cache."""

    snapshot: Step
    pack: list[Step]
    move: list[Step]


class CacheMoves:
    """The moves of a round in one cache, whose dense layers follow the decision and whose sliding-window layers
    keep their latest window."""

    def __init__(
        self,
        shape: RoundShape,
        decided_layers: int,
        decided_heads: int,
        max_tail: int,
        cache: PagedCache,
        layers: Sequence[LayerFacts],
    ) -> None:
        self.shape, self.max_tail = shape, max_tail
        self._page_table = cache.page_table
        self._layers = decided_layers
        # With one decision for all heads one row of moves serves them, however many they are.
        self._heads = 1 if shape.mode == "union" else decided_heads
        self._per_layer = shape.mode == "per_layer_perhead" and decided_layers > 1
        self._window = max((layer.window or 0 for layer in layers), default=0)
        pairs = [*zip(cache.pools, layers, strict=True)]
        self._dense = by_heads((pools, layer) for pools, layer in pairs if layer.window is None)
        self._sliding = by_heads((pools, layer) for pools, layer in pairs if layer.window is not None)
        budget, n = shape.budget, shape.requests
        self._columns = min(budget, shape.width - budget) if shape.fill else budget + max_tail
        planes = self._layers * self._heads if self._per_layer else self._heads
        self._tables = self._empty(n * self._page_table.shape[1])
        self._moves = self._empty((1 + shape.fill) * planes * n * self._columns)
        self._tail_moves = self._empty(self._heads * n * max_tail if shape.fill else 0)
        self._sliding_moves = self._empty(self._heads * n * self._sliding_columns)
        self._none = torch.zeros(n + 1, dtype=INT32, device=shape.device)
        self._layer_map = torch.tensor(
            [
                i
                for i, pools in enumerate(pools for pools, layer in pairs if layer.window is None)
                for _ in pools
            ],
            dtype=INT32,
            device=shape.device,
        )
        # Offsets of the moves; of the tail; of the sliding layers, and their first destination.
        self.table_rows = 1 + shape.fill + 2 * bool(self._sliding)

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=INT32, device=self.shape.device)

    @property
    def _sliding_columns(self) -> int:
        return self._window + self.max_tail if self._sliding else 0

    def tables(self, n: int) -> Tensor:
        """This round's page tables, a row for each request: the engine's may change while the round runs."""
        return self._tables[: n * self._page_table.shape[1]].view(n, -1)

    def stage(
        self,
        values: list[int],
        prompts: Sequence[int],
        lengths: Sequence[int],
        tails: Sequence[int],
        size: int,
    ) -> None:
        """Append the rows of the staged table that belong to this cache."""
        budget, window, missing = self.shape.budget, self._window, size - len(prompts)

        def append_offsets(counts: Iterable[int]) -> None:
            values.extend(accumulate(counts, initial=0))
            values.extend(values[-1:] * missing)

        if self.shape.fill:
            twice = 2 * budget  # of more than that to choose from every kept token may move
            append_offsets([length - budget if length < twice else budget for length in lengths])
            append_offsets(tails)
        else:
            append_offsets([budget + tail for tail in tails])
        if self._sliding:
            append_offsets([window + tail for tail in tails])
            values.extend([prompt + budget - window for prompt in prompts])
            values.extend([0] * (missing + 1))

    def plan(
        self,
        n: int,
        numbers: Tensor,
        slots: Tensor,
        sources: Tensor,
        prompts: Tensor,
        kept_ends: Tensor,
        kept: Tensor,
    ) -> Plan:
        """The steps for `n` requests."""
        shape, tables = self.shape, self.tables(n)
        rows = iter(numbers)
        offsets = next(rows)
        total = n * self._columns
        planes = (self._layers, self._heads) if self._per_layer else (self._heads,)
        moves = self._moves[: self._moves.numel() // (shape.requests * self._columns) * total]
        lists = moves.view(1 + shape.fill, *planes, total)
        pack: list[Step] = []
        move: list[Step] = []
        layer_map = self._layer_map if self._per_layer else None
        if shape.fill:
            tail_offsets, tail_total = next(rows), n * self.max_tail
            tail_moves = self._tail_moves[: self._heads * tail_total].view(self._heads, -1)
            arguments = (kept, sources, prompts, offsets, tail_offsets, self._layers, self._heads)
            fill = partial(kvc.pack_fill_moves, *arguments, total, tail_total)
            pack.append(partial(fill, sources=lists[0], destinations=lists[1], tail_sources=tail_moves))
            for heads, pools in self._dense:
                from_, to = (self._spread(rows_of_moves, heads) for rows_of_moves in lists)
                move.append(
                    partial(kvc.compact_pages_, pools, tables, from_, offsets, prompts, layer_map, to)
                )
                if self.max_tail:
                    tail = tail_moves[:1].expand(heads, -1)
                    move.append(partial(kvc.compact_pages_, pools, tables, tail, tail_offsets, kept_ends))
        else:
            for heads, pools in self._dense:
                from_ = self._spread(lists[0], heads)
                move.append(partial(kvc.compact_pages_, pools, tables, from_, offsets, prompts, layer_map))
        sliding_total = n * self._sliding_columns
        sliding_moves = self._sliding_moves[: self._heads * sliding_total].view(self._heads, -1)
        sliding_offsets = None
        if self._sliding:
            sliding_offsets, bases = next(rows), next(rows)[:n]
            for heads, pools in self._sliding:
                from_ = sliding_moves[:1].expand(heads, -1)
                move.append(partial(kvc.compact_pages_, pools, tables, from_, sliding_offsets, bases))
        if self._sliding or not shape.fill:
            # Beside pack_fill_moves this packs the sliding layers alone.
            dense = lists[0, ..., :0] if shape.fill else lists[0]
            dense_offsets = self._none[: n + 1] if shape.fill else offsets
            sizes = (self._window, self._layers, self._heads, dense.shape[-1], sliding_total)
            ordered = partial(kvc.pack_move_sources, kept, sources, dense_offsets, sliding_offsets, *sizes)
            pack.append(partial(ordered, dense=dense, swa=sliding_moves))
        snapshot = partial(torch.index_select, self._page_table, 0, slots, out=tables)
        return Plan(snapshot, pack, move)

    def _spread(self, moves: Tensor, heads: int) -> Tensor:
        return moves.expand(heads, -1) if self.shape.mode == "union" else moves


def by_heads(pairs: Iterable[tuple[Sequence[Tensor], LayerFacts]]) -> list[tuple[int, list[Tensor]]]:
    """The layers' tensors by their number of heads: one call of the op takes one number."""
    groups: dict[int, list[Tensor]] = {}
    for pools, layer in pairs:
        groups.setdefault(layer.num_kv_heads, []).extend(pools)
    return [*groups.items()]
