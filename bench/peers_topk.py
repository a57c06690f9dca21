"""The other top-k kernels that bench_topk.py measures in its process: FlashInfer's and CUB's.

``python bench/peers_topk.py FOLDER`` fetches their headers from the packages flashinfer-python and cuda-cccl, and
compiles two libraries into the folder with nvcc. They are loaded through ctypes, so the folder may be built on one
machine and used on another.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

# Package, what pip must be told beside it, and the headers inside the wheel. CUB's wheel has a tag that pip does not
# look for by itself.
PACKAGES = {
    "flashinfer": ("flashinfer-python==0.7.4", [], "flashinfer/data/include/"),
    "cub": (
        "cuda-cccl==1.2.1",
        ["--platform", "manylinux_2_26_x86_64", "--only-binary=:all:"],
        "cuda/cccl/headers/include/",
    ),
}
STATES = 1 << 20  # bytes of FlashInfer's row states


def headers(name: str, folder: Path) -> Path:
    """The peer's headers, unpacked below the folder."""
    package, options, inside = PACKAGES[name]
    target = folder / "headers"
    if not (target / inside).is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(folder),
            *options,
            package,
        ]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [n for n in archive.namelist() if n.startswith(inside)])
        wheel.unlink()
    return target / inside


def main(
    folder: Path, arch: Annotated[str, typer.Option(help="Of the GPU that will run it.")] = "90a"
) -> None:
    """Build the peers' libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    # CUB's headers come first: those of the CUDA toolkit may be too old for either.
    include = [f"-I{headers(name, folder)}" for name in ("cub", "flashinfer")]
    for name in PACKAGES:
        source, library = Path(__file__).with_name(f"peer_{name}.cu"), folder / f"{name}.so"
        flags = [
            "-O3",
            f"-arch=sm_{arch}",
            "-std=c++17",
            "--expt-relaxed-constexpr",
            "--expt-extended-lambda",
        ]
        command = [
            "nvcc",
            *flags,
            *include,
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "-o",
            str(library),
            str(source),
        ]
        subprocess.run(command, check=True)


def _check(status: int, name: str) -> None:
    if status != 0:
        raise RuntimeError(f"{name} refuses: CUDA error {status}")


class Peers:
    """The libraries of a folder."""

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()
        self._cub = ctypes.CDLL(str(folder / "cub.so")).cub_topk
        self._flashinfer = ctypes.CDLL(str(folder / "flashinfer.so")).flashinfer_topk
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        size = ctypes.POINTER(ctypes.c_size_t)
        self._cub.argtypes = [pointer, size, *[pointer] * 3, *[number] * 3, pointer]
        self._flashinfer.argtypes = [*[pointer] * 5, *[number] * 3, ctypes.c_int, pointer]
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

        def run() -> Tensor:
            _ = bases  # lives as long as its address is used
            stream = torch.cuda.current_stream().cuda_stream
            _check(self._flashinfer(*pointers, rows, width, k, int(deterministic), stream), "FlashInfer")
            return out

        return run


if __name__ == "__main__":
    typer.run(main)
