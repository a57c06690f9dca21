"""The installed headers in a C++17 program without torch: the same bytes as the op, and no silent FMA."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import kvc
import pytest
import torch

INCLUDE = Path(kvc.__file__).parent / "include"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
X86 = platform.machine() in ("x86_64", "AMD64")
FMA = ["-march=haswell"] if X86 else []  # other machines that have FMA use it by default
NO_CONTRACTION = ["-ffp-contract=off", "-DKVC_FP_CONTRACT_OFF"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]  # in the order of kvc::DType

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

# Standard input to standard output. "encode DTYPE G RESIDUAL": elements -> 9 or 18 bytes a group, data then scale.
# "place": rows of PageLayout.table -> the cold page's size, then three positions for every buffer.
PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kvc/nvfp4.h"
#include "kvc/pages.h"

using namespace kvc;

void put(const nvfp4::Group& group) {
  const unsigned char scale = static_cast<unsigned char>(group.scale);
  std::fwrite(&group.data, 1, 8, stdout);
  std::fwrite(&scale, 1, 1, stdout);
}

template <DType kType>
void encode(nvfp4::GlobalScale global, bool residual) {
  typename Element<kType>::Bits bits[nvfp4::kGroupSize];
  while (std::fread(bits, sizeof bits, 1, stdin) == 1) {
    float x[nvfp4::kGroupSize];
    for (int i = 0; i < nvfp4::kGroupSize; ++i) x[i] = Element<kType>::to_float(bits[i]);
    if (residual) {
      const nvfp4::ResidualGroup both = nvfp4::encode_residual_group(x, global);
      put(both.main);
      put(both.residual);
    } else {
      put(nvfp4::encode_group(x, global));
    }
  }
}

void place_rows() {
  std::vector<BufferSpec> buffers;
  int64_t row[12];
  while (std::fread(row, sizeof row, 1, stdin) == 1) {
    BufferSpec b;
    b.layer = row[0], b.pool = row[1], b.offset = row[2];
    b.transform = static_cast<Transform>(row[3]);
    b.dtype = static_cast<DType>(row[4]);
    b.rows = row[5], b.row_elements = row[6];
    b.quantized_start = row[7], b.quantized_elements = row[8];
    b.residual_start = row[9], b.residual_elements = row[10];
    b.nbytes = row[11];
    if (!check(b).empty()) std::exit(3);
    buffers.push_back(b);
  }
  std::vector<ColdPlacement> places;
  std::printf("%lld\n", static_cast<long long>(place(buffers, &places)));
  for (const ColdPlacement& p : places)
    std::printf("%lld %lld %lld\n", static_cast<long long>(p.data), static_cast<long long>(p.scales),
                static_cast<long long>(p.lossless));
}

int main(int, char** arguments) {
  if (std::string(arguments[1]) == "place") return place_rows(), 0;
  const nvfp4::GlobalScale global = nvfp4::global_scale(std::strtof(arguments[3], nullptr));
  const bool residual = std::atoi(arguments[4]) != 0;
  switch (static_cast<DType>(std::atoi(arguments[2]))) {
    case DType::kFloat16: encode<DType::kFloat16>(global, residual); break;
    case DType::kBFloat16: encode<DType::kBFloat16>(global, residual); break;
    case DType::kFloat32: encode<DType::kFloat32>(global, residual); break;
    case DType::kFloat8E4M3: encode<DType::kFloat8E4M3>(global, residual); break;
  }
}
"""


def compile_program(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.cpp").write_text(PROGRAM)
    command = [str(COMPILER), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", *flags, f"-I{INCLUDE}"]
    command += [str(folder / "program.cpp"), "-o", str(folder / "program")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=["baseline", "fma"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    flags = [*FMA, *NO_CONTRACTION] if request.param == "fma" else []
    if flags and X86 and " fma " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs a CPU with FMA")
    if not flags and not X86:
        flags = NO_CONTRACTION
    result = compile_program(folder, *flags)
    assert result.returncode == 0, result.stderr
    return folder / "program"


def run(program: Path, *arguments: object, stdin: torch.Tensor) -> bytes:
    raw = stdin.contiguous().view(torch.uint8).flatten()
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, input=bytes(raw.tolist()), capture_output=True, check=True).stdout


@pytest.mark.parametrize("residual", [False, True], ids=["main", "residual"])
@pytest.mark.parametrize("global_scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_op(
    program: Path, dtype: torch.dtype, global_scale: float, residual: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-16, 9, (500, 1), generator=generator).float()
    x = (torch.randn(500, 16, generator=generator) * exponents.exp2()).clamp(-448, 448).to(dtype)
    x[7, 3] = float("nan")
    data, scales, _ = kvc.nvfp4_quantize(x, global_scale, residual_elements=16 if residual else 0)
    components = torch.cat((data.view(-1, 8), scales.view(-1, 1)), 1)
    printed = run(program, "encode", DTYPES.index(dtype), global_scale, int(residual), stdin=x)
    assert printed == bytes(components.flatten().tolist())


def test_cold_page_has_the_size_of_the_layout(program: Path) -> None:
    nvfp4 = kvc.PageBuffer(0, 3, 96, torch.bfloat16, quantized_range=(32, 64), residual_range=(48, 16))
    copied = kvc.PageBuffer.copy(1, 37)
    layout = kvc.PageLayout([[copied, nvfp4], [kvc.PageBuffer(2, 5, 32, torch.float8_e4m3fn)]])
    size, *positions = run(program, "place", stdin=layout.table).decode().splitlines()
    assert int(size) == layout.cold_page_bytes
    # Data, scales and lossless rows of the first layer, its copied bytes, padding; then the second layer.
    data, scales, lossless = 3 * (64 + 16) // 2, 3 * (64 + 16) // 16, 3 * 32 * 2
    assert positions[1] == f"0 {data} {data + scales}"
    assert positions[0].split()[0] == str(data + scales + lossless)
    second = -(-(data + scales + lossless + 37) // 16) * 16
    assert positions[2].split()[:2] == [str(second), str(second + 5 * 16)]


def test_fused_multiply_add_is_refused(tmp_path: Path) -> None:
    result = compile_program(tmp_path, *FMA)
    if result.returncode == 0:
        pytest.skip("this machine's compiler does not use FMA by default")
    assert "compile with -ffp-contract=off -DKVC_FP_CONTRACT_OFF" in result.stderr
