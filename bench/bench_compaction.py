"""Compaction and move packing against the copy ceiling of the same run, and beside gather and copy back.

``python -m bench.bench_compaction --json bench/results/compaction.json`` on a GPU; ``pytest
bench/bench_compaction.py`` guards the CPU ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import kvc
import pytest
import torch
import typer
from torch import Tensor

from bench import common
from bench.common import Row, row
from bench.peers import on_this_stream, optional

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BUDGET, EVICTED = 2048, 128
OF_ORDERED_BAR = 0.2  # time of the fill form


@dataclass
class Case:
    """Requests of `budget + evicted` tokens from which each head evicts `evicted` at random."""

    requests: int
    layers: int = 36  # Qwen3-8B
    heads: int = 8
    planes: int = 2
    head_dim: int = 128
    tokens: int = 32
    dtype: torch.dtype = BF16
    layout: str = "HND"
    budget: int = BUDGET
    evicted: int = EVICTED
    device: str = "cuda"
    pools: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        length = self.budget + self.evicted
        columns = -(-length // self.tokens)
        pages = self.requests * columns
        inner = (self.heads, self.tokens) if self.layout == "HND" else (self.tokens, self.heads)
        shape = (pages, self.planes, *inner, self.head_dim)
        self.pools = []
        for layer in range(self.layers):
            memory = torch.full(shape, layer % 251, dtype=torch.uint8, device=self.device).to(self.dtype)
            self.pools.append(memory if self.layout == "HND" else memory.transpose(2, 3))
        generator = torch.Generator(self.device).manual_seed(0)
        order = torch.randperm(pages, generator=generator, device=self.device)
        self.table = order.view(self.requests, columns).int()
        noise = torch.rand(self.requests, self.heads, length, generator=generator, device=self.device)
        self.kept = noise.topk(self.budget).indices.sort().values.int()
        self.lengths = self.full(length)
        self.bases = self.full(0)
        self.offsets = self.cumulative(self.budget)
        self.fill_offsets = self.cumulative(self.evicted)
        self.no_offsets = self.cumulative(0)

    def full(self, value: int) -> Tensor:
        return torch.full((self.requests,), value, dtype=torch.int32, device=self.device)

    def cumulative(self, each: int) -> Tensor:
        return torch.arange(self.requests + 1, dtype=torch.int32, device=self.device) * each

    def pack(self) -> Callable[[], Any]:
        arguments = (self.kept, self.lengths, self.offsets, None, 0, self.layers, self.heads)
        return lambda: kvc.pack_move_sources(*arguments, self.requests * self.budget, 0)

    def pack_fill(self) -> Callable[[], Any]:
        arguments = (self.kept, self.lengths, self.bases, self.fill_offsets, self.no_offsets)
        return lambda: kvc.pack_fill_moves(
            *arguments, self.layers, self.heads, self.requests * self.evicted, 0
        )

    def pack_by_torch(self) -> dict[str, Callable[[], Any]]:
        arguments = (self.kept, self.lengths, self.offsets, self.requests * self.budget)
        ways = common.by_torch(move_sources)
        return {way: lambda run=run: (run(*arguments),) for way, run in ways.items()}  # type: ignore[misc]

    def pack_fill_by_torch(self) -> dict[str, Callable[[], Any]]:
        arguments = (self.kept, self.bases, self.fill_offsets, self.requests * self.evicted)
        return {way: partial(run, *arguments) for way, run in common.by_torch(fill_moves).items()}

    def nbytes(self, sources: Tensor, destinations: Tensor) -> int:
        """Bytes read and written: tokens that stay are neither."""
        row = self.head_dim * self.dtype.itemsize
        moves = int(((sources != destinations) & (sources >= 0)).sum())
        return 2 * self.layers * self.planes * row * moves

    def ordered(self) -> tuple[Callable[[], None], int]:
        sources, _ = self.pack()()
        targets = torch.arange(self.budget, dtype=torch.int32, device=self.device).repeat(self.requests)
        arguments = (self.pools, self.table, sources, self.offsets, self.bases)
        return lambda: kvc.compact_pages_(*arguments), self.nbytes(sources, targets.expand_as(sources))

    def fill(self) -> tuple[Callable[[], None], int]:
        sources, destinations, _ = self.pack_fill()()
        arguments = (self.pools, self.table, sources, self.fill_offsets, self.bases, None, destinations)
        return lambda: kvc.compact_pages_(*arguments), self.nbytes(sources, destinations)

    def gather_and_copy_back(self) -> dict[str, Callable[[], None]]:
        """The same moves by others on rows, their indices already computed."""
        rows = [memory if self.layout == "HND" else memory.transpose(2, 3) for memory in self.pools]
        flat = [memory.reshape(-1, self.head_dim) for memory in rows]
        sources, _ = self.pack()()
        sources = sources.view(self.heads, self.requests, self.budget)
        targets = torch.arange(self.budget, device=self.device).expand_as(sources)
        number = torch.arange(flat[0].shape[0], device=self.device).view(
            self.pools[0].shape[:1] + rows[0].shape[1:4]
        )
        number = number if self.layout == "HND" else number.transpose(2, 3)
        request = torch.arange(self.requests, device=self.device)[None, :, None]
        head = torch.arange(self.heads, device=self.device)[:, None, None]

        def row_numbers(tokens: Tensor) -> Tensor:
            pages = self.table[request, tokens.long() // self.tokens].long()
            return number[pages, :, head, tokens.long() % self.tokens].flatten()

        from_rows, to_rows = row_numbers(sources), row_numbers(targets)
        as_bytes = [f.view(torch.uint8) if self.dtype == E4M3 else f for f in flat]

        def move(pool: Tensor) -> None:
            pool.index_copy_(0, to_rows, pool.index_select(0, from_rows))

        def each(run: Callable[[Any], None], pools: Sequence[Any]) -> Callable[[], None]:
            def call() -> None:
                for pool in pools:
                    run(pool)

            return call

        ways = {"index_select, index_copy_": each(move, as_bytes)}
        ways["index_select, index_copy_, torch.compile"] = each(torch.compile(move, dynamic=False), as_bytes)
        if cupy := optional("cupy"):
            arrays = [cupy.from_dlpack(pool.view(torch.int16)) for pool in as_bytes]
            to, source = cupy.from_dlpack(to_rows), cupy.from_dlpack(from_rows)

            def move_array(array: Any) -> None:
                array[to] = array[source]

            ways["CuPy"] = on_this_stream(cupy, each(move_array, arrays))
        return ways


def repeats(requests: int) -> int:
    return 15 if requests > 1 else 40


def compaction_rows(copy: float, only: str) -> list[Row]:
    variants: dict[str, tuple[dict[str, Any], float | None, float | None]] = {
        # geometry, bar of the ordered form, bar of the fill form
        "32 requests, HND": ({"requests": 32}, 0.85, 0.5),
        "32 requests, NHD": ({"requests": 32, "layout": "NHD"}, 0.765, None),
        "1 request, HND": ({"requests": 1}, 0.6, None),
        "1 request, NHD": ({"requests": 1, "layout": "NHD"}, 0.54, None),
        "32 requests, head size 64": ({"requests": 32, "head_dim": 64}, 0.7, None),
        "32 requests, head size 256": ({"requests": 32, "head_dim": 256, "layers": 18}, 0.7, None),
        "32 requests, FP8": ({"requests": 32, "dtype": E4M3}, 0.7, None),
        "32 requests, pages of 16": ({"requests": 32, "tokens": 16}, 0.7, None),
        "32 requests, pages of 64": ({"requests": 32, "tokens": 64}, 0.7, None),
        "32 requests, pages of 128": ({"requests": 32, "tokens": 128}, 0.7, None),
        "32 requests, MLA 576": (
            {"requests": 32, "layers": 61, "heads": 1, "planes": 1, "head_dim": 576},
            None,
            None,
        ),
        "1 request, MLA 576": (
            {"requests": 1, "layers": 61, "heads": 1, "planes": 1, "head_dim": 576},
            None,
            None,
        ),
    }
    rows: list[Row] = []
    for name, (geometry, bar, fill_bar) in variants.items():
        if only and only not in name:
            continue
        case = Case(**geometry)
        run, moved = case.ordered()
        ordered = common.rate(moved, common.gpu_times(run, repeats=repeats(case.requests)))
        rows.append(row(f"ordered: {name}", ordered, copy, bar))
        run, moved = case.fill()
        filled = common.rate(moved, common.gpu_times(run, repeats=repeats(case.requests)))
        of_ordered = {"of_ordered_time": filled["us"] / ordered["us"]}
        of_ordered |= {"of_ordered_bar": OF_ORDERED_BAR} if fill_bar else {}
        rows.append(row(f"fill: {name}", filled, copy, fill_bar, **of_ordered))
        del case, run
        torch.cuda.empty_cache()
    return rows


def idle_rows(copy: float) -> list[Row]:
    """What requests cost that do not move: 255 beside one that does, and one whose tokens all stay."""
    rows = []
    case = Case(1)
    sources, _ = case.pack()()
    table = case.table.expand(256, -1)
    offsets = torch.zeros(257, dtype=torch.int32, device="cuda")
    offsets[129:] = case.budget
    bases = torch.zeros(256, dtype=torch.int32, device="cuda")
    _, moved = case.ordered()
    times = common.gpu_times(
        lambda: kvc.compact_pages_(case.pools, table, sources, offsets, bases), repeats=40
    )
    rows.append(row("ordered: 1 request beside 255 that are idle", common.rate(moved, times), copy))
    stay = torch.arange(case.budget, dtype=torch.int32, device="cuda").expand(case.heads, -1)
    times = common.gpu_times(
        lambda: kvc.compact_pages_(case.pools, case.table, stay, case.offsets, case.bases), repeats=40
    )
    rows.append({"case": "ordered: 1 request, every token stays", **common.summary(times)})
    return rows


def baseline_rows(copy: float) -> list[Row]:
    rows = []
    for requests in (1, 32):
        case = Case(requests)
        run, moved = case.ordered()
        name = f"side by side, {requests} requests"
        ours = common.rate(moved, common.gpu_times(run, repeats=repeats(requests)))
        rows.append(row(f"{name}: kvc", ours, copy, peak_bytes=common.peak(run)))
        for way, gather in case.gather_and_copy_back().items():
            cupy = way == "CuPy"  # its allocator is its own: no graph, no peak
            theirs = common.rate(moved, common.gpu_times(gather, repeats=7, graph=not cupy))
            extra = {} if cupy else {"peak_bytes": common.peak(gather)}
            rows.append(row(f"{name}: {way}", theirs, copy, of_kvc=theirs["us"] / ours["us"], **extra))
        if not optional("cupy"):
            rows.append({"case": f"{name}: CuPy", "refuses": "not installed"})
        del case, run, gather
        torch.cuda.empty_cache()
    return rows


def move_sources(kept: Tensor, lengths: Tensor, offsets: Tensor, total: int) -> Tensor:
    """`pack_move_sources` of a decision row per head as PyTorch; every column belongs to a request."""
    column = torch.arange(total, dtype=torch.int32, device=kept.device)
    request = torch.searchsorted(offsets, column, right=True) - 1
    move, count = column - offsets[request], kept.shape[2]
    picked = kept[request, :, move.clamp(max=count - 1).long()].T
    return torch.where(move < count, picked, lengths[request] + move - count)


def fill_moves(kept: Tensor, bases: Tensor, offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`pack_fill_moves` of a decision row per head as PyTorch: the movers' and the holes' ranks are their columns."""
    requests, heads, count = kept.shape
    base = bases.view(-1, 1, 1)
    place = (kept - base).long()
    stays = torch.zeros(requests, heads, count + 1, dtype=torch.bool, device=kept.device)
    holes = ~stays.scatter(2, place.clamp(max=count), True)[..., :count]
    places = (base + torch.arange(count, dtype=torch.int32, device=kept.device)).expand_as(kept)

    def packed(chosen: Tensor, tokens: Tensor) -> Tensor:
        column = (offsets[:-1].view(-1, 1, 1) + chosen.cumsum(2) - 1).masked_fill(~chosen, total)
        out = torch.full((heads, total + 1), -1, dtype=torch.int32, device=kept.device)
        column, tokens = (x.transpose(0, 1).flatten(1) for x in (column, tokens))
        return out.scatter(1, column, tokens)[:, :total]  # what is not chosen has one column of its own

    return packed(place >= count, kept), packed(holes, places)


