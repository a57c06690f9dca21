"""What the benchmarks' results become: tables, plots, comparisons. The numbers here are made up."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
REPOSITORY = Path(__file__).parent.parent
PLACE = {
    "gpu": "GPU",
    "driver": "1.2",
    "torch": "2.11.0",
    "cuda": "13.0",
    "commit": "abc",
    "when": "2030-01-02T03",
}


def bench(*arguments: object, fails: bool = False) -> str:
    """What ``python -m bench`` prints."""
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (result.returncode != 0) == fails, result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The benchmarks in this process."""
    monkeypatch.syspath_prepend(REPOSITORY)
    return lambda name: importlib.import_module(f"bench.{name}")


def result(us: float, gb_per_s: float, **fields: Any) -> dict[str, Any]:
    row = {
        "us": us,
        "us_p10": us * 0.99,
        "us_p90": us * 1.01,
        "bytes": us * gb_per_s * 1e3,
        "gb_per_s": gb_per_s,
    }
    return {**row, "share": gb_per_s / 4000, **fields}


def run_file(path: Path, encode_us: float) -> Path:
    topk = {"case": "256 x 4096, k 2048, normal, full", "us": 20.0, "read_us": 1.0, "settle_us": 9.5}
    topk |= {"peers": {"torch.topk": {"us": 50.0}, "cub": {"refuses": "k is too large"}}}
    topk |= {"settle_peers": {"PyTorch": {"us": 90.0}, "PyTorch, torch.compile": {"refuses": "no"}}}
    families = {
        "nvfp4": [
            result(2000, 4000, case="ceiling: device copy, read + write"),
            result(encode_us, 3500, case="HBM encode: BF16 whole"),
            result(450, 3800, case="HBM decode: BF16 whole"),
            {"case": "a", "way": "kvc", "page_bytes": 4096, "us_page": 0.5},
            {"case": "b", "way": "batch", "page_bytes": 4096, "refuses": "error 801"},
            {"case": "back", "way": "kvc", "direction": "in", "page_bytes": 4096, "us_page": 0.25},
            result(100, 3000, case="c", op="quantize", way="kvc", equal_bytes=1.0),
            result(250, 1200, case="d", op="quantize", way="other", equal_bytes=0.99),
            {
                "case": "dequantize rows: other",
                "op": "dequantize",
                "way": "other",
                "refuses": "not installed",
            },
        ],
        "topk": [topk],
    }
    path.write_text(json.dumps({"environment": PLACE, "benchmark": "all", "families": families}))
    return path


def test_report(tmp_path: Path) -> None:
    page, run = tmp_path / "page.md", run_file(tmp_path / "run.json", 500)
    page.write_text(
        "before\n<!-- bench:peers --><!-- /bench -->\n<!-- bench:hbm -->\nold\n<!-- /bench -->\n"
        "<!-- bench:topk --><!-- /bench -->\n"
        "<!-- bench:transfers --><!-- /bench -->\n<!-- bench:rounds -->kept<!-- /bench -->\nafter\n"
    )
    printed = bench("report", run, "--page", page, "--plots", tmp_path / "plots")
    text = page.read_text()
    assert "without results and left as it was: rounds" in printed
    assert "\n`settle_ties` of 256 x 4096, k 2048: 9.5 us, 90.0 us as PyTorch.\n" in text
    assert "\n| 4 KiB | 0.25 |\n" in text
    assert "| BF16 whole | 3.50 TB/s, 87.5% | 3.80 TB/s, 95.0% |" in text
    assert "| 4,096 | 2,048 | 20.0 | 1.0 | 9.5 | - | 50.0 |" in text
    assert "\nNo time of k 2,048: cub: k is too large.\n" in text
    assert "| 4 KiB | 0.50 | error 801 |" in text
    assert "| kvc | 100.0 | 1.0x | 100.00% | - | - | - |" in text
    assert "| other | 250.0 | 2.5x | 99.00% | - | - | - |" in text
    assert "\nNo time of dequantize rows: other: not installed.\n" in text
    assert "GPU, driver 1.2, torch 2.11.0, CUDA 13.0, kvc abc, 2030-01-02." in text
    assert "\nold\n" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- bench:rounds -->kept<!-- /bench -->\nafter\n")
    plots = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert sorted(plots) == ["bench_bytes.svg", "bench_topk.svg", "bench_transfers.svg"]
    assert all(name in printed for name in plots)

    bench("report", run, "--page", page, "--plots", tmp_path / "plots")
    assert page.read_text() == text
    assert plots == {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}


