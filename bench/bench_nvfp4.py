"""Cold pages: encode and decode against the copy, store and load ceilings of the same run.

``python -m bench.bench_nvfp4 --json bench/results/nvfp4.json`` on a GPU;
``pytest bench/bench_nvfp4.py`` guards the CPU op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import kvc
import pytest
import torch
import typer
from kvc import PageBuffer, PageLayout
from kvc.reference import nvfp4 as reference
from rich.console import Console
from rich.table import Table

from bench import common
from bench.common import Row, row
from bench.peers import Peers, reason

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TORCHAO = "torchao.prototype.mx_formats.nvfp4_tensor"
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


def hbm_rows(copy: float, only: str) -> list[Row]:
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


def pinned_rows(plain: common.Plain, only: str) -> list[Row]:
    rows: list[Row] = []
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
        bar, engine_bar = (0.97, 0.92) if name != "lossless BF16" else (None, None)
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
                        copy_engine_bar=engine_bar if ctas == 16 and direction == "encode to" else None,
                        pages_per_s=case.pages / result["us"] * 1e6,
                    )
                )
    return rows


def single_page_rows(plain: common.Plain) -> list[Row]:
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


def transfer_rows() -> list[Row]:
    """Pages of one buffer, 4 KiB to 4 MiB of BF16, to pinned memory and back: quantized by the copy that moves them, in
    two steps, or whole. A row counts the bytes that cross the link; events around plain calls, launches included."""
    rows: list[Row] = []
    for size in [4096 << i for i in range(11)]:
        pages = max(32, min(1024, (64 << 20) // size))
        case = Case(PageLayout([[PageBuffer(0, size // 256, 128, BF16)]]), hot_bytes=pages * size)
        hot = case.pools[0]
        cold, whole = case.pinned(), torch.empty(hot.shape, dtype=BF16, pin_memory=True)
        order = case.pairs[:, 1].long().contiguous()
        on_gpu, on_host = [hot[i] for i in order.tolist()], list(whole)
        back = order.argsort()
        to_hbm, from_hbm, batch = case.encode(), case.decode(), common.plain().batch
        store = partial(cold.copy_, case.cold, non_blocking=True)
        load = partial(case.cold.copy_, cold, non_blocking=True)

        def one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        # What is called, how many bytes of which tensor cross the link, where they arrive, and what must arrive.
        both: dict[str, dict[str, tuple[Callable[[], Any], torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        untouched = hot.clone()
        to_hbm()
        as_cold, as_whole = case.cold.clone(), untouched[order.to(hot.device)]
        from_hbm()
        restored = hot.clone()
        both["out"] = {
            "kvc, into pinned memory": (case.encode(cold), cold, cold, as_cold),
            "kvc into HBM, then one copy": (partial(in_turn, to_hbm, store), cold, cold, as_cold),
            "copy_ page by page, BF16": (partial(one_by_one, on_host, on_gpu), whole, whole, as_whole),
            "cudaMemcpyBatchAsync, BF16": (partial(batch, hot, order, whole), whole, whole, as_whole),
        }
        both["in"] = {
            "kvc, from pinned memory": (case.decode(cold), cold, hot, restored),
            "one copy, then kvc in HBM": (partial(in_turn, load, from_hbm), cold, hot, restored),
            "copy_ page by page, BF16": (partial(one_by_one, on_gpu, on_host), whole, hot, untouched),
            "cudaMemcpyBatchAsync, BF16": (partial(batch, whole, back, hot), whole, hot, untouched),
        }
        for direction, ways in both.items():
            for way, (run, crossing, target, expected) in ways.items():
                cold.copy_(as_cold)
                whole.copy_(as_whole)
                hot.copy_(untouched)
                target.zero_()
                torch.cuda.synchronize()  # what follows is on a stream of its own
                name = f"{case.pages} pages of {size >> 10} KiB{' back' * (direction == 'in')}: {way}"
                fields = {"case": name, "way": way, "direction": direction, "page_bytes": size}
                fields["pages"] = case.pages
                try:
                    with torch.cuda.stream(torch.cuda.Stream()):
                        times = common.gpu_times(run, repeats=7, cold=False, graph=False, warm_s=0.01)
                except RuntimeError as error:
                    rows.append({**fields, "refuses": reason(error)})
                    continue
                if not torch.equal(target.to(expected.device), expected):
                    raise SystemExit(f"{name}: other bytes arrived")
                result = common.rate(crossing.nbytes, times)
                rows.append({**fields, **result, "us_page": result["us"] / case.pages})
    return rows


def in_turn(*runs: Callable[[], Any]) -> None:
    for run in runs:
        run()


def beside_rows(size: int = 8192, products: int = 30) -> list[Row]:
    """What a transfer costs a model beside it: a loop of BF16 matrix products with and without the codec, between
    pools and pinned memory, on another stream."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    out, side, here = torch.empty_like(a), torch.cuda.Stream(), torch.cuda.current_stream()
    case = Case(qwen(BF16))
    host, nbytes = case.pinned(), case.pages * case.cold_page

    def event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(stream)
        return mark

    def loop(beside: Callable[[], Any] | None, transfers: int = 0) -> tuple[float, int, float]:
        """us of the loop, transfers that ended within it, and us of these."""
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # while the host submits
        begin = event(here)
        side.wait_event(begin)
        marks = []
        with torch.cuda.stream(side):
            for _ in range(transfers if beside else 0):
                assert beside is not None
                beside()
                marks.append(event(side))
        for _ in range(products):
            torch.mm(a, b, out=out)
        end = event(here)
        torch.cuda.synchronize()
        within = [mark for mark in marks if mark.elapsed_time(end) >= 0]
        spent = begin.elapsed_time(within[-1]) * 1e3 if within else 0.0
        return begin.elapsed_time(end) * 1e3, len(within), spent

    ways: dict[str, Callable[[], Any]] = {}
    for ctas in (4, 8, 16, 32):
        ways[f"encode, {ctas} CTAs"] = case.encode(host, ctas)
        ways[f"decode, {ctas} CTAs"] = case.decode(host, ctas)
    ways["copy engine out, the same bytes"] = partial(host.copy_, case.cold, non_blocking=True)
    loop(None)
    rows: list[Row] = []
    for way, run in ways.items():
        one = common.summary(common.gpu_times(run, repeats=3, cold=False, graph=False))["us"]
        alone, beside = [], []
        for _ in range(5):  # alternating, as clocks drift
            alone.append(loop(None)[0])
            beside.append(loop(run, int(2 * alone[-1] / one) + 2))
        slower = common.summary(
            [with_it / without for (with_it, *_), without in zip(beside, alone, strict=True)]
        )
        moved, spent = sum(n for _, n, _ in beside) * nbytes, sum(us for *_, us in beside)
        rows.append(
            {
                "case": f"{products} products of {size}^3 beside {way}",
                **common.summary([us for us, *_ in beside]),
                "alone_us": common.summary(alone)["us"],
                "slowdown": slower["us"],
                "slowdown_p10": slower["us_p10"],
                "slowdown_p90": slower["us_p90"],
                "gb_per_s": moved / spent / 1e3 if spent else 0.0,
                "gb_per_s_alone": nbytes / one / 1e3,
            }
        )
    return rows