def packing_rows() -> list[Row]:
    rows: list[Row] = []
    case = Case(64, layers=1)
    union = Case(64, layers=1)
    union.kept = union.kept[:, :1].contiguous()
    packs = {
        "pack_move_sources, a row per head": (case.pack(), 4.0, case.pack_by_torch()),
        "pack_move_sources, one row": (union.pack(), 4.0, {}),
        "pack_fill_moves, a row per head": (case.pack_fill(), None, case.pack_fill_by_torch()),
    }
    for name, (run, bar, others) in packs.items():
        for cold in (True, False):
            times = common.gpu_times(run, repeats=60, cold=cold)
            text = f"{name}: 64 requests, 8 heads, 2,048 kept, {'cold' if cold else 'warm'} L2"
            rows.append({"case": text, **common.summary(times)})
        text = f"{name}: 64 requests, 8 heads, 2,048 kept, each of 20 in a graph"
        rows.append({"case": text, **common.summary(common.times_of_each(run)), "bar_us": bar})
        rows += common.composition_rows(text, rows[-1]["us"], others, run()[: 1 + ("fill" in name)])
    empty = torch.zeros(1, device="cuda")
    times = common.gpu_times(lambda: empty.add_(1), repeats=60)
    rows.append({"case": "a kernel of one element, for comparison", **common.summary(times)})
    return rows


