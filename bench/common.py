"""What every benchmark shares: timing, the ceilings of the machine it runs on, and the JSON a claim lives in."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.peers import pins, reason

GIB = 1 << 30
Times = list[float]
Row = dict[str, Any]
Parts = Mapping[str, Callable[[], list[Row]]]  # what a family can measure, by name
HOST_YARDSTICK = "torch.add of one element"
MODULES = ("kvc", "triton", "torchao", "mslk", "cupy")  # whose versions a result names
CPU_PARTS = ("cpu",)  # those that need no GPU


def measure(parts: Parts, chosen: Iterable[str]) -> list[Row]:
    """Rows of the chosen parts behind their ceiling; without a GPU, of those that need none."""
    gpu = torch.cuda.is_available()
    rows = [ceiling_row()] if gpu else []
    for name in chosen:
        if name not in parts:
            raise SystemExit(f"no part is called {name}: there are {', '.join(parts)}")
        if gpu or name in CPU_PARTS:
            rows += parts[name]()
            free()
        else:
            Console(stderr=True).print(f"{name}: left out, it needs a GPU")
    return rows


def free() -> None:
    """Give back what the last case held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def flush_l2() -> Callable[[], None]:
    """A function that evicts the L2 cache by writing a buffer larger than it."""
    junk = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    return lambda: junk.fill_(1)  # type: ignore[return-value]


