"""Top-k selection beside its peers and beside a pure read of the scores, in one run.

``python bench/peers.py FOLDER`` builds the peers, then ``python -m bench.bench_topk --peers FOLDER --json
bench/results/topk.json`` on a GPU. Without --peers only PyTorch's own kernels stand beside. ``pytest
bench/bench_topk.py`` guards the CPU ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import kvc
import pytest
import torch
import typer
from kvc.reference import topk as reference
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import common
from bench.common import Row
from bench.peers import Peers, on_this_stream, optional, reason

Run = Callable[[], Tensor]
# Peers that return what kvc does, and those that a graph cannot hold.
CONTRACT = (
    "flashinfer deterministic",
    "cub + index sort",
    "stable sort",
    "stable sort, torch.compile",
    "CuPy argsort",
)
NO_GRAPH = ("CuPy argsort",)
SETTLED_BY_TORCH = (4096, 65536)  # widths of the scores that settle_ties and PyTorch settle side by side


@dataclass
class Case:
    """fp32 scores: `normal`, or `plateau`, of which nine in ten are exact zeros. `ragged` lengths lie in [k, n]."""

    rows: int
    n: int
    k: int
    scores: str = "normal"
    lengths: str = "full"
    device: str = "cuda"

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.rows + self.n)
        self.values = torch.randn(self.rows, self.n, generator=generator, device=self.device)
        if self.scores == "plateau":
            self.values = (self.values - 1.28).relu()
        self.limits = torch.full((self.rows,), self.n, dtype=torch.int32, device=self.device)
        if self.lengths == "ragged":
            self.limits.random_(self.k, self.n + 1, generator=generator)

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.n}, k {self.k}, {self.scores}, {self.lengths}"

    @property
    def shown(self) -> bool:
        """Whether the case stands beside the slow peers too: those of the plot."""
        return (self.rows, self.k, self.scores, self.lengths) == (256, 2048, "normal", "full")

    @property
    def nbytes(self) -> int:
        """Bytes of the scores that count."""
        return 4 * int(self.limits.sum())

    def masked(self) -> Tensor:
        """For kernels that know no lengths."""
        column = torch.arange(self.n, device=self.device)
        return self.values.masked_fill(column >= self.limits.unsqueeze(1), float("-inf"))

    def select(self) -> Run:
        return lambda: kvc.radix_topk(self.values, self.limits, self.k)

    def settle(self) -> Run:
        provisional = self.masked().topk(self.k, sorted=False).indices.int()
        return lambda: kvc.settle_ties(self.values, self.limits, provisional)

    def settle_others(self) -> dict[str, Run]:
        """`settle_ties` as PyTorch: all above the least chosen score, the first among its equals, packed by rank."""
        values, k = self.masked(), self.k
        provisional = values.topk(k, sorted=False).indices
        column = torch.arange(self.n, dtype=torch.int32, device=self.device).expand_as(values)

        def settled(values: Tensor, provisional: Tensor) -> Tensor:
            least = values.gather(1, provisional).amin(1, keepdim=True)
            above, equal = values > least, values == least
            wanted = k - above.sum(1, keepdim=True)
            chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= wanted))
            rank = (chosen.cumsum(1) - 1).masked_fill(~chosen, k)
            return column.new_empty(len(values), k + 1).scatter(1, rank, column)[:, :k]

        return {way: partial(run, values, provisional) for way, run in common.by_torch(settled).items()}

    def others(self, peers: Peers | None) -> dict[str, Run]:
        values = self.masked()

        def stable_sort() -> Tensor:
            order = values.sort(dim=1, descending=True, stable=True).indices[:, : self.k]
            return order.sort(dim=1).values

        found: dict[str, Run] = {
            "torch.topk": lambda: values.topk(self.k).indices,
            "stable sort": stable_sort,
        }
        if self.shown:
            compiled = torch.compile(stable_sort, dynamic=False)
            found["stable sort, torch.compile"] = compiled
            if cupy := optional("cupy"):
                array = cupy.from_dlpack(values)

                def argsort() -> Tensor:
                    order = cupy.argsort(-array, axis=1, kind="stable")[:, : self.k]
                    return torch.from_dlpack(cupy.sort(order, axis=1))

                found["CuPy argsort"] = on_this_stream(cupy, argsort)
        if peers is not None:
            cub = peers.cub(self.values, self.limits, self.k)
            found["cub"] = cub
            found["cub + index sort"] = lambda: cub().sort(dim=1).values
            found["flashinfer any order"] = peers.flashinfer(self.values, self.limits, self.k, False)
            found["flashinfer deterministic"] = peers.flashinfer(self.values, self.limits, self.k, True)
        return found


gpu_times = partial(common.gpu_times, repeats=20, warm_s=0.01)


def times_of(run: Run, graph: bool = True) -> dict[str, float]:
    return common.summary(gpu_times(run, graph=graph))


def read_time(case: Case, plain: common.Plain) -> float:
    """Microseconds of a pure read of as many bytes as the scores that count have, with the best number of blocks.

    Of ragged rows they are read side by side, as if no block had a longer row than another.
    """
    sink = torch.zeros(4, dtype=torch.int32, device="cuda")
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    runs = [partial(plain.load, case.values, sink, blocks * many, case.nbytes) for many in (2, 4, 8, 16)]
    return min(common.summary(common.gpu_times(run, repeats=20, warm_s=0.005))["us"] for run in runs)


def case_row(case: Case, peers: Peers | None, read_us: float, settle: bool) -> Row:
    expected = reference.radix_topk(case.values, case.limits, case.k)
    select = case.select()
    if not torch.equal(select(), expected):
        raise SystemExit(f"radix_topk is wrong: {case.name}")
    row: Row = {"case": case.name, "bytes": case.nbytes, "read_us": read_us, **times_of(select)}
    row["read_share"] = read_us / row["us"]
    found: dict[str, Any] = {}
    for name, run in case.others(peers).items():
        try:
            result = run()
        except RuntimeError as error:
            found[name] = {"refuses": reason(error)}
            continue
        found[name] = {**times_of(run, name not in NO_GRAPH), "exact": torch.equal(result.int(), expected)}
    row["peers"] = found
    met = {n: p["us"] for n, p in found.items() if n in CONTRACT and "us" in p}
    if met:
        row["best_peer"] = min(met, key=lambda n: met[n])
        row["speedup"] = met[row["best_peer"]] / row["us"]
    anyhow = found.get("flashinfer any order", {})
    if "us" in anyhow:
        row["speedup_any_order"] = anyhow["us"] / row["us"]
    if settle:
        run = case.settle()
        if not torch.equal(run(), expected):
            raise SystemExit(f"settle_ties is wrong: {case.name}")
        row["settle_us"] = times_of(run)["us"]
        row["settle_of_read"] = row["settle_us"] / read_us
        # It also reads the other answer and writes its own: no kernel does with less.
        row["settle_bytes_of_read"] = 1 + 2 * case.rows * case.k * 4 / case.nbytes
        if case.shown and case.n in SETTLED_BY_TORCH:
            ways = case.settle_others().items()
            row["settle_peers"] = {way: common.compared(run, expected, gpu_times) for way, run in ways}
    return row


def gpu_rows(cases: Iterable[Case], peers: Peers | None, settle: bool) -> list[Row]:
    plain, reads, rows = common.plain(), dict[int, float](), list[Row]()
    for case in cases:
        if case.nbytes not in reads:
            reads[case.nbytes] = read_time(case, plain)
        rows.append(case_row(case, peers, reads[case.nbytes], settle))
    return rows


def host_rows() -> list[Row]:
    case = Case(32, 4096, 512)
    provisional = case.values.topk(512).indices.int()
    out = torch.empty(32, 512, dtype=torch.int32, device="cuda")
    runs: dict[str, Callable[[], Any]] = {
        "radix_topk": case.select(),
        "radix_topk into out": lambda: kvc.radix_topk(case.values, case.limits, 512, out=out),
        "settle_ties": lambda: kvc.settle_ties(case.values, case.limits, provisional),
        "torch.topk": lambda: case.values.topk(512),
    }
    return common.host_rows(runs, bar_us=10, others=["torch.topk"])


def cpu_rows() -> list[Row]:
    rows: list[Row] = []
    for size in ((32, 65536, 2048), (512, 2304, 512), (1, 1 << 20, 8192)):
        for scores in ("normal", "plateau"):
            case = Case(*size, scores=scores, device="cpu")
            runs: dict[str, Run] = {
                "": case.select(),
                "settle_ties: ": case.settle(),
                "torch.topk + index sort: ": lambda case=case: case.values.topk(case.k).indices.sort().values,  # type: ignore[misc]
            }
            for name, run in runs.items():
                result = common.summary(common.host_times(run, repeats=7, warmup=1))
                rows.append({"case": f"CPU, {torch.get_num_threads()} threads: {name}{case.name}", **result})
    return rows


def show(rows: list[Row]) -> None:
    table = Table("case", "us", "read us", "share", "settle", "best equal peer", "x", "any", "topk", "cub")
    for r in rows:
        peers = r.get("peers", {})

        def time(name: str, peers: dict[str, Any] = peers) -> str:
            return f"{peers[name]['us']:.0f}" if "us" in peers.get(name, {}) else ""

        table.add_row(
            r["case"],
            f"{r['us']:.1f}",
            f"{r['read_us']:.1f}" if "read_us" in r else "",
            f"{r['read_share']:.2f}" if "read_share" in r else "",
            f"{r['settle_us']:.1f} = {r['settle_of_read']:.2f}" if "settle_us" in r else "",
            f"{r['best_peer']} {time(r['best_peer'])}" if "best_peer" in r else "",
            f"{r['speedup']:.1f}" if "speedup" in r else "",
            f"{r['speedup_any_order']:.1f}" if "speedup_any_order" in r else "",
            time("torch.topk"),
            time("cub"),
        )
    Console(width=150).print(table)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


PARTS = "gpu,ragged,host,cpu"
ROWS, COLUMNS, KS = "32,256,512", "2304,4096,16384,65536,262144", "512,2048,8192"


SCORES, LENGTHS = "normal,plateau", "full"


def grid(
    rows: str = ROWS, columns: str = COLUMNS, ks: str = KS, scores: str = SCORES, lengths: str = LENGTHS
) -> Iterator[Case]:
    for n in numbers(columns):
        for r in numbers(rows):
            for k in numbers(ks):
                for s in scores.split(","):
                    yield from (Case(r, n, k, s, length) for length in lengths.split(",") if k < n)


def ragged() -> Iterator[Case]:
    yield from grid(rows="256", lengths="ragged")
    yield from grid(rows="32,512", scores="normal", lengths="ragged")


def all_parts(
    peers: Path | None = None, cases: Iterable[Case] | None = None, settle: bool = True
) -> common.Parts:
    found = Peers(peers) if peers else None
    return {
        "gpu": lambda: gpu_rows(grid() if cases is None else cases, found, settle),
        "ragged": lambda: gpu_rows(ragged(), found, settle),
        "host": host_rows,
        "cpu": cpu_rows,
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
    peers: Annotated[Path | None, typer.Option(help="A folder that peers.py filled.")] = None,
    rows: Annotated[str, typer.Option(help="Comma-separated, as the next ones.")] = ROWS,
    columns: Annotated[str, typer.Option()] = COLUMNS,
    ks: Annotated[str, typer.Option()] = KS,
    scores: Annotated[str, typer.Option(help="Of normal, plateau.")] = SCORES,
    lengths: Annotated[str, typer.Option(help="Of full, ragged.")] = LENGTHS,
    settle: Annotated[bool, typer.Option(help="Measure settle_ties too.")] = True,
    parts: Annotated[str, typer.Option(help="Comma-separated: gpu, ragged, host, cpu.")] = PARTS,
) -> None:
    """Measure top-k selection on this machine."""
    cases = grid(rows, columns, ks, scores, lengths)
    found = common.measure(all_parts(peers, cases, settle), parts.split(","))
    show(found)
    if json is not None:
        common.write(json, {"benchmark": "topk", "rows": found}, peers)


@pytest.mark.parametrize("scores", ["normal", "plateau"])
@pytest.mark.parametrize("op", ["select", "settle"])
def test_cpu_topk(benchmark: Any, op: str, scores: str) -> None:
    benchmark(getattr(Case(16, 16384, 2048, scores, device="cpu"), op)())


if __name__ == "__main__":
    typer.run(main)
