"""Builds kvc: ``_C`` (CPU) always, ``_C_cuda`` when nvcc is found.

Needs the headers of an installed torch >= 2.11, of any flavour: the CPU wheel carries everything to compile CUDA code.
Environment: ``KVC_CUDA=0/1`` forces CUDA off/on, ``KVC_CUDA_ARCHS`` limits the architectures ("90a", "80;90a"),
``MAX_JOBS`` limits parallel compilers, ``CUDA_HOME`` says where nvcc lives, ``CXX`` which C++ compiler to take,
``KVC_TORCH_PATH`` where else to look for torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# The PTX runs, by way of the driver's compiler, on every architecture that has no machine code here.
CUDA_ARCHS = ("80", "86", "89", "90a", "100f", "120f", "80+PTX")
# Kernels compiled ahead of time to machine code that the CUDA library carries.
TRITON_MODULES = (
    "kernels/compaction/pack.py",
    "kernels/topk/settle.py",
    "kernels/triattention/triattention.py",
)
CUTE_MODULES: tuple[str, ...] = ("kernels/topk/select.py", "kernels/triattention/score.py")
CUTE_ARCHS = ("90a", "100f")
CODEC_SOURCES = ("kernels/nvfp4/codec.cpp", "kernels/nvfp4/tiles_cpu.cpp")
PYBIND_SOURCES = ("kernels/nvfp4/codec_python.cpp",)
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11
PYTHON_LIMITED_API = "0x030a0000"  # 3.10


def find_torch() -> Path:
    """Locate torch without importing it, also from inside pip's isolated build environment."""
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    candidates += [Path(sysconfig.get_path(key)) / "torch" for key in ("platlib", "purelib")]
    candidates += [
        Path(path) / "torch" for path in os.environ.get("KVC_TORCH_PATH", "").split(os.pathsep) if path
    ]
    for torch in candidates:
        if (torch / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            return torch
    sys.exit(
        "kvc builds against an installed torch >= 2.11 and found none. Install torch first (any flavour), then kvc;"
        " if torch lives outside this environment, use `pip install --no-build-isolation`."
    )


def find_nvcc() -> str | None:
    wanted = os.environ.get("KVC_CUDA", "auto")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    nvcc = nvcc or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if wanted == "0":
        print("kvc: KVC_CUDA=0, building for the CPU only")
        return None
    if nvcc is None:
        if wanted == "1":
            sys.exit("kvc: KVC_CUDA=1 but no nvcc in CUDA_HOME, PATH or /usr/local/cuda/bin")
        print("kvc: no nvcc found, building for the CPU only (set CUDA_HOME to build for CUDA)")
        return None
    print(f"kvc: building for CUDA with {nvcc}")
    return nvcc


class BuildExtension(build_ext):
    """setuptools' build_ext, with nvcc for .cu files and parallel compilation."""

    def get_ext_filename(self, fullname: str) -> str:
        folder, _, name = fullname.rpartition(".")
        if name.startswith("lib"):  # no module of Python but a library of its own
            return os.path.join(*folder.split("."), f"{name}.so")
        return str(super().get_ext_filename(fullname))

    def build_extension(self, ext: Extension) -> None:
        torch = find_torch()
        temp = Path(self.build_temp).resolve() / ext.name
        temp.mkdir(parents=True, exist_ok=True)
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        own = [ROOT / "include", ROOT / "kernels"]
        flags = [f"-I{path}" for path in own]
        for path in (torch / "include", sysconfig.get_path("include")):
            flags += ["-isystem", str(path)]
        flags += [
            f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
            f"-DPy_LIMITED_API={PYTHON_LIMITED_API}",
            "-DKVC_NAMESPACE=kvc",
            "-std=c++17",
            "-O3",
        ]
        host = [
            "-fPIC",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-ffp-contract=off",
            "-DKVC_FP_CONTRACT_OFF",
        ]
        host += [
            "-fno-math-errno",
            "-fno-trapping-math",
            f"-ffile-prefix-map={ROOT}=.",
            f"-ffile-prefix-map={torch}=torch",
        ]
        cuda = ext.name.endswith("_cuda")
        nvcc = find_nvcc() if cuda else None
        targets, names = cuda_targets()
        with_cuda = ["-DUSE_CUDA", f'-DKVC_CUDA_ARCHS="{names}"']

        def compile_one(source: str) -> str:
            if source.endswith(".cu"):
                assert nvcc is not None
                command = [
                    nvcc,
                    *flags,
                    *with_cuda,
                    *targets,
                    "-lineinfo",
                    "--expt-relaxed-constexpr",
                    "-Xcompiler",
                    ",".join(host),
                ]
            elif source in PYBIND_SOURCES:  # pybind11 needs all of Python's API
                limited = f"-DPy_LIMITED_API={PYTHON_LIMITED_API}"
                command = [os.environ.get("CXX", "g++"), *(flag for flag in flags if flag != limited), *host]
                command += ["-isystem", str(find_pybind11())]
            else:
                command = [os.environ.get("CXX", "g++"), *flags, *host]
                command += with_cuda if ext.name.endswith("_C_cuda") else []
            # Libraries share the objects of sources that they compile with the same flags.
            output = temp.parent / "objects" / hashlib.sha256(repr(command).encode()).hexdigest()[:12]
            output.mkdir(parents=True, exist_ok=True)
            output /= source.replace("/", "_") + ".o"
            depends = output.with_suffix(".d")
            command += ["-c", str(ROOT / source), "-o", str(output), "-MMD", "-MF", str(depends)]
            compiler = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout

            # An object is kept while what it was made of is the same, so a change elsewhere costs no compilation.
            def digest() -> str:
                content = repr(command).encode() + compiler + (torch / "version.py").read_bytes()
                if depends.is_file():
                    files = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
                    content += b"".join(Path(f).read_bytes() for f in sorted(files) if Path(f).is_file())
                return hashlib.sha256(content).hexdigest()

            known = output.with_suffix(".sha256")
            if not (output.is_file() and known.is_file() and known.read_text() == digest()):
                known.unlink(missing_ok=True)
                depends.unlink(missing_ok=True)
                subprocess.run(command, check=True)
                known.write_text(digest())
            return str(output)

        ops = ext.name in ("kvc._C", "kvc._C_cuda")
        sources = [*ext.sources, compiled_kernels(temp)] if cuda and ops else ext.sources
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(compile_one, sources))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        link = [os.environ.get("CXX", "g++"), "-shared", *objects, "-o", str(target)]
        if ops:
            link += [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
        else:
            link += [f"-Wl,-soname,{target.name}", "-pthread", "-ldl"]
        if ops and cuda:
            link += [f"-L{stub_libtorch_cuda(temp)}", "-ltorch_cuda"]
        if cuda:
            link += cudart(nvcc)
        subprocess.run(link, check=True)


def find_pybind11() -> str | None:
    """Its headers; pyproject.toml requires it, but a build that is not isolated may lack it."""
    try:
        import pybind11
    except ModuleNotFoundError:
        print("kvc: no pybind11 found, building without kvc._codec (the C++ codec as a Python object)")
        return None
    return str(pybind11.get_include())


def cuda_archs() -> list[str]:
    return [arch for arch in os.environ.get("KVC_CUDA_ARCHS", "").replace(",", ";").split(";") if arch] or [
        *CUDA_ARCHS
    ]


def cuda_targets() -> tuple[list[str], str]:
    """nvcc's -gencode flags and the list's readable form; "80+PTX" means PTX of compute_80."""
    archs = cuda_archs()
    flags = []
    for arch in archs:
        number, _, ptx = arch.partition("+")
        flags.append(f"-gencode=arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}")
    return flags, ", ".join("sm_" + arch for arch in archs)


def compiled_kernels(folder: Path) -> str:
    """A C++ file with the machine code of the Triton and CuTe DSL kernels."""
    output = folder / "compiled.cpp"
    majors = sorted({int("".join(filter(str.isdigit, arch))) // 10 * 10 for arch in cuda_archs()})
    command = [sys.executable, str(ROOT / "kernels" / "common" / "aot.py"), str(output)]
    command += ["--triton", ";".join(map(str, majors)), *(str(ROOT / module) for module in TRITON_MODULES)]
    # A kernel without any machine code would not exist, so the first target is always built.
    command += ["--cute", ";".join([arch for arch in CUTE_ARCHS if arch in cuda_archs()] or CUTE_ARCHS[:1])]
    command += [str(ROOT / module) for module in CUTE_MODULES]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_DISABLE_LINE_INFO": "1"}
    subprocess.run(command, check=True, env=environment)
    return str(output)


def stub_libtorch_cuda(folder: Path) -> Path:
    """An empty library of that name, so that a build beside a CPU torch records the need for the real one."""
    stub = folder / "stub"
    stub.mkdir(exist_ok=True)
    source = stub / "empty.cpp"
    source.write_text("")
    subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            "-shared",
            "-Wl,-soname,libtorch_cuda.so",
            str(source),
            "-o",
            str(stub / "libtorch_cuda.so"),
        ],
        check=True,
    )
    return stub


def cudart(nvcc: str | None) -> list[str]:
    """The static CUDA runtime, wherever this toolkit keeps it."""
    dryrun = subprocess.run(
        [str(nvcc), "-dryrun", "x.cu"], capture_output=True, text=True, check=False
    ).stderr
    top = next(
        (line.split("=", 1)[1].strip() for line in dryrun.splitlines() if line.startswith("#$ TOP=")), None
    )
    roots = [Path(top)] if top else []
    roots += [Path(str(nvcc)).resolve().parent.parent]
    for root in roots:
        for lib in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if (root / lib / "libcudart_static.a").is_file():
                return [str(root / lib / "libcudart_static.a"), "-lrt", "-lpthread", "-ldl"]
    sys.exit(f"kvc: libcudart_static.a not found beside {nvcc}")


def extensions() -> list[Extension]:
    found = [
        Extension(
            "kvc._C",
            [
                "kernels/common/module_cpu.cpp",
                "kernels/nvfp4/nvfp4_cpu.cpp",
                "kernels/nvfp4/tiles_cpu.cpp",
                "kernels/compaction/compaction_cpu.cpp",
                "kernels/topk/topk_cpu.cpp",
                "kernels/triattention/triattention_cpu.cpp",
            ],
            py_limited_api=True,
        ),
        # The C++ codec: a library without torch and Python, and the module that loads it.
        Extension("kvc.lib.libkvc_codec", [*CODEC_SOURCES, "kernels/nvfp4/codec_host.cpp"]),
    ]
    if find_pybind11() is not None:
        found.append(Extension("kvc._codec", [*PYBIND_SOURCES]))
    if find_nvcc() is not None:
        found.append(
            Extension(
                "kvc._C_cuda",
                [
                    "kernels/common/module_cuda.cpp",
                    "kernels/nvfp4/launch.cu",
                    "kernels/nvfp4/nvfp4.cu",
                    "kernels/compaction/compaction.cu",
                    "kernels/compaction/pack.cu",
                    "kernels/topk/select.cu",
                    "kernels/topk/settle.cu",
                    "kernels/topk/topk.cu",
                    "kernels/triattention/triattention.cu",
                    "kernels/triattention/score_cute.cu",
                ],
                py_limited_api=True,
            )
        )
        cuda_codec = [*CODEC_SOURCES, "kernels/nvfp4/codec_cuda.cu", "kernels/nvfp4/launch.cu"]
        found.append(Extension("kvc.lib.libkvc_codec_cuda", cuda_codec))
    return found


EXTENSIONS = extensions()

setup(
    ext_modules=EXTENSIONS,
    # pip installs these into its isolated environment, and only when CUDA is built.
    setup_requires=["triton~=3.6.0", "nvidia-cutlass-dsl==4.8.1"] if find_nvcc() is not None else [],
    cmdclass={"build_ext": BuildExtension},
    packages=["kvc", "kvc.include", "kvc.methods", "kvc.reference"],
    package_dir={"kvc": "ops", "kvc.include": "include", "kvc.methods": "methods"},
    package_data={"kvc": ["py.typed", "*.pyi"], "kvc.include": ["kvc/*.h"]},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
