"""Cold pages: encode and decode against the copy, store and load ceilings of the same run.

``python -m bench.bench_nvfp4 --json bench/results/nvfp4.json`` on a GPU;
``pytest bench/bench_nvfp4.py`` guards the CPU op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import kvc
import pytest
import torch
import typer
from kvc import PageBuffer, PageLayout
from rich.console import Console
from rich.table import Table

from bench import common

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LAYERS, HEADS, HEAD_DIM, TOKENS = 36, 8, 128, 32  # Qwen3-8B, pages of 32 tokens


def qwen(dtype: torch.dtype, **options: Any) -> PageLayout:
    return PageLayout.attention(LAYERS, HEADS, HEAD_DIM, TOKENS, dtype, **options)


def lossless(dtype: torch.dtype) -> PageLayout:
    nbytes = HEADS * TOKENS * HEAD_DIM * dtype.itemsize
    return PageLayout(
        [[PageBuffer.copy(2 * i, nbytes), PageBuffer.copy(2 * i + 1, nbytes)] for i in range(LAYERS)]
    )


def deepseek(dtype: torch.dtype, residual: int = 64) -> PageLayout:
    return PageLayout.mla(43, 448, 64, 32, dtype, residual_dim=residual)


class Case:
    """A layout with pools of at least ``hot_bytes``, a cold tensor on either side, and a random page order."""

    def __init__(
        self, layout: PageLayout, hot_bytes: int = 5 * common.GIB // 4, device: str = "cuda"
    ) -> None:
        buffers = [b for layer in layout.layers for b in layer]
        self.layout = layout
        self.hot_page = sum(b.nbytes for b in buffers)
        self.cold_page = layout.cold_page_bytes
        self.pages = max(1, -(-hot_bytes // self.hot_page))
        sizes: dict[int, int] = {}
        dtypes: dict[int, torch.dtype] = {}
        for b in buffers:
            sizes[b.pool] = max(sizes.get(b.pool, 0), b.offset + b.nbytes)
            dtypes[b.pool] = b.dtype if b.transform == "nvfp4" else BF16
        self.pools = []
        for index in sorted(sizes):
            pool = torch.randn(self.pages, sizes[index] // dtypes[index].itemsize, device=device)
            self.pools.append(pool.to(dtypes[index]))
        self.cold = torch.empty(self.pages, self.cold_page, dtype=torch.uint8, device=device)
        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(0)).int()
        self.pairs = torch.stack((torch.arange(self.pages, dtype=torch.int32), order), 1)

    def pinned(self) -> torch.Tensor:
        return torch.empty(self.pages, self.cold_page, dtype=torch.uint8, pin_memory=True)

    def encode(
        self, cold: torch.Tensor | None = None, max_ctas: int = 0, pages: int | None = None
    ) -> Callable[[], None]:
        target, pairs = self.cold if cold is None else cold, self.pairs[:pages].contiguous()
        table, scales = self.layout.table, self.layout.scales
        return lambda: kvc.encode_pages_(target, self.pools, pairs, table, scales, max_ctas)

    def decode(
        self, cold: torch.Tensor | None = None, max_ctas: int = 0, pages: int | None = None
    ) -> Callable[[], None]:
        source, pairs = self.cold if cold is None else cold, self.pairs[:pages].flip(1).contiguous()
        table, scales = self.layout.table, self.layout.scales
        return lambda: kvc.decode_pages_(self.pools, source, pairs, table, scales, max_ctas)


CASES: dict[str, Callable[[], PageLayout]] = {
    "BF16 whole": lambda: qwen(BF16),
    "BF16 skip RoPE 64": lambda: qwen(BF16, rotary_dim=64, skip_rope_quantization=True),
    "FP8 whole": lambda: qwen(E4M3),
    "FP8 skip RoPE 64": lambda: qwen(E4M3, rotary_dim=64, skip_rope_quantization=True),
    "FP16 whole": lambda: qwen(F16),
    "FP32 whole": lambda: qwen(F32),
    "BF16 global scale 0.3": lambda: qwen(BF16, global_scales=[(0.3, 0.3)] * LAYERS),
    "DeepSeek-V4 BF16 2FP4": lambda: deepseek(BF16),
    "DeepSeek-V4 FP8 2FP4": lambda: deepseek(E4M3),
    "lossless BF16": lambda: lossless(BF16),
}
# The bars of the HBM cases, as shares of the copy ceiling.
HBM_BARS = {
    "BF16 whole": 0.92,
    "BF16 skip RoPE 64": 0.92,
    "FP8 whole": 0.80,
    "FP8 skip RoPE 64": 0.80,
    "DeepSeek-V4 BF16 2FP4": 0.85,
}


def row(
    name: str, result: dict[str, float], ceiling: float, bar: float | None = None, **extra: Any
) -> dict[str, Any]:
    return {"case": name, **result, "share": result["gb_per_s"] / ceiling, "bar": bar, **extra}


def hbm_rows(copy: float, only: str) -> list[dict[str, Any]]:
    rows = []
    for name, build in CASES.items():
        if only and only not in name:
            continue
        case = Case(build())
        moved = case.pages * (case.hot_page + case.cold_page)
        for direction, run in (("encode", case.encode()), ("decode", case.decode())):
            times = common.gpu_times(run)
            rows.append(row(f"HBM {direction}: {name}", common.rate(moved, times), copy, HBM_BARS.get(name)))
            if name == "BF16 whole":
                times = common.gpu_times(run, repeats=300, warm_s=1.0)
                clock = common.sm_clock_mhz()
                rows.append(
                    row(
                        f"HBM {direction}: {name}, after 1 s of it",
                        common.rate(moved, times),
                        copy,
                        sm_mhz=clock,
                    )
                )
        del case
    return rows


def pinned_rows(plain: common.Plain, only: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in ("BF16 whole", "FP8 whole", "lossless BF16"):
        if only and only not in name:
            continue
        case = Case(CASES[name]())
        host = case.pinned()
        moved = case.pages * case.cold_page
        staged, sink = torch.empty_like(case.cold), torch.empty(16, dtype=torch.uint8, device="cuda")

        def timed(run: Callable[[], Any], moved: int = moved) -> dict[str, float]:
            return common.rate(moved, common.gpu_times(run, repeats=7))

        store = max(
            (timed(partial(plain.store, host, n, moved)) for n in (4, 8, 16, 32)), key=lambda r: r["gb_per_s"]
        )
        load = max(
            (timed(partial(plain.load, host, sink, n, moved)) for n in (8, 16, 32, 64)),
            key=lambda r: r["gb_per_s"],
        )
        out = timed(partial(host.copy_, staged, non_blocking=True))
        into = timed(partial(staged.copy_, host, non_blocking=True))
        bar = 0.97 if name != "lossless BF16" else None
        rows += [
            row(f"ceiling: plain stores, {name} cold bytes", store, store["gb_per_s"]),
            row(f"ceiling: plain loads, {name} cold bytes", load, load["gb_per_s"]),
            row(f"ceiling: copy engine out, {name} cold bytes", out, out["gb_per_s"]),
            row(f"ceiling: copy engine in, {name} cold bytes", into, into["gb_per_s"]),
        ]
        for ctas in (4, 8, 16, 32):
            for direction, run, ceiling, engine in (
                ("encode to", case.encode(host, ctas), store["gb_per_s"], out["gb_per_s"]),
                ("decode from", case.decode(host, ctas), load["gb_per_s"], into["gb_per_s"]),
            ):
                result = timed(run)
                rows.append(
                    row(
                        f"pinned {direction}: {name}, {ctas} CTAs",
                        result,
                        ceiling,
                        bar if ctas == 16 else None,
                        share_of_copy_engine=result["gb_per_s"] / engine,
                        pages_per_s=case.pages / result["us"] * 1e6,
                    )
                )
    return rows


def single_page_rows(plain: common.Plain) -> list[dict[str, Any]]:
    rows = []
    case = Case(qwen(BF16), hot_bytes=64 << 20)
    host = case.pinned()
    hot = torch.empty(case.hot_page, dtype=torch.uint8, device="cuda")
    for where, cold in (("HBM", case.cold), ("pinned", host)):
        both = where == "HBM"  # hot and cold bytes in HBM, or only the cold bytes across the link
        nbytes = (case.hot_page + case.cold_page) // 2 // 16 * 16 if both else case.cold_page
        blocks = (8, 16, 32, 64, 132, 264, 528) if both else (8, 16, 32, 64, 132)
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda") if both else host
        for direction in ("encode", "decode"):
            pieces = (hot, target) if direction == "encode" or both else (target, hot)
            floor = min(
                common.summary(common.gpu_times(partial(plain.copy, *pieces, n, nbytes), repeats=60))["us"]
                for n in blocks
            )
            run = (case.encode if direction == "encode" else case.decode)(cold, 0 if both else 64, pages=1)
            result = common.summary(common.gpu_times(run, repeats=100))
            rows.append(
                {
                    "case": f"one page, {where} {direction}",
                    **result,
                    "plain_us": floor,
                    "ratio": result["us"] / floor,
                    "bar": 1.3,
                }
            )
    return rows


def host_rows() -> list[dict[str, Any]]:
    case = Case(qwen(BF16), hot_bytes=64 << 20)
    arguments = (case.cold, case.pools, case.pairs[:1].contiguous(), case.layout.table, case.layout.scales)
    default = torch.ops.kvc.encode_pages_.default
    empty = arguments[2][:0]
    return [
        {
            "case": "host cost, 72 pools: kvc.encode_pages_",
            **common.summary(common.host_times(case.encode(pages=1))),
            "bar": 30,
        },
        {
            "case": "host cost, 72 pools: torch.ops",
            **common.summary(common.host_times(lambda: default(*arguments))),
        },
        {
            "case": "host cost, 72 pools, no pages (checks only)",
            **common.summary(common.host_times(lambda: default(*arguments[:2], empty, *arguments[3:]))),
        },
    ]


def cpu_rows() -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    rows = []
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        for name in ("BF16 whole", "FP8 whole", "FP16 whole", "FP32 whole", "DeepSeek-V4 BF16 2FP4"):
            case = Case(CASES[name](), hot_bytes=64 << 20, device="cpu")
            for direction, run in (("encode", case.encode()), ("decode", case.decode())):
                result = common.rate(case.pages * case.hot_page, common.host_times(run, repeats=5, warmup=1))
                bar = 1.0 * count if name == "BF16 whole" else None
                rows.append({"case": f"CPU {direction}: {name}, {count} threads", **result, "bar": bar})
    torch.set_num_threads(threads)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("case", "us", "GB/s", "share / ratio", "bar", "copy engine")
    for r in rows:
        share = r.get("share", r.get("ratio"))
        table.add_row(
            r["case"],
            f"{r['us']:.1f}",
            f"{r['gb_per_s']:.1f}" if "gb_per_s" in r else "",
            f"{share:.3f}" if share is not None else "",
            str(r["bar"]) if r.get("bar") else "",
            f"{r['share_of_copy_engine']:.3f}" if "share_of_copy_engine" in r else "",
        )
    Console(width=130).print(table)


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
    only: Annotated[
        str, typer.Option(help="Run only the HBM and pinned cases whose name contains this.")
    ] = "",
    parts: Annotated[
        str, typer.Option(help="Comma-separated: hbm, pinned, single, host, cpu.")
    ] = "hbm,pinned,single,host,cpu",
) -> None:
    """Measure the cold-page codec on the GPU of this machine."""
    chosen = parts.split(",")
    rows: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        copy = common.copy_ceiling()
        rows.append(row("ceiling: device copy, read + write", copy, copy["gb_per_s"]))
        plain = common.Plain()
        rows += hbm_rows(copy["gb_per_s"], only) if "hbm" in chosen else []
        rows += pinned_rows(plain, only) if "pinned" in chosen else []
        rows += single_page_rows(plain) if "single" in chosen else []
        rows += host_rows() if "host" in chosen else []
    rows += cpu_rows() if "cpu" in chosen else []
    show(rows)
    if json is not None:
        common.write(json, {"benchmark": "nvfp4", "rows": rows})


@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_cpu_regression(benchmark: Any, direction: str, dtype: torch.dtype) -> None:
    case = Case(PageLayout.attention(4, HEADS, HEAD_DIM, TOKENS, dtype), hot_bytes=8 << 20, device="cpu")
    benchmark(getattr(case, direction)())


if __name__ == "__main__":
    typer.run(main)
