"""What a bug report needs: ``python -m kvc.collect_env``.

Standard library only, and every probe may fail: this runs where torch, a GPU or nvcc is missing and where kvc's
libraries do not load. No probe creates a CUDA context.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PACKAGE = Path(__file__).parent
LIBRARIES = ("_C", "_C_cuda")
CODEC_LIBRARIES = ("libkvc_codec", "libkvc_codec_cuda")
PACKAGES = ("triton", "numpy", "transformers")
ENVIRONMENT = re.compile(
    r"KVC_\w+|CUDA_(HOME|PATH|VISIBLE_DEVICES)|MAX_JOBS|CXX|TRITON_\w+|OMP_\w+|LD_LIBRARY_PATH"
)
# What module_cuda.cpp puts in front of the list, so that it can be read from a library that does not load.
BUILT_FOR = re.compile(rb"kvc was built for ([\w+, ]+)\0")


def guarded(probe: Callable[[], str]) -> str:
    """The probe's answer, or why it has none."""
    try:
        return probe()
    except Exception as error:  # whatever is broken is what the reader wants to know
        text = str(error).strip()
        return f"not available ({type(error).__name__}{': ' + text.splitlines()[0] if text else ''})"


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def kvc_version() -> str:
    import kvc

    return f"{kvc.__version__} in {PACKAGE}"


def kvc_import() -> str:
    import kvc

    return f"works, {len([name for name in kvc.__all__ if getattr(kvc, name) is not None])} public names"


def library_file(name: str) -> Path | None:
    return next(iter(sorted(PACKAGE.glob(f"{name}.*so"))), None)


def library(name: str) -> str:
    path = library_file(name)
    if path is None:
        return "not built"
    size = f"{path.name}, {path.stat().st_size / 1e6:.1f} MB"
    if name == "_C_cuda" and torch_cuda() is None:
        return f"{size}, not loaded: this torch has no CUDA"
    importlib.import_module(f"kvc.{name}")
    return f"{size}, loads"


def built_architectures() -> str:
    path = library_file("_C_cuda")
    if path is None:
        return "none"
    found = BUILT_FOR.search(path.read_bytes())
    return found[1].decode() if found else "unknown"


def torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def torch_build() -> str:
    import torch

    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, in {Path(torch.__file__).parent}"


def gpus() -> str:
    rows = command(
        "nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"
    )
    return "; ".join(rows.splitlines()) or "none"


def nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    path = path or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        return "not found"
    release = re.search(r"release [\d.]+", command(path, "--version"))
    return f"{release[0] if release else 'unknown release'}, {path}"


def cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"model name\s*: (.+)", text)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model[1] if model else platform.processor() or platform.machine()}, {usable} usable cores"


def report() -> Iterator[tuple[str, str]]:
    """Pairs of a heading and what was found."""
    yield "kvc", guarded(kvc_version)
    yield "import kvc", guarded(kvc_import)
    for name in LIBRARIES:
        yield f"kvc.{name}", guarded(partial(library, name))
    yield "kvc._codec", guarded(partial(library, "_codec"))
    yield (
        "C++ codec",
        ", ".join(n for n in CODEC_LIBRARIES if (PACKAGE / "lib" / f"{n}.so").is_file()) or "not built",
    )
    yield "built for", guarded(built_architectures)
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", guarded(platform.platform)
    yield "cpu", guarded(cpu)
    yield "torch", guarded(torch_build)
    for package in PACKAGES:
        yield package, guarded(partial(installed_version, package))
    yield "gpu", guarded(gpus)
    yield "nvcc", guarded(nvcc)
    for name in sorted(os.environ):
        if ENVIRONMENT.fullmatch(name):
            yield f"${name}", os.environ[name]


def main() -> None:
    for heading, text in report():
        print(
            f"{heading:<23} {text}", flush=True
        )  # a library that crashes on loading leaves the lines before


if __name__ == "__main__":
    main()
