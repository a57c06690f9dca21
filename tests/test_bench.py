"""What the benchmarks' results become: tables, plots, comparisons. The numbers here are made up."""

from __future__ import annotations

import json
import subprocess
import sys
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
    families = {
        "nvfp4": [
            result(2000, 4000, case="ceiling: device copy, read + write"),
            result(encode_us, 3500, case="HBM encode: BF16 whole"),
            result(450, 3800, case="HBM decode: BF16 whole"),
            {"case": "a", "way": "kvc", "page_bytes": 4096, "us_page": 0.5},
            {"case": "b", "way": "batch", "page_bytes": 4096, "refuses": "error 801"},
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
    printed = bench("report", run, "--readme", page, "--plots", tmp_path / "plots")
    text = page.read_text()
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

    bench("report", run, "--readme", page, "--plots", tmp_path / "plots")
    assert page.read_text() == text
    assert plots == {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}


def test_report_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    page, run = tmp_path / "page.md", run_file(tmp_path / "run.json", 500)
    page.write_text("<!-- bench:other --><!-- /bench -->")
    assert "bench:other must be one of" in bench("report", run, "--readme", page, fails=True)
    run.write_text("{}")
    assert "must be written by a benchmark" in bench("report", run, "--readme", page, fails=True)


def test_compare(tmp_path: Path) -> None:
    before, after = run_file(tmp_path / "before.json", 500), run_file(tmp_path / "after.json", 400)
    printed = bench("compare", before, after)
    changed = [line for line in printed.splitlines() if "-20.0%" in line]
    assert len(changed) == 1
    assert "500.0" in changed[0]
    assert "400.0" in changed[0]
    assert "+0.0%" in printed
