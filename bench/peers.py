"""Other libraries' kernels that the benchmarks measure in their process: FlashInfer's top-k and NVFP4 cache, CUB's
top-k.

``python bench/peers.py FOLDER`` fetches their sources from the packages flashinfer-python and cuda-cccl, and compiles
two libraries into the folder with nvcc. They are loaded through ctypes, so the folder may be built on one machine and
used on another. torchao and CuPy are measured where they are installed: ``pip install torchao==0.18.0
cupy-cuda13x==14.2.0`` were measured last, with the Python part of mslk-cuda 1.1.0 that torchao imports; a result names
the versions it found.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

# Package, what pip must be told beside it, the headers inside the wheel and one source beside them. CUB's wheel has a
# tag that pip does not look for by itself.
PACKAGES = {
    "flashinfer": ("flashinfer-python==0.7.4", [], "flashinfer/data/include/"),
    "cub": (
        "cuda-cccl==1.2.1",
        ["--platform", "manylinux_2_26_x86_64", "--only-binary=:all:"],
        "cuda/cccl/headers/include/",
    ),
}
DEQUANTIZATION = "flashinfer/data/csrc/fp4_kv_dequantization.cu"
STATES = 1 << 20  # bytes of FlashInfer's row states


def headers(name: str, folder: Path) -> Path:
    """The peer's headers, unpacked below the folder."""
    package, options, inside = PACKAGES[name]
    target = folder / "headers"
    if not (target / inside).is_dir():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*pip, *options, package], check=True)
        (wheel,) = folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if n.startswith((inside, DEQUANTIZATION))]
            archive.extractall(target, wanted)
        wheel.unlink()
    return target / inside


def main(
    folder: Path, arch: Annotated[str, typer.Option(help="Of the GPU that will run it.")] = "90a"
) -> None:
    """Build the peers' libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    # CUB's headers come first: those of the CUDA toolkit may be too old for either.
    include = [f"-I{headers(name, folder)}" for name in ("cub", "flashinfer")]
    # The kernels of a source without what binds them to a run time of their own.
    kernels, binding, _ = (
        (folder / "headers" / DEQUANTIZATION).read_text().partition("void nvfp4_kv_dequant(")
    )
    if not binding:
        raise SystemExit(f"{DEQUANTIZATION} must hold nvfp4_kv_dequant, got another version")
    (folder / "headers" / "dequantization.cuh").write_text(kernels.replace('#include "tvm_ffi_utils.h"', ""))
    flags = ["-O3", f"-arch=sm_{arch}", "-std=c++17", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
    for name in PACKAGES:
        source, library = Path(__file__).with_name(f"peer_{name}.cu"), folder / f"{name}.so"
        command = ["nvcc", *flags, *include, f"-I{folder / 'headers'}", "-shared", "-Xcompiler", "-fPIC"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)


def reason(error: BaseException) -> str:
    """Why a peer does not do a case, in one line: of a compiler's report the error itself."""
    text = re.sub(
        r"(?<![\w./])/(?:[^\s/]+/)+", "", str(error)
    )  # a file's name says enough, its folder is private
    found = re.search(r"; error\s*:\s*(.+)", text)
    lines = [line for line in text.splitlines() if line and not line.endswith("raised:")]
    return found[1] if found else (lines or [type(error).__name__])[0]


def pins(folder: Path | None) -> dict[str, str]:
    """The packages whose kernels a folder holds, for a result's environment."""
    return dict(package.split("==") for package, *_ in PACKAGES.values()) if folder else {}


def optional(name: str) -> Any:
    """A peer's module, or None where it is not installed."""
    return import_module(name) if find_spec(name) else None


