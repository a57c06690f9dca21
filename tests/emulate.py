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
    (r'asm volatile\("prefetch\.global\.L2.*?\);', ";"),
    (
        r"extern __shared__ __align__\(16\) uint8_t (\w+)\[\];",
        r"uint8_t* const \1 = emulate::shared();",
    ),
    (r"#if __CUDA_ARCH__ >= 900", "#if 1"),
    (r'asm\("mov\.u32 %0, %%cluster_nctarank;".*?\);', "n = emulate::cluster;"),
    (r'asm\("mov\.u32 %0, %%cluster_ctarank;".*?\);', "r = emulate::rank();"),
    (r'asm volatile\("barrier\.cluster\.arrive.*?\);', "emulate::arrive_in_cluster();"),
    (r'asm volatile\("barrier\.cluster\.wait.*?\);', "emulate::wait_for_cluster();"),
    (r'asm\("mapa\.u64 .*?\);', "return emulate::peer(mine, rank);"),
    (r'asm volatile\("mbarrier\.init.*?\);', "*complete = 1;"),
    (r'asm volatile\("mbarrier\.arrive\.expect_tx.*?\);', "*complete += bytes - 1;"),
    (r'asm volatile\("fence\.mbarrier_init.*?\);', ";"),
    (r'asm volatile\(\s*"[^;]*\.reg \.b32 to, complete;.*?\);', "emulate::send(to, complete, rank, value);"),
    (r'asm volatile\(\s*"[^;]*\.reg \.pred done;.*?\);', "while (*complete != 0) emulate::yield();"),
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
    for part in ("common", family):
        (folder / part).mkdir()
        for source in (ROOT / "kernels" / part).glob("*.*"):
            text = source.read_text()
            for pattern, replacement in (*EVERYWHERE, *replaced):
                text = re.sub(pattern, replacement, text, flags=re.DOTALL)
            (folder / part / source.name).write_text(text)
    for name, text in (headers or {}).items():
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
