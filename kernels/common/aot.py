"""Compiles Triton and CuTe DSL kernels ahead of time, without a GPU, into one C++ file of machine code.

``python aot.py OUTPUT.cpp --triton "80;90" MODULE.py ... --cute "90a;100f" MODULE.py ...``

A Triton module lists its kernels in ``AOT``: name -> {"kernel", "signature", "constants", "warps"}, perhaps with
"aligned", the pointers that are multiples of 16 bytes, and "registers", the most that a thread may use. Each gets
machine code for the given compute capabilities, and PTX of 8.0 which the driver of any other GPU compiles.
A kernel with an argument ``PDL`` gets True for it from 9.0 on, and must then begin with ``gdc_wait()``: it is
launched while the kernel before it ends.
A CuTe DSL module lists its kernels in ``CUTE``: name -> (an object to ``cute.compile``, example arguments), where the
object launches one kernel. Each gets machine code for the given targets only: other GPUs need another kernel.
The result holds a ``const kvc::CompiledKernel kvc::compiled::<name>`` (kernels/common/compiled.h) for each, and a text
that tests find in the library: ``kvc has compiled <name> <first>-<last> ...``, the capabilities of each image.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

TRITON = (3, 6)
PTX_OF = 80
ANY = 10_000
WAIT = "griddepcontrol.wait"


@dataclass
class Image:
    first: int  # of the compute capabilities that it runs on, as 10 * major + minor
    last: int
    shared: int
    threads: int
    entry: str
    data: bytes
    waits: bool  # for the kernel before it, by itself


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kvc_aot_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def triton_image(name: str, description: dict[str, Any], capability: int) -> Image:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = description["kernel"], dict(description["constants"])
    if "PDL" in kernel.arg_names:
        constants["PDL"] = capability >= 90
    source = ASTSource(
        kernel,
        signature={**description["signature"], **dict.fromkeys(constants, "constexpr")},
        constexprs={(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
        attrs={
            (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
            for argument in description.get("aligned", ())
        },
    )
    options = {"num_warps": description["warps"], "num_stages": description.get("stages", 3)}
    if "registers" in description:
        options["maxnreg"] = description["registers"]
    compiled = triton.compile(source, target=GPUTarget("cuda", capability or PTX_OF, 32), options=options)
    metadata = compiled.metadata
    if list(source.signature) != kernel.arg_names:
        raise SystemExit(f"kvc: the signature of {name} does not follow its arguments")
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise SystemExit(f"kvc: {name} needs scratch memory, which the loader does not give")
    if metadata.num_warps != description["warps"]:
        raise SystemExit(f"kvc: {name} got {metadata.num_warps} warps, not the described ones")
    if metadata.shared > 48 << 10:
        raise SystemExit(f"kvc: {name} needs {metadata.shared} > 48 Ki bytes of shared memory")
    # Triton compiles for "a" targets from 9.0 on, whose code runs on that very capability only; before, code runs on
    # later minors too.
    last = capability if capability >= 90 else capability // 10 * 10 + 9
    data = compiled.asm["cubin"] if capability else compiled.asm["ptx"].encode() + b"\0"
    waits = waits_first(name, compiled.asm["ptx"])
    threads = 32 * metadata.num_warps
    return Image(
        capability, last if capability else ANY, metadata.shared, threads, metadata.name, data, waits
    )


def waits_first(name: str, ptx: str) -> bool:
    """Whether a kernel waits for the one before it, which it must do before it touches global memory."""
    if WAIT not in ptx:
        return False
    access = re.search(r"\b(ld|st|atom|red)(\.\w+)*\.global\b|\bcp\.(async|reduce)", ptx)
    if access and access.start() < ptx.index(WAIT):
        raise SystemExit(f"kvc: {name} must wait before it touches global memory")
    return True


def described_image(path: str, name: str, capability: int) -> Image:
    return triton_image(name, load(Path(path)).AOT[name], capability)


def cute_images(module: Path, arch: str, folder: Path) -> dict[str, Image]:
    """In a process of its own, because the DSL takes its target from the environment when it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUTE_DSL_ARCH": f"sm_{arch}"}
    subprocess.run(
        [sys.executable, __file__, "--cute-worker", str(module), arch],
        cwd=folder,
        env=environment,
        check=True,
    )
    number = int("".join(filter(str.isdigit, arch)))
    last = number // 10 * 10 + 9 if arch.endswith("f") else number
    images = {}
    for name, (entry, threads, waits) in json.loads((folder / "kernels.json").read_text()).items():
        data = (folder / f"{name}.cubin").read_bytes()
        images[name] = Image(number, last, 0, threads, entry, data, waits)
    return images


