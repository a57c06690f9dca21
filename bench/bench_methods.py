"""TriAttention's eviction round against the sum of its ops' own times, and what it costs the host; offload through
``ColdPageCodec`` against the bare op.

``python -m bench.bench_methods --json bench/results/methods.json`` on a GPU; ``pytest bench/bench_methods.py`` runs a
small round on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Annotated, Any

import kvc
import pytest
import torch
import typer
from kvc.calibration import Calibration
from kvc.methods import (
    CacheRows,
    ColdPageCodec,
    ColdPageConfig,
    EngineFacts,
    HotBuffer,
    LayerBuffers,
    LayerFacts,
    LifeCycle,
    Resize,
    TriAttentionConfig,
    TriAttentionManager,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import common
from bench.common import Row

RATIO_BAR, HOST_BAR_US, FILL_BAR_US = 1.25, 150.0, 2500.0
OFFLOAD_BAR = 1.03


@dataclass
class StandingRequest:
    """A request that is due again whenever it is asked."""

    slot: int
    prompt_length: int
    length: int
    tail: int
    draft_tail: int = 0
    suspended: bool = False

    @property
    def request_id(self) -> int:
        return self.slot


@dataclass
class Pools:
    pools: Sequence[Sequence[Tensor]]
    page_table: Tensor


@dataclass
class Case:
    """Requests of ``prompt + budget + beta`` tokens, all of which are due. Pages stay where they are, so a round can
    be repeated: it scores, selects and moves as much each time."""

    mode: str = "union"
    compaction: str = "ordered"
    requests: int = 32
    prompt: int = 512
    budget: int = 2048
    beta: int = 128
    tail: int = 1
    layers: int = 36  # Qwen3-8B
    heads: int = 8
    q_heads: int = 32
    head_dim: int = 128
    tokens: int = 32
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    draft: None = None
    running: list[StandingRequest] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        length = self.prompt + self.budget + self.beta
        columns = -(-(length + self.tail) // self.tokens)
        pages = self.requests * columns
        shape = (pages, 2, self.heads, self.tokens, self.head_dim)
        pools = []
        for _ in range(self.layers):
            pool = torch.empty(shape, dtype=self.dtype, device=self.device)
            pools.append([pool.normal_(generator=generator)])
        order = torch.randperm(pages, generator=generator, device=self.device).int()
        self.target = Pools(pools, order.view(self.requests, columns))
        config: dict[str, Any] = {"eviction_mode": self.mode, "compaction": self.compaction}
        layer: Row = {"num_kv_heads": self.heads, "head_dim": self.head_dim}
        facts = EngineFacts(
            layers=tuple(LayerFacts(index=i, **layer) for i in range(self.layers)),
            num_q_heads=self.q_heads,
            rotary_dim=self.head_dim,
            dtype=self.dtype,
            device=self.target.page_table.device,
            tokens_per_page=self.tokens,
            max_requests=self.requests,
            max_seq_len=1 << 17,
            max_tail=self.tail,
            logical_positions=True,
        )
        bands = self.head_dim // 2
        statistics = torch.Generator().manual_seed(1)
        shape3 = (self.layers, self.q_heads, bands)
        real, imag = (torch.randn(shape3, generator=statistics) for _ in range(2))
        excess = torch.rand(shape3, generator=statistics)
        omega = 1e6 ** (-torch.arange(bands) / bands)
        calibration = Calibration(real, imag, excess, torch.ones(bands), omega)
        settings = TriAttentionConfig(
            budget=self.budget, beta=self.beta, calibration_path=Path("none"), **config
        )
        self.manager = TriAttentionManager(settings, facts, calibration)
        self.manager.bind(self)
        self.length = length
        self.running = [
            StandingRequest(slot, self.prompt, length, self.tail) for slot in range(self.requests)
        ]
        for request in self.running:
            self.manager.on_request_init(request)

    def resize(self, changes: Sequence[Resize], after: torch.cuda.Event | None) -> None:
        for change in changes:
            change.request.length = change.length  # type: ignore[misc]

    def rewind(self) -> None:
        """Every request as it was before its round."""
        for request in self.running:
            request.length = self.length
            self.manager._compressed[request.slot] = 0

    def round(self) -> None:
        """What the engine calls after a step."""
        self.manager.on_generation_step_end(self.running)

    def again(self) -> None:
        self.rewind()
        self.round()

    def core(self) -> None:
        for _, step in self.steps():
            step()

    def steps(self) -> list[tuple[str, Any]]:
        """The ops of a round, each by itself."""
        program = self.manager._round._program(self.requests)
        return [(name_of(step), step) for step in (*program.decide, *program.move)]

    def stages(self) -> dict[str, float]:
        """A round as the hook runs it, with the microseconds the host spends on each part."""
        manager, core = self.manager, self.manager._round
        times = [perf_counter_ns()]
        due, requests, _ = manager._due(self.running)
        times.append(perf_counter_ns())
        core.stage(due)
        times.append(perf_counter_ns())
        core.decide(len(due))
        changes = manager._resizes(due, requests)
        times.append(perf_counter_ns())
        after = core.move(len(due))
        times.append(perf_counter_ns())
        self.resize(changes, after)
        times.append(perf_counter_ns())
        return {name: (b - a) / 1e3 for name, a, b in zip(STAGES, times, times[1:], strict=False)}


STAGES = (
    "find who is due and check",
    "numbers to the device",
    "plan new lengths",
    "launch, and an event",
    "the engine's resize",
)


def host_rows(case: Case, name: str, bar: float | None) -> list[Row]:
    """What a round costs the host, the GPU idle before each: in all, by stage, and with its ops called one by one."""
    program = case.manager._round._program(case.requests)

    def measured(run: Any) -> list[Any]:
        found = []
        for index in range(120):
            case.rewind()
            torch.cuda.synchronize()
            found += [run()] if index >= 20 else []
        return found

    def whole() -> float:
        (time,) = common.host_times(case.round, repeats=1, warmup=0)
        return time

    rows: list[Row] = [{"case": f"{name}: host", **common.summary(measured(whole)), "bar_us": bar}]
    stages = measured(case.stages)
    rows += [
        {"case": f"{name}: host, {stage}", **common.summary([times[stage] for times in stages])}
        for stage in STAGES
    ]
    graph, program.graph = program.graph, None
    rows.append({"case": f"{name}: host, without its graph", **common.summary(measured(whole))})
    program.graph = graph
    return rows


def name_of(step: Any) -> str:
    return step.func.__name__ if isinstance(step, partial) else str(step)


def gpu_rows(copy: float, only: str) -> list[Row]:
    rows: list[Row] = []
    cases: dict[str, dict[str, Any]] = {
        "union, ordered": {},
        "union, fill": {"compaction": "fill"},
        "per_head, fill": {"mode": "per_head", "compaction": "fill"},
        "1 request, union, fill": {"compaction": "fill", "requests": 1},
    }
    for name, fields in cases.items():
        if only and only not in name:
            continue
        case = Case(**fields)
        barred = case.mode == "union" and case.requests == 32
        parts = []
        for op, step in case.steps():
            case.rewind()
            case.again()
            parts.append(common.summary(common.gpu_times(step, repeats=15)))
            rows.append({"case": f"{name}: {op}", **parts[-1]})
        total = sum(part["us"] for part in parts)
        rows.append({"case": f"{name}: sum of its ops", "us": total})
        whole = common.summary(common.gpu_times(case.again, repeats=20, graph=False))
        core = common.summary(common.gpu_times(case.core, repeats=20))
        limit = FILL_BAR_US if barred and case.compaction == "fill" else None
        ratio = {"of_sum": whole["us"] / total, "bar": RATIO_BAR if barred else None}
        rows.append({"case": f"{name}: whole round", **whole, **ratio, "bar_us": limit})
        rows.append({"case": f"{name}: its core in a graph", **core, "of_sum": core["us"] / total})
        keys = case.requests * case.layers * case.heads * (case.budget + case.beta) * case.head_dim * 2
        rows[-2]["keys_at_copy_us"] = keys / copy / 1e3
        rows += host_rows(case, name, HOST_BAR_US if barred else None)
        del case
        torch.cuda.empty_cache()
    return rows


class Offload:
    """Qwen3-8B pages of BF16 in random order, from the GPU's pools to pinned host memory and back."""

    def __init__(self, nbytes: int = common.GIB, device: str = "cuda", layers: int = 36) -> None:
        rows = CacheRows.gqa(8, 128, 32, torch.bfloat16)
        self.pages = -(-nbytes // (2 * layers * rows.nbytes))
        shape = (self.pages, rows.rows, rows.row_elements)
        self.pools = [torch.randn(shape, device=device).bfloat16() for _ in range(2 * layers)]
        described = tuple(
            LayerBuffers(
                layer=layer,
                rows=rows,
                buffers=tuple(
                    HotBuffer(role=role, pool=2 * layer + i, nbytes=rows.nbytes)
                    for i, role in enumerate(("key", "value"))
                ),
            )
            for layer in range(layers)
        )
        self.codec = ColdPageCodec(ColdPageConfig(), [self.pools], [LifeCycle(id=0, layers=described)])
        self.layout = self.codec.layouts[0]
        shape2 = (self.pages, self.layout.cold_page_bytes)
        self.cold = torch.empty(shape2, dtype=torch.uint8, pin_memory=device == "cuda")
        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(0)).int()
        self.pairs = torch.stack((torch.arange(self.pages, dtype=torch.int32), order), 1)
        self.back = self.pairs.flip(1).contiguous()

    def ways(self) -> list[tuple[str, Any]]:
        """(name, call): the op and then what is compared with it, for either direction."""
        table, scales = self.layout.table, self.layout.scales
        found: list[tuple[str, Any]] = [
            ("offload: the op", lambda: kvc.encode_pages_(self.cold, self.pools, self.pairs, table, scales)),
            ("offload: ColdPageCodec", lambda: self.codec.encode(0, self.cold, self.pairs)),
            ("onboard: the op", lambda: kvc.decode_pages_(self.pools, self.cold, self.back, table, scales)),
            ("onboard: ColdPageCodec", lambda: self.codec.decode(0, self.cold, self.back)),
        ]
        try:
            native = self.codec.native()
        except ImportError:
            return found  # built for another Python
        stream = torch.cuda.current_stream().cuda_stream if self.pools[0].is_cuda else 0
        moved = (self.cold.data_ptr(), self.pairs.data_ptr(), self.pages, stream)
        found.insert(2, ("offload: C++ codec", lambda: native.encode(0, *moved)))
        return found


