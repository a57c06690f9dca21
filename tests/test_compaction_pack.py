"""Move packing against the reference, exactly, on every device; and the Triton kernels under the "
"interpreter."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc.reference import compaction as reference
from torch import Tensor

ops: Any = kvc  # called with unpacked arguments, which a type checker cannot follow
CUDA = torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if CUDA else ["cpu"]
SENTINEL = 0x5EED


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(counts: list[int]) -> Tensor:
    return ints(list(itertools.accumulate(counts, initial=0)))


def kept_tokens(requests: int, rows: int, count: int, low: int, high: int, seed: int) -> Tensor:
    """int32 `[requests, rows, count]` of ascending tokens in [low, high)."""
    generator = torch.Generator().manual_seed(seed)
    picks = [
        torch.randperm(high - low, generator=generator)[:count].sort()[0] + low
        for _ in range(requests * rows)
    ]
    return torch.stack(picks).int().view(requests, rows, count)


def to(device: torch.device | str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)


def check(op: str, device: torch.device | str, *arguments: Any) -> tuple[Tensor, ...]:
    """Functional form and `.out` form, the latter between sentinels, against the reference."""
    expected = getattr(reference, op)(*arguments)
    there = to(device, arguments)
    actual = getattr(ops, op)(*there)
    names = ("dense", "swa") if op == "pack_move_sources" else ("sources", "destinations", "tail_sources")
    guarded = [torch.full((e.numel() + 2,), SENTINEL, dtype=torch.int32, device=device) for e in expected]
    outputs = {n: g[1:-1].view(e.shape) for n, g, e in zip(names, guarded, expected, strict=True)}
    returned = getattr(ops, op)(*there, **outputs)
    for name, a, r, g, e in zip(names, actual, returned, guarded, expected, strict=True):
        assert a.shape == e.shape
        assert a.dtype == torch.int32
        assert a.is_contiguous()
        assert torch.equal(a.cpu(), e), name
        assert r is outputs[name]
        assert torch.equal(r.cpu(), e), f"{name} given"
        assert g[0] == SENTINEL
        assert g[-1] == SENTINEL
    return actual


MODES = ["union", "per_head", "per_layer"]


def rows_of(mode: str, layers: int, heads: int) -> int:
    return {"union": 1, "per_head": heads, "per_layer": layers * heads}[mode]


class TestMoveSources:
    def test_by_hand(self, device: torch.device) -> None:
        arguments = ints([[[2, 5, 7]], [[1, 3, 4]]]), ints([9, 6]), ints([0, 5, 8]), ints([0, 4, 7])
        dense, swa = ops.pack_move_sources(*to(device, arguments), 2, 4, 1, 10, 8)
        assert dense.tolist() == [[2, 5, 7, 9, 10, 1, 3, 4, -1, -1]]
        assert swa.tolist() == [[7, 8, 9, 10, 4, 5, 6, -1]]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("with_window", [False, True])
    @pytest.mark.parametrize(("width", "count"), [(21, 5), (350, 300), (3000, 2500), (1025, 1024)])
    def test_modes(self, device: torch.device, width: int, count: int, with_window: bool, mode: str) -> None:
        requests, layers, heads, tails = 3, 2, 2, [2, 0, 0]
        kept = kept_tokens(requests, rows_of(mode, layers, heads), count, 2, width + 2, seed=1)
        lengths, window = ints([width + 2, width + 2, 0]), 6
        dense = cumulative([count + tails[0], count + tails[1], 0])
        swa = cumulative([window + tails[0], window + tails[1], 0]) if with_window else None
        totals = (count + 2) * requests, (window + 2) * requests if with_window else 0
        check("pack_move_sources", device, kept, lengths, dense, swa, window, layers, heads, *totals)

    def test_minus_one_is_forwarded(self, device: torch.device) -> None:
        kept = kept_tokens(2, 1, 10, 0, 30, seed=2)
        kept[0, 0, 6:] = -1
        check("pack_move_sources", device, kept, ints([40, 30]), ints([0, 12, 22]), None, 0, 3, 2, 22, 0)

    def test_long_tails(self, device: torch.device) -> None:
        kept = kept_tokens(2, 1, 7, 0, 30, seed=3)
        arguments = kept, ints([30, 30]), ints([0, 5000, 9000]), ints([0, 3000, 6000]), 11, 2, 2, 9100, 6100
        check("pack_move_sources", device, *arguments)

    def test_thousands_of_requests(self, device: torch.device) -> None:
        requests = 4000
        kept = kept_tokens(requests, 2, 5, 0, 9, seed=4)
        counts = torch.randint(0, 8, (requests,), generator=torch.Generator().manual_seed(5)).tolist()
        offsets, lengths = cumulative(counts), torch.full((requests,), 9, dtype=torch.int32)
        check("pack_move_sources", device, kept, lengths, offsets, offsets, 3, 4, 2, 30000, 20000)

    def test_more_rows_than_a_grid_has(self, device: torch.device) -> None:
        arguments = kept_tokens(1, 1, 3, 0, 9, seed=6), ints([9]), ints([0, 4]), ints([0, 3]), 2
        check("pack_move_sources", device, *arguments, 1, 70000, 5, 3)


class TestFillMoves:
    def test_by_hand(self, device: torch.device) -> None:
        # Range [2, 6): 3 stays, 7, 8 and 11 fill 2, 4 and 5. The second request is already short enough.
        kept = ints([[[3, 7, 8, 11]], [[1, 2, 3, 4]]])
        arguments = kept, ints([12, 5]), ints([2, 1]), ints([0, 4, 8]), ints([0, 2, 3])
        sources, destinations, tail = ops.pack_fill_moves(*to(device, arguments), 1, 1, 9, 4)
        assert sources.tolist() == [[7, 8, 11, -1, -1, -1, -1, -1, -1]]
        assert destinations.tolist() == [[2, 4, 5, -1, -1, -1, -1, -1, -1]]
        assert tail.tolist() == [[12, 13, -1, -1]]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("width", "count"), [(21, 5), (350, 300), (5000, 2500), (4200, 4100)])
    def test_modes(self, device: torch.device, width: int, count: int, mode: str) -> None:
        requests, layers, heads = 3, 2, 2
        kept = kept_tokens(requests, rows_of(mode, layers, heads), count, 4, width + 4, seed=7)
        lengths, bases = ints([width + 4, width + 4, count + 3]), ints([4, 3, 4])
        most = [max(min(count, int(n - b) - count), 0) for n, b in zip(lengths, bases, strict=True)]
        fill, tail = cumulative(most), cumulative([3, 0, 2])
        check(
            "pack_fill_moves", device, kept, lengths, bases, fill, tail, layers, heads, int(fill[-1]) + 7, 9
        )

    def test_moves_only_what_must(self, device: torch.device) -> None:
        count, length, base = 2048, 2176 + 100, 100
        kept = kept_tokens(2, 4, count, base, length, seed=8)
        arguments = kept, ints([length] * 2), ints([base] * 2), ints([0, 128, 256]), ints([0, 0, 0])
        sources, destinations, _ = check("pack_fill_moves", device, *arguments, 1, 4, 256, 0)
        for r, head in itertools.product(range(2), range(4)):
            mine = slice(128 * r, 128 * r + 128)
            s, d = (t[head, mine][t[head, mine] >= 0].cpu() for t in (sources, destinations))
            before = set(kept[r, head].tolist())
            assert set(s.tolist()) == {t for t in before if t >= base + count}
            assert before - set(s.tolist()) | set(d.tolist()) == set(range(base, base + count))

    def test_below_the_base_and_missing(self, device: torch.device) -> None:
        kept = kept_tokens(3, 2, 30, 0, 80, seed=9)
        kept[0, :, 25:] = -1
        kept[1, 1] = -1
        arguments = kept, ints([80, 80, 80]), ints([10, 20, 49]), ints([0, 30, 60, 90]), ints([0, 1, 2, 3])
        check("pack_fill_moves", device, *arguments, 2, 2, 90, 3)

    def test_too_few_columns_drop_moves(self, device: torch.device) -> None:
        kept = kept_tokens(2, 1, 30, 10, 80, seed=10)
        check(
            "pack_fill_moves",
            device,
            kept,
            ints([80, 80]),
            ints([0, 0]),
            ints([0, 5, 8]),
            ints([0, 0, 0]),
            1,
            2,
            8,
            0,
        )

    def test_thousands_of_requests(self, device: torch.device) -> None:
        requests = 3000
        kept = kept_tokens(requests, 1, 5, 0, 19, seed=11)
        fill, tail = cumulative([5] * requests), cumulative([0, 1, 2] * (requests // 3))
        lengths, bases = (
            torch.full((requests,), 19, dtype=torch.int32),
            ints([i % 3 for i in range(requests)]),
        )
        check("pack_fill_moves", device, kept, lengths, bases, fill, tail, 2, 2, 5 * requests, requests + 5)


class TestBoth:
    @pytest.mark.parametrize(
        "offsets",
        [
            [0, 9, 4, 20],
            [20, 0, 7, 7],
            [3, 3, 3, 30],
            [-6, 10, 12, 60],
            [0, 40, 1, 39],
            [-(2**31), 2**31 - 1, 0, 2],
        ],
    )
    def test_malformed_offsets(self, device: torch.device, offsets: list[int]) -> None:
        kept, lengths = kept_tokens(3, 2, 8, 3, 40, seed=12), ints([40, 44, 48])
        there, other = ints(offsets), ints([5, 2, 30, 12])
        check("pack_move_sources", device, kept, lengths, there, other, 4, 1, 2, 33, 21)
        check("pack_move_sources", device, kept, lengths, other, there, 4, 1, 2, 33, 21)
        check("pack_fill_moves", device, kept, lengths, ints([3, 0, 9]), there, other, 1, 2, 33, 21)
        check("pack_fill_moves", device, kept, lengths, ints([3, 0, 9]), other, there, 1, 2, 33, 21)

    @settings(max_examples=100 if CUDA else 50)
    @given(st.data())
    def test_anything(self, data: st.DataObject) -> None:
        draw = data.draw
        requests, layers, heads = draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        rows, count = rows_of(draw(st.sampled_from(MODES)), layers, heads), draw(st.integers(0, 70))
        low, high = draw(st.integers(0, 9)), 90
        kept = torch.zeros(0, rows, count, dtype=torch.int32)
        if requests:
            kept = kept_tokens(requests, rows, count, low, high, draw(st.integers(0, 10**6)))
        if count:
            kept[..., count - draw(st.integers(0, min(count, 4))) :] = -1
        numbers = st.integers(-3, 200)
        offsets, side = (
            draw(
                st.one_of(
                    st.lists(st.integers(0, 60), min_size=requests, max_size=requests).map(cumulative),
                    st.lists(numbers, min_size=requests + 1, max_size=requests + 1).map(ints),
                )
            )
            for _ in range(2)
        )
        totals = [max(0, int(o.max()) + draw(st.integers(-5, 40))) for o in (offsets, side)]
        lengths = ints([draw(st.integers(60, 120)) for _ in range(requests)])
        bases = ints([draw(st.integers(0, 40)) for _ in range(requests)])
        window = draw(st.integers(0, 9))
        for device in DEVICES:
            check("pack_move_sources", device, kept, lengths, offsets, side, window, layers, heads, *totals)
            check(
                "pack_move_sources", device, kept, lengths, offsets, None, window, layers, heads, totals[0], 0
            )
            check("pack_fill_moves", device, kept, lengths, bases, offsets, side, layers, heads, *totals)

    @pytest.mark.parametrize(("requests", "count"), [(0, 4), (3, 0), (0, 0)])
    def test_empty(self, device: torch.device, requests: int, count: int) -> None:
        kept, zeros = (
            torch.zeros(requests, 1, count, dtype=torch.int32),
            torch.zeros(requests + 1, dtype=torch.int32),
        )
        check("pack_move_sources", device, kept, zeros[1:], zeros, zeros, 0, 2, 2, 5, 3)
        check("pack_move_sources", device, kept, zeros[1:], zeros, None, 0, 2, 2, 0, 0)
        check("pack_fill_moves", device, kept, zeros[1:], zeros[1:], zeros, zeros, 2, 2, 5, 3)
        check("pack_fill_moves", device, kept, zeros[1:], zeros[1:], zeros, zeros, 2, 2, 0, 0)

    def test_strided_inputs_and_outputs(self, device: torch.device) -> None:
        kept = kept_tokens(2, 4, 40, 0, 60, seed=13)
        spread = torch.full((2, 40, 4, 2), -8, dtype=torch.int32)
        spread[..., 0] = kept.transpose(1, 2)
        offsets, lengths = ints([0, 42, 80]), ints([60, 60])
        spaced = torch.stack((offsets, offsets + 1), 1).flatten()[::2]
        arguments = spread[..., 0].transpose(1, 2), lengths, spaced, spaced, 3, 2, 2, 80, 80
        expected = reference.pack_move_sources(kept, lengths, offsets, offsets, 3, 2, 2, 80, 80)
        dense = torch.full((80, 2, 2, 2), SENTINEL, dtype=torch.int32, device=device)
        swa = torch.full((80, 2), SENTINEL, dtype=torch.int32, device=device)
        views = dense[..., 1].permute(1, 2, 0), swa.t()
        returned = ops.pack_move_sources(*to(device, arguments), dense=views[0], swa=views[1])
        assert all(torch.equal(r.cpu(), e) for r, e in zip(returned, expected, strict=True))
        assert bool((dense[..., 0] == SENTINEL).all())
        functional = ops.pack_move_sources(*to(device, arguments))
        assert all(torch.equal(f.cpu(), e) for f, e in zip(functional, expected, strict=True))


def move_arguments() -> dict[str, Any]:
    return {
        "kept": kept_tokens(2, 2, 6, 0, 20, seed=14),
        "valid_lengths": ints([20, 21]),
        "dense_offsets": ints([0, 8, 14]),
        "swa_offsets": ints([0, 5, 8]),
        "window": 3,
        "num_layers": 2,
        "num_kv_heads": 2,
        "dense_total": 14,
        "swa_total": 8,
    }


def fill_arguments() -> dict[str, Any]:
    return {
        "kept": kept_tokens(2, 2, 6, 0, 20, seed=15),
        "valid_lengths": ints([20, 21]),
        "bases": ints([0, 0]),
        "fill_offsets": ints([0, 6, 12]),
        "tail_offsets": ints([0, 2, 2]),
        "num_layers": 2,
        "num_kv_heads": 2,
        "fill_total": 12,
        "tail_total": 2,
    }


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "pack_move_sources": move_arguments,
    "pack_fill_moves": fill_arguments,
}
OPS = list(ARGUMENTS)
LONG = torch.zeros(3, dtype=torch.int64)
BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "pack_move_sources",
        {"kept": torch.zeros(2, 2, 6)},
        TypeError,
        "kept must be torch.int32, got torch.float32",
    ),
    (
        "pack_move_sources",
        {"kept": torch.zeros(2, 3, 6, dtype=torch.int32)},
        ValueError,
        "kept must be int32 [requests, decision_rows, K] with 1, 2 or 4 decision rows, got [2, 3, 6] with "
        "strides"
        " [18, 6, 1]",
    ),
    (
        "pack_move_sources",
        {"kept": ints([[1]])},
        ValueError,
        "kept must be int32 [requests, decision_rows, K] with 1, 2 or 4 decision rows, got [1, 1] with "
        "strides"
        " [1, 1]",
    ),
    (
        "pack_move_sources",
        {"valid_lengths": ints([1])},
        ValueError,
        "valid_lengths must be int32 [requests] = [2], got [1] with strides [1]",
    ),
    (
        "pack_move_sources",
        {"dense_offsets": ints([0, 1])},
        ValueError,
        "dense_offsets must be int32 [requests + 1] = [3], got [2] with strides [1]",
    ),
    (
        "pack_move_sources",
        {"swa_offsets": LONG},
        TypeError,
        "swa_offsets must be torch.int32, got torch.int64",
    ),
    ("pack_move_sources", {"swa_offsets": None}, ValueError,
     "swa_total must be 0 without swa_offsets, got 8"),
    ("pack_move_sources", {"window": -1}, ValueError, "window must be in [0, 2^31), got -1"),
    ("pack_move_sources", {"num_layers": 0}, ValueError, "num_layers must be in [1, 2^31 - 1), got 0"),
    ("pack_move_sources", {"num_kv_heads": 2**31}, ValueError,
     "num_kv_heads must be in [1, 2^31 - 1), got 2147483648"),
    ("pack_move_sources", {"dense_total": -1}, ValueError, "dense_total must be in [0, 2^31 - 1), got -1"),
    ("pack_move_sources", {"swa_total": 2**31}, ValueError,
     "swa_total must be in [0, 2^31 - 1), got 2147483648"),
    ("pack_fill_moves", {"bases": ints([1])}, ValueError,
     "bases must be int32 [requests] = [2], got [1] with strides [1]"),
    ("pack_fill_moves", {"fill_offsets": LONG}, TypeError,
     "fill_offsets must be torch.int32, got torch.int64"),
    ("pack_fill_moves", {"tail_offsets": ints([0])}, ValueError,
     "tail_offsets must be int32 [requests + 1] = [3], got [1] with strides [1]"),
    ("pack_fill_moves", {"fill_total": -1}, ValueError, "fill_total must be in [0, 2^31 - 1), got -1"),
    ("pack_fill_moves", {"tail_total": -2}, ValueError, "tail_total must be in [0, 2^31 - 1), got -2"),
]  # fmt: skip

BAD_OUTPUTS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("pack_move_sources", {"dense": torch.zeros(2, 13)}, TypeError,
     "dense must be torch.int32, got torch.float32"),
    ("pack_move_sources", {"dense": torch.zeros(2, 13, dtype=torch.int32)}, ValueError,
     "dense must be int32 [2, 14], got [2, 13] with strides [13, 1]"),
    ("pack_move_sources", {"swa": torch.zeros(1, 2, 8, dtype=torch.int32)}, ValueError,
     "swa must be int32 [2, 8], got [1, 2, 8] with strides [16, 8, 1]"),
    ("pack_move_sources", {"swa": torch.zeros(0, dtype=torch.int32)}, ValueError,
     "swa must be int32 [2, 8], got [0] with strides [1]"),
    ("pack_move_sources", {"swa": None}, ValueError, "swa must be given beside the other output, got None"),
    ("pack_move_sources", {"dense": None}, ValueError,
     "dense must be given beside the other output, got None"),
    ("pack_fill_moves", {"sources": torch.zeros(2, 12, dtype=torch.int64)}, TypeError,
     "sources must be torch.int32, got torch.int64"),
    ("pack_fill_moves", {"destinations": torch.zeros(12, 2, dtype=torch.int32)}, ValueError,
     "destinations must be int32 [2, 12], got [12, 2] with strides [2, 1]"),
    ("pack_fill_moves", {"tail_sources": torch.zeros(2, 3, dtype=torch.int32)}, ValueError,
     "tail_sources must be int32 [2, 2], got [2, 3] with strides [3, 1]"),
    ("pack_fill_moves", {"destinations": None}, ValueError,
     "destinations must be given beside the other outputs, got None"),
]  # fmt: skip


def moved(given: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}


def outputs_for(op: str, device: torch.device | str) -> dict[str, Any]:
    shapes = {"dense": (2, 14), "swa": (2, 8)}
    if op == "pack_fill_moves":
        shapes = {"sources": (2, 12), "destinations": (2, 12), "tail_sources": (2, 2)}
    return {k: torch.full(v, SENTINEL, dtype=torch.int32, device=device) for k, v in shapes.items()}


class TestErrors:
    @pytest.mark.parametrize(
        ("op", "changes", "kind", "text"), BAD, ids=[f"{b[0]}-{next(iter(b[1]))}" for b in BAD]
    )
    def test_arguments(
        self, device: torch.device, op: str, changes: dict[str, Any], kind: type[Exception], text: str
    ) -> None:
        given = moved(ARGUMENTS[op]() | changes, device)
        with pytest.raises(kind) as error:
            getattr(ops, op)(**given)
        assert str(error.value) == f"kvc.{op}: {text}"
        with pytest.raises((ValueError, RuntimeError)) as raw:
            getattr(torch.ops.kvc, op)(**given)
        assert f"kvc.{op}: {text}" in str(raw.value)

    @pytest.mark.parametrize(("op", "changes", "kind", "text"), BAD_OUTPUTS)
    def test_outputs(
        self, device: torch.device, op: str, changes: dict[str, Any], kind: type[Exception], text: str
    ) -> None:
        outputs = outputs_for(op, device) | moved(changes, device)
        with pytest.raises(kind) as error:
            getattr(ops, op)(**moved(ARGUMENTS[op](), device), **outputs)
        assert str(error.value) == f"kvc.{op}: {text}"
        untouched = [o for name, o in outputs.items() if name not in changes]
        assert all(bool((o == SENTINEL).all()) for o in untouched)

    @pytest.mark.cuda
    @pytest.mark.parametrize("op", OPS)
    def test_devices(self, op: str) -> None:
        for name in ("valid_lengths", *(n for n in ARGUMENTS[op]() if n.endswith("offsets"))):
            given = moved(ARGUMENTS[op](), "cuda")
            given[name] = given[name].cpu()
            with pytest.raises(TypeError, match=rf"^kvc.{op}: {name} must be on cuda:0, got cpu$"):
                getattr(ops, op)(**given)

    @pytest.mark.parametrize(
        ("op", "changes", "text"),
        [
            ("pack_move_sources", {"dense_offsets": ints([0, 8, 7])},
             "dense_offsets[2] must be in [8, 14], got 7"),
            ("pack_move_sources", {"swa_offsets": ints([0, 5, 9])},
             "swa_offsets[2] must be in [5, 8], got 9"),
            ("pack_move_sources", {"valid_lengths": ints([20, -1])},
             "valid_lengths[1] must be at least 0, got -1"),
            ("pack_move_sources", {"valid_lengths": ints([20, 2])},
             "valid_lengths[1] must be at least the window, 3, got 2"),
            ("pack_move_sources", {"kept": ints([[[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 3, 5]]])},
             "kept (request 1, row 0, index 4) must be above the ordinal before it, 3, got 3"),
            ("pack_move_sources", {"kept": ints([[[0, 1, 2, 3, 4, 20]], [[0, 1, 2, 3, 4, 5]]])},
             "kept (request 0, row 0, index 5) must be in [0, 20) or -1, got 20"),
            ("pack_move_sources", {"kept": ints([[[0, 1, -1, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]]])},
             "kept (request 0, row 0, index 3) must be -1 behind a -1, got 3"),
            ("pack_fill_moves", {"fill_offsets": ints([0, 13, 12])},
             "fill_offsets[1] must be in [0, 12], got 13"),
            ("pack_fill_moves", {"tail_offsets": ints([1, 0, 0])},
             "tail_offsets[1] must be in [1, 2], got 0"),
            ("pack_fill_moves", {"bases": ints([0, -3])}, "bases[1] must be at least 0, got -3"),
            ("pack_fill_moves", {"kept": ints([[[0, 1, 2, 9, 10, 11]]] * 2), "fill_offsets": ints([0, 2, 9])},
             "fill_offsets[1] must be at least 3 for the moves of row 0, got 2"),
            ("pack_fill_moves", {"kept": ints([[[0, 1, 2, 3, 4, 25]]] * 2)},
             "kept (request 0, row 0, index 5) must be in [0, 20) or -1, got 25"),
        ],
    )  # fmt: skip
    def test_debug_mode(
        self, device: torch.device, debug_mode: None, op: str, changes: dict[str, Any], text: str
    ) -> None:
        given, outputs = moved(ARGUMENTS[op]() | changes, device), outputs_for(op, device)
        with pytest.raises(ValueError) as error:  # noqa: PT011  (the text is compared below)
            getattr(ops, op)(**given, **outputs)
        assert str(error.value) == f"kvc.{op}: {text}"
        assert all(bool((o == SENTINEL).all()) for o in outputs.values())

    def test_debug_mode_accepts_what_is_right(self, device: torch.device, debug_mode: None) -> None:
        kept = kept_tokens(3, 4, 30, 4, 80, seed=16)
        kept[0, :, 25:] = -1
        kept[2] = 99  # of a request that moves nothing
        check(
            "pack_move_sources", device, kept, ints([80, 80, 0]), ints([0, 32, 62, 62]), None, 0, 2, 2, 70, 0
        )
        lengths, bases = ints([80, 80, 20]), ints([4, 0, 3])
        fill, tail = ints([0, 30, 60, 60]), ints([0, 2, 2, 2])
        check("pack_fill_moves", device, kept, lengths, bases, fill, tail, 2, 2, 60, 5)


class TestFramework:
    @pytest.mark.parametrize("op", OPS)
    def test_opcheck(self, device: torch.device, op: str) -> None:
        given = moved(ARGUMENTS[op](), device)
        packet = getattr(torch.ops.kvc, op)
        torch.library.opcheck(packet.default, tuple(given.values()))
        torch.library.opcheck(packet.out, tuple(given.values()), outputs_for(op, device))
        given["kept"] = kept_tokens(2, 4, 6, 0, 20, seed=17).to(device)
        torch.library.opcheck(packet.default, tuple(given.values()))

    @pytest.mark.parametrize("op", OPS)
    def test_compile(self, device: torch.device, op: str) -> None:
        given = moved(ARGUMENTS[op](), device)
        expected = getattr(ops, op)(**given)
        compiled = torch.compile(lambda **k: getattr(ops, op)(**k), fullgraph=True, backend="aot_eager")
        for result in (compiled(**given), compiled(**given, **outputs_for(op, device))):
            assert all(torch.equal(a, e) for a, e in zip(result, expected, strict=True))

    def test_schemas(self) -> None:
        for op, names in (
            ("pack_move_sources", ["dense", "swa"]),
            ("pack_fill_moves", ["sources", "destinations", "tail_sources"]),
        ):
            functional, out = (getattr(getattr(torch.ops.kvc, op), o)._schema for o in ("default", "out"))
            assert [r.name for r in functional.returns] == names
            assert not out.returns
            extra = out.arguments[len(functional.arguments) :]
            assert [a.name for a in extra] == names
            assert all(a.kwarg_only and a.alias_info.is_write for a in extra)
            shared = zip(out.arguments, functional.arguments, strict=False)
            assert all((a.name, str(a.type)) == (b.name, str(b.type)) for a, b in shared)


@pytest.mark.cuda
class TestCuda:
    @pytest.mark.parametrize("op", OPS)
    def test_graph_replay_reads_new_contents(self, op: str) -> None:
        given = moved(ARGUMENTS[op](), "cuda")
        getattr(ops, op)(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = getattr(ops, op)(**given)
        for seed in (18, 19):
            for name, value in given.items():
                if name == "kept":
                    value.copy_(kept_tokens(2, 2, 6, 0, 20, seed))
                elif isinstance(value, Tensor) and name.endswith("offsets"):
                    value.copy_(value // 2 + seed % 2)
                elif isinstance(value, Tensor):
                    value += 1
            graph.replay()
            expected = getattr(reference, op)(**moved(given, "cpu"))
            assert all(torch.equal(h.cpu(), e) for h, e in zip(held, expected, strict=True))

    @pytest.mark.parametrize("op", OPS)
    def test_first_call_inside_a_capture(self, op: str) -> None:
        # A process of its own, so that the kernel is loaded during the capture.
        script = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import torch, kvc, test_compaction_pack as t\n"
            f"given = t.moved(t.ARGUMENTS[{op!r}](), 'cuda')\n"
            "torch.cuda.synchronize()\n"
            "graph = torch.cuda.CUDAGraph()\n"
            f"with torch.cuda.graph(graph): held = getattr(kvc, {op!r})(**given)\n"
            "graph.replay()\n"
            f"expected = getattr(t.reference, {op!r})(**t.moved(given, 'cpu'))\n"
            "assert all(torch.equal(h.cpu(), e) for h, e in zip(held, expected))\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)

    @pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
    def test_calls_that_follow_each_other(self, captured: bool) -> None:
        # Kernels may be launched while the one before ends. Each call reads what the one before wrote and writes what
        # that one read, between neighbours that are kernels, copies and fills, on two streams that fork and join.
        n, count, calls = 24, 3000, 40
        size = n * n * count
        start = torch.arange(size, dtype=torch.int32, device="cuda").view(n, n, count)
        lengths = torch.zeros(n, dtype=torch.int32, device="cuda")
        offsets = torch.arange(n + 1, dtype=torch.int32, device="cuda") * count
        streams = [torch.cuda.Stream() for _ in range(2)]
        pairs = [[torch.empty_like(start) for _ in range(2)] for _ in streams]
        swa = torch.empty(n, 0, dtype=torch.int32, device="cuda")

        def run() -> None:
            current = torch.cuda.current_stream()
            for side, stream in enumerate(streams):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    pair = pairs[side]
                    pair[0].copy_(start)
                    for call in range(calls):
                        kept, dense = pair[call % 2], pair[1 - call % 2]
                        if call % 5 == side:
                            dense.zero_()
                        moves = (kept, lengths, offsets, None, 0, 1, n, n * count, 0)
                        ops.pack_move_sources(*moves, dense=dense.view(n, -1), swa=swa)
                        if call % 7 == side:
                            dense.add_(1)
                            kept.zero_()
                current.wait_stream(stream)

        if captured:
            run()  # loads the kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            for pair in pairs:
                pair[0].fill_(-9)
        for _ in range(10):
            graph.replay() if captured else run()
            for side, pair in enumerate(pairs):  # an even number of transpositions
                assert torch.equal(pair[0], start + len(range(side, calls, 7)))

    def test_outputs_beyond_2_to_31_elements(self) -> None:
        heads, total = 16, (1 << 27) + 4096
        if torch.cuda.mem_get_info()[0] < 12 << 30:
            pytest.skip("needs 12 GiB")
        kept = kept_tokens(1, heads, 3000, 0, 4000, seed=20)
        offsets = ints([total - 3002, total])
        arguments = kept.cuda(), ints([4000]).cuda(), offsets.cuda(), None, 0, 1, heads, total, 0
        dense, _ = ops.pack_move_sources(*arguments)
        assert torch.equal(dense[:, -3002:-2].cpu(), kept[0])
        assert dense[:, -2:].tolist() == [[4000, 4001]] * heads
        assert int((dense[:, :-3002] != -1).count_nonzero()) == 0


INTERPRETED = Path(__file__).with_name("interpret.py")


def test_triton_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(INTERPRETED), "compaction"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("cases agree")


def test_outputs_that_share_memory() -> None:
    kept = torch.tensor([[[0, 2, 5, 6]]] * 2, dtype=torch.int32)
    lengths, dense_offsets, swa_offsets = (
        torch.tensor(v, dtype=torch.int32) for v in ([8, 7], [0, 5, 9], [0, 3, 5])
    )
    arguments = (kept, lengths, dense_offsets, swa_offsets, 2, 2, 2, 9, 5)
    dense, swa = torch.full((2, 9), 77, dtype=torch.int32), torch.full((2, 5), 77, dtype=torch.int32)
    both = torch.full((32,), 77, dtype=torch.int32)
    cases = [
        (dense, swa[:1].expand(2, 5), "swa must be free of elements that share memory"),
        (both[:18].view(2, 9), both[12:22].view(2, 5), "swa must be apart from dense"),
    ]
    for first, second, text in cases:
        with pytest.raises(ValueError, match=f"^kvc.pack_move_sources: {text}"):
            kvc.pack_move_sources(*arguments, dense=first, swa=second)
        assert int(first.min()) == 77
        assert int(second.min()) == 77
