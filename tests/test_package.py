"""The package as it is installed: what it ships, what importing it does, and that the ops and the functions match."""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvc
import pytest
import torch
from kvc import collect_env

REPOSITORY = Path(__file__).parent.parent
PACKAGE = Path(kvc.__file__).parent
SCHEMAS = {
    (s.name.removeprefix("kvc::"), s.overload_name): s
    for s in torch._C._jit_get_all_schemas()
    if s.name.startswith("kvc::")
}
OPS = sorted(name for name, overload in SCHEMAS if not overload)
# Libraries that every Linux with a C++ runtime has.
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")


def python(*arguments: str, folder: Path, **environment: str) -> str:
    """Standard output of a fresh interpreter that finds packages in `folder` first."""
    command = [sys.executable, *arguments]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def lines(report: str) -> dict[str, str]:
    return {line[:24].strip(): line[24:] for line in report.splitlines()}


class TestCollectEnv:
    def test_with_all_there_is(self, tmp_path: Path) -> None:
        report = lines(python("-m", "kvc.collect_env", folder=tmp_path, KVC_TEST="1"))
        assert report["kvc"] == f"{kvc.__version__} in {PACKAGE}"
        assert report["import kvc"] == f"works, {len(kvc.__all__)} public names"
        assert report["kvc._C"].endswith(" MB, loads")
        assert report["torch"].startswith(torch.__version__)
        assert report["$KVC_TEST"] == "1"

    def test_without_torch(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('hidden')")
        report = lines(python("-m", "kvc.collect_env", folder=tmp_path))
        assert report["torch"] == "not available (ImportError: hidden)"
        assert "kvc.PageBuffer is not available: hidden" in report["import kvc"]
        assert report["kvc"].startswith(kvc.__version__)

    def test_with_the_standard_library_alone(self, tmp_path: Path) -> None:
        (tmp_path / "kvc").symlink_to(PACKAGE)
        report = lines(python("-S", "-m", "kvc.collect_env", folder=tmp_path, PATH="", CUDA_HOME=""))
        assert "No module named 'torch'" in report["torch"]
        assert report["gpu"].startswith("not available")
        assert report["triton"] == "not installed"
        assert report["built for"] == collect_env.built_architectures()

    def test_with_a_broken_library(self, tmp_path: Path) -> None:
        shutil.copytree(
            PACKAGE, tmp_path / "kvc", ignore=shutil.ignore_patterns("_C_cuda*.so", "__pycache__")
        )
        library = next((tmp_path / "kvc").glob("_C.*so"))
        library.write_bytes(b"not a library")
        report = lines(python("-m", "kvc.collect_env", folder=tmp_path))
        assert report["kvc._C"].startswith("not available (ImportError: ")
        assert str(library) in report["kvc._C"]
        assert report["kvc._C_cuda"] == "not built"
        assert report["built for"] == "none"
        assert report["torch"].startswith(torch.__version__)

    def test_creates_no_cuda_context(self, tmp_path: Path) -> None:
        code = "from kvc import collect_env; list(collect_env.report())"
        code += "; import torch; print(torch.cuda.is_initialized())"
        assert python("-c", code, folder=tmp_path) == "False\n"

    @pytest.mark.cuda
    def test_architectures_are_those_of_the_library(self) -> None:
        from kvc import _C_cuda

        assert collect_env.built_architectures() == _C_cuda.built_architectures()


IMPORT = """
import sys, torch
before = set(sys.modules)
import kvc
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(torch.cuda.is_initialized(), sorted(new))
"""


def test_importing_initialises_no_cuda_and_imports_nothing_else(tmp_path: Path) -> None:
    assert python("-c", IMPORT, folder=tmp_path) == "False ['kvc']\n"


CONTEXTS = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuInit(0) == 0

def active():
    flags, state = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(state)) == 0
    return state.value

