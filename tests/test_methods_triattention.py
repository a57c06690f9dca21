"""TriAttention's rounds on an engine in memory, against known answers and an oracle that scores token by token."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any, ClassVar

import kvc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc import calibration as calibration_files
from kvc.methods import (
    EngineFacts,
    LayerFacts,
    RequestsLostError,
    TriAttentionConfig,
    TriAttentionManager,
    create_kv_cache_compression_manager,
    triattention_round,
)
from paged_engine import PagedEngine, PagedRequest, facts
from torch import Tensor

MODES = ("union", "per_head", "per_layer_perhead")
COMPACTIONS = ("ordered", "fill")
TOLERANCE = 4e-3  # of scores, relative and absolute; the op promises 2e-3
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def config(**fields: Any) -> TriAttentionConfig:
    values: dict[str, Any] = {"budget": 4, "beta": 4, "calibration_path": Path("unused")}
    return TriAttentionConfig(**values | fields)


def statistics(f: EngineFacts, seed: int | None = None) -> calibration_files.Calibration:
    """Random ones, or without a seed those that score a key by the length of its first frequency."""
    layers = max(layer.index for layer in f.layers) + 1
    dense = [layer for layer in f.layers if layer.window is None]
    bands = dense[0].head_dim // 2
    shape = (layers, f.num_q_heads * f.tensor_parallel_size, bands)
    real, imag, excess = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    excess[..., 0] = 1
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        real, imag = (torch.randn(shape, generator=generator) for _ in range(2))
        excess = torch.rand(shape, generator=generator)
    omega = 10000.0 ** (-torch.arange(bands) / bands)
    kv_heads = dense[0].num_kv_heads * f.tensor_parallel_size
    return calibration_files.Calibration(real, imag, excess, torch.ones(bands), omega, kv_heads)


def start(
    c: TriAttentionConfig, f: EngineFacts, seed: int | None = None, columns: int = 64
) -> tuple[TriAttentionManager, PagedEngine]:
    manager = TriAttentionManager(c, f, statistics(f, seed))
    engine = PagedEngine(f, columns=columns)
    manager.bind(engine)
    return manager, engine


def admit(manager: TriAttentionManager, engine: PagedEngine, prompt: int, name: Any = "a") -> PagedRequest:
    request = engine.admit(name, prompt)
    manager.on_request_init(request)
    return request


def keys_of(values: Any, f: EngineFacts) -> list[Tensor]:
    """Keys whose first element is `values` (`[n]`, or `[layers, n]`, or `[layers, heads, n]`), all else 0."""
    values = torch.as_tensor(values, dtype=torch.float32)
    while values.dim() < 3:
        values = values.unsqueeze(-2 if values.dim() == 2 else 0)
    rows = values.expand(len(f.layers), -1, -1)
    return [
        torch.nn.functional.pad(rows[i].expand(layer.num_kv_heads, -1).unsqueeze(-1), (0, layer.head_dim - 1))
        for i, layer in enumerate(f.layers)
    ]


def contents(
    engine: PagedEngine, request: PagedRequest, layer: int = 0, draft: bool = False
) -> list[list[int]]:
    """Token numbers in a layer's slots, head by head, tail included."""
    cache = engine.draft if draft else engine.target
    assert cache is not None
    tail = request.draft_tail if draft else request.tail
    return cache.read(request.slot, layer, 0, request.length + tail)[0].tolist()


