"""TriAttention scoring against the copy ceiling of the same run, and beside gather and einsum.

``python -m bench.bench_triattention --json bench/results/triattention.json`` on a GPU; ``pytest
bench/bench_triattention.py`` guards the CPU ops. A share counts every key byte as read once. The environment variable
KVC_TRIATTENTION_SCORER=triton, read once a process, chooses the scorer that runs on every GPU: its rows come from a
process of their own.
"""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import kvc
import pytest
import torch
import typer
from kvc.reference import triattention as reference
from torch import Tensor

from bench import common
from bench.common import Row, row

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TRITON = {"KVC_TRIATTENTION_SCORER": "triton"}


@dataclass
class Case:
    """Requests of `tokens` generated tokens behind a prompt; Qwen3-8B's heads and layers."""

    requests: int
    tokens: int = 2176
    mode: str = "union"
    normalize: bool = True
    layers: int = 36
    kv_heads: int = 8
    q_heads: int = 32
    head_dim: int = 128
    page: int = 32
    prompt: int = 64
    dtype: torch.dtype = BF16
    layout: str = "HND"
    device: str = "cuda"
    pools: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        bands, columns = self.head_dim // 2, -(-(self.prompt + self.tokens) // self.page)
        pages = self.requests * columns
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device)

        inner = (self.kv_heads, self.page) if self.layout == "HND" else (self.page, self.kv_heads)
        self.pools = []
        for _ in range(self.layers):
            memory = torch.empty(pages, *inner, self.head_dim, dtype=self.dtype, device=self.device)
            for first in range(0, pages, 256):
                part = memory[first : first + 256]
                part.copy_(normal(*part.shape))
            self.pools.append(memory if self.layout == "HND" else memory.transpose(1, 2))
        self.table = (
            torch.randperm(pages, generator=generator, device=self.device).view(self.requests, columns).int()
        )
        self.prompts = torch.full((self.requests,), self.prompt, dtype=torch.int32, device=self.device)
        self.sources = self.prompts + self.tokens
        positions = self.sources + 1000
        omega = 1e6 ** (-torch.arange(bands, device=self.device) / bands)
        self.phase_arguments = (positions, omega, 2 ** torch.arange(17, device=self.device))
        self.cos, self.sin = kvc.mean_phase(*self.phase_arguments)
        self.queries = [normal(self.layers, self.q_heads, bands) for _ in range(3)]
        self.scale = torch.ones(bands, device=self.device)

    @property
    def nbytes(self) -> int:
        return self.requests * self.tokens * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def score(self) -> Callable[[], Tensor]:
        lengths, options = (self.prompts, self.sources), (self.mode, self.normalize, self.tokens)
        arguments: tuple[Any, ...] = (
            *(self.pools, self.table, *lengths, self.cos, self.sin, *self.queries, self.scale, *options),
        )
        return lambda: kvc.triattention_score(*arguments)

    def gather_and_einsum(self, dtype: torch.dtype, compiled: bool) -> Callable[[], Tensor]:
        """The same rows of requests of one length with PyTorch: gather pages, three products, normalise, reduce."""
        bands, group = self.head_dim // 2, self.q_heads // self.kv_heads
        table, prompt, tokens, kv_heads = self.table.long(), self.prompt, self.tokens, self.kv_heads

        def layer(pool: Tensor, real: Tensor, imag: Tensor, excess: Tensor) -> Tensor:
            keys = pool[table].transpose(1, 2).flatten(2, 3)[:, :, prompt : prompt + tokens].to(dtype)
            k_real, k_imag = keys[..., :bands], keys[..., bands:]
            cos, sin = self.cos[:, None], self.sin[:, None]
            a, b = (self.scale * x for x in (real * cos - imag * sin, real * sin + imag * cos))
            c = (self.scale * excess).expand_as(a)
            a, b, c = (x.unflatten(1, (kv_heads, group)).to(dtype) for x in (a, b, c))
            norm = (k_real.square() + k_imag.square()).sqrt()
            scores = torch.einsum("rgjf,rgtf->rgjt", a, k_real) + torch.einsum("rgjf,rgtf->rgjt", b, k_imag)
            scores = (scores + torch.einsum("rgjf,rgtf->rgjt", c, norm)).float()
            if self.normalize:
                deviation, mean = torch.std_mean(scores, -1, correction=0, keepdim=True)
                scores = (scores - mean) / deviation.clamp(min=1e-6)
            return scores.amax(2)

        each = torch.compile(layer, dynamic=False) if compiled else layer

        def run() -> Tensor:
            rows = [each(pool, *(q[i] for q in self.queries)) for i, pool in enumerate(self.pools)]
            if self.mode == "union":
                best = rows[0].amax(1)
                for row in rows[1:]:
                    best = torch.maximum(best, row.amax(1))
                return best[:, None]
            stacked = torch.stack(rows, 1)
            return stacked.mean(1) if self.mode == "per_head" else stacked.flatten(1, 2)

        return run