def test_report_of_one_run_names_its_machine_once(tmp_path: Path, modules: Callable[[str], Any]) -> None:
    report = modules("report")
    page, runs = tmp_path / "page.md", report.load([run_file(tmp_path / "run.json", 500)])
    marked = "<!-- bench:machine --><!-- /bench -->\n<!-- bench:hbm --><!-- /bench -->\n"
    page.write_text(marked + "<!-- bench:topk --><!-- /bench -->\n")
    assert report.write_tables(page, runs) == (["machine", "hbm", "topk"], [])
    assert page.read_text().count("GPU, driver 1.2") == 1
    # A table of another run stays beside: the new ones name theirs.
    page.write_text(marked + "<!-- bench:rounds -->\nold\n<!-- /bench -->\n")
    assert report.write_tables(page, runs) == (["hbm"], ["rounds"])
    assert "Tables that name no run" not in page.read_text()
    assert page.read_text().count("GPU, driver 1.2") == 1


def test_compositions_give_the_answers_of_the_ops(modules: Callable[[str], Any]) -> None:
    compaction, topk, common = modules("bench_compaction"), modules("bench_topk"), modules("common")
    case = compaction.Case(5, layers=1, heads=3, budget=70, evicted=9, device="cpu")
    assert common.same(case.pack_by_torch()["PyTorch"](), case.pack()()[:1])
    assert common.same(case.pack_fill_by_torch()["PyTorch"](), case.pack_fill()()[:2])
    for scores in ("normal", "plateau"):
        for lengths in ("full", "ragged"):
            case = topk.Case(6, 300, 40, scores, lengths, device="cpu")
            assert common.same(case.settle_others()["PyTorch"](), case.select()())


def test_results_name_packages_but_no_folders(modules: Callable[[str], Any]) -> None:
    peers, common = modules("peers"), modules("common")
    assert peers.reason(OSError("cannot load: /home/me/site/a.so")) == "cannot load: a.so"
    assert (
        peers.reason(OSError("see csrc/a/b.cu and https://a.b/c/d")) == "see csrc/a/b.cu and https://a.b/c/d"
    )
    assert peers.reason(RuntimeError("backend='inductor' raised:\nValueError: no")) == "ValueError: no"
    assert peers.pins(None) == {}
    assert "flashinfer-python" in peers.pins(Path("folder"))
    assert "kvc" in common.environment()["packages"]


def test_report_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    page, run = tmp_path / "page.md", run_file(tmp_path / "run.json", 500)
    page.write_text("<!-- bench:other --><!-- /bench -->")
    assert "bench:other must be one of" in bench("report", run, "--page", page, fails=True)
    run.write_text("{}")
    assert "must be written by a benchmark" in bench("report", run, "--page", page, fails=True)


def test_compare(tmp_path: Path) -> None:
    before, after = run_file(tmp_path / "before.json", 500), run_file(tmp_path / "after.json", 400)
    printed = bench("compare", before, after)
    changed = [line for line in printed.splitlines() if "-20.0%" in line]
    assert len(changed) == 1
    assert "500.0" in changed[0]
    assert "400.0" in changed[0]
    assert "+0.0%" in printed


def test_committed_results_name_no_folder_of_a_machine() -> None:
    pages = [
        REPOSITORY / "README.md",
        *REPOSITORY.glob("docs/*.md"),
        *REPOSITORY.glob("bench/results/*.json"),
    ]
    assert len(pages) > 5
    for page in pages:
        assert not re.findall(r"(?<![\w.])/(?:tmp|home|root|work|opt|mnt)/[\w./-]+", page.read_text()), page