def on_this_stream(cupy: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """CuPy on the stream that is PyTorch's at the time of the call."""

    def call() -> Any:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return run()

    return call


def _check(status: int, name: str, why: str = "") -> None:
    if status != 0:
        raise RuntimeError(f"{name} refuses: CUDA error {status}{why}")


class Peers:
    """The libraries of a folder."""

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()
        self._cub = ctypes.CDLL(str(folder / "cub.so")).cub_topk
        flashinfer = ctypes.CDLL(str(folder / "flashinfer.so"))
        self._flashinfer, self._append = flashinfer.flashinfer_topk, flashinfer.flashinfer_append
        self._dequantize = flashinfer.flashinfer_dequantize
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        size = ctypes.POINTER(ctypes.c_size_t)
        self._cub.argtypes = [pointer, size, *[pointer] * 3, *[number] * 3, pointer]
        self._flashinfer.argtypes = [*[pointer] * 5, *[number] * 3, ctypes.c_int, pointer]
        self._append.argtypes = [*[pointer] * 11, *[number] * 3, pointer]
        self._dequantize.argtypes = [*[pointer] * 4, number, pointer]
        self._states = torch.zeros(STATES, dtype=torch.uint8, device="cuda")

    def cub(self, scores: Tensor, lengths: Tensor, k: int) -> Callable[[], Tensor]:
        """Smaller index among ties, any order. Columns behind a short row's winners hold the width."""
        rows, width = scores.shape
        out = torch.full((rows, k), width, dtype=torch.int32, device="cuda")
        nbytes = ctypes.c_size_t()
        arguments = [scores.data_ptr(), lengths.data_ptr(), out.data_ptr(), rows, width, k]
        _check(self._cub(None, ctypes.byref(nbytes), *arguments, None), "CUB")
        scratch = torch.empty(max(nbytes.value, 1), dtype=torch.uint8, device="cuda")

        def run() -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            _check(self._cub(scratch.data_ptr(), ctypes.byref(nbytes), *arguments, stream), "CUB")
            return out

        return run

    def flashinfer(
        self, scores: Tensor, lengths: Tensor, k: int, deterministic: bool
    ) -> Callable[[], Tensor]:
        """With `deterministic` the result that kvc returns; else any order and any choice among ties."""
        rows, width = scores.shape
        out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
        bases = torch.zeros(rows, dtype=torch.int32, device="cuda")
        pointers = [t.data_ptr() for t in (scores, lengths, bases, out, self._states)]
        largest = 2048  # FILTERED_TOPK_MAX_K in topk.cuh, for a choice among ties
        why = f": its kernel that settles ties takes k up to {largest:,}" if k > largest else ""

        def run() -> Tensor:
            _ = bases  # lives as long as its address is used
            stream = torch.cuda.current_stream().cuda_stream
            status = self._flashinfer(*pointers, rows, width, k, int(deterministic), stream)
            _check(status, "FlashInfer", why if deterministic else "")
            return out

        return run

    def append(
        self, x: Tensor, order: Tensor, heads: int, tokens: int
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Keys and then values of all tokens, BF16 rows of 128, appended to one request's pages of `tokens` in the
        `order` given. The call returns data and scales, `[2, pages, heads, tokens, 64 or 8]`."""
        shape, rows = (2, len(order), heads, tokens), len(x) // 2
        data, scales = (torch.zeros(*shape, n, dtype=torch.uint8, device="cuda") for n in (64, 8))
        positions = torch.arange(len(order) * tokens, dtype=torch.int32, device="cuda")
        requests, ends = torch.zeros_like(positions), torch.tensor([0, len(order)], device="cuda").int()
        last = torch.tensor([tokens], device="cuda").int()
        held = (x[:rows], x[rows:], requests, positions, *data, *scales, order.int(), ends, last)

        def run() -> tuple[Tensor, Tensor]:
            stream, pointers = torch.cuda.current_stream().cuda_stream, [t.data_ptr() for t in held]
            _check(self._append(*pointers, len(positions), heads, tokens, stream), "FlashInfer")
            return data, scales

        return run

    def dequantize(self, data: Tensor, scales: Tensor) -> Callable[[], Tensor]:
        """Rows of NVFP4, `[rows, 64]` and `[rows, 8]`, to BF16."""
        out = torch.empty(len(data), 128, dtype=torch.bfloat16, device="cuda")
        one = torch.ones(1, device="cuda")
        pointers = [t.data_ptr() for t in (data, scales, one, out)]

        def run() -> Tensor:
            _ = one
            stream = torch.cuda.current_stream().cuda_stream
            _check(self._dequantize(*pointers, len(out), stream), "FlashInfer")
            return out

        return run


if __name__ == "__main__":
    typer.run(main)
