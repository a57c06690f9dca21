"""The server example on a tiny random model: every mode reuses, moves and answers as it must."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path

import pytest
import torch

NEEDS = "needs kvc[demo] and kvc[methods]"
for module in ("transformers", "typer", "rich", "pydantic", "safetensors", "xxhash"):
    pytest.importorskip(module, reason=NEEDS)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import serve_smollm as example  # noqa: E402
import smollm  # noqa: E402
from kvc import calibration  # noqa: E402
from kvc.methods import TriAttentionConfig  # noqa: E402

VOCABULARY = 96
TOKENS = example.TOKENS_PER_PAGE


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


def workload() -> example.Workload:
    ids = torch.randint(VOCABULARY, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    return example.make_workload(ids, 2 * TOKENS, 3, 2, 40, 8)


def test_every_mode_serves_the_same_conversations(tiny: smollm.SmolLM) -> None:
    work = workload()
    assert (work.longest, work.pages) == (64 + 2 * 48, 2 + 3 * 3)
    everything, off, lossless, nvfp4 = example.serve_in_every_mode(tiny, work, slots=6, host_pages=2)
    history = sum(len(work.system) + 40 * (t + 1) + 8 * t for t in range(2)) * 3
    for result in (everything, off, lossless, nvfp4):
        assert result.computed_tokens + result.reused_tokens == history
        assert result.generated_tokens == result.scored == 3 * 2 * 8
    # Pages that left the pools come back from the tiers, or are computed again without them.
    assert everything.reused_tokens == lossless.reused_tokens == nvfp4.reused_tokens > off.reused_tokens
    assert everything.hits["host"] == everything.hits["disk"] == off.hits["host"] == off.hits["disk"] == 0
    for result in (lossless, nvfp4):
        assert result.hits["host"] + result.hits["disk"] > 0
        assert result.offloaded_bytes["disk"] > 0
        assert sum(result.hits.values()) * TOKENS == result.reused_tokens
    assert nvfp4.offloaded_bytes["host"] * 3 < lossless.offloaded_bytes["host"]
    assert (lossless.loss, lossless.differing_tokens) == (everything.loss, 0)
    assert nvfp4.loss != everything.loss
    assert nvfp4.perplexity == pytest.approx(everything.perplexity, rel=0.1)


@pytest.mark.cuda
def test_tiers_serve_a_gpu(tiny: smollm.SmolLM) -> None:
    model = copy.deepcopy(tiny.model).to("cuda")
    work = workload()
    everything, off, lossless, nvfp4 = example.serve_in_every_mode(
        smollm.describe(model), work, slots=6, host_pages=2
    )
    assert everything.reused_tokens == lossless.reused_tokens == nvfp4.reused_tokens > off.reused_tokens
    assert lossless.hits["host"] + lossless.hits["disk"] > 0
    assert (lossless.loss, lossless.differing_tokens) == (everything.loss, 0)
    assert nvfp4.perplexity == pytest.approx(everything.perplexity, rel=0.1)


def test_pools_hold_what_the_model_computed(tiny: smollm.SmolLM) -> None:
    server = example.Server(tiny, "test", 8, 100)
    history = list(range(70))
    request, cache, _ = server.start(history, 10)
    assert (request.length, len(request.pages), len(server.store._hot[0].pages)) == (70, 3, 2)
    read = server.pools.read(request.pages, 70)
    for ours, theirs in zip(example.tail_of(read, 0), example.tail_of(cache, 0), strict=True):
        assert torch.equal(ours, theirs.to(example.DTYPE).float())
    server.store.release(0, request.pages)
    again, _, _ = server.start(history, 10)
    assert again.pages[:2] == request.pages[:2]
    assert server.result.reused_tokens == 2 * TOKENS


def test_triattention_evicts_and_frees(tiny: smollm.SmolLM, tmp_path: Path) -> None:
    ids = torch.randint(VOCABULARY, (1, 256), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(False):
        calibration.save(calibration.collect(tiny.model, ids, window=128), tmp_path / "c.safetensors")
    config = TriAttentionConfig(budget=48, beta=16, calibration_path=tmp_path / "c.safetensors")
    work = workload()
    prompts = [work.system + turns[0] for turns in work.users[:2]]
    results, answers = example.generate_long_answers(tiny, prompts, 96, config)
    whole, evicting, speaking = results
    assert whole.evicted_tokens == whole.freed_pages == 0
    assert evicting.evicted_tokens == 96 - 48
    assert evicting.freed_pages > 0
    assert evicting.scored == whole.scored == 2 * 96
    assert evicting.rounds == speaking.rounds == 2 * 3
    assert evicting.loss != whole.loss
    modes = list(answers.values())
    assert [answer.said for answer in modes[0]] == [answer.said for answer in modes[1]]
    assert [answer.said for answer in modes[0]] != [answer.said for answer in modes[2]]
    for prompt, answer in zip(prompts, modes[2], strict=True):
        logits = tiny.model(torch.tensor([prompt + answer.said])).logits[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer.said), reduction="sum")
        assert example.loss_of(tiny.model, prompt, answer.said, piece=17) == pytest.approx(
            loss.item(), rel=1e-4
        )


def test_broken_promises_are_found() -> None:
    def result(mode: str, loss: float, differing: int = 0) -> example.Result:
        return example.Result(
            mode, loss=loss, scored=10, differing_tokens=differing, generated_tokens=10, seconds=1.0
        )

    baseline = result("everything fits", 10.0)
    kept = [result("lossless tiers", 10.0), result("NVFP4 tiers", 10.1, 4), result("TriAttention", 11.0, 9)]
    assert example.broken_promises(kept, baseline) == []
    bad = [
        result("lossless tiers", 10.0, 1),
        result("NVFP4 tiers", 10.5),
        result("NVFP4 tiers", float("nan")),
    ]
    assert len(example.broken_promises(bad, baseline)) == 3


def test_table_shows_all_numbers() -> None:
    from rich.console import Console

    moved = {"host": 123_456_789, "disk": 77_700_000}
    hits = {"gpu": 111, "host": 222, "disk": 333}
    row = example.Result("NVFP4 tiers", 12_345, 67_890, 100, 10.0, [0.5], 7, 100.0, 100, hits, moved, moved)
    console = Console(width=example.TABLE_COLUMNS, record=True, file=io.StringIO())
    console.print(example.as_table([row], row, "title"))
    text = console.export_text()
    for number in (
        "12,345",
        "67,890",
        "111",
        "222",
        "333",
        "123.5",
        "77.7",
        "10.0",
        "0.50 s",
        "7/100",
        "2.718",
        "+0.00%",
    ):
        assert number in text
    assert "…" not in text
