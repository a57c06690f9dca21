"""Top-k selection and tie settling against the stable sort, exactly, on every device.

The classes name what went wrong in public kernels: scores that share their leading bits, ties at the last place,
lengths that are not those of the memory, and state left behind by the row or the call before.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulate
import kvc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc.reference import topk as reference
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if CUDA else ["cpu"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SENTINEL = 0x5EED
INF, NAN = float("inf"), float("nan")


def ints(values: Any, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def full(scores: Tensor) -> Tensor:
    return torch.full((scores.shape[0],), scores.shape[1], dtype=torch.int32)


def hostile(
    scores: Tensor, lengths: Tensor, k: int, dtype: torch.dtype = torch.int32, seed: int = 0
) -> Tensor:
    """An answer that takes the last of equal scores, in no order, with -1 anywhere."""
    width = scores.shape[1]
    values = scores.double()
    values = values.masked_fill(values.isnan() | (values == -INF), -1e300)
    values = values.masked_fill(torch.arange(width, device=values.device) >= lengths.unsqueeze(1), -INF)
    order = width - 1 - values.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :k]
    order = order.masked_fill(values.gather(1, order) == -INF, -1)
    order = torch.nn.functional.pad(order, (0, k - order.shape[1]), value=-1)
    shuffle = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return order[:, shuffle.to(order.device)].to(dtype)


def place(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same values and strides on a device."""
    if tensor.device.type == torch.device(device).type or tensor.is_contiguous():
        return tensor.to(device)
    base = tensor._base
    assert base is not None
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check(
    device: torch.device | str, scores: Tensor, lengths: Tensor, k: int, bases: Tensor | None = None
) -> Tensor:
    """Both ops, returning and into a given output between sentinels, against the reference."""
    there = place(scores, device), lengths.to(device)
    base = None if bases is None else bases.to(device)
    wide = torch.int64 if k % 2 else torch.int32
    if scores.numel() < 200_000:
        expected = reference.radix_topk(scores, lengths, k, bases)
        provisional = hostile(scores, lengths, k, wide).to(device)
    else:  # sorted where that is fast
        expected = reference.radix_topk(*there, k, base).cpu()
        provisional = hostile(*there, k, wide)

    calls: dict[str, Callable[..., Tensor]] = {
        "radix_topk": lambda **out: kvc.radix_topk(*there, k, base, **out),
        "settle_ties": lambda **out: kvc.settle_ties(*there, provisional, base, **out),
    }
    for name, call in calls.items():
        actual = call()
        assert actual.dtype == torch.int32
        assert actual.is_contiguous()
        same(actual, expected, name)
        guarded = torch.full((expected.numel() + 2,), SENTINEL, dtype=torch.int32, device=device)
        out = guarded[1:-1].view(expected.shape)
        assert call(out=out) is out
        same(out, expected, f"{name} into out")
        assert guarded[0] == SENTINEL
        assert guarded[-1] == SENTINEL
    return expected