Read = Callable[[Any], Sequence[torch.Tensor]]  # what a way has returned, laid out as kvc does
Way = tuple[Callable[[], Any], Read]


def quantizers(x: torch.Tensor, found: Peers | None) -> dict[str, Callable[[], Way]]:
    """Ways to quantize rows of 128 BF16 elements; those of packages that are not installed raise ImportError."""
    compiled = torch.compile(reference.nvfp4_quantize)
    first_two: Read = itemgetter(slice(2))

    def torchao(wrap: Callable[..., Any]) -> Way:
        run = wrap(import_module(TORCHAO).nvfp4_quantize)
        return partial(run, x), lambda result: (result[1], result[0].flatten(1))

    def torchao_triton() -> Way:
        options = {"is_swizzled_scales": True, "use_triton_kernel": True}
        run = partial(import_module(TORCHAO).NVFP4Tensor.to_nvfp4, x, **options)
        return run, lambda result: (result.qdata, result.get_hp_scales().to(E4M3))

    ways: dict[str, Callable[[], Way]] = {
        "kvc": lambda: (partial(kvc.nvfp4_quantize, x), first_two),
        "PyTorch": lambda: (partial(reference.nvfp4_quantize, x), first_two),
        "PyTorch, torch.compile": lambda: (partial(compiled, x), first_two),
        "torchao": lambda: torchao(lambda run: run),
        "torchao, torch.compile": lambda: torchao(torch.compile),
        "torchao, its Triton kernel": torchao_triton,
    }
    if found is None:
        ways["FlashInfer"] = not_built
    else:
        order = torch.randperm(len(x) // (2 * HEADS * TOKENS), device=x.device)
        append = partial(found.append, x, order, HEADS, TOKENS)
        ways["FlashInfer"] = lambda: (
            append(),
            lambda result: [part[:, order].transpose(2, 3).reshape(len(x), -1) for part in result],
        )
    return ways


def dequantizers(
    data: torch.Tensor, scales: torch.Tensor, lossless: torch.Tensor, found: Peers | None
) -> dict[str, Callable[[], Way]]:
    one: Read = lambda result: (result,)  # noqa: E731
    arguments = (data, scales, lossless, BF16)

    def torchao(wrap: Callable[..., Any]) -> Way:
        tensor = import_module(TORCHAO).NVFP4Tensor(data, scales.view(E4M3), 16, BF16)
        return partial(wrap(lambda quantized: quantized.dequantize(BF16)), tensor), one

    ways: dict[str, Callable[[], Way]] = {
        "kvc": lambda: (partial(kvc.nvfp4_dequantize, *arguments), one),
        "PyTorch": lambda: (partial(reference.nvfp4_dequantize, *arguments), one),
        "PyTorch, torch.compile": lambda: (
            partial(torch.compile(reference.nvfp4_dequantize), *arguments),
            one,
        ),
        "torchao": lambda: torchao(lambda run: run),
        "torchao, torch.compile": lambda: torchao(torch.compile),
    }
    ways["FlashInfer"] = lambda: (found.dequantize(data, scales), one) if found else not_built()
    return ways


def not_built() -> Way:
    raise RuntimeError("not built; bench/peers.py builds it")


def peer_rows(found: Peers | None = None, nbytes: int = common.GIB // 4, device: str = "cuda") -> list[Row]:
    """Rows of 128 BF16 elements to NVFP4 and back, beside the same bytes by others. Plain calls: the PyTorch code
    makes a tensor of a number, which a graph cannot hold."""
    x = torch.randn(nbytes // 256, 128, device=device).bfloat16()
    data, scales, lossless = kvc.nvfp4_quantize(x)
    restored = kvc.nvfp4_dequantize(data, scales, lossless, BF16)
    moved = nbytes + data.numel() + scales.numel()
    rows: list[Row] = []
    for op, ways, expected in (
        ("quantize", quantizers(x, found), (data, scales)),
        ("dequantize", dequantizers(data, scales, lossless, found), (restored,)),
    ):
        for way, prepare in ways.items():
            fields: Row = {"case": f"{op} rows: {way}", "op": op, "way": way}
            try:
                run, read = prepare()
                with redirect_stdout(StringIO()):  # Triton prints every line of what it cannot compile
                    result = run()
                equal = share_of_equal_bytes(read(result), expected)
            except Exception as error:  # a peer may refuse in any way
                rows.append({**fields, "refuses": reason(error)})
                continue
            if way in ("kvc", "PyTorch") and equal != 1:
                raise SystemExit(f"{fields['case']}: other bytes")
            times = (
                common.gpu_times(run, repeats=10, graph=False) if x.is_cuda else common.host_times(run, 3, 1)
            )
            rows.append({**fields, **common.rate(moved, times), "equal_bytes": equal})
            if x.is_cuda:
                rows[-1]["share"] = rows[-1]["gb_per_s"] / common.copy_rate()
            del run, result
            common.free()
    if x.is_cuda and torch.cuda.get_device_capability() < (10, 0):
        why = "for sm_100 and newer; elsewhere its conversion to E2M1 is a trap (csrc/fp4_kv_quantization.cu)"
        way = "FlashInfer, nvfp4_kv_quantize"
        rows.append({"case": f"quantize rows: {way}", "op": "quantize", "way": way, "refuses": why})
    return rows


def share_of_equal_bytes(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    equal = total = 0
    for one, other in zip(found, expected, strict=True):
        one, other = (t.contiguous().view(torch.uint8).flatten() for t in (one, other))
        equal, total = equal + int((one == other).sum()), total + other.numel()
    return equal / total


def host_rows() -> list[Row]:
    case = Case(qwen(BF16), hot_bytes=64 << 20)
    arguments = (case.cold, case.pools, case.pairs[:1].contiguous(), case.layout.table, case.layout.scales)
    default = torch.ops.kvc.encode_pages_.default
    runs = {
        "encode_pages_, 72 pools": case.encode(pages=1),
        "decode_pages_, 72 pools": case.decode(pages=1),
        "torch.ops.kvc.encode_pages_, 72 pools": lambda: default(*arguments),
    }
    return common.host_rows(runs, bar_us=30)


def cpu_rows() -> list[Row]:
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


def show(rows: list[Row]) -> None:
    table = Table("case", "us", "GB/s", "share / ratio", "bar", "copy engine", "note")
    for r in rows:
        if "refuses" in r:
            table.add_row(r["case"], *[""] * 5, r["refuses"])
            continue
        share = r.get("share", r.get("ratio", r.get("slowdown")))
        engine_bar = f", bar {r['copy_engine_bar']}" if r.get("copy_engine_bar") else ""
        table.add_row(
            r["case"],
            f"{r['us']:.1f}",
            f"{r['gb_per_s']:.1f}" if "gb_per_s" in r else "",
            f"{share:.3f}" if share is not None else "",
            str(r["bar"]) if r.get("bar") else "",
            f"{r['share_of_copy_engine']:.3f}{engine_bar}" if "share_of_copy_engine" in r else "",
            f"{r['equal_bytes']:.2%} of kvc's bytes" if "equal_bytes" in r else "",
        )
    Console(width=160).print(table)


PARTS = "hbm,pinned,single,transfers,beside,peers,host,cpu"


def all_parts(only: str = "", peers: Path | None = None) -> common.Parts:
    return {
        "hbm": lambda: hbm_rows(common.copy_rate(), only),
        "pinned": lambda: pinned_rows(common.plain(), only),
        "single": lambda: single_page_rows(common.plain()),
        "transfers": transfer_rows,
        "beside": beside_rows,
        "peers": lambda: peer_rows(Peers(peers) if peers else None),
        "host": host_rows,
        "cpu": cpu_rows,
    }


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
    only: Annotated[
        str, typer.Option(help="Run only the HBM and pinned cases whose name contains this.")
    ] = "",
    parts: Annotated[str, typer.Option(help="Comma-separated, of those of the default.")] = PARTS,
    peers: Annotated[Path | None, typer.Option(help="A folder that bench/peers.py filled.")] = None,
) -> None:
    """Measure the cold-page codec on the GPU of this machine."""
    rows = common.measure(all_parts(only, peers), parts.split(","))
    show(rows)
    if json is not None:
        common.write(json, {"benchmark": "nvfp4", "rows": rows}, peers)


@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_cpu_regression(benchmark: Any, direction: str, dtype: torch.dtype) -> None:
    case = Case(PageLayout.attention(4, HEADS, HEAD_DIM, TOKENS, dtype), hot_bytes=8 << 20, device="cpu")
    benchmark(getattr(case, direction)())


if __name__ == "__main__":
    typer.run(main)
