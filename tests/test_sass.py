"""The machine code in the installed CUDA library: every architecture, the E2M1 instruction where it exists.

CuTe DSL's and Triton's is data of the library, which cuobjdump does not see; kernels/common/aot.py says what it wrote.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvc import collect_env

LIBRARY = collect_env.library_file("_C_cuda")
ARCHITECTURES = collect_env.built_architectures().split(", ") if LIBRARY else []
# The .cu files with each family's kernels, of which every architecture must have an image.
KERNELS = [
    ("nvfp4", "launch"),
    ("compaction", "compaction"),
    ("topk", "select"),
    ("topk", "settle"),
    ("triattention", "triattention"),
]
CUTE = re.compile(r"streaming_select_\w+|triattention_score_\w+")
CUTE_ARCHITECTURES = ("sm_90a", "sm_100f")
CONVERSION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(F2FP\.\S*E2M1\S*)", re.MULTILINE)

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="kvc was built without CUDA")


@pytest.fixture(scope="module")
def cuobjdump() -> Path:
    """From the CUDA toolkit, or from the pip package of that name."""

    def candidates() -> Iterator[Path]:
        if found := shutil.which("cuobjdump"):
            yield Path(found)
        try:
            files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
        except importlib.metadata.PackageNotFoundError:
            return
        yield from (Path(str(file.locate())) for file in files if file.name == "cuobjdump")

    path = next(candidates(), None)
    if path is None:
        pytest.skip("needs cuobjdump")
    return path


def dump(cuobjdump: Path, *options: str) -> str:
    command = [str(cuobjdump), *options, str(LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_has_an_image(cuobjdump: Path, architecture: str) -> None:
    name, _, ptx = architecture.partition("+")
    listed = dump(cuobjdump, "--list-ptx" if ptx else "--list-elf", "-arch", name)
    for family, source in KERNELS:
        assert re.search(rf"\b{source}\b", listed), f"{family} has no {ptx or 'machine code'} of {name}"


def compiled_kernels() -> dict[str, list[tuple[int, int]]]:
    """The first and the last compute capability of each image of each kernel of CuTe DSL and Triton."""
    assert LIBRARY is not None
    found = re.findall(rb"kvc has compiled (\w+) ([\d -]+)\0", LIBRARY.read_bytes())
    images = {name.decode(): re.findall(rb"(\d+)-(\d+)", ranges) for name, ranges in found}
    return {name: [(int(first), int(last)) for first, last in ranges] for name, ranges in images.items()}


def test_every_compiled_kernel_has_an_image() -> None:
    kernels = compiled_kernels()
    assert (
        sum(bool(CUTE.fullmatch(name)) for name in kernels) == 3 + 24
    )  # dtypes; dtypes, head dims and groups
    for family in ("pack_", "settle_", "triattention_", "mean_phase"):
        assert any(name.startswith(family) for name in kernels if not CUTE.fullmatch(name)), family
    for name, images in kernels.items():
        cute = bool(CUTE.fullmatch(name))
        assert cute == ((0, 10_000) not in images), name  # PTX for any GPU is Triton's
        for architecture in ARCHITECTURES:
            if "+" in architecture or (cute and architecture not in CUTE_ARCHITECTURES):
                continue
            capability = int(re.sub(r"\D", "", architecture))
            covering = [image for image in images if image[0] <= capability <= image[1] < 10_000]
            assert len(covering) == 1, f"{name} has {len(covering)} images for {architecture}: {images}"


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if "+" not in name])
def test_hardware_converts_where_it_can(cuobjdump: Path, architecture: str) -> None:
    sass = dump(cuobjdump, "-sass", "-arch", architecture)
    sections = re.split(r"^\s*Function : (?=\S)", sass, flags=re.MULTILINE)[1:]
    converting = {s.split()[0]: CONVERSION.findall(s) for s in sections if "5nvfp4" in s.split()[0]}
    assert converting, "no kernel of the nvfp4 family was disassembled"
    instructions = {name for found in converting.values() for name in found}
    if architecture.startswith(("sm_100", "sm_120")):
        assert instructions
        assert all(name.startswith("F2FP.SATFINITE.E2M1.F32") for name in instructions)
        # A group of 16 takes eight of them, so whole groups are converted and nothing by halves.
        assert all(len(found) % 8 == 0 for found in converting.values())
    else:
        assert not instructions