def offload_rows() -> list[Row]:
    """1 GiB of BF16 pages; events around the plain calls, so that the host's part shows if it does not hide."""
    case = Offload()
    rows: list[Row] = []
    base = 0.0
    for name, run in case.ways():
        row = common.rate(
            case.pages * case.layout.cold_page_bytes,
            common.gpu_times(run, repeats=15, cold=False, graph=False),
        )
        host = common.summary(common.host_times(run, repeats=30, warmup=5))["us"]
        base = row["us"] if name.endswith("the op") else base
        rows.append({"case": name, **row, "host_us": host, "of_op": row["us"] / base, "bar": OFFLOAD_BAR})
    return rows


def small_case(compaction: str) -> Case:
    sizes: Row = {"requests": 2, "layers": 2, "heads": 2, "q_heads": 4, "head_dim": 64, "prompt": 32}
    return Case(compaction=compaction, budget=256, beta=64, device="cpu", **sizes)


def cpu_rows() -> list[Row]:
    rows: list[Row] = []
    for compaction in ("ordered", "fill"):
        times = common.host_times(small_case(compaction).again, repeats=15, warmup=2)
        name = f"CPU round: 2 requests, 2 layers, union, {compaction}, {torch.get_num_threads()} threads"
        rows.append({"case": name, **common.summary(times)})
    return rows