import kvc
print(active(), end=" ")
import kvc.methods
print(active(), end=" ")
import torch
layout = kvc.PageLayout.attention(2, 2, 64, 8, torch.bfloat16)
print(active(), end=" ")
layout.table.cuda()
print(active())
"""


@pytest.mark.cuda
def test_importing_creates_no_cuda_context(tmp_path: Path) -> None:
    """Nor does building a layout; the driver knows, and the last line of the script shows that it would tell."""
    for name in ("pydantic", "safetensors", "xxhash"):
        pytest.importorskip(name, reason="needs kvc[methods]")
    assert python("-c", CONTEXTS, folder=tmp_path) == "0 0 0 1\n"


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("kvc") == kvc.__version__


@pytest.mark.parametrize(
    "name",
    [
        "py.typed",
        "_C.pyi",
        "_C_cuda.pyi",
        "_codec.pyi",
        "include/kvc/cold_page_codec.h",
        "include/kvc/nvfp4.h",
        "include/kvc/pages.h",
        "lib/libkvc_codec.so",
        "methods/__init__.py",
    ],
)
def test_file_is_shipped(name: str) -> None:
    assert (PACKAGE / name).is_file()


@pytest.mark.parametrize("name", collect_env.LIBRARIES)
def test_library_needs_torch_and_the_c_library_only(name: str) -> None:
    library = collect_env.library_file(name)
    if library is None:
        pytest.skip("kvc was built without CUDA")
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    dump = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dump))
    torch_libraries = {"libtorch_cpu.so"} | ({"libtorch_cuda.so"} if name == "_C_cuda" else set())
    assert {n for n in needed if not SYSTEM_LIBRARIES.fullmatch(n)} == torch_libraries
    assert "RPATH" not in dump
    assert "RUNPATH" not in dump


def test_debug_mode_is_set_and_cleared() -> None:
    def move_from_a_page_that_is_not_there() -> None:
        pool = torch.zeros(2, 1, 1, 4, 8)
        table, sources = torch.full((1, 1), 7, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
        offsets, bases = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        kvc.compact_pages_([pool], table, sources, offsets, bases)

    move_from_a_page_that_is_not_there()
    kvc.set_debug(True)
    try:
        with pytest.raises(ValueError, match=r"^kvc\.compact_pages_: page_table"):
            move_from_a_page_that_is_not_there()
    finally:
        kvc.set_debug(False)
    move_from_a_page_that_is_not_there()


def encode_arguments(device: torch.device) -> list[object]:
    layout = kvc.PageLayout.attention(1, 1, 16, 4, torch.float16)
    cold = torch.zeros(2, layout.cold_page_bytes, dtype=torch.uint8, device=device)
    pools = [torch.zeros(2, 64, dtype=torch.float16, device=device) for _ in range(2)]
    pairs = torch.tensor([[0, 1]], dtype=torch.int32)
    return [cold, pools, pairs, layout.table.clone(), layout.scales.clone()]


def compact_arguments(device: torch.device) -> list[object]:
    pools = [torch.zeros(2, 1, 1, 4, 8, device=device) for _ in range(2)]
    rows = [torch.zeros(1, n, dtype=torch.int32, device=device) for n in (2, 1)]
    return [pools, *rows, *(torch.zeros(n, dtype=torch.int32, device=device) for n in (2, 1)), None, None]


def score_arguments(device: torch.device) -> list[object]:
    pools = [torch.zeros(2, 1, 4, 8, device=device) for _ in range(2)]
    integers = [torch.ones(*shape, dtype=torch.int32, device=device) for shape in ((1, 2), (1,), (1,))]
    shapes = [(1, 4), (1, 4), (2, 1, 4), (2, 1, 4), (2, 1, 4), (4,)]
    return [pools, *integers, *(torch.ones(shape, device=device) for shape in shapes), "union", True, 4]


@pytest.mark.parametrize("thread", [False, True], ids=["main", "thread"])
@pytest.mark.parametrize("wrong", [False, True], ids=["good", "wrong"])
@pytest.mark.parametrize(
    ("name", "arguments_on"),
    [
        ("encode_pages_", encode_arguments),
        ("compact_pages_", compact_arguments),
        ("triattention_score", score_arguments),
    ],
)
def test_a_call_keeps_none_of_its_arguments(
    name: str,
    arguments_on: Callable[[torch.device], list[object]],
    wrong: bool,
    thread: bool,
    device: torch.device,
) -> None:
    arguments = arguments_on(device)
    if wrong:
        lists = [a for a in arguments if isinstance(a, list)]
        lists[0].append(torch.zeros((), device=device))
    given = [a for argument in arguments for a in (argument if isinstance(argument, list) else [argument])]
    alive = [weakref.ref(tensor) for tensor in given if isinstance(tensor, torch.Tensor)]
    given.clear()

    def call() -> type[Exception] | None:
        try:
            getattr(kvc, name)(*arguments)
        except ValueError:
            return ValueError
        return None

    with ThreadPoolExecutor(1) as pool:
        raised = pool.submit(call).result() if thread else call()
    assert raised is (ValueError if wrong else None)
    assert all(reference() is not None for reference in alive)
    arguments.clear()
    if wrong:
        lists.clear()
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


PUBLIC = [
    name
    for name, value in vars(kvc).items()
    if callable(value) and not name.startswith("_") and value.__module__.split(".")[0] == "kvc"
]


def test_all_names_the_public_objects() -> None:
    assert sorted(kvc.__all__) == sorted(["__version__", *PUBLIC])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_object_is_documented(name: str) -> None:
    value = getattr(kvc, name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty
            assert re.search(rf"^\s*(.*, )?{parameter.name}(,.*)?( : |$)", value.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("name", OPS)
def test_function_has_the_arguments_of_the_op(name: str) -> None:
    parameters = inspect.signature(getattr(kvc, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [a.name for a in SCHEMAS[name, ""].arguments]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name in positional}
    assert defaults == {a.name: a.default_value for a in SCHEMAS[name, ""].arguments if a.has_default_value()}
    out = SCHEMAS.get((name, "out"))
    expected = [a.name for a in out.arguments if a.kwarg_only] if out is not None else []
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == expected


def test_one_file_names_the_namespace() -> None:
    naming = {
        str(path.relative_to(REPOSITORY))
        for folder in ("ops", "methods")
        for path in (REPOSITORY / folder).rglob("*.py*")
        if path.suffix in (".py", ".pyi") and re.search(r"torch\.ops\.kvc|kvc::|NAMESPACE", path.read_text())
    }
    assert naming == {"ops/_ops.py"}


@pytest.mark.parametrize(
    "page", ["README.md", "docs/compaction.md", "docs/tiers.md", "docs/topk.md", "docs/triattention.md"]
)
def test_examples_of_page_run(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


def test_documentation_builds(tmp_path: Path) -> None:
    """Warnings are errors; from the checkout alone, so in an interpreter of its own."""
    pytest.importorskip("sphinx")
    python("-m", "sphinx", "-W", "-q", str(REPOSITORY / "docs"), str(tmp_path), folder=tmp_path)
    assert "radix_topk" in (tmp_path / "topk.html").read_text()
