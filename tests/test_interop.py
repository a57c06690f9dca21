"""The ops beside other frameworks and compilers: DLPack, torch.compile, AOTInductor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvc
import numpy as np
import pytest
import torch
from kvc.reference import nvfp4 as reference_nvfp4
from kvc.reference import topk as reference_topk
from torch import Tensor

EXAMPLE = Path(__file__).parent.parent / "examples" / "other_frameworks.py"
ops = torch.ops.kvc


def example_scores(library: Any) -> tuple[Any, Any]:
    """[5, 301] scores with ties, and lengths, of a library like NumPy."""
    scores = library.asarray(np.random.default_rng(3).integers(-9, 9, (5, 301)).astype(np.float32))
    return scores, library.asarray(np.array([301, 300, 17, 8, 0], dtype=np.int32))


def check_selection(scores: Tensor, lengths: Tensor, kept: Tensor) -> None:
    assert torch.equal(kept.cpu(), reference_topk.radix_topk(scores.cpu(), lengths.cpu(), 16))


class TestDLPack:
    def test_numpy(self) -> None:
        scores, lengths = (torch.from_dlpack(array) for array in example_scores(np))
        kept = ops.radix_topk(scores, lengths, 16)
        check_selection(scores, lengths, kept)
        assert np.shares_memory(np.from_dlpack(kept), kept.numpy())

    def test_numpy_in_place(self) -> None:
        """An op that writes its argument writes the array."""
        rows = np.random.default_rng(4).standard_normal((3, 2, 64), dtype=np.float32)
        layout = kvc.PageLayout([[kvc.PageBuffer(0, 2, 64, torch.float32)]])
        cold = np.full((2, layout.cold_page_bytes), 0xAB, dtype=np.uint8)
        pairs = torch.from_dlpack(np.array([[1, 2]], dtype=np.int32))
        expected = torch.full(cold.shape, 0xAB, dtype=torch.uint8)
        reference_nvfp4.encode_pages_(expected, [torch.from_numpy(rows.copy())], pairs, layout)
        ops.encode_pages_(
            torch.from_dlpack(cold), [torch.from_dlpack(rows)], pairs, layout.table, layout.scales
        )
        assert np.array_equal(cold, expected.numpy())

    def test_jax(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of a GPU's memory
        jax = pytest.importorskip("jax")
        try:
            place = jax.devices(device.type)[0]
        except RuntimeError as error:
            pytest.skip(f"JAX has no such device: {error}")
        with jax.default_device(place):
            arrays = example_scores(jax.numpy)
            scores, lengths = (torch.from_dlpack(array) for array in arrays)
            assert scores.device.type == device.type
            assert scores.data_ptr() == arrays[0].unsafe_buffer_pointer()
            kept = ops.radix_topk(scores, lengths, 16)
            check_selection(scores, lengths, kept)
            assert np.array_equal(np.asarray(jax.numpy.from_dlpack(kept)), kept.cpu().numpy())

    @pytest.mark.cuda
    def test_cupy(self) -> None:
        cupy = pytest.importorskip("cupy")
        arrays = example_scores(cupy)
        scores, lengths = (torch.from_dlpack(array) for array in arrays)
        assert scores.data_ptr() == arrays[0].data.ptr
        kept = ops.radix_topk(scores, lengths, 16)
        check_selection(scores, lengths, kept)
        assert np.array_equal(cupy.asnumpy(cupy.from_dlpack(kept)), kept.cpu().numpy())

    def test_example(self) -> None:
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        run = subprocess.run(
            [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, env=environment
        )
        assert run.returncode == 0, run.stderr
        assert "NumPy: 64 of 100 tokens" in run.stdout


def evict(budget: int, pool: Tensor, table: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
    """Three ops and PyTorch's own around them: select, plan, move; the sum of each row that was kept."""
    requests, heads = scores.shape[0], pool.shape[2]
    kept = ops.radix_topk(scores * 0.5, lengths, budget)
    offsets = torch.arange(requests + 1, dtype=torch.int32, device=pool.device) * budget
    sources, _ = ops.pack_move_sources(
        kept.unsqueeze(1), lengths, offsets, None, 0, 1, heads, requests * budget, 0
    )
    ops.compact_pages_([pool], table, sources, offsets, torch.zeros_like(lengths))
    return kept.sum(1)


def eviction_case(device: torch.device, requests: int = 3, length: int = 45) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    pool = torch.randn(requests * 6, 2, 2, 8, 16, generator=generator)
    table = torch.randperm(requests * 6, generator=generator).int().view(requests, 6)
    scores = torch.randint(0, 9, (requests, length), generator=generator).float()
    lengths = torch.tensor([length, length - 1, length - 9], dtype=torch.int32)
    return tuple(t.to(device) for t in (pool, table, scores, lengths))


# Inductor writes code for the GPU with Triton, which has what CI without a GPU lacks, and for the CPU with g++.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_function_of_three_ops(device: torch.device, backend: str) -> None:
    if backend == "inductor" and device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    torch._dynamo.reset()
    pool, *rest = eviction_case(device)
    expected_pool, compiled_pool = pool.clone(), pool.clone()
    expected = evict(20, expected_pool, *rest)
    assert not torch.equal(expected_pool, pool)
    compiled = torch.compile(evict, fullgraph=True, backend=backend)
    assert torch.equal(compiled(20, compiled_pool, *rest), expected)
    assert torch.equal(compiled_pool.view(torch.int32), expected_pool.view(torch.int32))


# A program of its own, as a package that PyTorch cannot load may end the process.
AOT_INDUCTOR = """
import sys
import torch

class Select(torch.nn.Module):
    def forward(self, scores, lengths):
        return torch.ops.kvc.radix_topk(scores, lengths, 16) if with_kvc else scores.sum(1) + lengths

folder, device, with_kvc = sys.argv[1], sys.argv[2], sys.argv[3] == "kvc"
if with_kvc:
    import kvc
arguments = [tensor.to(device) for tensor in torch.load(f"{folder}/arguments.pt")]
rows = torch.export.Dim("rows", min=2, max=64)
program = torch.export.export(Select(), tuple(arguments), dynamic_shapes=({0: rows}, {0: rows}))
options = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # the op's own code is compiled already
package = torch._inductor.aoti_compile_and_package(
    program, package_path=f"{folder}/{sys.argv[3]}.pt2", inductor_configs=options
)
print("packaged", flush=True)
select = torch._inductor.aoti_load_package(package)
fewer = [tensor[:3].contiguous() for tensor in arguments]
torch.save([select(*arguments).cpu(), select(*fewer).cpu()], f"{folder}/selected.pt")
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_aot_inductor(device: torch.device, tmp_path: Path) -> None:
    """A program exported ahead of time calls the op, also for a number of rows it was not exported with."""
    scores, lengths = (torch.from_dlpack(array) for array in example_scores(np))
    torch.save([scores, lengths], tmp_path / "arguments.pt")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", AOT_INDUCTOR, str(tmp_path), device.type, what]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    result = run("kvc")
    if result.returncode < 0 and "packaged" in result.stdout and run("PyTorch alone").returncode < 0:
        pytest.skip("this PyTorch crashes when it loads a package, one without kvc too")
    assert result.returncode == 0, result.stderr
    whole, fewer = torch.load(tmp_path / "selected.pt")
    check_selection(scores, lengths, whole)
    check_selection(scores[:3], lengths[:3], fewer)