def show(rows: list[Row]) -> None:
    table = Table("case", "us", "p90", "ratio", "bar")
    for r in rows:
        bar = f"{r['bar']}x" if r.get("bar") else ""
        bar += f" {r['bar_us']:.0f} us" if r.get("bar_us") else ""
        found = [r[name] for name in ("of_sum", "of_op") if name in r]
        ratio = f"{found[0]:.3f}" if found else ""
        p90 = f"{r['us_p90']:.1f}" if "us_p90" in r else ""
        table.add_row(r["case"], f"{r['us']:.1f}", p90, ratio, bar.strip())
    Console(width=140).print(table)


PARTS = "rounds,offload,cpu"


def all_parts(only: str = "") -> common.Parts:
    return {
        "rounds": lambda: gpu_rows(common.copy_rate(), only),
        "offload": offload_rows,
        "cpu": cpu_rows,
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
    only: Annotated[str, typer.Option(help="Run only the rounds whose name contains this.")] = "",
    parts: Annotated[str, typer.Option(help="Comma-separated, of those of the default.")] = PARTS,
) -> None:
    """Measure whole eviction rounds and the offload of pages on the GPU of this machine."""
    rows = common.measure(all_parts(only), parts.split(","))
    show(rows)
    if json is not None:
        common.write(json, {"benchmark": "methods", "rows": rows})


@pytest.mark.parametrize("compaction", ["ordered", "fill"])
def test_cpu_round(benchmark: Any, compaction: str) -> None:
    benchmark(small_case(compaction).again)


@pytest.mark.parametrize("way", range(5))
def test_cpu_offload(benchmark: Any, way: int) -> None:
    ways = Offload(16 << 20, device="cpu", layers=2).ways()
    if way >= len(ways):
        pytest.skip("kvc._codec was built for another Python")
    benchmark(ways[way][1])


if __name__ == "__main__":
    typer.run(main)