def cute_worker(module: Path, arch: str) -> None:
    try:
        import cutlass.cute as cute
    except ImportError as error:
        raise SystemExit(f"kvc: the CUDA build needs nvidia-cutlass-dsl ({error})") from None

    kernels = {}
    for name, (kernel, arguments) in load(module).CUTE.items():
        options = f"--gpu-arch sm_{arch} --keep-cubin --keep-ptx"
        artifacts = cute.compile(kernel, *arguments, options=options).artifacts
        entries = re.findall(
            r"\.entry (\w+)\(.*?\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", artifacts.PTX, re.S
        )
        if len(entries) != 1:
            raise SystemExit(f"kvc: {name} must launch one kernel, got {len(entries)}")
        entry, *block = entries[0]
        threads = 1
        for extent in block:
            threads *= int(extent or 1)
        kernels[name] = (entry, threads, waits_first(name, artifacts.PTX))
        Path(f"{name}.cubin").write_bytes(artifacts.CUBIN)
    Path("kernels.json").write_text(json.dumps(kernels))


def emit(name: str, images: list[Image]) -> str:
    arrays, rows = [], []
    for i, image in enumerate(images):
        if image.threads != images[0].threads:
            raise SystemExit(f"kvc: {name} has blocks of different sizes")
        lines = [",".join(map(str, image.data[at : at + 32])) for at in range(0, len(image.data), 32)]
        arrays.append(
            f"alignas(16) const unsigned char {name}_{i}[] = {{\n" + ",\n".join(lines) + "};\n",
        )
        waits = str(image.waits).lower()
        rows.append(f'{{{image.first}, {image.last}, {image.shared}, {waits}, {name}_{i}, "{image.entry}"}}')
    # Constants are local to a file unless declared extern first.
    table = f"extern const CompiledKernel {name};\n"
    table += f'const CompiledKernel {name}{{"{name}", {images[0].threads}, {{{", ".join(rows)}}}}};\n'
    ranges = " ".join(f"{image.first}-{image.last}" for image in images)
    table += f"extern const char {name}_images[];\n"
    table += f'const char {name}_images[] = "kvc has compiled {name} {ranges}";\n'
    return "namespace {\n" + "".join(arrays) + "}  // namespace\n" + table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--triton", nargs="+", default=[""])
    parser.add_argument("--cute", nargs="+", default=[""])
    arguments = parser.parse_args()
    needed = f"kvc: the CUDA build needs triton >= {TRITON[0]}.{TRITON[1]}"
    try:
        import triton
    except ImportError as error:
        raise SystemExit(f"{needed} ({error})") from None
    if tuple(map(int, triton.__version__.split(".")[:2])) < TRITON:
        raise SystemExit(f"{needed}, found {triton.__version__}")
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    capabilities, *modules = arguments.triton
    wanted = [*sorted(map(int, capabilities.split(";"))), 0] if modules else []  # 0: PTX
    archs, *cute_modules = arguments.cute
    kernels: dict[str, list[Image]] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        triton_jobs = [
            (name, [pool.submit(described_image, path, name, capability) for capability in wanted])
            for path in modules
            for name in load(Path(path)).AOT
        ]
        cute_jobs = []
        for path in map(Path, cute_modules):
            for arch in filter(None, archs.split(";")):
                folder = arguments.output.parent / "cute" / path.parent.name / path.stem / arch
                cute_jobs.append(pool.submit(cute_images, path.resolve(), arch, folder))
        for name, images in triton_jobs:
            kernels[name] = [image.result() for image in images]
        for job in cute_jobs:
            for name, image in job.result().items():
                kernels.setdefault(name, []).append(image)
    text = (
        '// Generated by kernels/common/aot.py.\n#include "common/compiled.h"\n\nnamespace kvc::compiled {\n'
    )
    text += "".join(emit(name, images) for name, images in kernels.items())
    arguments.output.write_text(text + "}  // namespace kvc::compiled\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cute-worker"]:
        cute_worker(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