class TestTrigger:
    def test_two_tokens_a_step(self) -> None:
        f = facts()
        manager, engine = start(config(budget=4, beta=4), f)
        request = admit(manager, engine, 2)
        engine.append(request, 4)
        evictions = []
        for step in range(1, 7):
            engine.append(request, 2)
            before = request.length
            manager.on_generation_step_end(engine.running)
            if request.length < before:
                evictions.append((step, before - request.length))
        assert evictions == [(2, 4), (4, 4), (6, 4)]
        assert manager.compressed("a") == request.compressed == 12
        assert manager.logical_length(request) == 2 + 4 + 12

    def test_a_suspended_request_is_caught_later(self) -> None:
        manager, engine = start(
            config(budget=4096, beta=128), facts(tokens_per_page=64, max_seq_len=8192), columns=96
        )
        request = admit(manager, engine, 1024)
        engine.append(request, 4096 + 127)
        manager.on_generation_step_end(engine.running)
        assert request.length == 1024 + 4096 + 127
        engine.append(request, 1)
        request.suspended = True
        manager.on_generation_step_end(engine.running)
        assert request.length == 1024 + 4096 + 128
        request.suspended = False
        engine.append(request, 1)
        manager.on_generation_step_end(engine.running)
        assert (request.length, manager.compressed("a")) == (1024 + 4096, 129)
        # The boundary that was missed by one token stays where it is: the next one is 127 tokens away.
        engine.append(request, 126)
        manager.on_generation_step_end(engine.running)
        assert manager.compressed("a") == 129
        engine.append(request, 1)
        manager.on_generation_step_end(engine.running)
        assert manager.compressed("a") == 129 + 127

    def test_many_boundaries_are_one_round(self) -> None:
        manager, engine = start(config(budget=8, beta=4, compaction="fill"), facts())
        request = admit(manager, engine, 3)
        engine.append(request, 8 + 4 + 4 + 4 + 1)
        manager.on_generation_step_end(engine.running)
        assert (request.length, manager.compressed("a"), len(engine.changes)) == (11, 13, 1)
        manager.on_generation_step_end(engine.running)
        assert len(engine.changes) == 1

    def test_resumes_from_the_one_number_it_keeps(self) -> None:
        c = config(budget=8, beta=128)
        assert c.is_due(1024, 1160, 120)
        manager, engine = start(c, facts(max_seq_len=4096, tokens_per_page=32))
        request = admit(manager, engine, 1024)
        request.keys = [torch.cat([rows, rows[:, :120]], 1) for rows in request.keys]
        request.compressed = manager._compressed["a"] = 120
        engine.append(request, 136)
        manager.on_generation_step_end(engine.running)
        assert (request.length, manager.compressed("a")) == (1032, 248)

    @pytest.mark.parametrize("generated", [0, 1, 7, 8])
    def test_what_fits_stays(self, generated: int) -> None:
        c = config(budget=8, beta=4)
        assert not c.is_due(5, 5 + generated, 0)
        assert not c.is_due(5, 5 + 8, 40)  # as an eviction leaves it

    def test_first_eviction(self) -> None:
        for budget, beta in [(2048, 128), (100, 64), (5, 7), (1, 1), (64, 1)]:
            c = config(budget=budget, beta=beta)
            first = next(n for n in itertools.count() if c.is_due(9, 9 + n, 0))
            assert first == (budget // beta + 1) * beta

    def test_selection_width(self) -> None:
        assert config(budget=128, beta=64).selection_width(0) == 256
        assert config(budget=2048, beta=128).selection_width(0) == 2304
        assert config(budget=2048, beta=127).selection_width(40) == 2304
        assert config(budget=2048, beta=128).selection_width(64) == 2560

    def test_more_than_the_selection_width_is_refused(self) -> None:
        manager, engine = start(config(budget=4, beta=4), facts(tokens_per_page=32))
        request = admit(manager, engine, 2)
        engine.append(request, 256)
        keep = [pool.clone() for pools in engine.target.pools for pool in pools]
        request.length += 1
        with pytest.raises(RuntimeError, match="selection width"):
            manager.on_generation_step_end(engine.running)
        assert all(
            torch.equal(a, b) for a, b in zip(keep, itertools.chain(*engine.target.pools), strict=True)
        )
        assert manager.compressed("a") == 0
        request.length -= 1
        manager.on_generation_step_end(engine.running)
        assert manager.compressed("a") == 252

    def test_unknown_requests_are_refused(self) -> None:
        manager, engine = start(config(), facts())
        request = engine.admit("a", 2)
        engine.append(request, 9)
        with pytest.raises(RuntimeError, match="'a' must be one that was initialised"):
            manager.on_generation_step_end([request])
        manager.on_request_init(request)
        manager.on_request_finish(request)
        with pytest.raises(RuntimeError, match="'a' must be one that was initialised and is not finished"):
            manager.on_generation_step_end([request])
        assert engine.changes == []

    def test_a_request_may_finish_in_resize(self, monkeypatch: pytest.MonkeyPatch) -> None:
        manager, engine = start(config(), facts())
        request = admit(manager, engine, 2)
        engine.append(request, 9)
        monkeypatch.setattr(engine, "resize", lambda *_: manager.on_request_finish(request))
        manager.on_generation_step_end([request])
        manager.on_request_init(request)  # nothing is left of the one before
        assert manager.compressed("a") == 0

    def test_numbers_that_cannot_be_are_refused(self) -> None:
        manager, engine = start(config(), facts(max_tail=2))
        request = admit(manager, engine, 4)
        engine.append(request, 8, tail=2)
        request.tail = 3
        with pytest.raises(RuntimeError, match=r"tails of at most 2 and.*got \(3, 0\)"):
            manager.on_generation_step_end(engine.running)
        request.tail, request.slot = 2, 4
        with pytest.raises(RuntimeError, match="a slot of its own below 4, got 4"):
            manager.on_generation_step_end(engine.running)
        request.slot = 0
        with pytest.raises(RuntimeError, match="a slot of its own below 4, got 0"):
            manager.on_generation_step_end([request, request])
        request.prompt_length = -4
        with pytest.raises(RuntimeError, match="a prompt of 0 tokens or more, got -4"):
            manager.on_generation_step_end([request])
        request.prompt_length, request.length = 4000, 4097
        with pytest.raises(RuntimeError, match="at most 4096 tokens, max_seq_len, got 4097"):
            manager.on_generation_step_end([request])
        request.prompt_length, request.length = 60, 60 * 4 + 15
        with pytest.raises(RuntimeError, match="page table of 256 tokens, got 257"):
            manager.on_generation_step_end(engine.running)
        request.prompt_length, request.length = 4, 12
        manager.on_generation_step_end(engine.running)
        request.length -= 1
        with pytest.raises(RuntimeError, match="at least 4 generated tokens, got 3"):
            manager.on_generation_step_end(engine.running)
        with pytest.raises(RuntimeError, match="known already"):
            manager.on_request_init(request)
        manager.on_request_finish(request)
        manager.on_request_init(request)
        assert manager.compressed("a") == 0

    def test_needs_an_engine(self) -> None:
        f = facts()
        with pytest.raises(RuntimeError, match="no engine is bound"):
            TriAttentionManager(config(), f, statistics(f)).on_generation_step_end([])


@pytest.mark.parametrize("compaction", COMPACTIONS)
class TestKnownAnswers:
    """Keys whose first element is the score: what is kept is known beforehand."""

    def run(
        self, device: torch.device, values: Any, prompt: int, tail: int = 0, **fields: Any
    ) -> tuple[PagedEngine, PagedRequest, TriAttentionManager]:
        layers = fields.pop("layers", 1)
        f = facts(num_layers=layers, num_kv_heads=fields.pop("heads", 1), max_tail=tail, device=device)
        manager, engine = start(config(**fields), f)
        request = engine.admit("a", 0)
        request.prompt_length = prompt
        manager.on_request_init(request)
        values = torch.as_tensor(values, dtype=torch.float32)
        engine.append(
            request, values.shape[-1] - tail, keys_of(values[..., : values.shape[-1] - tail], f), tail=tail
        )
        manager.on_generation_step_end(engine.running)
        return engine, request, manager

    def kept(self, engine: PagedEngine, request: PagedRequest, layer: int = 0) -> list[list[int]]:
        return [
            sorted(row[request.prompt_length : request.length]) for row in contents(engine, request, layer)
        ]

    def test_small_union(self, device: torch.device, compaction: str) -> None:
        values = [0, 0, 8, 1, 7, 2, 6, 3, 5, 4, 9, 0]
        engine, request, _ = self.run(device, values, 2, tail=2, budget=4, beta=4, compaction=compaction)
        assert self.kept(engine, request) == [[2, 4, 6, 8]]
        (row,) = contents(engine, request)
        assert row[:2] == [0, 1]
        assert row[6:] == [10, 11]
        if compaction == "ordered":
            assert row == [0, 1, 2, 4, 6, 8, 10, 11]

    def test_each_layer_its_own(self, device: torch.device, compaction: str) -> None:
        values = [[1, 8, 2, 3, 4, 5, 9, 6], [2, 3, 8, 4, 5, 9, 6, 7], [3, 4, 5, 9, 6, 7, 8, 10]]
        engine, request, _ = self.run(
            device,
            values,
            0,
            layers=3,
            budget=2,
            eviction_mode="per_layer_perhead",
            normalize_scores=False,
            compaction=compaction,
        )
        assert [self.kept(engine, request, layer) for layer in range(3)] == [[[1, 6]], [[2, 5]], [[3, 7]]]

    def test_two_rounds(self, device: torch.device, compaction: str) -> None:
        values = [7 * t % 64 + 1 for t in range(64)]
        fields: Any = {"budget": 32, "beta": 16, "compaction": compaction}
        engine, request, manager = self.run(device, values, 2, tail=2, **fields)
        first = sorted(sorted(range(2, 62), key=lambda t: (-values[t], t))[:32])
        assert self.kept(engine, request) == [first]
        assert request.length + request.tail == 36
        assert len(engine.target.pages[request.slot]) == 9
        fresh = [11 * t % 64 + 100 for t in range(30)]
        request.tail = 0
        logical = request.length + request.compressed
        engine.append(request, 30, keys_of(fresh, engine.facts))
        manager.on_generation_step_end(engine.running)
        everyone = {t: float(values[t]) for t in first} | {logical + i: float(v) for i, v in enumerate(fresh)}
        # 30 fresh tokens outscore all others, and the best two of the old ones stay.
        assert self.kept(engine, request) == [sorted(sorted(everyone, key=lambda t: -everyone[t])[:32])]
        assert contents(engine, request)[0][:2] == [0, 1]

    def test_ties_go_to_the_lowest_index(self, device: torch.device, compaction: str) -> None:
        engine, request, _ = self.run(device, [5] * 3 + [1] * 12, 3, budget=4, compaction=compaction)
        assert self.kept(engine, request) == [[3, 4, 5, 6]]

    @pytest.mark.parametrize("mode", MODES)
    def test_several_requests(self, device: torch.device, compaction: str, mode: str) -> None:
        kept = [[16, 32, 56, 72], [24, 40, 48, 64]]
        prompts, tails = [2, 5], [2, 1]
        f = facts(num_layers=2, max_tail=2, tokens_per_page=32, device=device)
        manager, engine = start(config(budget=4, beta=4, eviction_mode=mode, compaction=compaction), f)
        for index, (tokens, prompt, tail) in enumerate(zip(kept, prompts, tails, strict=True)):
            request = engine.admit(index, 0)
            request.prompt_length = prompt
            manager.on_request_init(request)
            values = torch.zeros(80)
            values[tokens] = torch.tensor([4.0, 2.0, 8.0, 3.0])
            engine.append(request, 80, keys_of(values, f), tail=tail)
        assert [len(engine.target.pages[request.slot]) for request in engine.running] == [3, 3]
        before = [engine.target.read(r.slot, 1, 0, 80 + r.tail)[1] for r in engine.running]
        manager.on_generation_step_end(engine.running)
        for request, tokens, old in zip(engine.running, kept, before, strict=True):
            assert request.length == request.prompt_length + 4
            assert len(engine.target.pages[request.slot]) == 1
            numbers, keys = engine.target.read(request.slot, 1, 0, request.length + request.tail)
            expected = [*range(request.prompt_length), *tokens, *range(80, 80 + request.tail)]
            for row, key_rows, old_rows in zip(numbers.tolist(), keys, old, strict=True):
                assert sorted(row) == expected
                assert torch.equal(key_rows, old_rows[row])
        assert [(c.freed_pages, c.capacity) for c in engine.changes] == [(2, 8), (2, 10)]

    def test_sliding_window_and_draft(self, device: torch.device, compaction: str) -> None:
        kept = [[16, 32, 40, 56], [16, 24, 40, 48]]
        prompts, tails, draft_tails, lengths = [2, 2], [2, 1], [1, 2], [64, 56]
        layers = [
            LayerFacts(index=0, num_kv_heads=2, head_dim=8),
            LayerFacts(index=1, num_kv_heads=2, head_dim=8, window=2),
        ]
        draft = (
            LayerFacts(index=0, num_kv_heads=4, head_dim=16),
            LayerFacts(index=1, num_kv_heads=1, head_dim=6, window=3),
        )
        f = facts(
            layers,
            draft_layers=draft,
            max_tail=2,
            max_draft_tail=2,
            max_draft_tokens=1,
            tokens_per_page=32,
            device=device,
        )
        manager, engine = start(config(budget=4, beta=4, compaction=compaction), f)
        everything = zip(kept, prompts, tails, draft_tails, lengths, strict=True)
        for index, (tokens, prompt, tail, draft_tail, length) in enumerate(everything):
            request = engine.admit(index, 0)
            request.prompt_length = prompt
            manager.on_request_init(request)
            values = torch.zeros(length)
            values[tokens] = 1.0
            engine.append(request, length, keys_of(values, f), tail=tail, draft_tail=draft_tail)
        manager.on_generation_step_end(engine.running)
        for request, tokens, prompt, length in zip(engine.running, kept, prompts, lengths, strict=True):
            rows = contents(engine, request, 0)
            flying = [*range(length, length + request.tail)]
            draft_flying = [*range(length, length + request.draft_tail)]
            assert [sorted(row) for row in rows] == [[*range(prompt), *tokens, *flying]] * 2
            # Slots between the prompt and the window are never read again.
            assert [row[:prompt] + row[prompt + 2 :] for row in contents(engine, request, 1)] == [
                [*range(prompt), length - 2, length - 1, *flying]
            ] * 2
            draft_rows = contents(engine, request, 0, draft=True)
            assert [sorted(row) for row in draft_rows] == [[*range(prompt), *tokens, *draft_flying]] * 4
            assert [row[:prompt] + row[prompt + 1 :] for row in contents(engine, request, 1, draft=True)] == [
                [*range(prompt), *range(length - 3, length), *draft_flying]
            ]
        assert [(c.cache, c.length, c.capacity) for c in engine.changes] == [
            ("target", 6, 8),
            ("draft", 6, 7),
            ("target", 6, 7),
            ("draft", 6, 8),
        ]


class Oracle:
    """Scores every token of a request by the definition and follows which of them are left.

    A token is its number; `rows[layer][head]` lists those in a dense layer's cache in slot order. Scores that
    differ by less than the op's tolerance may be ranked either way: the oracle then takes the engine's choice.
    """

    def __init__(self, c: TriAttentionConfig, f: EngineFacts, given: calibration_files.Calibration) -> None:
        self.config, self.facts, self.given = c, f, given
        self.dense = [i for i, layer in enumerate(f.layers) if layer.window is None]
        self.rows: dict[Any, list[list[list[int]]]] = {}

    def raw(self, keys: Tensor, layer: int, head: int, position: int) -> Tensor:
        """Float64 scores of `[n, D]` keys, term by term: the mean over what a query expects at each offset."""
        real, imag, excess = (
            getattr(self.given, name)[self.facts.layers[layer].index, head].double()
            for name in ("q_mean_real", "q_mean_imag", "q_norm_excess")
        )
        bands = len(real)
        k = torch.complex(keys[:, :bands].double(), keys[:, bands:].double())
        angles = (position + self.given.offsets.double())[:, None] * self.given.omega.double()
        query = torch.complex(real, imag) * torch.polar(torch.ones_like(angles), angles).mean(0)
        return (self.given.freq_scale_sq.double() * ((query * k.conj()).real + excess * k.abs())).sum(-1)

    def decision_rows(
        self, request: PagedRequest, rows: list[list[list[int]]], position: int
    ) -> list[Tensor]:
        """What is compared: for each decision row the scores of the slots behind the prompt."""
        f, c = self.facts, self.config
        heads = f.layers[self.dense[0]].num_kv_heads
        group = f.num_q_heads // heads
        grouped = []
        for index, layer in enumerate(self.dense):
            for head in range(heads):
                keys = request.keys[layer][head, rows[index][head]]
                scores = []
                for q in range(head * group, (head + 1) * group):
                    s = self.raw(keys, layer, q, position)
                    if c.normalize_scores:
                        s = (s - s.mean()) / s.std(unbiased=False).clamp(min=1e-6)
                    scores.append(s)
                grouped.append(torch.stack(scores).amax(0))
        if c.eviction_mode == "union":
            return [torch.stack(grouped).amax(0)]
        if c.eviction_mode == "per_head":
            return [torch.stack(grouped[head::heads]).mean(0) for head in range(heads)]
        return grouped

    def step(self, engine: PagedEngine, request: PagedRequest, before: PagedRequest) -> None:
        """Compare a request after a step with what it was: `before` holds the numbers the hook was shown."""
        c, f = self.config, self.facts
        prompt, heads = request.prompt_length, f.layers[self.dense[0]].num_kv_heads
        rows = self.rows.setdefault(request.request_id, [[[] for _ in range(heads)] for _ in self.dense])
        logical = before.length + before.compressed
        for layer_rows in rows:
            for row in layer_rows:
                row += range(logical - (before.length - len(row)), logical)
        decided = logical - prompt
        due = (
            not before.suspended
            and decided // c.beta > (c.budget + before.compressed) // c.beta
            and before.length > prompt + c.budget
        )
        assert request.length == (prompt + c.budget if due else before.length)
        assert request.compressed + request.length == logical
        tail = [logical + i for i in range(before.tail)]
        old = [[list(row) for row in layer_rows] for layer_rows in rows]
        actual = [
            engine.target.read(request.slot, layer, 0, request.length + request.tail) for layer in self.dense
        ]
        for index, layer in enumerate(self.dense):
            for head in range(heads):
                row = actual[index][0][head].tolist()
                assert row[:prompt] == list(range(prompt))
                assert row[request.length :] == tail
                assert torch.equal(actual[index][1][head], request.keys[layer][head, row])
                rows[index][head] = row[: request.length]
        for layer, facts_of_layer in enumerate(f.layers):
            if facts_of_layer.window is not None:
                end, seen = request.length + request.tail, facts_of_layer.window + request.tail
                first = max(end - seen, 0)
                for row in engine.target.read(request.slot, layer, first, end)[0].tolist():
                    assert row == list(range(logical + len(tail) - (end - first), logical + len(tail)))
        if not due:
            assert rows == old
            return
        choices = self.decision_rows(request, [[row[prompt:] for row in layer] for layer in old], logical)
        for index in range(len(self.dense)):
            for head in range(heads):
                decision = {"union": 0, "per_head": head, "per_layer_perhead": index * heads + head}
                self.check_choice(
                    choices[decision[c.eviction_mode]], old[index][head][prompt:], rows[index][head][prompt:]
                )
        if c.eviction_mode != "per_layer_perhead":
            assert all(layer_rows == rows[0] for layer_rows in rows)
        if c.eviction_mode == "union":
            assert all(row == rows[0][0] for row in rows[0])

    def check_choice(self, scores: Tensor, old: list[int], new: list[int]) -> None:
        budget = self.config.budget
        assert len(new) == len(set(new)) == budget
        kept = set(new)
        assert kept <= set(old)
        threshold = scores.topk(budget).values[-1].item()
        slack = TOLERANCE * (1 + abs(threshold))
        for token, score in zip(old, scores.tolist(), strict=True):
            assert token in kept or score <= threshold + slack
            assert token not in kept or score >= threshold - slack
        if self.config.compaction == "ordered":
            assert new == [token for token in old if token in kept]
        else:
            # Who lay inside the budget stays in place; the holes are filled in order.
            movers = iter([token for token in old[budget:] if token in kept])
            assert new == [token if token in kept else next(movers) for token in old[:budget]]


def numbers_of(request: PagedRequest) -> PagedRequest:
    """A copy of the numbers alone."""
    return PagedRequest(
        request.request_id,
        request.slot,
        request.prompt_length,
        request.length,
        request.tail,
        request.draft_tail,
        request.suspended,
        request.compressed,
    )


@st.composite
def scenarios(draw: Any) -> dict[str, Any]:
    mode = draw(st.sampled_from(MODES))
    heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 8, 12]))
    budget = draw(st.integers(1, 20))
    layers = [
        LayerFacts(index=i, num_kv_heads=heads, head_dim=head_dim) for i in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        window = draw(st.integers(1, budget))
        extra = LayerFacts(index=7, num_kv_heads=draw(st.integers(1, 2)), head_dim=4, window=window)
        layers.insert(draw(st.integers(0, len(layers))), extra)
    speculates = mode == "union" and draw(st.booleans())
    return {
        "config": config(
            budget=budget,
            beta=draw(st.integers(1, 12)),
            eviction_mode=mode,
            normalize_scores=mode == "union" or draw(st.booleans()),
            compaction=draw(st.sampled_from(COMPACTIONS)),
        ),
        "facts": facts(
            layers,
            num_q_heads=heads * draw(st.integers(1, 3)),
            rotary_dim=head_dim,
            tokens_per_page=draw(st.sampled_from([1, 3, 4, 16])),
            max_tail=3,
            max_draft_tail=3 if speculates else 0,
            max_draft_tokens=3 if speculates else 0,
            draft_layers=(LayerFacts(index=0, num_kv_heads=4, head_dim=4),) if speculates else (),
            device=draw(st.sampled_from(DEVICES)),
        ),
        "steps": draw(
            st.lists(
                st.tuples(
                    st.integers(0, 3),  # which request
                    st.integers(1, 4),  # tokens accepted
                    st.integers(0, 3),  # tail
                    st.integers(0, 3),  # draft tail
                    st.sampled_from([False, False, False, True]),  # suspended
                    st.integers(0, 20),  # finishes at 0
                ),
                min_size=5,
                max_size=40,
            )
        ),
        "seed": draw(st.integers(0, 5)),
    }


class TestTraces:
    """Whatever requests do, a round keeps what the definition says and nothing else moves."""

    @settings(max_examples=60)
    @given(scenarios())
    def test_against_the_oracle(self, scenario: dict[str, Any]) -> None:
        c, f, seed = scenario["config"], scenario["facts"], scenario["seed"]
        manager, engine = start(c, f, seed, columns=256)
        oracle = Oracle(c, f, statistics(f, seed))
        kvc.set_debug(True)
        try:
            names = itertools.count()
            for which, accepted, tail, draft_tail, suspended, ends in scenario["steps"]:
                if len(engine.running) <= which:
                    admit(manager, engine, 1 + (which * 7 + ends) % 9, next(names))
                request = engine.running[min(which, len(engine.running) - 1)]
                if ends == 0:
                    manager.on_request_finish(request)
                    engine.finish(request)
                    oracle.rows.pop(request.request_id, None)
                    continue
                room = c.selection_width(f.max_draft_tokens) - (request.length - request.prompt_length)
                # Work in flight writes the same slots in both caches, so tokens stand at the same places.
                limit = f.max_draft_tail and draft_tail
                engine.append(request, min(accepted * 3, room), tail=tail, draft_tail=limit)
                request.suspended = suspended
                before = [numbers_of(r) for r in engine.running]
                manager.on_generation_step_end(engine.running)
                for r, b in zip(engine.running, before, strict=True):
                    oracle.step(engine, r, b)
                    self.check_draft(engine, r, c)
        finally:
            kvc.set_debug(False)
        owned = [page for pages in engine.target.pages.values() for page in pages]
        assert sorted(owned + engine.target.free) == list(range(256 * f.max_requests))

    def check_draft(self, engine: PagedEngine, request: PagedRequest, c: TriAttentionConfig) -> None:
        if engine.draft is None:
            return
        end = request.length + min(request.tail, request.draft_tail)
        dense = next(i for i, layer in enumerate(engine.facts.layers) if layer.window is None)
        target = engine.target.read(request.slot, dense, 0, end)[0][0]
        for row in engine.draft.read(request.slot, 0, 0, end)[0]:
            assert torch.equal(row, target)


class TestFailure:
    """What an exception leaves behind."""

    @pytest.mark.parametrize("compaction", COMPACTIONS)
    @pytest.mark.parametrize("op", ["mean_phase", "triattention_score", "radix_topk", "pack"])
    def test_before_the_first_move_nothing_has_changed(
        self, monkeypatch: pytest.MonkeyPatch, op: str, compaction: str
    ) -> None:
        name = {"ordered": "pack_move_sources", "fill": "pack_fill_moves"}[compaction] if op == "pack" else op
        manager, engine, request = self.broken(monkeypatch, name, compaction)
        before = contents(engine, request), request.length, engine.target.page_table.clone()
        with pytest.raises(RuntimeError, match="broken") as caught:
            manager.on_generation_step_end(engine.running)
        assert not isinstance(caught.value, RequestsLostError)
        assert (contents(engine, request), request.length) == before[:2]
        assert torch.equal(engine.target.page_table, before[2])
        assert (manager.compressed("a"), engine.changes) == (0, [])
        monkeypatch.undo()
        manager._round._programs.clear()
        manager.on_generation_step_end(engine.running)
        assert (request.length, manager.compressed("a")) == (7, 8)

    @pytest.mark.parametrize("where", ["compact_pages_", "resize"])
    def test_after_the_first_move_requests_are_lost(
        self, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        manager, engine, request = self.broken(monkeypatch, where, "ordered")
        idle = admit(manager, engine, 3, "b")
        if where == "resize":
            engine.resize_error = RuntimeError("broken")
        with pytest.raises(RequestsLostError, match="broken") as caught:
            manager.on_generation_step_end(engine.running)
        assert caught.value.request_ids == ("a",)
        assert (manager.compressed("a"), request.length, engine.changes) == (0, 15, [])
        engine.resize_error = None
        with pytest.raises(RequestsLostError, match="lost in an earlier round"):
            manager.on_generation_step_end(engine.running)
        manager.on_request_finish(request)
        engine.finish(request)
        monkeypatch.undo()
        manager._round._programs.clear()
        engine.append(idle, 8)
        manager.on_generation_step_end(engine.running)
        assert manager.compressed("b") == 4

    def broken(
        self, monkeypatch: pytest.MonkeyPatch, name: str, compaction: str
    ) -> tuple[TriAttentionManager, PagedEngine, PagedRequest]:
        """An engine with one request that is due, and an op that raises from now on."""
        manager, engine = start(config(compaction=compaction), facts())
        request = admit(manager, engine, 3)
        engine.append(request, 12)
        manager._round._programs.clear()

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken")

        if name != "resize":
            monkeypatch.setattr(triattention_round.kvc, name, fail)
        return manager, engine, request


def full_pools(engine: PagedEngine) -> list[Tensor]:
    return [pool.cpu() for cache in engine.caches for pools in cache.pools for pool in pools]


@pytest.mark.cuda
class TestCuda:
    """Streams, graphs and the host: what only a GPU can show."""

    GEOMETRY: ClassVar[dict[str, Any]] = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 64,
        "group": 4,
        "tokens_per_page": 32,
        "max_requests": 8,
        "max_tail": 2,
        "dtype": torch.bfloat16,
    }

    def prepared(
        self, device: str, mode: str, compaction: str, requests: int = 5
    ) -> tuple[TriAttentionManager, PagedEngine]:
        """An engine in which every request is due, the same on every device."""
        f = facts(device=device, **self.GEOMETRY)
        c = config(budget=100, beta=32, eviction_mode=mode, compaction=compaction)
        manager, engine = start(c, f, seed=3)
        for name in range(requests):
            request = admit(manager, engine, 30 + 7 * name, name)
            engine.append(request, 128 + name, tail=name % 3)
        return manager, engine

    @pytest.mark.parametrize("compaction", COMPACTIONS)
    @pytest.mark.parametrize("mode", MODES)
    def test_as_on_the_cpu(self, mode: str, compaction: str) -> None:
        engines = []
        for device in ("cpu", "cuda"):
            manager, engine = self.prepared(device, mode, compaction)
            for _ in range(2):
                manager.on_generation_step_end(engine.running)
                for request in engine.running:
                    engine.append(request, 32, tail=1)
            engines.append(engine)
        assert [r.compressed for r in engines[0].running] == [r.compressed for r in engines[1].running]
        same = 0.0
        for one, other in zip(engines[0].running, engines[1].running, strict=True):
            a, b = contents(engines[0], one), contents(engines[1], other)
            same += sum(len({*x} & {*y}) for x, y in zip(a, b, strict=True)) / sum(map(len, a))
        # Scores agree within the tolerance only, so a token at the threshold may differ; hardly more than that.
        assert same / len(engines[0].running) > 0.99

    @pytest.mark.parametrize("compaction", COMPACTIONS)
    @pytest.mark.parametrize("mode", MODES)
    def test_a_replayed_graph_does_what_the_ops_do(self, mode: str, compaction: str) -> None:
        manager, engine = self.prepared("cuda", mode, compaction)
        twin_manager, twin = self.prepared("cuda", mode, compaction)
        programs = twin_manager._round._programs.values()
        assert all(program.graph is not None for program in programs)
        assert sorted(twin_manager._round._programs) == [1, 2, 4, 8]
        for program in programs:
            program.graph = None
        # What a round of more requests leaves in the buffers must be nothing to the next one.
        for count, following in itertools.pairwise((5, 3, 1, 5, 0)):
            for m, e in ((manager, engine), (twin_manager, twin)):
                e.changes.clear()
                m.on_generation_step_end(e.running)
                assert [change.request.slot for change in e.changes] == list(range(count))
                for request in e.running:
                    e.append(request, 32 if request.slot < following else 1, tail=2)
            assert all(torch.equal(a, b) for a, b in zip(full_pools(engine), full_pools(twin), strict=True))

    def test_a_round_is_no_part_of_a_graph(self) -> None:
        manager, engine = self.prepared("cuda", "union", "fill")
        before = full_pools(engine)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
            with pytest.raises(RuntimeError, match="cannot be part of a CUDA graph") as caught:
                manager.on_generation_step_end(engine.running)
        assert not isinstance(caught.value, RequestsLostError)
        assert all(torch.equal(a, b) for a, b in zip(before, full_pools(engine), strict=True))
        manager.on_generation_step_end(engine.running)
        assert [request.compressed for request in engine.running] == [28 + name for name in range(5)]

    def test_many_rounds_in_flight(self) -> None:
        manager, engine = self.prepared("cuda", "per_head", "ordered")
        twin_manager, twin = self.prepared("cuda", "per_head", "ordered")
        twin_manager._round._programs[1].graph = None
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(400_000_000)  # all are submitted before the first one runs
            for request in engine.running:
                manager.on_generation_step_end([request])
            ends = [event for _, event in engine.target.released if event is not None]
            assert len(ends) == 5
            assert not any(event.query() for event in ends)
        torch.cuda.synchronize()
        for request in twin.running:
            twin_manager.on_generation_step_end([request])
            torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(full_pools(engine), full_pools(twin), strict=True))

    @pytest.mark.parametrize("compaction", COMPACTIONS)
    def test_pages_are_freed_behind_the_work(self, compaction: str) -> None:
        manager, engine = self.prepared("cuda", "union", compaction)
        twin_manager, twin = self.prepared("cuda", "union", compaction)
        twin_manager.on_generation_step_end(twin.running)
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        before = full_pools(engine)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # the producer is late by some 0.2 s
            began = time.perf_counter()
            manager.on_generation_step_end(engine.running)
            took = time.perf_counter() - began
        ((freed, after),) = [(pages, event) for pages, event in engine.target.released if pages][:1]
        assert after is not None
        assert not after.query(), "the producer was not late"
        assert took < 0.1, f"the host waited: {took:.3f} s"
        with torch.cuda.stream(other):
            freed_pages = torch.tensor(freed, pin_memory=True).to("cuda", non_blocking=True)
            after.wait(other)
            for pools in engine.target.pools:
                for pool in pools:
                    pool.index_fill_(0, freed_pages, -7.0)
        torch.cuda.synchronize()
        expected = full_pools(twin)
        for pool in expected:
            pool[freed] = -7.0
        assert all(torch.equal(a, b) for a, b in zip(full_pools(engine), expected, strict=True))
        assert not torch.equal(before[0], expected[0])

    @pytest.mark.parametrize("mode", MODES)
    def test_the_host_never_waits(self, mode: str) -> None:
        manager, engine = self.prepared("cuda", mode, "fill")
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                engine.target.page_table.sum().item()
            manager.on_generation_step_end(engine.running)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [request.compressed for request in engine.running] == [28 + name for name in range(5)]
        assert torch.cuda.memory_allocated() == allocated