def repeats(case: Case) -> int:
    return 15 if case.nbytes > common.GIB else 30


VARIANTS: dict[str, tuple[dict[str, Any], float | None]] = {
    "union, 32 requests x 2,176": ({"requests": 32}, 0.65),
    "union, 1 request x 32,768": ({"requests": 1, "tokens": 32_768}, 0.65),
    "union, 1 request x 2,176": ({"requests": 1}, None),
    "per_head, 32 x 2,176": ({"requests": 32, "mode": "per_head", "normalize": False}, 0.6),
    "per_head normalised, 32 x 2,176": ({"requests": 32, "mode": "per_head"}, 0.6),
    "per_layer_perhead, 32 x 2,176": ({"requests": 32, "mode": "per_layer_perhead", "normalize": False}, 0.6),
    "per_layer_perhead normalised, 32 x 2,176": ({"requests": 32, "mode": "per_layer_perhead"}, 0.6),
    "union, head size 64, 32 x 2,176": ({"requests": 32, "head_dim": 64}, 0.55),
    "union, head size 96, 32 x 2,176": ({"requests": 32, "head_dim": 96}, None),
    "union, head size 256, 16 x 2,176": ({"requests": 16, "head_dim": 256}, None),
    "union, NHD, 32 x 2,176": ({"requests": 32, "layout": "NHD"}, None),
    "union, pages of 16, 32 x 2,176": ({"requests": 32, "page": 16}, None),
    "union, pages of 128, 32 x 2,176": ({"requests": 32, "page": 128}, None),
    "union, prompt of 77, 32 x 2,176": ({"requests": 32, "prompt": 77}, None),
    "union, FP16, 32 x 2,176": ({"requests": 32, "dtype": torch.float16}, None),
    "union, FP8, 32 x 2,176": ({"requests": 32, "dtype": E4M3}, None),
    "union, FP32, 8 x 2,176": ({"requests": 8, "dtype": torch.float32}, None),
    "union, 64 query heads, 32 x 2,176": ({"requests": 32, "q_heads": 64}, None),
    "union, 8 query heads, 32 x 2,176": ({"requests": 32, "q_heads": 8}, None),
}


def score_rows(ceiling: float, only: str, prefix: str = "") -> list[Row]:
    rows: list[Row] = []
    for name, (geometry, bar) in VARIANTS.items():
        if only and not any(part in name for part in only.split(";")):
            continue
        case = Case(**geometry)
        run = case.score()
        times = common.gpu_times(run, repeats=repeats(case))
        rows.append(row(prefix + name, common.rate(case.nbytes, times), ceiling, None if prefix else bar))
        rows[-1]["peak_bytes"] = common.peak(run)
        del case, run
        torch.cuda.empty_cache()
    return rows