def host_rows() -> list[Row]:
    case = Case(1, budget=64, evicted=8)
    runs: dict[str, Callable[[], Any]] = {
        "compact_pages_, 36 layers": case.ordered()[0],
        "compact_pages_ with destinations, 36 layers": case.fill()[0],
        "pack_move_sources": case.pack(),
        "pack_fill_moves": case.pack_fill(),
    }
    return common.host_rows(runs, bar_us=15)


def cpu_rows() -> list[Row]:
    rows: list[Row] = []
    for name, layout in (("HND", "HND"), ("NHD", "NHD")):
        case = Case(2, layers=4, device="cpu", layout=layout)
        run, moved = case.ordered()
        result = common.rate(moved, common.host_times(run, repeats=7, warmup=1))
        rows.append(
            {
                "case": f"CPU ordered: 2 requests, 4 layers, {name}, {torch.get_num_threads()} threads",
                **result,
            }
        )
    return rows


def notes_of(r: Row) -> list[str]:
    notes = [f"{r['of_ordered_time']:.3f} of ordered"] if "of_ordered_time" in r else []
    notes += [f"bar {r['of_ordered_bar']}"] if "of_ordered_bar" in r else []
    notes += [f"peak +{r['peak_bytes'] / 2**20:.0f} MiB"] if "peak_bytes" in r else []
    notes += [f"{r['of_kvc']:.1f} times kvc's time"] if "of_kvc" in r else []
    return notes


