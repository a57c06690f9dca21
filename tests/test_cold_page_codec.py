"""The C++ cold-page codec: the example program, the capsule, and the same bytes as the op."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc import PageBuffer, PageLayout

PACKAGE = Path(kvc.__file__).parent
EXAMPLE = Path(__file__).parent.parent / "examples" / "cold_page_codec.cpp"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
BF16 = torch.bfloat16
DTYPES = [torch.float16, BF16, torch.float32, torch.float8_e4m3fn]

try:
    from kvc._codec import Codec
except ImportError as error:  # built for another Python
    NO_MODULE = str(error)
else:
    NO_MODULE = ""
needs_module = pytest.mark.skipif(bool(NO_MODULE), reason=f"kvc._codec: {NO_MODULE}")


def library(device: torch.device | str) -> Path:
    name = "libkvc_codec_cuda.so" if torch.device(device).type == "cuda" else "libkvc_codec.so"
    return PACKAGE / "lib" / name


# The example's geometry: K with 32 lossless rotary elements of 64, V with global scale 0.5, a copied side buffer.
LAYERS, ROWS, HEAD_DIM, SLOTS, SIDE = 3, 32, 64, 12, 100
OUT = torch.tensor([[3, 11], [0, 2], [4, 0], [1, 7], [2, 5]], dtype=torch.int32)


def layout(lossless: bool = False) -> PageLayout:
    layers = []
    for i in range(LAYERS):
        key = PageBuffer(3 * i, ROWS, HEAD_DIM, BF16, quantized_range=(32, 32))
        value = PageBuffer(3 * i + 1, ROWS, HEAD_DIM, BF16, global_scale=0.5)
        if lossless:
            key, value = (PageBuffer.copy(b.pool, b.nbytes) for b in (key, value))
        layers.append([key, value, PageBuffer.copy(3 * i + 2, SIDE)])
    return PageLayout(layers)


def read_pools(folder: Path) -> list[torch.Tensor]:
    pools = []
    for i in range(3 * LAYERS):
        raw = torch.frombuffer(bytearray((folder / f"pool{i}.bin").read_bytes()), dtype=torch.uint8)
        pools.append(raw.view(SLOTS, -1))
    return pools


def encoded(pools: list[torch.Tensor], lossless: bool, pairs: torch.Tensor = OUT) -> torch.Tensor:
    page = layout(lossless)
    cold = torch.empty(len(pairs), page.cold_page_bytes, dtype=torch.uint8, device=pools[0].device)
    kvc.encode_pages_(cold, pools, pairs, page.table, page.scales)
    return cold


@pytest.mark.parametrize(
    "compiler", ["g++", pytest.param("nvcc", marks=[pytest.mark.cuda])], ids=["host memory", "cuda"]
)
def test_example_program(compiler: str, tmp_path: Path) -> None:
    program = tmp_path / "cold_page_codec"
    if compiler == "g++":
        if COMPILER is None:
            pytest.skip("needs a C++ compiler")
        command = [
            COMPILER,
            "-Wall",
            "-Wextra",
            "-Werror",
            str(EXAMPLE),
            "-lkvc_codec",
            f"-Wl,-rpath,{PACKAGE / 'lib'}",
        ]
    else:
        if shutil.which("nvcc") is None:
            pytest.skip("needs nvcc")
        command = [
            "nvcc",
            "-x",
            "cu",
            str(EXAMPLE),
            "-lkvc_codec_cuda",
            "-Xlinker",
            f"-rpath={PACKAGE / 'lib'}",
        ]
    command += ["-std=c++17", f"-I{PACKAGE / 'include'}", f"-L{PACKAGE / 'lib'}", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lossless: 24912 bytes a page, relative error 0.0000\nNVFP4: 11664 bytes")
    pools = read_pools(tmp_path)
    for name, lossless in (("lossless", True), ("nvfp4", False)):
        assert (tmp_path / f"{name}.bin").read_bytes() == bytes(encoded(pools, lossless).flatten().tolist())


def test_header_stands_alone(tmp_path: Path) -> None:
    """Included by itself with FMA and all warnings, and implemented by an engine's own class."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    source = tmp_path / "own.cpp"
    source.write_text("""
#include "kvc/cold_page_codec.h"
struct Own final : kvc::ColdPageCodec {
  bool configure(const kvc::HotPoolGroup*, int32_t n) noexcept override { return n > 0; }
  int64_t queryColdPageBytes(int32_t) const noexcept override { return 16; }
  kvc::PageIndexLocation queryPageIndexLocation(int32_t) const noexcept override {
    return kvc::PageIndexLocation::kDevice;
  }
  bool encode(int32_t, void*, const kvc::PageIndexPair*, int64_t, void*) noexcept override { return true; }
  bool decode(int32_t, const void*, const kvc::PageIndexPair*, int64_t, void*) noexcept override { return true; }
};
static_assert(sizeof(kvc::PageIndexPair) == 8 && alignof(kvc::PageIndexPair) == 8);
static_assert(static_cast<int>(kvc::PageIndexLocation::kBadLocation) == -1);
int main() { Own own; kvc::ColdPageCodec& codec = own; return codec.getBatchingLayerGroupId(3) == 3 ? 0 : 1; }
""")
    program = tmp_path / "own"
    flags = ["-std=c++17", "-O2", "-march=native", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command = [COMPILER, *flags, f"-I{PACKAGE / 'include'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    subprocess.run([str(program)], check=True)


def test_libraries_need_neither_torch_nor_python() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    for path in (PACKAGE / "lib").glob("*.so"):
        dump = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        assert "torch" not in dump
        assert "python" not in dump
        assert "PATH" not in dump


def described(pools: list[torch.Tensor]) -> list[tuple[int, int, int, int]]:
    return [
        (p.data_ptr(), p.shape[0], p[0].numel() * p.element_size(), p.stride(0) * p.element_size())
        for p in pools
    ]


def group_of(pools: list[torch.Tensor], *ids: int, page: PageLayout | None = None) -> Any:
    page = page or layout()
    return described(pools), [(i, page.table.tolist(), page.scales.tolist()) for i in ids]


def random_pools(device: torch.device | str, padded: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pools = []
    for i in range(3 * LAYERS):
        nbytes = SIDE if i % 3 == 2 else ROWS * HEAD_DIM * 2
        if i % 3 == 2:
            data = torch.randint(256, (SLOTS, nbytes), generator=generator).to(torch.uint8)
        else:
            data = torch.randn(SLOTS, nbytes // 2, generator=generator).to(BF16).view(torch.uint8)
        stride = nbytes + (48 if padded else 0)
        pool = torch.full((SLOTS, stride), 0xA5, dtype=torch.uint8, device=device)
        pool[:, :nbytes] = data.to(device)
        pools.append(pool[:, :nbytes])
    return pools


@needs_module
class TestModule:
    @pytest.mark.parametrize("form", ["lossless", "nvfp4"])
    @pytest.mark.parametrize("padded", [False, True])
    def test_bytes_are_those_of_the_op(self, device: torch.device, form: str, padded: bool) -> None:
        pools = random_pools(device, padded)
        expected = encoded(pools, form == "lossless")
        codec = Codec(str(library(device)), form)
        codec.configure([group_of(pools, 4, 2)])
        assert codec.cold_page_bytes(4) == expected.shape[1]
        guard = 64
        memory = torch.full(
            (expected.numel() + 2 * guard,), 0x5A, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        codec.encode(4, memory.data_ptr() + guard, OUT.data_ptr(), len(OUT), stream)
        back = OUT.flip(1)
        before = [pool.clone() for pool in pools]
        for pool in pools:
            pool[OUT[:, 1].long()] = 0
        codec.decode(2, memory.data_ptr() + guard, back.data_ptr(), len(back), stream)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(memory[guard:-guard].view_as(expected), expected.cpu())
        assert bool((memory[:guard] == 0x5A).all() & (memory[-guard:] == 0x5A).all())
        for pool, old in zip(pools, before, strict=True):
            whole = pool.as_strided((SLOTS, pool.stride(0)), (pool.stride(0), 1))
            assert bool((whole[:, pool.shape[1] :] == 0xA5).all())
            rest = [i for i in range(SLOTS) if i not in OUT[:, 1].tolist()]
            assert torch.equal(pool[rest], old[rest])
        again = encoded(pools, form == "lossless")
        assert torch.equal(again, expected)  # one trip is a fixed point at this magnitude

    @given(st.data())
    @settings(max_examples=30)
    def test_any_layout_has_the_bytes_of_the_op(self, data: st.DataObject) -> None:
        layers: list[list[PageBuffer]] = []
        pool = 0
        for _ in range(data.draw(st.integers(1, 3))):
            layers.append([])
            for _ in range(data.draw(st.integers(1, 3))):
                if data.draw(st.booleans()):
                    layers[-1].append(PageBuffer.copy(pool, data.draw(st.integers(1, 70))))
                else:
                    groups = data.draw(st.integers(1, 6))
                    start = data.draw(st.integers(0, groups - 1))
                    count = data.draw(st.integers(1, groups - start))
                    first = data.draw(st.integers(start, start + count))
                    residual = data.draw(st.integers(0, start + count - first))
                    layers[-1].append(
                        PageBuffer(
                            pool,
                            data.draw(st.integers(1, 5)),
                            16 * groups,
                            data.draw(st.sampled_from(DTYPES)),
                            quantized_range=(16 * start, 16 * count),
                            residual_range=(16 * first, 16 * residual),
                            global_scale=data.draw(st.sampled_from([1.0, 0.37])),
                        )
                    )
                pool += 1
        page = PageLayout(layers)
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
        pools = []
        for buffer in (b for layer in layers for b in layer):
            slot = torch.randn(4, -(-buffer.nbytes // 16) * 16, generator=generator) * 3
            dtype = buffer.dtype if buffer.transform == "nvfp4" else torch.float8_e4m3fn
            pools.append(slot.to(dtype).view(torch.uint8)[:, : -(-buffer.nbytes // 16) * 16].contiguous())
        pairs = torch.tensor([[2, 3], [0, 1]], dtype=torch.int32)
        expected, cold = (torch.full((3, page.cold_page_bytes), 0x5A, dtype=torch.uint8) for _ in range(2))
        kvc.encode_pages_(expected, pools, pairs, page.table, page.scales)
        codec = Codec(str(library("cpu")), "nvfp4")
        codec.configure([group_of(pools, 0, page=page)])
        codec.encode(0, cold.data_ptr(), pairs.data_ptr(), 2)
        assert torch.equal(cold, expected)
        back, home = [torch.zeros_like(p) for p in pools], pairs.flip(1).contiguous()
        kvc.decode_pages_(back, cold, home, page.table, page.scales)
        for p in pools:
            p.zero_()
        codec.decode(0, cold.data_ptr(), home.data_ptr(), 2)
        assert all(torch.equal(a, b) for a, b in zip(pools, back, strict=True))

    def test_many_pages_on_many_threads(self) -> None:
        """Large enough for several threads in a call, and several calls at once."""
        buffer = PageBuffer(0, 128, 128, BF16)
        page, slots = PageLayout([[buffer]]), 96
        pool = torch.randn(slots, 128 * 128, generator=torch.Generator().manual_seed(0)).to(BF16)
        pairs = torch.stack((torch.randperm(slots), torch.randperm(slots)), 1).int()
        expected = torch.empty(slots, page.cold_page_bytes, dtype=torch.uint8)
        kvc.encode_pages_(expected, [pool], pairs, page.table, page.scales)
        codec = Codec(str(library("cpu")), "nvfp4")
        codec.configure([group_of([pool], 0, page=page)])

        def encode(_: int) -> torch.Tensor:
            cold = torch.zeros_like(expected)
            codec.encode(0, cold.data_ptr(), pairs.data_ptr(), slots)
            return cold

        with ThreadPoolExecutor(4) as executor:
            assert all(torch.equal(cold, expected) for cold in executor.map(encode, range(8)))

    def test_layer_groups_of_all_pool_groups(self) -> None:
        one, two = random_pools("cpu"), random_pools("cpu")
        other = PageLayout([[PageBuffer(0, ROWS, HEAD_DIM, BF16)]])
        codec = Codec(str(library("cpu")), "nvfp4")
        shared = described(one), [*group_of(one, 7, 3)[1], *group_of(one, 5, page=other)[1]]
        codec.configure([shared, group_of(two, 1)])
        assert [codec.batching_id(i) for i in (7, 3, 5, 1, 9)] == [3, 3, 5, 1, -1]
        assert [codec.page_index_location(i) for i in (7, 9)] == [0, -1]
        assert codec.cold_page_bytes(5) == other.cold_page_bytes
        assert codec.cold_page_bytes(9) == 0

    def test_capsule_outlives_its_codec(self) -> None:
        pools = random_pools("cpu")
        codec = Codec(str(library("cpu")), "nvfp4")
        codec.configure([group_of(pools, 0)])
        capsule = codec.capsule()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = get(capsule, b"kvc.ColdPageCodec")
        assert address
        assert get(codec.capsule(), b"kvc.ColdPageCodec") == address
        del codec
        # queryColdPageBytes is the fourth entry of the table of virtual functions, after two destructors.
        table = ctypes.cast(address, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
        query = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)(table[3])
        assert query(address, 0) == layout().cold_page_bytes

    def test_what_is_refused(self) -> None:
        pools = random_pools("cpu")
        with pytest.raises(ValueError, match="format"):
            Codec(str(library("cpu")), "zip")
        with pytest.raises(ImportError, match=r"nothing\.so"):
            Codec("/nothing.so", "nvfp4")

        def configure(*groups: Any) -> None:
            Codec(str(library("cpu")), "nvfp4").configure(groups)

        described_pools, (entry,) = group_of(pools, 0)
        _, rows, scales = entry
        for groups, text in (
            ([], "at least one pool group"),
            ([([], [entry])], "at least one pool"),
            ([(described_pools, [])], "at least one layer group"),
            ([(described_pools, [entry, entry])], "an id >= 0 that is used once"),
            ([(described_pools, [(-1, rows, scales)])], "an id >= 0"),
            ([(described_pools, [(0, [], [])])], "at least one buffer"),
            ([(described_pools[:2], [entry])], "of a pool below 2"),
            ([([(0, *p[1:]) for p in described_pools], [entry])], "memory"),
            ([([(p[0], p[1], p[2] - 16, p[3]) for p in described_pools], [entry])], "inside a slot"),
            ([([(p[0] + 1, p[1], p[2], p[3]) for p in described_pools], [entry])], "multiples of 16"),
            ([([(p[0], p[1], p[2], p[2] - 1) for p in described_pools], [entry])], "do not overlap"),
            ([(described_pools, [(0, rows[::-1], scales)])], "ascending layer order"),
            ([(described_pools, [(0, [rows[0], rows[0]], scales[:2])])], "free of overlapping"),
            ([(described_pools, [(0, [[*rows[0][:8], 40, *rows[0][9:]]], scales[:1])])], "multiples of 16"),
            ([(described_pools, [(0, rows, [float("nan")] * len(rows))])], "global_scale"),
        ):
            with pytest.raises(ValueError, match=text):
                configure(*groups)

        codec = Codec(str(library("cpu")), "nvfp4")
        cold = torch.full((5, layout().cold_page_bytes), 0x5A, dtype=torch.uint8)
        with pytest.raises(ValueError, match="a configured one"):
            codec.encode(0, cold.data_ptr(), OUT.data_ptr(), 1)
        codec.configure([group_of(pools, 0)])
        with pytest.raises(RuntimeError, match="configured already"):
            codec.configure([group_of(pools, 0)])
        for pairs, text in (
            ([[0, SLOTS]], "a hot slot in"),
            ([[0, -1]], "a hot slot in"),
            ([[-1, 0]], "a cold slot"),
            ([[0, 1], [0, 2]], "repeated destinations"),
            ([[1 << 30, 1], [1 << 30, 2]], "repeated destinations"),
        ):
            tensor = torch.tensor(pairs, dtype=torch.int32)
            with pytest.raises(ValueError, match=text):
                codec.encode(0, cold.data_ptr(), tensor.data_ptr(), len(pairs))
        for arguments in (
            (0, 0, OUT.data_ptr(), 1),
            (0, cold.data_ptr(), 0, 1),
            (9, 1, 1, 1),
            (9, 0, 0, 0),
            (0, 1, 1, -1),
        ):
            with pytest.raises(ValueError, match="must be"):
                codec.decode(*arguments)
        codec.encode(0, 0, 0, 0)
        assert bool((cold == 0x5A).all())

    @pytest.mark.cuda
    def test_unpinned_memory_and_mixed_pools_are_refused(self) -> None:
        pools = random_pools("cuda")
        codec = Codec(str(library("cuda")), "nvfp4")
        codec.configure([group_of(pools, 0)])
        cold = torch.empty(5, layout().cold_page_bytes, dtype=torch.uint8)
        with pytest.raises(ValueError, match="pinned host memory"):
            codec.encode(0, cold.data_ptr(), OUT.data_ptr(), len(OUT))
        mixed = [*pools[:-1], random_pools("cpu")[-1]]
        with pytest.raises(ValueError, match="all on one device"):
            Codec(str(library("cuda")), "nvfp4").configure([group_of(mixed, 0)])

    @pytest.mark.cuda
    def test_many_buffers_need_no_memory_and_no_synchronisation(self) -> None:
        """More than a kernel's parameters hold: 300 buffers and 3,000 pages."""
        buffers, slots = 300, 3000
        pools = [torch.randn(slots, 64, device="cuda").bfloat16() for _ in range(buffers)]
        page = PageLayout([[PageBuffer(i, 2, 32, BF16)] for i in range(buffers)])
        pairs = torch.stack((torch.randperm(slots), torch.randperm(slots)), 1).int()
        expected = torch.empty(slots, page.cold_page_bytes, dtype=torch.uint8, device="cuda")
        kvc.encode_pages_(expected, pools, pairs, page.table, page.scales)
        codec = Codec(str(library("cuda")), "nvfp4")
        codec.configure([group_of(pools, 0, page=page)])
        cold = torch.zeros_like(expected)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            codec.encode(0, cold.data_ptr(), pairs.data_ptr(), slots, torch.cuda.current_stream().cuda_stream)
        pairs.zero_()  # read during the call
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cold, expected)