class TestAdmission:
    @pytest.mark.parametrize(
        ("fields", "changes", "reason"),
        [
            ({"normalize_scores": False}, {}, "always normalises"),
            ({"eviction_mode": "per_head"}, {"max_draft_tokens": 1}, "speculative decoding"),
            ({}, {"logical_positions": False}, "position"),
            ({}, {"beam_width": 4}, "beam"),
            ({}, {"rope_style": "interleaved"}, "rope_style"),
            ({}, {"rotary_dim": None}, "rotated whole"),
            ({}, {"rotary_dim": 4}, "rotated whole"),
            ({}, {"dtype": torch.int8}, "keys must be"),
            ({}, {"num_q_heads": 3}, "no multiple"),
            ({}, {"tensor_parallel_size": 2}, "tensor parallelism"),
            ({}, {"max_seq_len": (1 << 24) + 1}, "2\\^24"),
            ({"budget": 1 << 20}, {"max_requests": 2048}, "2\\^31"),
            (
                {},
                {"layers": (LayerFacts(index=0, num_kv_heads=1, head_dim=8, kind="mla"),)},
                "layers other than",
            ),
            ({}, {"layers": (LayerFacts(index=0, num_kv_heads=1, head_dim=8, window=4),)}, "no layer"),
            (
                {},
                {"layers": tuple(LayerFacts(index=i, num_kv_heads=1 + i, head_dim=8) for i in range(2))},
                "differ",
            ),
            (
                {},
                {
                    "layers": tuple(
                        LayerFacts(index=i, num_kv_heads=2, head_dim=8, window=w)
                        for i, w in enumerate((None, 2, 3))
                    )
                },
                "windows differ",
            ),
            (
                {},
                {
                    "layers": tuple(
                        LayerFacts(index=i, num_kv_heads=2, head_dim=8, window=w)
                        for i, w in enumerate((None, 5))
                    )
                },
                "exceeds the budget",
            ),
        ],
    )
    def test_refuses(self, fields: Any, changes: Any, reason: str) -> None:
        f = facts().model_copy(update=changes)
        with pytest.raises(ValueError, match=f"TriAttentionConfig: not supported here: .*{reason}"):
            create_kv_cache_compression_manager(config(**fields), f)

    def test_predicates(self) -> None:
        assert TriAttentionConfig.changes_physical_kv_length
        assert config().supports_block_reuse()
        assert [config(eviction_mode=m).supports_speculative_decoding() for m in MODES] == [
            True,
            False,
            False,
        ]
        defaults = TriAttentionConfig(calibration_path=Path("x"))
        assert (defaults.budget, defaults.beta, defaults.eviction_mode) == (2048, 128, "union")
        assert (defaults.normalize_scores, defaults.compaction) == (True, "ordered")

    def test_loads_the_calibration_once(self, tmp_path: Path) -> None:
        f = facts(block_reuse=True)
        path = tmp_path / "calibration.safetensors"
        with pytest.raises(FileNotFoundError):
            create_kv_cache_compression_manager(config(calibration_path=path), f)
        path.write_bytes(b"nonsense")
        with pytest.raises(ValueError, match="calibration"):
            create_kv_cache_compression_manager(config(calibration_path=path), f)
        calibration_files.save(statistics(f, 3), path)
        manager = create_kv_cache_compression_manager(config(calibration_path=path), f)
        path.unlink()
        engine = PagedEngine(f)
        manager.bind(engine)
        request = engine.admit("a", 2)
        manager.on_request_init(request)
        engine.append(request, 8)
        manager.on_generation_step_end(engine.running)
        assert request.compressed == 4

    def test_the_artifact_is_not_shared(self) -> None:
        f = facts()
        given = statistics(f, 1)
        manager = TriAttentionManager(config(), f, given)
        before = [value.clone() for value in vars(manager._statistics).values()]
        for value in vars(given).values():
            if isinstance(value, Tensor):
                value.zero_()
        assert all(torch.equal(a, b) for a, b in zip(before, vars(manager._statistics).values(), strict=True))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_layers": 3}, "layers of the calibration must be more than the last scored one, 2, got 2"),
            ({"group": 4}, "query heads of the calibration must be 8, got 4"),
            ({"head_dim": 12}, "frequencies of the calibration must be 6, got 4"),
            ({"rope_frequencies": (1.0, 0.1, 0.01, 0.002)}, "omega of the calibration must be the model's"),
            ({"rope_frequencies": (1.0, 0.1)}, "omega of the calibration must be the model's"),
        ],
    )
    def test_another_models_calibration(self, changes: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TriAttentionManager(config(), facts(**changes), statistics(facts()))

    def test_a_rank_takes_its_heads(self) -> None:
        f = facts(tensor_parallel_size=2, tensor_parallel_rank=1)
        given = statistics(f, 2)
        manager = TriAttentionManager(config(eviction_mode="per_head"), f, given)
        assert torch.equal(manager._statistics.q_mean_real, given.q_mean_real[:, 4:])

    def test_only_dense_layers_are_scored(self) -> None:
        layers = [
            LayerFacts(index=i, num_kv_heads=2, head_dim=8, window=2 if i == 1 else None) for i in range(3)
        ]
        f = facts(layers)
        given = statistics(f, 2)
        manager = TriAttentionManager(config(), f, given)
        assert torch.equal(manager._statistics.q_norm_excess, given.q_norm_excess[[0, 2]])

    def test_pools_must_be_as_the_facts_said(self) -> None:
        f = facts(num_layers=3)

        def bind(change: Any) -> None:
            engine = PagedEngine(f)
            change(engine.target)
            TriAttentionManager(config(), f, statistics(f)).bind(engine)

        def replace(layer: int, pool: Tensor) -> Any:
            return lambda cache: cache.pools[layer].__setitem__(0, pool)

        with pytest.raises(ValueError, match=r"engine\.target\.pools must be of 3 layers, got 2"):
            bind(lambda cache: cache.pools.pop())
        with pytest.raises(ValueError, match=r"pools\[2\]\[0\] must be \[pages, planes, 2, 4, D\]"):
            bind(replace(2, torch.zeros(8, 1, 2, 8, 8)))
        with pytest.raises(ValueError, match=r"pools\[0\]\[0\] must be torch.float32, got torch.float16"):
            bind(replace(0, torch.zeros(8, 1, 2, 4, 8).half()))
        with pytest.raises(ValueError, match=r"pools\[0\]\[0\] must be keys of 8 elements"):
            bind(replace(0, torch.zeros(8, 1, 2, 4, 6)))
        with pytest.raises(ValueError, match=r"page_table must be int32 \[slots, max_pages\]"):
            bind(lambda cache: setattr(cache, "page_table", cache.page_table.long()))
        draft = f.model_copy(update={"draft_layers": f.layers})
        with pytest.raises(ValueError, match=r"engine\.draft must be a cache, got None"):
            TriAttentionManager(config(), draft, statistics(f)).bind(PagedEngine(f))