def show(rows: list[Row]) -> None:
    common.show(rows, notes_of, width=140)


PARTS = "compaction,idle,baseline,packing,host,cpu"


def all_parts(only: str = "") -> common.Parts:
    return {
        "compaction": lambda: compaction_rows(common.copy_rate(), only),
        "idle": lambda: idle_rows(common.copy_rate()),
        "baseline": lambda: baseline_rows(common.copy_rate()),
        "packing": packing_rows,
        "host": host_rows,
        "cpu": cpu_rows,
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
    only: Annotated[str, typer.Option(help="Run only the compaction cases whose name contains this.")] = "",
    parts: Annotated[str, typer.Option(help="Comma-separated, of those of the default.")] = PARTS,
) -> None:
    """Measure compaction and move packing on the GPU of this machine."""
    rows = common.measure(all_parts(only), parts.split(","))
    show(rows)
    if json is not None:
        common.write(json, {"benchmark": "compaction", "rows": rows})


@pytest.mark.parametrize("form", ["ordered", "fill"])
def test_cpu_compaction(benchmark: Any, form: str) -> None:
    case = Case(1, layers=2, device="cpu", budget=512, evicted=64)
    benchmark(getattr(case, form)()[0])


@pytest.mark.parametrize("form", ["pack", "pack_fill"])
def test_cpu_packing(benchmark: Any, form: str) -> None:
    benchmark(getattr(Case(16, layers=1, head_dim=1, device="cpu"), form)())


if __name__ == "__main__":
    typer.run(main)
