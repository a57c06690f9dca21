"""The verification tool: it visits what it says, counts right, and notices when the claim does not hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

NEEDS = "needs kvc[verify]"
pytest.importorskip("typer", reason=NEEDS)
pytest.importorskip("rich", reason=NEEDS)
pytest.importorskip("matplotlib", reason=NEEDS)
safetensors_torch = pytest.importorskip("safetensors.torch", reason=NEEDS)

from kvc import verify  # noqa: E402
from typer.testing import CliRunner, Result  # noqa: E402

CPU = torch.device("cpu")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(verify.build_app(), [str(a) for a in arguments])


@pytest.mark.parametrize("name", verify.DTYPES)
def test_magnitudes_are_every_finite_one_in_order(name: str) -> None:
    values = verify.from_codes(verify.magnitudes(verify.DTYPES[name], CPU), verify.DTYPES[name]).float()
    assert values[0] == 0
    assert values[-1] == torch.finfo(verify.DTYPES[name]).max
    assert (values.diff() > 0).all()
    assert len(values) == {"fp8": 127, "fp16": 31744, "bf16": 32640}[name]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_maxima_cover_every_block_scale(name: str) -> None:
    dtype = verify.DTYPES[name]
    maxima = verify.from_codes(verify.class_ends(dtype, CPU), dtype)
    _, scales = verify.round_trip(maxima.unsqueeze(1).repeat(1, 16))
    assert scales.unique().tolist() == list(range(0x7F))
    assert maxima[-1] == torch.finfo(dtype).max


def test_maxima_stand_for_all_that_behave_alike() -> None:
    dtype = torch.bfloat16
    ends = verify.class_ends(dtype, CPU)
    codes = verify.magnitudes(dtype, CPU)
    decoded, scales = verify.round_trip(verify.from_codes(codes, dtype).unsqueeze(1).repeat(1, 16))
    behaviour = list(zip(scales[:, 0].tolist(), decoded[:, 0].tolist(), strict=True))
    chosen = {behaviour[i] for i in torch.searchsorted(codes, ends).tolist()}
    assert chosen == set(behaviour)


def test_members_are_all_values_up_to_the_maximum_with_both_signs() -> None:
    maxima = torch.tensor([0, 3, 20, 126])
    visited: dict[int, list[int]] = {int(m): [] for m in maxima}
    for blocks, count in verify.member_blocks(maxima, torch.float8_e4m3fn, CPU):
        codes = blocks.view(torch.uint8).long()
        assert not count[:, 0].any()
        for row, counted in zip(codes, count, strict=True):
            visited[int(row[0]) & 0x7F] += row[counted].tolist()
            assert ((row & 0x7F) <= (row[0] & 0x7F)).all()
    for m, found in visited.items():
        assert sorted(found) == sorted([*range(m + 1), *range(128, 129 + m)])


def test_largest_holds_every_value_in_front() -> None:
    blocks = torch.cat([b for b, _ in verify.largest_blocks(torch.float8_e4m3fn, CPU)])
    assert blocks[:, 0].view(torch.uint8).unique().numel() == 254
    assert (blocks.float().abs().amax(1) == blocks[:, 0].float().abs()).all()


def test_fp8_pairs_are_complete_and_settle() -> None:
    shares: list[float] = []
    results = verify.verify_dtype("fp8", trips=4, on_progress=shares.append)
    by_class = {r.scales: r for r in results}
    assert set(by_class) == {"zero", "subnormal", "normal"}  # 448 is less than a block can hold
    assert sum(r.pairs for r in results) == sum(2 * (m + 1) for m in range(127)) + 254 * 16
    assert by_class["normal"].values == 254
    assert by_class["normal"].settles
    assert by_class["normal"].changed[0] > 0
    assert by_class["normal"].d_orig_max[0] <= 1 / 6 + 1e-6
    assert by_class["zero"].d_orig_max == [1.0] * 4
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] <= 1


def test_counts_agree_with_a_plain_loop() -> None:
    dtype = torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(40, 16, generator=generator) * 10.0 ** -torch.arange(40).remainder(4).unsqueeze(1)
    order = blocks.abs().argsort(1, descending=True)
    blocks = blocks.gather(1, order).to(dtype)
    counter = verify.TripCounter(dtype, 2, CPU)
    counter.add(blocks, torch.ones(40, 16, dtype=torch.bool))
    found = {r.scales: r for r in counter.results("fp8")}

    first, scales = verify.round_trip(blocks)
    second, _ = verify.round_trip(first)
    x, m = blocks.float(), blocks[:, :1].float().abs()
    for name, rows in {
        "zero": scales[:, 0] == 0,
        "subnormal": (scales[:, 0] > 0) & (scales[:, 0] < 8),
        "normal": scales[:, 0] >= 8,
    }.items():
        assert rows.any()
        for trip, (now, before) in enumerate([(first, blocks), (second, first)]):
            distance = ((now.float() - x).abs() / m.clamp(min=1e-30))[rows]
            assert found[name].d_orig_max[trip] == pytest.approx(distance.max().item())
            assert found[name].d_orig_median[trip] == pytest.approx(distance.median().item(), abs=2e-5)
            assert found[name].changed[trip] == int((now.float() != before.float())[rows].sum())
        assert found[name].pairs == 16 * int(rows.sum())


def test_command_reports_and_draws(tmp_path: Path) -> None:
    report, picture = tmp_path / "v.json", tmp_path / "v.png"
    result = run("--dtype", "fp8", "--trips", "2", "--json", report, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "nothing moves after the first trip" in result.output
    rows = {r["scales"]: r for r in json.loads(report.read_text())["round_trips"]}
    assert rows["normal"]["changed"][1] == 0
    assert len(rows["normal"]["d_prev_max"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_fails_when_values_keep_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = verify.round_trip

    def drifting(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        back, scales = honest(x)
        return (back.float() / 2).to(x.dtype), scales

    monkeypatch.setattr(verify, "round_trip", drifting)
    result = run("--dtype", "fp8", "--trips", "2")
    assert result.exit_code == 1
    assert "move after the first trip" in result.output


def test_tensors_are_measured(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    path, report = tmp_path / "kv.safetensors", tmp_path / "v.json"
    tensors = {
        "layers.10.key": torch.randn(2, 5, 64, generator=generator).bfloat16(),
        "layers.2.key": torch.randn(3, 64, generator=generator).bfloat16(),
        "layers.2.value": torch.zeros(3, 64).bfloat16(),
        "lengths": torch.arange(3),
    }
    safetensors_torch.save_file(tensors, path)
    options = ("--no-round-trips", "--kv", path, "--tensor", "key", "--tensor", "value", "--rotary-dim", "32")
    result = run(*options, "--json", report, "--plot", tmp_path / "v.svg")
    assert result.exit_code == 0, result.output
    costs = json.loads(report.read_text())["tensors"]
    assert [c["tensor"] for c in costs[::3]] == ["layers.2.key", "layers.2.value", "layers.10.key"]
    whole, skip, double = costs[6:]
    assert [c["mode"] for c in costs[:3]] == ["NVFP4", "skip-RoPE", "2FP4"]
    assert [c["bytes_per_value"] for c in (whole, skip, double)] == [0.5625, 1.28125, 0.84375]
    assert skip["relative_error"] < double["relative_error"] < whole["relative_error"] < 0.12
    assert costs[3]["zero_blocks"] == 1
    assert costs[3]["relative_error"] == 0


@pytest.mark.parametrize("rope", ["leading", "trailing"])
def test_rope_part_is_kept(rope: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).half()
    noisy = x.clone()
    part = slice(0, 16) if rope == "leading" else slice(48, 64)
    noisy[:, part] *= 1000  # beside these the error of the rest is nothing
    _, skip, double = verify.measure_tensor("k", noisy, 16, None, verify.Rope(rope))
    assert skip.relative_error < 1e-3
    assert 1e-3 < double.relative_error < 0.03


def test_whole_row_with_rope_leaves_nothing_to_skip() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).half()
    assert [c.mode for c in verify.measure_tensor("k", x, None, None)] == ["NVFP4", "2FP4"]
    assert [c.mode for c in verify.measure_tensor("k", x, 0, None)] == ["NVFP4"]


@pytest.mark.parametrize(
    "arguments",
    [("--no-round-trips",), ("--trips", "0"), ("--dtype", "fp64"), ("--kv", "missing.safetensors")],
)
def test_bad_options_are_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_unsuitable_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    tensors = {"odd": torch.zeros(4, 17), "lengths": torch.arange(16), "empty": torch.zeros(0, 64)}
    safetensors_torch.save_file(tensors, path)
    for name in ("odd", "lengths", "empty", "nowhere"):
        assert run("--no-round-trips", "--kv", path, "--tensor", name).exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_said() -> None:
    assert run("--device", "cuda").exit_code == 2


def test_missing_libraries_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"kvc\[verify\]"):
        verify.build_app()