def gpu_times(
    run: Callable[[], Any], repeats: int = 30, cold: bool = True, graph: bool = True, warm_s: float = 0.03
) -> Times:
    """Microseconds of ``run`` on the GPU: CUDA events around graph replays, with a cold L2 unless told otherwise.

    Before the first measurement ``run`` is repeated for ``warm_s`` seconds, so that the clocks have left their idle
    state. Much longer, and a GPU at its power limit has lowered them again: what a burst of transfers sees is not what
    minutes of nothing else would.
    """
    flush = flush_l2() if cold else None
    run()
    torch.cuda.synchronize()
    call: Callable[[], Any] = run
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        call = captured.replay
    until = perf_counter() + warm_s
    while perf_counter() < until:
        call()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        # Something runs while the host submits, so that its own latency does not count.
        if flush is not None:
            flush()
        else:
            torch.cuda._sleep(100_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def times_of_each(run: Callable[[], Any], many: int = 20) -> Times:
    """Microseconds of each of ``many`` runs in one graph: two events around one small kernel measure themselves too."""

    def together() -> None:
        for _ in range(many):
            run()

    return [t / many for t in gpu_times(together, repeats=60)]


def by_torch(run: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A composition of PyTorch's operators as it is and compiled."""
    return {"PyTorch": run, "PyTorch, torch.compile": torch.compile(run, dynamic=False)}


def same(found: Any, expected: Any) -> bool:
    """Whether tensors, or several, are equal; within 1e-6 where they are floats."""
    if isinstance(expected, Tensor):
        if expected.is_floating_point():
            return torch.allclose(found, expected, rtol=0, atol=1e-6)
        return torch.equal(found, expected)
    return all(same(one, other) for one, other in zip(found, expected, strict=True))


def composition_rows(
    name: str, ours_us: float, ways: Mapping[str, Callable[[], Any]], expected: Any
) -> list[Row]:
    """The same answer by others, compared first, then each of 20 in a graph as the op's own row is."""
    rows: list[Row] = []
    for way, run in ways.items():
        found = compared(run, expected, times_of_each)
        of_kvc = {"of_kvc": found["us"] / ours_us} if "us" in found else {}
        rows.append({"case": f"{name}: {way}", **found, **of_kvc})
    return rows


def compared(run: Callable[[], Any], expected: Any, measure: Callable[[Callable[[], Any]], Times]) -> Row:
    """Time of a peer whose answer is as expected, or why it has none."""
    try:
        if not same(run(), expected):
            return {"refuses": "another answer"}
        return {**summary(measure(run))}
    except Exception as error:  # a peer may refuse in any way
        return {"refuses": reason(error)}


def host_times(run: Callable[[], Any], repeats: int = 300, warmup: int = 20) -> Times:
    """Microseconds a call keeps the host busy; the GPU is drained in between."""
    times = []
    for index in range(repeats + warmup):
        if index % 20 == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()
        start = perf_counter_ns()
        run()
        if index >= warmup:
            times.append((perf_counter_ns() - start) / 1e3)
    return times


def host_rows(runs: Mapping[str, Callable[[], Any]], bar_us: float, others: Iterable[str] = ()) -> list[Row]:
    """Host time of calls, and of a small one of PyTorch's at the same moment, as CPUs change their pace. No bar holds
    for the others."""
    one = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    found = {HOST_YARDSTICK: lambda: torch.add(one, 1), **runs}
    return [
        {
            "case": f"host: {name}",
            **summary(host_times(run)),
            "bar_us": None if name == HOST_YARDSTICK or name in others else bar_us,
        }
        for name, run in found.items()
    ]


def peak(run: Callable[[], Any]) -> int:
    """Bytes of GPU memory that ``run`` needs beside what is allocated already."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "us": statistics.median(ordered),
        "us_p10": ordered[len(ordered) // 10],
        "us_p90": ordered[(len(ordered) * 9) // 10],
    }


def rate(moved: float, times: Sequence[float]) -> dict[str, float]:
    """Median time with spread, and GB/s for the bytes moved."""
    result = summary(times)
    return result | {"bytes": moved, "gb_per_s": moved / result["us"] / 1e3}


def row(name: str, result: dict[str, float], ceiling: float, bar: float | None = None, **extra: Any) -> Row:
    return {"case": name, **result, "share": result["gb_per_s"] / ceiling, "bar": bar, **extra}


def show(rows: list[Row], notes: Callable[[Row], list[str]], width: int) -> None:
    """Print time, rate and bar of each row, and what ``notes`` says of it."""
    table = Table("case", "us", "GB/s", "share", "bar", "note")
    for r in rows:
        if "refuses" in r:
            table.add_row(r["case"], "", "", "", "", r["refuses"])
            continue
        bar = f"{r['bar_us']:.0f} us" if r.get("bar_us") else str(r["bar"]) if r.get("bar") else ""
        table.add_row(
            r["case"],
            f"{r['us']:.1f}",
            f"{r['gb_per_s']:.1f}" if "gb_per_s" in r else "",
            f"{r['share']:.3f}" if "share" in r else "",
            bar,
            ", ".join(notes(r)),
        )
    Console(width=width).print(table)


def sm_clock_mhz() -> int | None:
    """The multiprocessors' clock at this moment."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


@cache
def copy_ceiling(nbytes: int = 4 * GIB) -> dict[str, float]:
    """A large device-to-device copy, counting bytes read and bytes written: torch's kernel or the driver's."""
    source = torch.randn(nbytes // 4, device="cuda")
    target = torch.empty_like(source)
    ways = [gpu_times(lambda: target.copy_(source), repeats=15, graph=graph) for graph in (False, True)]
    ways.append(gpu_times(lambda: torch.add(source, 1.0, out=target), repeats=15))
    return max((rate(2 * nbytes, times) for times in ways), key=lambda r: r["gb_per_s"])


def copy_rate() -> float:
    """GB/s of the copy ceiling, measured once a process."""
    return copy_ceiling()["gb_per_s"]


def ceiling_row() -> Row:
    return row("ceiling: device copy, read + write", copy_ceiling(), copy_rate())


def link_rows(nbytes: int = GIB) -> list[Row]:
    """The link to pinned host memory: the copy engine, and plain kernels with the best number of blocks."""
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    sink, kernels = torch.empty(16, dtype=torch.uint8, device="cuda"), plain()
    ways: dict[str, list[Callable[[], Any]]] = {
        "copy engine out": [partial(host.copy_, device, non_blocking=True)],
        "copy engine in": [partial(device.copy_, host, non_blocking=True)],
        "plain stores to pinned memory": [partial(kernels.store, host, n, nbytes) for n in (4, 8, 16, 32)],
        "plain loads from pinned memory": [
            partial(kernels.load, host, sink, n, nbytes) for n in (8, 16, 32, 64)
        ],
    }
    rows = []
    for name, runs in ways.items():
        rates = [rate(nbytes, gpu_times(run, repeats=5)) for run in runs]
        best = max(rates, key=lambda r: r["gb_per_s"])
        rows.append(row(f"ceiling: {name}", best, best["gb_per_s"]))
    return rows


@cache
def versions() -> dict[str, str]:
    """Of the installed packages that results depend on."""
    owners = packages_distributions()
    return {name: version(owners[name][0]) for name in MODULES if name in owners}


def environment(peers: Path | None = None) -> dict[str, Any]:
    """GPU, driver, commit and versions, those of a folder of peers included: what a number means nothing without."""

    def command(*words: str) -> str | None:
        try:
            return subprocess.run(
                words, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    named = os.environ.get("KVC_COMMIT")
    facts: dict[str, Any] = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # An archive of a commit knows its name from KVC_COMMIT alone.
        "commit": named or command("git", "rev-parse", "--short", "HEAD"),
        "dirty": not named and bool(command("git", "status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": versions() | pins(peers),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return facts


def write(path: Path, results: dict[str, Any], peers: Path | None = None) -> None:
    """Results as JSON, with where they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(peers), **results}, indent=1) + "\n")


class Plain:
    """bench/plain.cu, compiled on the spot: store, load and copy kernels of 16-byte accesses."""

    def __init__(self) -> None:
        import ctypes
        import tempfile

        folder = Path(tempfile.mkdtemp(prefix="kvc-bench-"))
        library = folder / "plain.so"
        source = str(Path(__file__).parent / "plain.cu")
        major, minor = torch.cuda.get_device_capability()
        subprocess.run(
            [
                "nvcc",
                "-O3",
                f"-arch=sm_{major}{minor}",
                "-shared",
                "-Xcompiler",
                "-fPIC",
                "-o",
                str(library),
                source,
            ],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))
        self._pointer, self._long = ctypes.c_void_p, ctypes.c_int64

    def _call(self, name: str, *tensors: torch.Tensor, blocks: int, nbytes: int) -> None:
        stream = self._pointer(torch.cuda.current_stream().cuda_stream)
        pointers = [self._pointer(t.data_ptr()) for t in tensors]
        getattr(self._library, name)(*pointers, self._long(nbytes), blocks, stream)

    def store(self, to: torch.Tensor, blocks: int, nbytes: int) -> None:
        self._call("plain_store", to, blocks=blocks, nbytes=nbytes)

    def load(self, source: torch.Tensor, sink: torch.Tensor, blocks: int, nbytes: int) -> None:
        self._call("plain_load", source, sink, blocks=blocks, nbytes=nbytes)

    def batch(self, source: torch.Tensor, rows: torch.Tensor, to: torch.Tensor) -> None:
        """Row ``rows[i]`` of one tensor to row i of another by `cudaMemcpyBatchAsync`, on no default stream."""
        stream = self._pointer(torch.cuda.current_stream().cuda_stream)
        pointers = [self._pointer(t.data_ptr()) for t in (source, rows, to)]
        sizes = self._long(source.stride(0) * source.itemsize), self._long(len(rows))
        status = self._library.plain_batch(*pointers, *sizes, stream)
        if status != 0:
            raise RuntimeError(f"cudaMemcpyBatchAsync refuses: CUDA error {status}")

    def copy(self, source: torch.Tensor, to: torch.Tensor, blocks: int, nbytes: int) -> None:
        self._call("plain_copy", source, to, blocks=blocks, nbytes=nbytes)


@cache
def plain() -> Plain:
    return Plain()
