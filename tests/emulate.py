"""Builds programs that run CUDA C++ kernels on a CPU, as fibers (emulate.h)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What sources say in PTX, and what C++ wants in another order.
EVERYWHERE = (
    (r'asm volatile\("" : "\+f"\(\w+\)(, "\+f"\(\w+\))?\);', ";"),
    (r'asm\("set\.gt\.f32\.f32 .*?\);', "r = a > b ? 1.0f : 0.0f;"),
    (r'asm\("set\.ge\.f32\.f32 .*?\);', "r = a >= b ? 1.0f : 0.0f;"),
    (r'asm\("set\.eq\.f32\.f32 .*?\);', "r = a == b ? 1.0f : 0.0f;"),
    (r'asm\("prmt\.b32 .*?\);', "result = emulate::prmt(a, b, selector);"),
    (r'asm volatile\(\s*"cp\.async\.cg\..*?: "memory"\);', "memcpy(shared, from, 16);"),
    (r'asm volatile\("cp\.async\.[^;]*;[^;]*;', ";"),
    (
        r"extern __shared__ __align__\(16\) uint8_t (\w+)\[\];",
        r"uint8_t* const \1 = emulate::dynamic_shared;",
    ),
    (r"__shared__ (alignas\(\d+\))", r"\1 __shared__"),
)


def build(
    folder: Path,
    family: str,
    program: str,
    *,
    compiled: Sequence[str] = (),
    replaced: Sequence[tuple[str, str]] = (),
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Compile `tests/<program>.cpp` in `folder`, with a family's sources and others, and headers in place of some."""
    nvcc = shutil.which("nvcc")
    homes = [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr/local/cuda")]
    cuda = next((h / "include" for h in homes if (h / "include" / "cuda_fp16.h").is_file()), None)
    if cuda is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and CUDA's headers")
    (folder / family).mkdir()
    for source in (ROOT / "kernels" / family).glob("*.*"):
        text = source.read_text()
        for pattern, replacement in (*EVERYWHERE, *replaced):
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        (folder / family / source.name).write_text(text)
    for name, text in (headers or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    flags = ["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-DKVC_FP_CONTRACT_OFF"]
    includes = [f"-I{p}" for p in (folder, ROOT / "tests", ROOT / "kernels", ROOT / "include")]
    sources = [str(ROOT / "tests" / f"{program}.cpp"), *(str(ROOT / source) for source in compiled)]
    result = folder / program
    subprocess.run(["g++", *flags, *includes, f"-isystem{cuda}", *sources, "-o", str(result)], check=True)
    return result


def run(program: Path, cases: int, seed: int) -> None:
    result = subprocess.run([program, str(cases), str(seed)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
