"""The eviction study's own logic, on a tiny random model: what stays, where it stands, and what is reported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDS = "needs kvc[demo] and kvc[methods]"
transformers = pytest.importorskip("transformers", reason=NEEDS)
for module in ("typer", "rich", "matplotlib", "pydantic", "safetensors", "xxhash"):
    pytest.importorskip(module, reason=NEEDS)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import evict_smollm as study  # noqa: E402
import rounds_smollm as rounds  # noqa: E402
from cold_pages_smollm import forward, hf_cache  # noqa: E402
from kvc import calibration  # noqa: E402

LAYERS, KV_HEADS, GROUP, VOCABULARY = 2, 2, 2, 96
TOKENS, SCORED = 75, 20


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=32,
        vocab_size=VOCABULARY,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (1, TOKENS + SCORED + 1), generator=generator)


@pytest.fixture(scope="module")
def passage(model: Any, ids: torch.Tensor) -> study.Passage:
    with torch.inference_mode():
        return study.read(model, ids, TOKENS)


@pytest.fixture(scope="module")
def statistics(model: Any) -> calibration.Calibration:
    return calibration.collect(model, torch.arange(200) % VOCABULARY)


def test_attention_received_is_the_mean_weight(model: Any, ids: torch.Tensor, passage: study.Passage) -> None:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(ids[:, :-1], output_attentions=True).attentions
        logits = model(ids).logits
    model.set_attn_implementation("sdpa")
    for layer in range(LAYERS):
        expected = weights[layer][0, :, TOKENS:, :TOKENS].mean(1)
        torch.testing.assert_close(passage.received[layer], expected, rtol=1e-4, atol=1e-6)
    expected_loss = torch.nn.functional.cross_entropy(logits[0, TOKENS:-1], ids[0, TOKENS + 1 :])
    assert passage.full_loss == pytest.approx(expected_loss.item(), rel=1e-5)


def test_keeping_everything_changes_nothing(model: Any, passage: study.Passage) -> None:
    kept = study.keep(torch.rand(1, 1, TOKENS), TOKENS, LAYERS, KV_HEADS)
    assert kept.eq(torch.arange(TOKENS)).all()
    with torch.inference_mode():
        loss = study.continued_loss(model, study.evict(passage.cache, kept), passage)
    assert loss == pytest.approx(passage.full_loss, rel=1e-5)
    part, whole = study.attention_kept(passage.received, kept)
    assert part == pytest.approx(whole)


def test_evicted_tokens_are_as_if_masked(model: Any, passage: study.Passage) -> None:
    """The same tokens hidden by a mask in a full cache: positions and rotation are right."""
    kept = study.keep(
        torch.rand(1, 1, TOKENS, generator=torch.Generator().manual_seed(2)), 30, LAYERS, KV_HEADS
    )
    seen = torch.zeros(SCORED, TOKENS + SCORED, dtype=torch.bool)
    seen[:, kept[0, 0]] = True
    seen[:, TOKENS:] = torch.ones(SCORED, SCORED).tril().bool()
    following = passage.following
    with torch.inference_mode():
        loss = study.continued_loss(model, study.evict(passage.cache, kept), passage)
        masked = model(following[:, :-1], seen[None, None], None, hf_cache(passage.cache)).logits
        unmasked = forward(model, following[:, :-1], hf_cache(passage.cache))
    assert loss == pytest.approx(study.next_token_loss(masked, following), rel=1e-5)
    assert abs(loss - study.next_token_loss(unmasked, following)) > 1e-3


def test_heads_and_layers_keep_their_own(passage: study.Passage) -> None:
    scores = torch.rand(LAYERS, KV_HEADS, TOKENS, generator=torch.Generator().manual_seed(3))
    kept = study.keep(scores, 10, LAYERS, KV_HEADS)
    evicted = study.evict(passage.cache, kept)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            expected = scores[layer, head].topk(10).indices.sort().values
            assert kept[layer, head].equal(expected)
            for rows, before in zip(
                evicted[2 * layer :], passage.cache[2 * layer : 2 * layer + 2], strict=False
            ):
                assert rows[head].equal(before[head, expected])


def test_scores_do_not_depend_on_the_pages(
    passage: study.Passage, statistics: calibration.Calibration
) -> None:
    """The mode's reduction of the score's definition, from the keys in their order."""
    half, phase = 16, torch.zeros(2, 16, dtype=torch.float64)
    for offset in statistics.offsets.tolist():
        angle = (TOKENS + offset) * statistics.omega.double()
        phase += torch.stack([angle.cos(), angle.sin()]) / len(statistics.offsets)
    mean = torch.complex(statistics.q_mean_real, statistics.q_mean_imag) * torch.complex(*phase)
    z = []
    for layer, keys in enumerate(passage.cache[0::2]):
        k = torch.complex(keys[..., :half].double(), keys[..., half:].double()).repeat_interleave(GROUP, 0)
        score = torch.einsum("hf,htf->ht", mean[layer], k.conj()).real
        score += torch.einsum("hf,htf->ht", statistics.q_norm_excess[layer].double(), k.abs())
        z.append((score - score.mean(1, keepdim=True)) / score.std(1, correction=0, keepdim=True))
    by_group = torch.stack(z).unflatten(1, (KV_HEADS, GROUP)).amax(2)
    expected = {
        "union": by_group.amax((0, 1))[None],
        "per_head": by_group.mean(0),
        "per_layer_perhead": by_group.flatten(0, 1),
    }
    for mode in study.MODES:
        found = study.triattention(passage, statistics, mode)
        torch.testing.assert_close(found, expected[mode].float(), rtol=2e-3, atol=2e-3)


def test_every_rule_is_measured(model: Any, ids: torch.Tensor, statistics: calibration.Calibration) -> None:
    steps: list[str] = []
    with torch.inference_mode():
        full, results = study.measure(
            model, [ids, ids.flip(1)], TOKENS, [8, 40], statistics, on_step=steps.append
        )
    assert [r.rule for r in results[::2]] == list(study.STYLES)
    assert len(steps) == 2 * (1 + len(study.STYLES))
    for budget, at in ((8, 0), (40, 1)):
        found = {r.rule: r for r in results[at::2]}
        assert {r.budget for r in found.values()} == {budget}
        most = max(r.attention_kept for r in found.values())
        assert found["oracle"].attention_kept == most < 1
        assert found["random"].attention_kept == pytest.approx(budget / TOKENS, abs=0.2)
        for r in found.values():
            assert r.perplexity_change == pytest.approx(r.perplexity / full - 1)
            assert len(r.by_passage) == 2
            assert r.perplexity**2 == pytest.approx(r.by_passage[0] * r.by_passage[1])
    lines = study.as_markdown(full, results).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 4 + len(study.STYLES)
    assert study.as_table(full, results, TOKENS, SCORED).row_count == len(study.STYLES)


def test_rules_are_chosen_by_name(model: Any, ids: torch.Tensor, statistics: calibration.Calibration) -> None:
    with torch.inference_mode():
        _, results = study.measure(model, [ids], TOKENS, [8], statistics, ["union", "recent"])
    assert [r.rule for r in results] == ["TriAttention union", "most recent", "recent + 4 sinks"]


def test_picture_is_drawn(tmp_path: Path) -> None:
    results = [study.Result(rule, b, 10 + 100 / b, 0.1, 0.5, []) for rule in study.STYLES for b in (8, 16)]
    study.plot(9.0, results, 64, 20, tmp_path / "e.png")
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", study.CalibrationText)
def test_calibration_text_is_another(kind: study.CalibrationText) -> None:
    text = study.calibration_text(kind)
    assert len(text) > 60_000
    passages = study.smollm.english()
    lines = {line.strip() for line in passages.splitlines() if len(line.strip()) > 60}
    shared = sum(line.strip() in lines for line in text.splitlines() if len(line.strip()) > 60)
    assert shared <= 0.01 * len(lines)


def test_bad_options_are_refused() -> None:
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(study.main)
    for options in (("--budgets", "0"), ("--budgets", "100,4096"), ("--rule", "none")):
        assert CliRunner().invoke(app, options).exit_code == 2


class TestRounds:
    """The long text under one round after another."""

    WINDOW = 16
    BETA = 32
    PROMPT, GENERATED = 20, 80

    @pytest.fixture(autouse=True)
    def small_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounds, "WINDOW", self.WINDOW)

    @pytest.fixture
    def path(self, tiny: Any, tmp_path: Path) -> Path:
        path = tmp_path / "c.safetensors"
        calibration.save(calibration.collect(tiny.model, torch.arange(200) % VOCABULARY), path)
        return path

    @pytest.fixture
    def text(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        ids = torch.randint(VOCABULARY, (self.PROMPT + self.GENERATED,), generator=generator)
        return ids[: self.PROMPT], ids[self.PROMPT :]

    def session(self, lm: Any, rule: str, budget: int, path: Path) -> Any:
        return rounds.session_of(lm, rule, budget, self.BETA, path, self.PROMPT + self.GENERATED)

    @pytest.mark.parametrize("rule", [*(f"TriAttention {mode}" for mode in study.MODES), rounds.RECENT])
    def test_rounds_come_at_their_places(self, tiny: Any, text: Any, path: Path, rule: str) -> None:
        session, whole = (self.session(tiny, name, 24, path) for name in (rule, rounds.WHOLE))
        lengths: list[int] = []
        with torch.inference_mode():
            for piece in (text[0], *text[1].split(self.WINDOW)):
                logits, expected = session.feed(piece), whole.feed(piece)
                if len(lengths) < 3:  # nothing is evicted before the end of the third piece
                    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
                lengths.append(session.cached)
        assert lengths == [20, 36, 20 + 24, 20 + 40, 20 + 24, 20 + 40]
        assert whole.cached == self.PROMPT + self.GENERATED
        assert not torch.allclose(logits, expected, rtol=1e-2, atol=1e-2)

    def test_steps_do_not_matter(self, tiny: Any, text: Any, path: Path) -> None:
        readings = []
        for step in (1, self.WINDOW, self.BETA):
            session = self.session(tiny, "TriAttention union", 24, path)
            with torch.inference_mode():
                session.feed(text[0])
            readings.append(rounds.read(session, text[1], step))
        for other in readings[1:]:
            torch.testing.assert_close(other.losses, readings[0].losses, rtol=1e-4, atol=1e-4)
            assert other.best.equal(readings[0].best)

    def test_recent_tokens_are_as_if_others_were_masked(self, tiny: Any, text: Any, path: Path) -> None:
        session = self.session(tiny, rounds.RECENT, 24, path)
        ids, end = torch.cat(text), self.PROMPT + self.BETA
        with torch.inference_mode():
            session.feed(ids[: self.PROMPT])
            session.feed(ids[self.PROMPT : end])
            found = session.feed(ids[end : end + 8])
            cache = hf_cache([])
            forward(tiny.model, ids[None, :end], cache)
            seen = torch.ones(8, end + 8).tril(end).bool()
            seen[:, self.PROMPT : end - 24] = False
            expected = tiny.model(ids[None, end : end + 8], seen[None, None], None, cache).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def test_results_of_every_rule(self, tiny: Any, text: Any, path: Path) -> None:
        prompt, ids = text
        results = rounds.read_by_every_rule(
            tiny,
            [text, (prompt, ids.flip(0))],
            ["TriAttention per_head", rounds.RECENT],
            [8, 24],
            self.BETA,
            path,
        )
        assert [(r.rule, r.budget) for r in results[1:]] == [
            (rule, budget) for rule in ("TriAttention per_head", rounds.RECENT) for budget in (8, 24)
        ]
        whole = results[0]
        assert whole.agreement == [1.0, 1.0, 1.0]
        for r in results:
            assert (len(r.perplexity), len(r.windows)) == (3, 5)
            assert r.perplexity[1] ** 2 == pytest.approx(r.windows[2] * r.windows[3])
            # The round at the end of a span changes nothing in it.
            assert r.perplexity[0] == pytest.approx(whole.perplexity[0], rel=1e-4)
        assert all(r.perplexity[1:] != whole.perplexity[1:] for r in results[1:])
        assert rounds.as_table(results, self.GENERATED, self.BETA, "title").row_count == 5
        # As if each rule had read its text from the beginning.
        session = self.session(tiny, "TriAttention per_head", 8, path)
        with torch.inference_mode():
            session.feed(prompt)
            logits = tiny.model(torch.cat(text)[None]).logits[0, self.PROMPT - 1 : -1]
        (found,) = rounds.read_by_every_rule(tiny, [text], ["TriAttention per_head"], [8], self.BETA, path)[
            1:
        ]
        losses = rounds.read(session, ids, self.WINDOW).losses
        assert found.windows == pytest.approx(
            [part.mean().exp().item() for part in losses.split(self.WINDOW)]
        )
        (whole,) = rounds.read_by_every_rule(tiny, [text], [], [], self.BETA, path)
        expected = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
        assert whole.windows == pytest.approx(
            [part.mean().exp().item() for part in expected.split(self.WINDOW)], rel=1e-4
        )

    def test_picture_of_rounds_is_drawn(self, tmp_path: Path) -> None:
        whole = rounds.Result(rounds.WHOLE, 80, [9.0] * 3, [1.0] * 3, [9.0] * 5)
        others = [
            rounds.Result(rule, budget, [9.5] * 3, [0.9] * 3, [9.0, 9.1, 9.2, 9.3, 9.4])
            for rule in ("TriAttention union", rounds.RECENT)
            for budget in (8, 24)
        ]
        rounds.plot([whole, *others], 80, self.BETA, tmp_path / "r.png")
        assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")

    def test_sampled_text_repeats_no_run(self, tiny: Any, text: Any, path: Path) -> None:
        said = []
        for rule, seed in (
            (rounds.WHOLE, 1),
            (rounds.WHOLE, 1),
            (rounds.WHOLE, 2),
            ("TriAttention union", 1),
        ):
            session = self.session(tiny, rule, 24, path)
            with torch.inference_mode():
                session.feed(text[0])
            said.append(rounds.write(session, text[0], self.GENERATED, seed).tolist())
        assert said[0] == said[1] != said[2]
        assert said[3][: self.BETA] == said[0][: self.BETA]
        assert said[3] != said[0]
        for ids in said:
            assert tiny.model.config.eos_token_id not in ids
            assert rounds.repeated(torch.tensor(ids), rounds.REPEATABLE + 1) == 0
        assert rounds.repeated(torch.tensor([1, 2, 3, 1, 2, 3]), 3) == 0.25

    def test_headings_are_given(self, tiny: Any, text: Any, path: Path) -> None:
        session = self.session(tiny, rounds.WHOLE, 24, path)
        with torch.inference_mode():
            session.feed(text[0])
        given = {self.PROMPT + 5: 7, self.PROMPT + 6: 8}
        said = rounds.write(session, text[0], 10, 1, given).tolist()
        assert said[5:7] == [7, 8]
        with torch.inference_mode():
            expected = tiny.model(torch.cat((text[0], torch.tensor(said)))[None]).logits[0, -1:]
        torch.testing.assert_close(session.next, expected, rtol=1e-4, atol=1e-4)
        places = rounds.given_headings(lambda text: {"input_ids": [1, 2, 3]}, 100)
        assert [*places][:4] == [100 + rounds.CHAPTER + i for i in range(3)] + [100 + 2 * rounds.CHAPTER]
        assert len(places) == 3 * len(rounds.HEADINGS)