def triton_rows(only: str) -> list[Row]:
    """Rows of the scorer that runs on every GPU, from a process that was told to use it."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "bench.bench_triattention",
            "--parts",
            "forced",
            "--json",
            str(target),
        ]
        only = only or "union, 32 requests;union, 1 request;per_head, 32;head size 64;FP8;FP32"
        subprocess.run(
            [*command, "--only", only], check=True, env={**os.environ, **TRITON}, stdout=subprocess.DEVNULL
        )
        return [
            r for r in json_module.loads(target.read_text())["rows"] if not r["case"].startswith("ceiling")
        ]


def peer_rows(ceiling: float, compiled: bool) -> list[Row]:
    rows: list[Row] = []
    for requests, mode in ((32, "union"), (1, "union"), (32, "per_head")):
        case = Case(requests, mode=mode)
        ours = case.score()
        scored = ours()
        base = common.rate(case.nbytes, common.gpu_times(ours, repeats=repeats(case)))
        name = f"side by side, {mode}, {requests} x 2,176"
        rows.append(row(f"{name}: kvc", base, ceiling, peak_bytes=common.peak(ours)))
        for dtype in (torch.float32, BF16):
            for with_compile in (False, True) if compiled and mode == "union" and requests > 1 else (False,):
                run = case.gather_and_einsum(dtype, with_compile)
                off = float((run() - scored).abs().max())
                theirs = common.rate(case.nbytes, common.gpu_times(run, repeats=7))
                extra = {
                    "peak_bytes": common.peak(run),
                    "of_kvc": theirs["us"] / base["us"],
                    "largest_difference": off,
                }
                way = f"gather, einsum, {str(dtype).removeprefix('torch.')}{', torch.compile' * with_compile}"
                rows.append(row(f"{name}: {way}", theirs, ceiling, **extra))
        del case, ours, run
        torch.cuda.empty_cache()
    return rows


def phase_rows() -> list[Row]:
    rows: list[Row] = []
    others = common.by_torch(reference.mean_phase)
    for requests in (1, 32, 256):
        case = Case(requests, tokens=1, layers=1, kv_heads=1, q_heads=1)
        run = partial(kvc.mean_phase, *case.phase_arguments)
        name = f"mean_phase, {requests} requests, 64 bands, 17 offsets, each of 20 in a graph"
        rows.append({"case": name, **common.summary(common.times_of_each(run)), "bar_us": 5.0})
        ways = {way: partial(by, *case.phase_arguments) for way, by in others.items()}
        rows += common.composition_rows(name, rows[-1]["us"], ways, run())
    return rows


def host_rows() -> list[Row]:
    cases = {
        mode: Case(1, tokens=64, mode=mode, normalize=mode == "union")
        for mode in ("union", "per_head", "per_layer_perhead")
    }
    runs: dict[str, Callable[[], Any]] = {
        f"triattention_score, {mode}, 36 layers": case.score() for mode, case in cases.items()
    }
    runs["mean_phase"] = partial(kvc.mean_phase, *cases["union"].phase_arguments)
    return common.host_rows(runs, bar_us=30)


def cpu_rows() -> list[Row]:
    case = Case(2, tokens=1024, layers=2, device="cpu")
    result = common.rate(case.nbytes, common.host_times(case.score(), repeats=7, warmup=1))
    return [{"case": f"CPU union: 2 requests x 1,024, 2 layers, {torch.get_num_threads()} threads", **result}]


def notes_of(r: Row) -> list[str]:
    notes = [f"peak +{r['peak_bytes'] / 2**20:.0f} MiB"] if "peak_bytes" in r else []
    notes += [f"{r['of_kvc']:.1f} times kvc's time"] if "of_kvc" in r else []
    notes += [f"differs by {r['largest_difference']:.1e}"] if "largest_difference" in r else []
    return notes


def show(rows: list[Row]) -> None:
    common.show(rows, notes_of, width=150)


PARTS = "score,triton,compiled,phase,host,cpu"


def all_parts(only: str = "") -> common.Parts:
    return {
        "score": lambda: score_rows(common.copy_rate(), only),
        "forced": lambda: score_rows(common.copy_rate(), only, "Triton scorer: "),
        "triton": lambda: triton_rows(only),
        "peers": lambda: peer_rows(common.copy_rate(), False),
        "compiled": lambda: peer_rows(common.copy_rate(), True),
        "phase": phase_rows,
        "host": host_rows,
        "cpu": cpu_rows,
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
    only: Annotated[
        str, typer.Option(help="Only the scoring cases whose name contains one of these; ; between.")
    ] = "",
    parts: Annotated[
        str, typer.Option(help="Comma-separated; `peers` is `compiled` without torch.compile.")
    ] = PARTS,
) -> None:
    """Measure TriAttention scoring on the GPU of this machine."""
    rows = common.measure(all_parts(only), parts.split(","))
    show(rows)
    if json is not None:
        common.write(json, {"benchmark": "triattention", "rows": rows})


@pytest.mark.parametrize("mode", ["union", "per_head"])
def test_cpu_score(benchmark: Any, mode: str) -> None:
    benchmark(Case(1, tokens=512, mode=mode, normalize=mode == "union", layers=2, device="cpu").score())


def test_cpu_mean_phase(benchmark: Any) -> None:
    case = Case(16, tokens=1, layers=1, kv_heads=1, q_heads=1, device="cpu")
    benchmark(partial(kvc.mean_phase, *case.phase_arguments))


if __name__ == "__main__":
    typer.run(main)