def same(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.shape == expected.shape
    if not torch.equal(actual.cpu(), expected):
        wrong = (actual.cpu() != expected).any(1).nonzero().flatten().tolist()
        raise AssertionError(f"{name}: rows {wrong[:10]} of {len(expected)} differ")


def near_equal(width: int) -> Tensor:
    """Neighbours in fp32 that no leading 19 bits tell apart."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(3))
    return (order.int() % 8192 + 0x3F800000).view(torch.float32)


def signed_zeros(width: int) -> Tensor:
    zeros = torch.zeros(width)
    zeros[::3] = -0.0
    zeros[::97] = 1.0
    zeros[5::89] = -1.0
    return zeros


def non_finite(width: int) -> Tensor:
    strange = torch.tensor([NAN, INF, -INF, -NAN, 3e38, -3e38, 1e-45, -1e-45])
    values = normal(width, seed=4)
    values[::2] = strange[torch.arange((width + 1) // 2) % 8]
    return values


def two_level(width: int) -> Tensor:
    """Two plateaus: the second begins within what is selected."""
    values = torch.zeros(width)
    values[torch.randperm(width, generator=torch.Generator().manual_seed(5))[: width // 3]] = 1.0
    return values


# Rows by name, as functions of their width: what kernels have answered wrongly, or slowly.
ROWS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: normal(n, seed=1),
    "narrow range": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(2)) * 0.2 + 10.0,
    "near equal": near_equal,
    "all equal": lambda n: torch.full((n,), 0.7),
    "two values": two_level,
    "mostly zeros": lambda n: (normal(n, seed=6) - 1.28).relu(),
    "zeros of both signs": signed_zeros,
    "coarse": lambda n: normal(n, seed=7).bfloat16().float(),
    "all -inf": lambda n: torch.full((n,), -INF),
    "all NaN": lambda n: torch.full((n,), NAN),
    "all inf": lambda n: torch.full((n,), INF),
    "non-finite": non_finite,
    "mostly -inf": lambda n: normal(n, seed=8).masked_fill(torch.arange(n) % 50 != 7, -INF),
    "negative": lambda n: -normal(n, seed=9).abs() - 0.1,
    "ascending": lambda n: torch.arange(n).float() - n / 2,
    "descending": lambda n: n / 3 - torch.arange(n).float(),
    "trend": lambda n: normal(n, seed=10) + torch.arange(n) / max(n, 1) * 8,
    "period 32": lambda n: (torch.arange(n) % 32 == 5).float(),
    "period 1,024": lambda n: (torch.arange(n) % 1024).float(),
    "period 4,096 of levels": lambda n: (torch.arange(n) % 4096 // 512).float(),
    "one bucket and outliers": lambda n: near_equal(n) + (torch.arange(n) % 1000 == 3) * 100.0,
    "huge exponents": lambda n: torch.exp2(normal(n, seed=11).clamp(-3, 3) * 40),
    "subnormal": lambda n: normal(n, seed=12) * 1e-40,
    "last column wins": lambda n: torch.arange(n).eq(n - 1).float(),
}


class TestRows:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", ROWS)
    def test_rows(self, device: torch.device, name: str, dtype: torch.dtype) -> None:
        for width, ks in ((2304, (1, 512, 2048, 2303, 2304, 2400)), (9001, (7, 3000, 8192))):
            scores = ROWS[name](width).to(dtype)
            rows = torch.stack((scores, scores.roll(177), scores.flip(0)))
            for k in ks:
                check(device, rows, ints([width, width - 3, width // 2]), k, ints([0, 100, 7]))

    @pytest.mark.cuda
    @pytest.mark.parametrize("name", ROWS)
    def test_long_rows(self, name: str) -> None:
        for width, ks in ((16384, (512, 8192)), (65536, (2048, 8192)), (262144, (512, 2048, 20000))):
            scores = ROWS[name](width)
            rows = torch.stack((scores, scores.roll(1777), scores.flip(0), scores.roll(-5)))
            for k in ks:
                check("cuda", rows, ints([width, width - 1, width // 2 + 13, width]), k)

    @pytest.mark.parametrize(
        "k", [1, 2, 31, 32, 33, 100, 511, 1024, 2047, 2049, 4096, 5000, 8193, 16384, 20000]
    )
    def test_k(self, device: torch.device, k: int) -> None:
        rows = torch.stack((normal(20500), (normal(20500, seed=1) - 1.28).relu(), ROWS["coarse"](20500)))
        check(device, rows, ints([20500, 20499, 20001]), k)

    def test_last_place_on_a_plateau(self, device: torch.device) -> None:
        # The plateau ends, begins, or covers the last place.
        for above in (0, 1, 99, 100, 101):
            scores = torch.zeros(3, 1000)
            scores[:, 1000 - above :] = 2.0
            scores[:, ::7] -= 1.0
            check(device, scores, ints([1000, 998, 500]), 100)

    def test_every_k_of_a_short_row(self, device: torch.device) -> None:
        scores = torch.stack([ROWS[name](70) for name in ROWS])
        for k in range(1, 73):
            check(device, scores, full(scores), k)

    @pytest.mark.cuda
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_many_long_rows(self, dtype: torch.dtype) -> None:
        # More than a GPU has multiprocessors: a block of settle_ties then reads a row alone.
        width = 17_001
        scores = torch.stack([ROWS[name](width).roll(177 * i) for i in range(9) for name in ROWS]).to(dtype)
        lengths = ints([max(width - i % 5 * 3999, 0) for i in range(len(scores))])
        bases = torch.arange(len(scores), dtype=torch.int32)
        for k in (7, 500, 5001):
            check("cuda", scores, lengths, k, bases)

    @pytest.mark.cuda
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("width", [9001, 16_379, 65_529, 70_001, 262_137])
    def test_few_long_rows(self, width: int, dtype: torch.dtype) -> None:
        # Blocks of a cluster share a row of settle_ties, where there are clusters.
        scores = torch.stack([ROWS[name](width) for name in ROWS]).to(dtype)
        lengths = ints([max(width - i % 5 * width // 4, 0) for i in range(len(scores))])
        for k in (7, 2048, 8192):
            check("cuda", scores, lengths, k, torch.arange(len(scores), dtype=torch.int32))

    @pytest.mark.cuda
    def test_one_tie_for_the_last_place(self) -> None:
        # What a guess from a part of an answer misses.
        width, k = 30_000, 8192
        order = [torch.randperm(width, generator=torch.Generator().manual_seed(i)) for i in range(200)]
        scores = torch.stack(order).float()
        scores[scores == width - k - 1] = width - k  # the values of ranks k and k + 1
        check("cuda", scores, full(scores), k)

    @pytest.mark.cuda
    def test_all_zero_rows_by_the_hundred(self) -> None:
        # What overflows the buffers of every block at once: tests/run_gpu.sh looks for races here.
        rows, width, k = 512, 131_072, 2048
        scores = torch.zeros(rows, width, device="cuda")
        lengths = full(scores).cuda()
        last = torch.arange(width - k, width, device="cuda").expand(rows, k).contiguous()
        first = torch.arange(k, dtype=torch.int32).expand(rows, k)
        same(kvc.radix_topk(scores, lengths, k), first, "radix_topk")
        same(kvc.settle_ties(scores, lengths, last), first, "settle_ties")

    @pytest.mark.parametrize("width", [1_000_003, 1 << 20])
    def test_a_million_columns(self, device: torch.device, width: int) -> None:
        rows = torch.stack((normal(width), (normal(width, seed=1) - 1.28).relu()))
        check(device, rows, ints([width, width - 17]), 2048)
        check(device, rows[:1], ints([width]), 20000)

    def test_bfloat16_negatives_by_hand(self, device: torch.device) -> None:
        scores = torch.tensor([[-1.0, -2.0, -0.5, -4.0, -0.5, -1.0]], dtype=torch.bfloat16)
        assert check(device, scores, ints([6]), 3).tolist() == [[0, 2, 4]]

    def test_by_hand(self, device: torch.device) -> None:
        scores = torch.tensor([[0.0, NAN, 3.0, -0.0, -INF, 3.0, INF], [1.0, 1.0, 1.0, 2.0, 1.0, 9.0, 9.0]])
        result = check(device, scores, ints([7, 5]), 5, ints([10, 0]))
        assert result.tolist() == [[10, 12, 13, 15, 16], [0, 1, 2, 3, 4]]
        # NaN and -inf are equal: the lower index wins.
        assert check(device, scores, ints([7, 7]), 6).tolist()[0] == [0, 1, 2, 3, 5, 6]
        assert check(device, scores, ints([3, 0]), 4).tolist() == [[0, 1, 2, -1], [-1] * 4]

    def test_the_reference_is_not_torch_topk(self) -> None:
        scores = (normal(1, 5000) - 1.28).relu()
        expected = sorted(range(5000), key=lambda i: (-float(scores[0, i]), i))[:2000]
        assert reference.radix_topk(scores, full(scores), 2000)[0].tolist() == sorted(expected)


class TestLengths:
    @pytest.mark.parametrize("width", [64, 1000, 4099, 40000])
    def test_edges(self, device: torch.device, width: int) -> None:
        k = min(300, width // 2)
        lengths = [-(2**31), -1, 0, 1, k - 1, k, k + 1, width - 1, width, width + 1, 2**31 - 1]
        scores = (normal(len(lengths), width) * 3).round()
        check(device, scores, ints(lengths), k)

    def test_every_length(self, device: torch.device) -> None:
        # No multiple of a vector among most of them, and what lies behind the end is larger.
        scores = normal(301, 300)
        lengths = ints(list(range(301)))
        scores.masked_fill_(torch.arange(300) >= lengths.unsqueeze(1), INF)
        check(device, scores, lengths, 128)
        check(device, scores, lengths, 5)

    @pytest.mark.parametrize("width", [2304, 65536])
    def test_short_between_long(self, device: torch.device, width: int) -> None:
        # Rows that need no selection leave nothing behind for the next one.
        k = 512
        lengths = [width, k - 1, width - 3, 0, width, k, width - 1, 1, k + 1, width] * 4
        scores = (normal(len(lengths), width, seed=2) * 50).round()
        check(device, scores, ints(lengths), k)

    def test_short_rows_in_wide_memory(self, device: torch.device) -> None:
        scores = normal(6, 200_000, seed=3)
        scores[:, 3000:] += 100
        check(device, scores, ints([10, 3000, 2999, 513, 511, 0]), 512)

    def test_ends_beyond_the_width(self, device: torch.device) -> None:
        scores = normal(2, 40, seed=4)
        check(device, scores, ints([1000, 41]), 50)


class TestLayouts:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("offset", range(9))
    def test_unaligned(self, device: torch.device, offset: int, dtype: torch.dtype) -> None:
        for width, stride in ((1021, 1027), (1024, 1024), (17000, 17001)):
            memory = torch.full((offset + 3 * stride + 8,), INF, dtype=dtype)
            scores = memory[offset:].as_strided((3, width), (stride, 1))
            scores.copy_((normal(3, width) * 20).round())
            check(device, scores, ints([width, width - 1, width - 5]), 400)

    @pytest.mark.parametrize("rows", [1, 5])
    def test_padded_stride(self, device: torch.device, rows: int) -> None:
        memory = torch.full((rows, 6000), INF)
        scores = memory[:, :5000]
        scores.copy_((normal(rows, 5000) - 1.28).relu())
        check(device, scores, full(scores), 600)

    def test_a_row_shared_by_all(self, device: torch.device) -> None:
        scores = (normal(1, 3000) * 10).round().expand(6, 3000)
        check(device, scores, ints([3000, 100, 2999, 0, 1500, 3000]), 200)

    def test_strided_vectors_and_provisional(self, device: torch.device) -> None:
        scores = (normal(4, 500) * 10).round()
        lengths, bases = ints([500, 400, 3, 77]), ints([5, 6, 7, 8])
        expected = reference.radix_topk(scores, lengths, 60, bases)
        spread = torch.stack((lengths, lengths * 0, bases), 1).to(device)
        provisional = hostile(scores, lengths, 60).t().contiguous().t().to(device)
        views = spread[:, 0], spread[:, 2]
        assert torch.equal(kvc.radix_topk(scores.to(device), views[0], 60, views[1]).cpu(), expected)
        settled = kvc.settle_ties(scores.to(device), views[0], provisional, views[1])
        assert torch.equal(settled.cpu(), expected)

    def test_strided_output(self, device: torch.device) -> None:
        scores, lengths = (normal(3, 500) * 10).round(), ints([500, 20, 400])
        expected = reference.radix_topk(scores, lengths, 50)
        memory = torch.full((50, 3, 2), SENTINEL, dtype=torch.int32, device=device)
        out = memory[..., 1].t()
        kvc.radix_topk(scores.to(device), lengths.to(device), 50, out=out)
        assert torch.equal(out.cpu(), expected)
        out.fill_(SENTINEL)
        provisional = hostile(scores, lengths, 50).to(device)
        kvc.settle_ties(scores.to(device), lengths.to(device), provisional, out=out)
        assert torch.equal(out.cpu(), expected)
        assert bool((memory[..., 0] == SENTINEL).all())

    @pytest.mark.parametrize(("rows", "width"), [(33000, 70), (70001, 9)])
    def test_more_rows_than_a_grid_has(self, device: torch.device, rows: int, width: int) -> None:
        scores = (normal(rows, width) * 3).round()
        lengths = torch.arange(rows, dtype=torch.int32) % (width + 2) - 1
        check(device, scores, lengths, 5, torch.arange(rows, dtype=torch.int32))

    @pytest.mark.parametrize(
        ("rows", "width", "k"), [(0, 10, 3), (3, 0, 2), (0, 0, 1), (1, 1, 1), (2, 5, 1000)]
    )
    def test_empty_and_tiny(self, device: torch.device, rows: int, width: int, k: int) -> None:
        check(device, torch.ones(rows, width), torch.full((rows,), width, dtype=torch.int32), k)

    def test_no_provisional_columns(self, device: torch.device) -> None:
        provisional = torch.zeros(3, 0, dtype=torch.int64, device=device)
        result = kvc.settle_ties(torch.ones(3, 9, device=device), ints([9] * 3, device), provisional)
        assert result.shape == (3, 0)


class TestProvisional:
    def test_indices_that_do_not_count(self, device: torch.device) -> None:
        scores, lengths, k = (normal(5, 900) * 9).round(), ints([900, 500, 40, 0, 900]), 64
        expected = reference.radix_topk(scores, lengths, k)
        for dtype in (torch.int32, torch.int64):
            provisional = hostile(scores, lengths, k, dtype)
            absent = provisional < 0
            strange = torch.tensor([-1, -7, 900, 2**31 - 1, -(2**31)], dtype=dtype)
            provisional[absent] = strange[torch.arange(int(absent.sum())) % 5]
            if dtype == torch.int64:  # their low halves are columns of the row
                provisional[absent] = torch.where(provisional[absent] == -7, 2**32 + 3, provisional[absent])
                provisional[absent] = torch.where(
                    provisional[absent] == 900, -(2**32) + 3, provisional[absent]
                )
            settled = kvc.settle_ties(scores.to(device), lengths.to(device), provisional.to(device))
            assert torch.equal(settled.cpu(), expected)

    def test_fewer_than_k(self, device: torch.device) -> None:
        scores, lengths = (normal(4, 5000) * 9).round(), ints([5000, 4000, 10, 5000])
        provisional = torch.full((4, 300), -1, dtype=torch.int64)
        for row, count in enumerate((0, 1, 10, 299)):
            mine = slice(row, row + 1)
            if count:
                provisional[mine, 300 - count :] = hostile(scores[mine], lengths[mine], count, torch.int64)
        expected = reference.settle_ties(scores, lengths, provisional)
        assert (expected >= 0).sum(1).tolist() == [0, 1, 10, 299]
        settled = kvc.settle_ties(scores.to(device), lengths.to(device), provisional.to(device))
        assert torch.equal(settled.cpu(), expected)

    @pytest.mark.parametrize(("width", "k"), [(100, 40), (30000, 3000), (30000, 20000)])
    def test_broken_promises_stay_inside(self, device: torch.device, width: int, k: int) -> None:
        scores, generator = (normal(6, width) * 3).round(), torch.Generator().manual_seed(1)
        lengths = ints([width, width - 1, width // 2, 5, 0, width])
        provisional = torch.randint(-2, width + 2, (6, k), generator=generator)  # repeated, wrong, missing
        provisional[5] = 7
        guarded = torch.full((6 * k + 2,), SENTINEL, dtype=torch.int32, device=device)
        out = guarded[1:-1].view(6, k)
        kvc.settle_ties(scores.to(device), lengths.to(device), provisional.to(device), out=out)
        assert guarded[[0, -1]].tolist() == [SENTINEL] * 2
        assert bool(((out >= -1) & (out.cpu() < lengths.clamp(0, width).unsqueeze(1)).to(device)).all())

    @pytest.mark.parametrize("kind", [torch.topk, torch.sort], ids=["topk", "sort"])
    def test_answers_of_torch(self, device: torch.device, kind: Any) -> None:
        scores = (normal(3, 20000) - 1.28).relu()
        there = scores.to(device)
        answer = (
            there.topk(4096).indices if kind is torch.topk else there.sort(descending=True).indices[:, :4096]
        )
        expected = reference.radix_topk(scores, full(scores), 4096)
        assert torch.equal(kvc.settle_ties(there, full(scores).to(device), answer).cpu(), expected)
        assert torch.equal(kvc.radix_topk(there, full(scores).to(device), 4096).cpu(), expected)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, Tensor | None]:
    rows, width = draw(st.integers(0, 5)), draw(st.one_of(st.integers(0, 80), st.integers(80, 9000)))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 10**6))
    offset, padding = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((offset + rows * (width + padding) + 1,), INF, dtype=dtype)
    scores = memory[offset:].as_strided((rows, width), (width + padding, 1))
    levels = draw(st.sampled_from([0.0, 0.6, 3.0, 1000.0, None]))
    values = torch.randn(rows, width, generator=generator)
    scores.copy_(values if levels is None else (values * levels).round())
    share = draw(st.sampled_from([0.0, 0.0, 0.05, 0.9]))
    strange = torch.tensor([NAN, INF, -INF, -0.0, 0.0]).to(dtype)
    where = torch.rand(rows, width, generator=generator) < share
    scores[where] = strange[torch.randint(0, 5, (int(where.sum()),), generator=generator)]
    k = draw(st.one_of(st.integers(1, 40), st.integers(1, max(1, width + 3))))
    some = st.one_of(st.sampled_from([-1, 0, 1, k - 1, k, k + 1, width, width + 1]), st.integers(0, width))
    lengths = ints(draw(st.lists(some, min_size=rows, max_size=rows)))
    bases = draw(
        st.one_of(st.none(), st.lists(st.integers(0, 2**30), min_size=rows, max_size=rows).map(ints))
    )
    return scores, lengths, k, bases


@settings(max_examples=300 if CUDA else 60)
@given(cases())
def test_anything(case: tuple[Tensor, Tensor, int, Tensor | None]) -> None:
    for device in DEVICES:
        check(device, *case)


def topk_arguments() -> dict[str, Any]:
    return {
        "scores": (normal(3, 40) * 3).round(),
        "lengths": ints([40, 9, 31]),
        "k": 8,
        "bases": ints([1, 2, 3]),
    }


def settle_arguments() -> dict[str, Any]:
    given = topk_arguments()
    provisional = hostile(given["scores"], given["lengths"], given.pop("k"), torch.int64)
    return {**given, "provisional": provisional}


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "radix_topk": topk_arguments,
    "settle_ties": settle_arguments,
}
OPS = list(ARGUMENTS)


def expected_of(op: str, given: dict[str, Any]) -> Tensor:
    result: Tensor = getattr(reference, op)(**moved(given, "cpu"))
    return result


def moved(given: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}


def an_output(device: torch.device | str = "cpu") -> Tensor:
    return torch.full((3, 8), SENTINEL, dtype=torch.int32, device=device)


BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scores": torch.zeros(3, 40, dtype=torch.float64)}, TypeError,
     "scores must be torch.float32, torch.float16 or torch.bfloat16, got torch.float64"),
    ({"scores": torch.zeros(3, 40, dtype=torch.int32)}, TypeError,
     "scores must be torch.float32, torch.float16 or torch.bfloat16, got torch.int32"),
    ({"scores": torch.zeros(40)}, ValueError,
     "scores must be [rows, W] with unit stride in dim 1, got [40] with strides [1]"),
    ({"scores": torch.zeros(3, 40, 2)[..., 0]}, ValueError,
     "scores must be [rows, W] with unit stride in dim 1, got [3, 40] with strides [80, 2]"),
    ({"scores": torch.zeros(3, 1).expand(3, 40)}, ValueError,
     "scores must be [rows, W] with unit stride in dim 1, got [3, 40] with strides [1, 0]"),
    ({"lengths": ints([1, 2])}, ValueError, "lengths must be int32 [rows] = [3], got [2] with strides [1]"),
    ({"lengths": ints([[1], [2], [3]])}, ValueError,
     "lengths must be int32 [rows] = [3], got [3, 1] with strides [1, 1]"),
    ({"lengths": torch.zeros(3, dtype=torch.int64)}, TypeError, "lengths must be torch.int32, got torch.int64"),
    ({"bases": ints([1])}, ValueError, "bases must be int32 [rows] = [3], got [1] with strides [1]"),
    ({"bases": torch.zeros(3)}, TypeError, "bases must be torch.int32, got torch.float32"),
]  # fmt: skip
BAD = [(op, *bad) for op in OPS for bad in BOTH] + [
    ("radix_topk", {"k": 0}, ValueError, "k must be at least 1, got 0"),
    ("radix_topk", {"k": -3}, ValueError, "k must be at least 1, got -3"),
    ("settle_ties", {"provisional": torch.zeros(3, 8)}, TypeError,
     "provisional must be torch.int32 or torch.int64, got torch.float32"),
    ("settle_ties", {"provisional": torch.zeros(2, 8, dtype=torch.int32)}, ValueError,
     "provisional must be [rows, k] with rows = 3, got [2, 8] with strides [8, 1]"),
    ("settle_ties", {"provisional": torch.zeros(24, dtype=torch.int64)}, ValueError,
     "provisional must be [rows, k] with rows = 3, got [24] with strides [1]"),
]  # fmt: skip


class TestErrors:
    @pytest.mark.parametrize(("op", "changes", "kind", "text"), BAD)
    def test_arguments(
        self, device: torch.device, op: str, changes: dict[str, Any], kind: type[Exception], text: str
    ) -> None:
        # Moved by storage: .to() would make a strided tensor contiguous.
        given = moved(ARGUMENTS[op](), device)
        for name, value in changes.items():
            given[name] = place(value, device) if isinstance(value, Tensor) else value
        with pytest.raises(kind) as error:
            getattr(kvc, op)(**given)
        assert str(error.value) == f"kvc.{op}: {text}"
        out = an_output(device)
        with pytest.raises(kind):
            getattr(kvc, op)(**given, out=out)
        assert bool((out == SENTINEL).all())
        with pytest.raises((ValueError, RuntimeError)) as raw:
            getattr(torch.ops.kvc, op)(**given)
        assert f"kvc.{op}: {text}" in str(raw.value)

    @pytest.mark.parametrize("op", OPS)
    def test_outputs(self, device: torch.device, op: str) -> None:
        given = moved(ARGUMENTS[op](), device)
        bad: list[tuple[Tensor, type[Exception], str]] = [
            (torch.zeros(3, 8), TypeError, "out must be torch.int32, got torch.float32"),
            (an_output()[:2], ValueError, "out must be int32 [3, 8], got [2, 8] with strides [8, 1]"),
            (an_output().view(24), ValueError, "out must be int32 [3, 8], got [24] with strides [1]"),
            (an_output()[:1].expand(3, 8), ValueError,
             "out must be free of elements that share memory, got [3, 8] with strides [0, 1]"),
        ]  # fmt: skip
        for out, kind, text in bad:
            there = place(out, device)
            with pytest.raises(kind) as error:
                getattr(kvc, op)(**given, out=there)
            assert str(error.value) == f"kvc.{op}: {text}"
        for name in ("scores", "lengths", "bases", *(("provisional",) if op == "settle_ties" else ())):
            argument = given[name]
            memory = torch.zeros(64, dtype=torch.int64, device=device).view(torch.int32)
            shared = memory[: argument.numel() * argument.element_size() // 4]
            shared = shared.view(argument.dtype).view(argument.shape)
            shared.copy_(argument)
            with pytest.raises(
                ValueError, match=f"^kvc.{op}: out must be apart from {name}, got memory that"
            ):
                getattr(kvc, op)(**given | {name: shared}, out=memory[:24].view(3, 8))
            assert torch.equal(shared, argument)

    @pytest.mark.cuda
    @pytest.mark.parametrize("op", OPS)
    def test_devices(self, op: str) -> None:
        for name in set(ARGUMENTS[op]()) - {"scores", "k"}:
            given = moved(ARGUMENTS[op](), "cuda")
            given[name] = given[name].cpu()
            with pytest.raises(TypeError, match=rf"^kvc.{op}: {name} must be on cuda:0, got cpu$"):
                getattr(kvc, op)(**given)
        with pytest.raises(TypeError, match=rf"^kvc.{op}: out must be on cuda:0, got cpu$"):
            getattr(kvc, op)(**moved(ARGUMENTS[op](), "cuda"), out=an_output())


class TestFramework:
    @pytest.mark.parametrize("op", OPS)
    def test_opcheck(self, device: torch.device, op: str) -> None:
        given, packet = moved(ARGUMENTS[op](), device), getattr(torch.ops.kvc, op)
        torch.library.opcheck(packet.default, (), given)
        torch.library.opcheck(packet.out, (), {**given, "out": an_output(device)})
        torch.library.opcheck(
            packet.default, (), {**given, "bases": None, "scores": given["scores"].bfloat16()}
        )

    @pytest.mark.parametrize("op", OPS)
    def test_compile(self, device: torch.device, op: str) -> None:
        given = moved(ARGUMENTS[op](), device)
        compiled = torch.compile(lambda **k: getattr(kvc, op)(**k), fullgraph=True, backend="aot_eager")
        for extra in ({}, {"out": an_output(device)}):
            assert torch.equal(compiled(**given, **extra).cpu(), expected_of(op, given))

    @pytest.mark.parametrize("op", OPS)
    def test_meta(self, op: str) -> None:
        result = getattr(kvc, op)(**moved(ARGUMENTS[op](), "meta"))
        assert (result.device.type, result.dtype, result.shape) == ("meta", torch.int32, (3, 8))
        with pytest.raises(TypeError, match=f"^kvc.{op}: lengths must be on the device of scores, got meta"):
            getattr(kvc, op)(
                **ARGUMENTS[op]() | {"lengths": torch.zeros(3, dtype=torch.int32, device="meta")}
            )

    @pytest.mark.parametrize("op", OPS)
    def test_schema(self, op: str) -> None:
        functional, out = (getattr(getattr(torch.ops.kvc, op), o)._schema for o in ("default", "out"))
        assert len(functional.returns) == 1
        assert not out.returns
        (extra,) = out.arguments[len(functional.arguments) :]
        assert extra.name == "out"
        assert extra.kwarg_only
        assert extra.alias_info.is_write

    @pytest.mark.parametrize("op", OPS)
    @pytest.mark.parametrize("width", [9000, 30_000])
    def test_repeats_are_equal(self, device: torch.device, op: str, width: int) -> None:
        scores = torch.cat((normal(20, width), (normal(20, width, seed=1) - 1.28).relu()))
        lengths = torch.randint(0, width + 1, (40,), generator=torch.Generator().manual_seed(2)).int()
        given: dict[str, Any] = {"scores": scores, "lengths": lengths, "k": 1000}
        if op == "settle_ties":
            given["provisional"] = hostile(scores, lengths, given.pop("k"))
        given = moved(given, device)
        first = getattr(kvc, op)(**given)
        same(first, reference.radix_topk(scores, lengths, 1000), op)
        for _ in range(1000 if device.type == "cuda" else 20):
            assert torch.equal(getattr(kvc, op)(**given), first)

    def test_threads_agree(self) -> None:
        scores = (normal(3, 100_000) - 1.28).relu()
        expected = reference.radix_topk(scores, full(scores), 9000)
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                same(kvc.radix_topk(scores, full(scores), 9000), expected, f"{threads} threads")
                provisional = hostile(scores, full(scores), 9000)
                same(kvc.settle_ties(scores, full(scores), provisional), expected, f"{threads} threads")
        finally:
            torch.set_num_threads(before)


def multiprocessors() -> int:
    """What the current context may use, by the driver."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    resource = (ctypes.c_uint * 64)()  # a CUdevResource: sm.smCount is at byte 96
    assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
    assert driver.cuCtxGetDevResource(context, resource, 1) == 0  # CU_DEV_RESOURCE_TYPE_SM
    return resource[24]


NO_GREEN_CONTEXTS = 75  # a status that nothing else ends with


def select_on_few_multiprocessors(few: int = 8) -> None:
    # Resident, spread and streaming rows, those that a cluster streams, with the compiled kernel and the C++ one.
    shapes = [(400, 900, 64), (40, 9000, 1000), (30, 60_000, 2048), (200, 40_000, 2048), (30, 300_000, 2048)]
    shapes += [(1, 300_000, 2048), (2, 1_000_000, 8192), (1, 3_000_000, 2048)]
    work = []
    for index, (rows, width, k) in enumerate(shapes):
        scores = (normal(rows, width, seed=index) * 50).round().cuda()
        lengths = ints([width - i % 3 for i in range(rows)], "cuda")
        expected = reference.radix_topk(scores, lengths, k).cpu()
        work.append((scores, lengths, hostile(scores, lengths, k), expected))
    try:
        from torch.cuda.green_contexts import GreenContext

        context: Any = GreenContext.create(num_sms=few, device_id=0)
    except (ImportError, RuntimeError) as error:
        print("no green contexts:", str(error).partition("\n")[0])
        sys.exit(NO_GREEN_CONTEXTS)
    context.set_context()
    for scores, lengths, provisional, expected in work:
        shape = f"of {list(scores.shape)}"
        same(kvc.radix_topk(scores, lengths, expected.shape[1]), expected, f"radix_topk {shape}")
        same(kvc.settle_ties(scores, lengths, provisional), expected, f"settle_ties {shape}")
        assert multiprocessors() == few
    context.pop_context()


@pytest.mark.cuda
class TestCuda:
    def test_few_multiprocessors(self) -> None:
        # A process of its own: blocks that wait for others which are never there would hang every other test too.
        script = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import test_topk; test_topk.select_on_few_multiprocessors()"
        )
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == NO_GREEN_CONTEXTS:
            pytest.skip(done.stdout.strip())
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize("op", OPS)
    @pytest.mark.parametrize(("rows", "width", "k"), [(3, 40, 8), (40, 5000, 700), (2, 300_000, 3000)])
    def test_graph_replay_reads_new_contents(self, op: str, rows: int, width: int, k: int) -> None:
        def contents(seed: int) -> dict[str, Any]:
            scores = (normal(rows, width, seed=seed) * 5).round()
            generator = torch.Generator().manual_seed(seed)
            lengths = torch.randint(-1, width + 2, (rows,), generator=generator, dtype=torch.int32)
            bases = torch.randint(0, 99, (rows,), generator=generator, dtype=torch.int32)
            last: dict[str, Any] = {"k": k}
            if op == "settle_ties":
                last = {"provisional": hostile(scores, lengths, k, seed=seed)}
            return {"scores": scores, "lengths": lengths, "bases": bases, **last}

        given = moved(contents(0), "cuda")
        getattr(kvc, op)(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = getattr(kvc, op)(**given)
        for seed in (1, 2, 3):
            changed = contents(seed)
            for name, value in changed.items():
                if isinstance(value, Tensor):
                    given[name].copy_(value)
            held.fill_(SENTINEL)
            graph.replay()
            same(held, expected_of(op, changed), f"{op}, replay {seed}")

    @pytest.mark.parametrize("op", OPS)
    def test_first_call_inside_a_capture(self, op: str) -> None:
        # A process of its own, so that the kernel is loaded during the capture.
        script = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import torch, kvc, test_topk as t\n"
            f"given = t.moved(t.ARGUMENTS[{op!r}](), 'cuda')\n"
            "torch.cuda.synchronize()\n"
            "graph = torch.cuda.CUDAGraph()\n"
            f"with torch.cuda.graph(graph): held = getattr(kvc, {op!r})(**given)\n"
            "graph.replay()\n"
            f"assert torch.equal(held.cpu(), t.expected_of({op!r}, given))\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)

    @pytest.mark.parametrize("op", OPS)
    def test_side_stream_with_delayed_producer(self, op: str) -> None:
        given = ARGUMENTS[op]()
        there, stream = moved(given, "cuda"), torch.cuda.Stream()
        real = {n: v.clone() for n, v in there.items() if isinstance(v, Tensor)}
        for name in real:
            there[name].zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for name, value in real.items():
                there[name].copy_(value)
            result = getattr(kvc, op)(**there)
        stream.synchronize()
        same(result, expected_of(op, given), op)

    @pytest.mark.parametrize(("op", "calls"), [("radix_topk", 20_000), ("settle_ties", 5000)])
    def test_thousands_of_calls_on_two_streams(self, op: str, calls: int) -> None:
        streams = [torch.cuda.Stream() for _ in range(2)]
        shapes = [(3, 2304, 512), (2, 20000, 700), (1, 70000, 2048), (5, 300, 299)]
        work = []
        for index, (rows, width, k) in enumerate(shapes):
            scores = (normal(rows, width, seed=index) * 4).round()
            lengths = ints([width - i for i in range(rows)])
            expected = reference.radix_topk(scores, lengths, k).cuda()
            outs = [torch.empty_like(expected) for _ in streams]
            wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
            last = k if op == "radix_topk" else hostile(scores, lengths, k).cuda()
            work.append((scores.cuda(), lengths.cuda(), last, expected, outs, wrong))
        torch.cuda.synchronize()
        for call in range(calls):
            scores, lengths, last, expected, outs, wrong = work[call % len(work)]
            side = call // 3 % 2
            with torch.cuda.stream(streams[side]):
                getattr(kvc, op)(scores, lengths, last, out=outs[side])
                if call % 7 == 0:
                    wrong[side].add_((outs[side] != expected).any())
        torch.cuda.synchronize()
        assert [int(w) for item in work for w in item[5]] == [0] * (2 * len(work))

    @pytest.mark.parametrize(("rows", "width"), [(70, 32_000_000), (40_000, 60_000)])
    def test_scores_past_2_to_31_elements(self, rows: int, width: int) -> None:
        if torch.cuda.mem_get_info()[0] < 24 << 30:
            pytest.skip("needs 24 GiB")
        k, last = 1000, rows - 1
        scores = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
        picks = torch.randperm(width, generator=torch.Generator().manual_seed(rows))[: k // 2].sort().values
        for row in (0, last // 2, last):
            scores[row, picks.cuda()] = 1.0
        # Ones, then the first zeros.
        zeros = torch.arange(2 * k)
        zeros = zeros[~torch.isin(zeros, picks)][: k - k // 2]
        expected = torch.cat((picks, zeros)).sort().values.int()
        lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
        result = kvc.radix_topk(scores, lengths, k)
        provisional = torch.arange(width - k, width, device="cuda").expand(rows, k).clone()
        for row in (0, last // 2, last):
            provisional[row, : k // 2] = picks.cuda()
            spare = torch.arange(width - 3 * k, width - k)
            provisional[row, k // 2 :] = spare[~torch.isin(spare, picks)][: k - k // 2].cuda()
        settled = kvc.settle_ties(scores, lengths, provisional)
        for name, answer in (("radix_topk", result), ("settle_ties", settled)):
            for row in (0, last // 2, last):
                assert torch.equal(answer[row].cpu(), expected), (name, row)
            assert torch.equal(answer[1].cpu(), torch.arange(k, dtype=torch.int32)), name

    @pytest.mark.parametrize(
        ("rows", "width", "select", "settle"),
        [
            (32, 4096, "resident_select", "settle_parts"),
            (512, 16384, "resident_select", "settle_parts"),
            (32, 65536, "spread_select", "settle_parts"),
            (512, 65536, "StreamingSelect", "settle_stream"),
            (4, 1 << 20, "StreamingSelect", "settle_emit"),
        ],
    )
    def test_which_kernels_run(self, launches: Any, rows: int, width: int, select: str, settle: str) -> None:
        if (
            torch.cuda.get_device_capability() != (9, 0)
            or torch.cuda.get_device_properties(0).multi_processor_count < 128
        ):
            pytest.skip("the table is that of a large GPU with clusters and kernels of the CuTe DSL")
        if os.environ.get("KVC_TOPK_AS_ON"):
            pytest.skip("the kernels are those of another GPU")
        scores, lengths = normal(rows, width).cuda(), ints([width] * rows, "cuda")
        provisional = scores.topk(500).indices

        def kernels(call: Callable[[], object]) -> list[str]:  # tests fill new results too
            return [name for name in launches(call) if "at::native" not in name]

        found = kernels(lambda: kvc.radix_topk(scores, lengths, 500))
        assert [select in name for name in found] == [True], found
        found = kernels(lambda: kvc.settle_ties(scores, lengths, provisional))
        assert settle in found[-1], found
        assert len(found) == (3 if settle == "settle_emit" else 1), found

    def test_no_memory_but_the_result_survives_a_call(self) -> None:
        scores, lengths = normal(64, 20000).cuda(), ints([20000] * 64, "cuda")
        out = torch.empty(64, 500, dtype=torch.int32, device="cuda")
        provisional = scores.topk(500).indices
        before = torch.cuda.memory_allocated()
        kvc.radix_topk(scores, lengths, 500, out=out)
        kvc.settle_ties(scores, lengths, provisional, out=out)
        assert torch.cuda.memory_allocated() == before


def test_triton_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton")
    command = [sys.executable, str(Path(__file__).with_name("interpret.py")), "topk"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("cases agree")


class TestEmulated:
    """The C++ kernels on a CPU: what they compute, and no proof of the GPU."""

    def test_against_a_stable_sort(self, tmp_path: Path) -> None:
        emulate.run(emulate.build(tmp_path, "topk", "emulate_topk"), 680, 1)
