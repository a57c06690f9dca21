"""TriAttention scoring against the float64 reference on every device, and the Triton kernels under the
interpreter."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kvc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc.reference import triattention as reference
from torch import Tensor

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
DTYPES = [BF16, FP16, FP32, E4M3]
MODES = ["union", "per_head", "per_layer_perhead"]
LOWEST = float("-inf")
OFFSETS = 2 ** torch.arange(17)
ops: Any = kvc  # called with unpacked arguments, which a type checker cannot follow
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SENTINEL = 12345.0


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def omegas(bands: int, theta: float = 10_000.0) -> Tensor:
    return (theta ** (-torch.arange(bands, dtype=torch.float64) / bands)).float()


@dataclass
class Case:
    """Arguments of one call, on the CPU."""

    requests: int = 2
    layers: int = 2
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    tokens_per_page: int = 16
    max_pages: int = 6
    dtype: torch.dtype = BF16
    layout: str = "HND"
    mode: str = "union"
    normalize: bool = True
    width: int = 96
    seed: int = 0
    prompts: list[int] | None = None
    sources: list[int] | None = None
    pools: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        bands, tokens = self.head_dim // 2, self.max_pages * self.tokens_per_page
        pages = self.requests * self.max_pages + 3
        self.pools = []
        for layer in range(self.layers):
            inner = (self.kv_heads, self.tokens_per_page)
            inner = inner[::-1] if self.layout == "NHD" else inner
            pool = normal(pages + layer, *inner, self.head_dim + (6 if self.layout == "padded" else 0)).to(
                self.dtype
            )
            pool = pool.transpose(1, 2) if self.layout == "NHD" else pool
            self.pools.append(pool[..., 3 : 3 + self.head_dim] if self.layout == "padded" else pool)
        order = torch.randperm(pages, generator=generator)[: self.requests * self.max_pages]
        self.table = order.view(self.requests, self.max_pages).int()
        prompts = self.prompts or [5 * r % 11 for r in range(self.requests)]
        sources = self.sources or [max(0, tokens - 7 * r) for r in range(self.requests)]
        self.prompt_lengths, self.source_lengths = ints(prompts), ints(sources)
        self.cos, self.sin = reference.mean_phase(torch.arange(self.requests) + 9, omegas(bands), OFFSETS[:5])
        self.queries = [0.5 * normal(self.layers, self.kv_heads * self.group, bands) for _ in range(3)]
        self.scale = torch.rand(bands, generator=generator) + 0.5

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        tensors = (
            self.table,
            self.prompt_lengths,
            self.source_lengths,
            self.cos,
            self.sin,
            *self.queries,
            self.scale,
        )
        pools = [on(pool, device) for pool in self.pools]
        return (pools, *(t.to(device) for t in tensors), self.mode, self.normalize, self.width)

    def expected(self) -> Tensor:
        return reference.triattention_score(*self.arguments())


def on(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On another device with the same strides, those of a slice included."""
    if tensor.device.type == torch.device(device).type:
        return tensor
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def agree(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == FP32
    actual = actual.cpu()
    assert torch.equal(actual == LOWEST, expected == LOWEST)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def check(case: Case, device: torch.device | str) -> Tensor:
    """Functional form and `.out` form between sentinels, against the reference."""
    arguments, expected = case.arguments(device), case.expected()
    actual = ops.triattention_score(*arguments)
    agree(actual, expected)
    guarded = torch.full((expected.numel() + 2,), SENTINEL, device=device)
    out = guarded[1:-1].view(expected.shape)
    assert ops.triattention_score(*arguments, out=out) is out
    assert torch.equal(out, actual)
    assert guarded[[0, -1]].tolist() == [SENTINEL, SENTINEL]
    return actual


class TestMeanPhase:
    @pytest.mark.parametrize("theta", [10_000.0, 1e6, 150_000.0])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_close_to_float64(self, device: torch.device, dtype: torch.dtype, theta: float) -> None:
        positions = torch.tensor([0, 1, 777, 16_384, 32_768, 131_071, (1 << 23) + 1, (1 << 24) - 1, 1 << 24])
        for bands in (1, 16, 32, 48, 64, 100, 128):
            omega = omegas(bands, theta)
            angle = (positions[:, None] + OFFSETS).double()[..., None] * omega.double()
            actual = ops.mean_phase(positions.to(device, dtype), omega.to(device), OFFSETS.to(device))
            for a, exact in zip(actual, (angle.cos().mean(1), angle.sin().mean(1)), strict=True):
                assert a.dtype == FP32
                assert (a.cpu().double() - exact).abs().max() <= 1e-6

    @pytest.mark.parametrize("offsets", [[0], [-5, 3], list(range(1000)), [1 << 30, -(1 << 30)], [1] * 33])
    def test_offsets(self, device: torch.device, offsets: list[int]) -> None:
        positions, omega = torch.tensor([0, 12_345, 1 << 33]), omegas(20)
        given = torch.tensor(offsets)
        actual = ops.mean_phase(positions.to(device), omega.to(device), given.to(device))
        for a, e in zip(actual, reference.mean_phase(positions, omega, given), strict=True):
            torch.testing.assert_close(a.cpu(), e, rtol=0, atol=1e-6)

    def test_by_hand(self, device: torch.device) -> None:
        quarter = torch.tensor([torch.pi / 2, 0.0], device=device)
        positions = torch.tensor([0, 1, 2, 3], device=device)
        cos, sin = ops.mean_phase(positions, quarter, torch.tensor([0, 2], device=device))
        assert cos[:, 1].tolist() == [1, 1, 1, 1]
        assert sin[:, 1].tolist() == [0, 0, 0, 0]
        assert cos[:, 0].abs().max() < 1e-6  # half a turn apart
        cos, sin = ops.mean_phase(positions, quarter, torch.tensor([0], device=device))
        torch.testing.assert_close(cos[:, 0].cpu(), torch.tensor([1.0, 0, -1, 0]), rtol=0, atol=1e-6)
        torch.testing.assert_close(sin[:, 0].cpu(), torch.tensor([0.0, 1, 0, -1]), rtol=0, atol=1e-6)

    def test_outputs_of_any_strides(self, device: torch.device) -> None:
        positions, omega = torch.arange(5, device=device)[::2], omegas(12).to(device)[::2]
        expected = reference.mean_phase(positions.cpu(), omega.cpu(), OFFSETS)
        memory = torch.full((2, 8, 9), SENTINEL, device=device)
        cos, sin = memory[0, :6, 1:4].t(), memory[1, 1:4, 1:7]
        returned = ops.mean_phase(positions, omega, OFFSETS.to(device), cos=cos, sin=sin)
        assert returned[0] is cos
        assert returned[1] is sin
        for a, e in zip(returned, expected, strict=True):
            torch.testing.assert_close(a.cpu(), e, rtol=0, atol=1e-6)
        assert int((memory == SENTINEL).sum()) == memory.numel() - 2 * 18

    def test_empty(self, device: torch.device) -> None:
        for requests, bands in ((0, 4), (3, 0)):
            positions = torch.zeros(requests, dtype=torch.int32, device=device)
            cos, sin = ops.mean_phase(positions, torch.zeros(bands, device=device), OFFSETS.to(device))
            assert cos.shape == sin.shape == (requests, bands)

    def test_same_bits_in_every_place(self, device: torch.device) -> None:
        positions = torch.tensor([100_003] * 5 + [7], device=device)
        omega = omegas(40).to(device)
        both = [torch.stack(ops.mean_phase(positions, omega, OFFSETS.to(device))) for _ in range(2)]
        assert torch.equal(both[0], both[1])
        assert all(torch.equal(both[0][:, 0], both[0][:, r]) for r in range(5))

    @pytest.mark.parametrize(
        ("changes", "error", "text"),
        [
            (
                {"offsets": torch.zeros(0, dtype=torch.int64)},
                ValueError,
                "offsets must be one offset or more, [O], got",
            ),
            ({"offsets": ints([1])}, TypeError, "offsets must be torch.int64, got torch.int32"),
            ({"positions": torch.zeros(3)}, TypeError, "positions must be torch.int32 or torch.int64, got"),
            ({"positions": ints([[1]])}, ValueError, "positions must be [requests], got [1, 1]"),
            ({"omega": torch.zeros(4, dtype=torch.float64)}, TypeError, "omega must be torch.float32, got"),
            ({"omega": torch.zeros(4, 1)}, ValueError, "omega must be [F], got [4, 1]"),
            ({"cos": torch.zeros(3, 4)}, ValueError, "sin must be given beside the other output, got None"),
            (
                {"cos": torch.zeros(3, 4), "sin": torch.zeros(3, 5)},
                ValueError,
                "sin must be torch.float32 [requests, F] = [3, 4], got [3, 5]",
            ),
            (
                {"cos": torch.zeros(1, 4).expand(3, 4), "sin": torch.zeros(3, 4)},
                ValueError,
                "cos must be free of elements that share memory",
            ),
        ],
    )
    def test_errors(self, device: torch.device, changes: dict[str, Any], error: type, text: str) -> None:
        usual = {"positions": ints([1, 2, 3]), "omega": torch.zeros(4), "offsets": OFFSETS} | changes
        with pytest.raises(error) as raised:
            ops.mean_phase(**{k: on(v, device) for k, v in usual.items()})
        assert str(raised.value).startswith(f"kvc.mean_phase: {text}")

    def test_opcheck(self, device: torch.device) -> None:
        arguments = (torch.tensor([3, 9], device=device), omegas(6).to(device), OFFSETS.to(device))
        torch.library.opcheck(torch.ops.kvc.mean_phase.default, arguments)
        outputs = {name: torch.zeros(2, 6, device=device) for name in ("cos", "sin")}
        torch.library.opcheck(torch.ops.kvc.mean_phase.out, arguments, outputs)


class TestReference:
    @pytest.mark.parametrize("head_dim", [2, 16, 64])
    def test_is_the_papers_score_of_unrotated_keys(self, head_dim: int) -> None:
        """Section 4 of the paper, with key positions: what the cached, rotated keys make unnecessary."""
        bands, tokens, position = head_dim // 2, 40, 57
        generator = torch.Generator().manual_seed(0)
        key = torch.randn(tokens, bands, dtype=torch.complex128, generator=generator)
        queries = torch.randn(200, bands, dtype=torch.complex128, generator=generator) + 1
        omega = omegas(bands)
        mean, excess = queries.mean(0), queries.abs().mean(0) - queries.mean(0).abs()
        distance = position - torch.arange(tokens)[:, None, None] + OFFSETS[:, None]
        angle = omega.double() * distance + mean.angle() - key.angle()[:, None]
        trigonometric = (mean.abs() * key.abs()[:, None] * angle.cos()).sum(-1).mean(-1)
        expected = trigonometric + (excess * key.abs()).sum(-1)

        rotated = key * torch.exp(1j * omega.double() * torch.arange(tokens)[:, None])
        pool = torch.cat((rotated.real, rotated.imag), 1).float().view(5, 1, 8, head_dim)
        cos, sin = reference.mean_phase(torch.tensor([position]), omega, OFFSETS)
        statistics = [x.float().view(1, 1, bands) for x in (mean.real, mean.imag, excess)]
        table = torch.arange(5).int()[None]
        arguments: tuple[Any, ...] = ([pool], table, ints([0]), ints([tokens]), cos, sin, *statistics)
        arguments += (torch.ones(bands), "per_head", False, tokens)
        rows = reference.triattention_score(*arguments)
        torch.testing.assert_close(rows[0, 0], expected.float(), rtol=1e-4, atol=1e-4)

    def test_modes_by_hand(self) -> None:
        """Two layers, two KV heads of two query heads; the score is a multiple of |K|."""
        pools = [torch.zeros(1, 2, 3, 2) for _ in range(2)]
        pools[0][0, :, :, 0] = torch.tensor([[1.0, 2, 3], [3, 4, 5]])
        pools[1][0, :, :, 0] = torch.tensor([[5.0, 4, 3], [1, 1, 7]])
        excess = torch.tensor([[[1.0], [2.0], [1.0], [-1.0]]]).expand(2, 4, 1)
        nothing = torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(2, 4, 1), torch.zeros(2, 4, 1)
        arguments = (pools, ints([[0]]), ints([0]), ints([3]), *nothing, excess, torch.ones(1))
        assert reference.triattention_score(*arguments, "per_layer_perhead", False, 4)[0].tolist() == [
            [2, 4, 6, LOWEST],
            [3, 4, 5, LOWEST],
            [10, 8, 6, LOWEST],
            [1, 1, 7, LOWEST],
        ]
        assert reference.triattention_score(*arguments, "per_head", False, 2)[0].tolist() == [
            [6, 6],
            [2, 2.5],
        ]
        z = torch.tensor([[1.0, 2, 3], [3, 4, 5], [5, 4, 3], [1, 1, 7]])
        z = (z - z.mean(1, keepdim=True)) / z.std(1, correction=0, keepdim=True)
        best = torch.cat((z, -z[[1, 3]])).amax(0)
        torch.testing.assert_close(reference.triattention_score(*arguments, "union", True, 3)[0, 0], best)


class TestScore:
    def test_norms_by_hand(self, device: torch.device) -> None:
        values = torch.tensor([1.0, 8, 2, 3, 4, 5, 9, 6], device=device)
        pool = torch.zeros(2, 1, 4, 4, device=device)
        pool[[1, 0], 0, :, 2] = -values.view(2, 4)
        zero, one = torch.zeros(1, 1, 2, device=device), torch.tensor([1.0, 0.0], device=device)
        lengths = [ints([n]).to(device) for n in (2, 8)]
        rows = ops.triattention_score(
            [pool],
            ints([[1, 0]]).to(device),
            *lengths,
            zero[0],
            zero[0],
            zero,
            zero,
            one.view(1, 1, 2),
            one,
            "per_head",
            False,
            7,
        )
        assert rows.tolist() == [[[2, 3, 4, 5, 9, 6, LOWEST]]]

    @pytest.mark.parametrize("layout", ["HND", "NHD", "padded"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("head_dim", [2, 6, 10, 64, 96, 128, 256])
    def test_keys(self, device: torch.device, head_dim: int, dtype: torch.dtype, layout: str) -> None:
        for mode, normalize in (("union", True), ("per_layer_perhead", False)):
            check(
                Case(head_dim=head_dim, dtype=dtype, layout=layout, mode=mode, normalize=normalize, layers=1),
                device,
            )

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("normalize", [True, False])
    @pytest.mark.parametrize(
        "geometry",
        [(4, 2, 4, 32, 128, 2, 4), (2, 3, 4, 32, 64, 1, 8), (2, 2, 2, 128, 64, 1, 8)],
        ids=["128x4", "64x8", "pages of 128"],
    )
    def test_ragged(
        self, device: torch.device, geometry: tuple[int, ...], normalize: bool, mode: str
    ) -> None:
        requests, layers, columns, page, head_dim, kv_heads, group = geometry
        tokens = columns * page
        case = Case(
            *(requests, layers, kv_heads, group, head_dim, page, columns),
            mode=mode,
            normalize=normalize,
            width=tokens,
            prompts=[5] * requests,
            sources=[tokens - cut for cut in (0, 58, 3, 33)[:requests]],
        )
        check(case, device)

    @pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 9, 16, 33])
    @pytest.mark.parametrize("normalize", [True, False])
    def test_group_sizes(self, device: torch.device, group: int, normalize: bool) -> None:
        check(Case(group=group, mode="per_head", normalize=normalize), device)

    @pytest.mark.parametrize("page", [1, 2, 5, 16, 31, 48, 64, 256])
    def test_page_borders(self, device: torch.device, page: int) -> None:
        columns = -(-300 // page)
        for prompt, source in itertools.product((0, page, 127, 128), (page * columns, 299, 257, 256)):
            case = Case(1, 1, 1, 2, 16, page, columns, prompts=[prompt], sources=[source], width=300)
            agree(ops.triattention_score(*case.arguments(device)), case.expected())

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("width", [1, 7, 32, 80, 89, 127, 200, 1000])
    def test_widths(self, device: torch.device, width: int, mode: str) -> None:
        full = check(Case(mode=mode, width=1000), device)
        part = check(Case(mode=mode, width=width), device)
        assert torch.equal(full[..., :width], part)

    def test_layers_that_differ(self, device: torch.device) -> None:
        case = Case(layers=4, mode="per_layer_perhead", normalize=False)
        more = Case(layers=4, layout="NHD", seed=3)
        case.pools[1] = more.pools[2]
        case.pools[2] = torch.stack((more.pools[0], case.pools[0]), 1)[
            :, 0
        ]  # keys of a pool of keys and values
        case.pools[3] = case.pools[3].repeat(3, 1, 1, 1)[::3]
        case.table %= min(len(pool) for pool in case.pools)
        check(case, device)

    def test_more_layers_than_a_launch_carries(self, device: torch.device) -> None:
        for mode in MODES:
            check(Case(1, layers=150, kv_heads=1, group=2, head_dim=8, mode=mode, normalize=False), device)

    @pytest.mark.parametrize("mode", MODES)
    def test_long_request_beside_short_ones(self, device: torch.device, mode: str) -> None:
        case = Case(
            *(5, 2, 1, 2, 16, 16, 320),
            mode=mode,
            width=5120,
            prompts=[0, 7, 4000, 0, 100],
            sources=[5120, 9, 4001, 0, 2100],
        )
        check(case, device)

    @settings(max_examples=60)
    @given(data=st.data(), device=st.sampled_from(DEVICES))
    def test_any_geometry(self, data: st.DataObject, device: str) -> None:
        draw = data.draw
        requests, columns, page = (draw(st.integers(*r)) for r in ((1, 4), (1, 5), (1, 40)))
        tokens = columns * page
        length = st.integers(0, tokens + 20)
        case = Case(
            requests,
            draw(st.integers(1, 3)),
            draw(st.integers(1, 3)),
            draw(st.integers(1, 5)),
            2 * draw(st.integers(1, 40)),
            page,
            columns,
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(["HND", "NHD", "padded"])),
            draw(st.sampled_from(MODES)),
            draw(st.booleans()),
            draw(st.integers(1, tokens + 20)),
            draw(st.integers(0, 100)),
            draw(st.lists(length, min_size=requests, max_size=requests)),
            draw(st.lists(length, min_size=requests, max_size=requests)),
        )
        # Two scores, or nearly equal ones, have a deviation that rounding may move far.
        if case.normalize or case.mode == "union":
            counts = case.source_lengths.clamp(max=tokens) - case.prompt_lengths
            case.source_lengths[(counts > 0) & (counts < 4)] = 0
        agree(ops.triattention_score(*case.arguments(device)), case.expected())


class TestNothingToScore:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("normalize", [True, False])
    def test_requests(self, device: torch.device, mode: str, normalize: bool) -> None:
        prompts, sources = [0, 10, 50, 96, 3, 200, 95], [0, 10, 20, 96, 90, 300, 96]
        case = Case(7, mode=mode, normalize=normalize, prompts=prompts, sources=sources)
        rows = check(case, device)
        assert (rows[[0, 1, 2, 3, 5]] == LOWEST).all()
        assert (rows[4, :, :87] > LOWEST).all()
        if normalize:
            assert (rows[6, :, 0] == 0).all()  # one token is its own mean

    @pytest.mark.parametrize("mode", MODES)
    def test_no_requests_and_no_columns(self, device: torch.device, mode: str) -> None:
        case = Case(mode=mode)
        rows = {"union": 1, "per_head": 2, "per_layer_perhead": 4}[mode]
        arguments = case.arguments(device)
        assert ops.triattention_score(*arguments[:-1], 0).shape == (2, rows, 0)
        per_request = [a[:0] for a in arguments[1:6]]
        assert ops.triattention_score(arguments[0], *per_request, *arguments[6:]).shape == (0, rows, 96)

    @pytest.mark.parametrize("mode", MODES)
    def test_no_pages(self, device: torch.device, mode: str) -> None:
        for columns, pages in ((0, 4), (6, 0)):
            case = Case(mode=mode)
            case.table = case.table[:, :columns]
            case.pools = [pool[:pages] for pool in case.pools]
            assert (check(case, device) == LOWEST).all()

    def test_far_lengths(self, device: torch.device) -> None:
        most, least = (1 << 31) - 1, -(1 << 31)
        prompts, sources = [0, most, least, -5, 90, 50], [most, most, most, 60, 97, least]
        for mode in MODES:
            rows = check(Case(6, mode=mode, prompts=prompts, sources=sources, width=120), device)
            assert (rows[[1, 2, 5]] == LOWEST).all()
            assert (rows[3, :, :5] == LOWEST).all()
            assert (rows[3, :, 5:65] > LOWEST).all()


class TestBadTokens:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("normalize", [True, False])
    def test_pages(self, device: torch.device, mode: str, normalize: bool) -> None:
        case = Case(layers=3, mode=mode, normalize=normalize, prompts=[0, 3], sources=[96, 200], width=200)
        case.table[0, 2], case.table[0, 4], case.table[1, 1] = (
            -1,
            1 << 30,
            len(case.pools[1]),
        )  # in the last layer only
        rows = check(case, device)
        assert (rows[0, :, 32:48] == LOWEST).all()
        assert (rows[1, :, 93:] == LOWEST).all()
        assert (rows[1, :, 13:29] > LOWEST).all() == (mode == "union")

    def test_entries_outside_the_range_mean_nothing(self, device: torch.device) -> None:
        case = Case(prompts=[20, 40], sources=[70, 60])
        rows = check(case, device)
        case.table[0, [0, 5]] = ints([-7, 1 << 30])
        case.table[1, [0, 1, 4]] = ints([99, -(1 << 31), 1 << 30])
        assert torch.equal(check(case, device), rows)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), LOWEST])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("mode", MODES)
    def test_keys_that_are_not_finite(
        self, device: torch.device, mode: str, dtype: torch.dtype, value: float
    ) -> None:
        if dtype == E4M3 and value == value:
            pytest.skip("e4m3 has no infinity")
        for normalize in (True, False):
            case = Case(dtype=dtype, mode=mode, normalize=normalize, layers=2)
            page = case.table[0, 1]
            case.pools[1][page, 0, 3, 7] = value
            case.pools[1][page, 1, 4, 40] = value
            case.pools[0][page, :, 5, 0] = value
            case.pools[1][page, :, 5, 0] = value
            rows = check(case, device)
            assert (rows[0, :, 21] == LOWEST).all()
            assert int((rows[0] == LOWEST).sum()) == {"union": 1, "per_head": 4, "per_layer_perhead": 6}[mode]

    @pytest.mark.parametrize("dtype", [BF16, FP32])
    def test_keys_whose_squares_are_no_floats(self, device: torch.device, dtype: torch.dtype) -> None:
        case = Case(dtype=dtype, mode="per_head", normalize=False)
        case.pools[0][case.table[0, 2], 1, 3, ::5] = 3e20
        case.pools[1][case.table[1, 0], 0, 9, :] *= 1e25
        check(case, device)

    def test_statistics_that_are_not_finite(self, device: torch.device) -> None:
        case = Case(mode="per_layer_perhead")
        case.queries[0][1, 0:4] = float("nan")
        rows = check(case, device)
        assert (rows[:, 2] == LOWEST).all()
        assert (rows[:, [0, 1, 3], 0] > LOWEST).all()


class TestTies:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("head_dim", [6, 64, 128, 256])
    def test_equal_keys_get_equal_bits(self, device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
        """Eight keys over and over, at other places of pages and tiles in each request."""
        requests, columns = 3, 30
        case = Case(
            requests,
            2,
            2,
            4,
            head_dim,
            16,
            columns,
            dtype,
            prompts=[0, 3, 131],
            sources=[480, 477, 470],
            width=480,
        )
        case.cos[:], case.sin[:] = case.cos[0].clone(), case.sin[0].clone()
        kinds = torch.randint(0, 8, (requests, 480), generator=torch.Generator().manual_seed(1))
        for pool in case.pools:
            keys = torch.randn(8, 2, head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
            for r in range(requests):
                chosen = keys.view(torch.uint8)[kinds[r]].view(dtype).view(columns, 16, 2, head_dim)
                pool.view(torch.uint8)[case.table[r].long()] = (
                    chosen.transpose(1, 2).contiguous().view(torch.uint8)
                )
        for mode, normalize in itertools.product(MODES, (True, False)):
            rows = check(replace_mode(case, mode, normalize), device).cpu()
            seen: dict[tuple[int, int, int], float] = {}
            for r, prompt in enumerate((0, 3, 131)):
                for j in range(int(case.source_lengths[r]) - prompt):
                    for row in range(rows.shape[1]):
                        # Other requests have other means, unless nothing is normalised.
                        key = (r if normalize or mode == "union" else 0, row, int(kinds[r, prompt + j]))
                        assert seen.setdefault(key, float(rows[r, row, j])) == float(rows[r, row, j])

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("value", [1.0, 0.1, 37.0, 400.0])
    def test_rows_of_equal_scores_become_0(self, device: torch.device, mode: str, value: float) -> None:
        case = Case(1, 2, 2, 4, 128, 16, 70, mode=mode, width=1120)
        for pool in case.pools:
            pool[:] = torch.linspace(-value, value, 128).to(BF16)
        rows = ops.triattention_score(*case.arguments(device))
        assert (rows.abs() <= 2e-3).all()
        assert (rows == rows[0, 0, 0]).all()

    def test_heads_without_statistics(self, device: torch.device) -> None:
        case = Case()
        for q in case.queries:
            q[0, 3] = 0
        rows = check(case, device)
        assert (rows[rows > LOWEST] >= 0).all()  # that head's 0 is the least of a union


def replace_mode(case: Case, mode: str, normalize: bool) -> Case:
    other = replace(case, mode=mode, normalize=normalize)
    other.pools, other.table, other.cos, other.sin = case.pools, case.table, case.cos, case.sin
    return other


class TestOutputs:
    @pytest.mark.parametrize("mode", MODES)
    def test_any_strides(self, device: torch.device, mode: str) -> None:
        case = Case(mode=mode)
        expected = case.expected()
        requests, rows, width = expected.shape
        memory = torch.full((width + 1, requests, 2, rows + 1), SENTINEL, device=device)
        out = memory[1:, :, 1, 1:].permute(1, 2, 0)
        ops.triattention_score(*case.arguments(device), out=out)
        agree(out, expected)
        assert int((memory == SENTINEL).sum()) == memory.numel() - expected.numel()

    def test_arguments_of_any_strides(self, device: torch.device) -> None:
        case = Case()
        arguments = list(case.arguments(device))
        for i in range(1, 10):
            wide = arguments[i].new_full([2 * n for n in arguments[i].shape], 77)
            view = wide[tuple(slice(None, None, 2) for _ in arguments[i].shape)]
            view.copy_(arguments[i])
            arguments[i] = view
        agree(ops.triattention_score(*arguments), case.expected())
        arguments[1] = case.table.t().contiguous().to(device).t()
        agree(ops.triattention_score(*arguments), case.expected())


ERRORS: list[tuple[dict[str, Any], type, str]] = [
    ({"key_pools": []}, ValueError, "key_pools must be at least one tensor, got none"),
    (
        {"key_pools": [torch.zeros(3, 2, 64)]},
        ValueError,
        "key_pools[0] must be [pages, kv_heads, tokens_per_page, D]",
    ),
    (
        {"key_pools": [torch.zeros(3, 2, 4, 63)] * 2},
        ValueError,
        "key_pools[0] must be of an even D from 2 to 256",
    ),
    (
        {"key_pools": [torch.zeros(3, 2, 4, 258)] * 2},
        ValueError,
        "key_pools[0] must be of an even D from 2 to 256",
    ),
    (
        {"key_pools": [torch.zeros(3, 0, 4, 64)] * 2},
        ValueError,
        "key_pools[0] must be of one KV head or more",
    ),
    (
        {"key_pools": [torch.zeros(3, 2, 0, 64)] * 2},
        ValueError,
        "key_pools[0] must be of one token a page or more",
    ),
    (
        {"key_pools": [torch.zeros(3, 2, 16, 64).double()] * 2},
        TypeError,
        "key_pools[0] must be torch.bfloat16, torch.float16, torch.float32 or torch.float8_e4m3fn, got torch.float64",
    ),
    (
        {"key_pools": [torch.zeros(3, 2, 16, 64), torch.zeros(3, 2, 16, 64).half()]},
        TypeError,
        "key_pools[1] must be torch.float32, as key_pools[0], got torch.float16",
    ),
    (
        {"key_pools": [torch.zeros(3, 2, 16, 64), torch.zeros(3, 2, 8, 64)]},
        ValueError,
        "key_pools[1] must be [pages, 2, 16, 64], as key_pools[0], got [3, 2, 8, 64]",
    ),
    (
        {"key_pools": [torch.zeros(3, 2, 64, 16).transpose(2, 3)] * 2},
        ValueError,
        "key_pools[0] must be contiguous in its last dimension",
    ),
    ({"page_table": torch.zeros(2, 6).long()}, TypeError, "page_table must be torch.int32, got torch.int64"),
    ({"page_table": ints([1])}, ValueError, "page_table must be int32 [requests, max_pages], got [1]"),
    (
        {"prompt_lengths": ints([1])},
        ValueError,
        "prompt_lengths must be torch.int32 [requests] = [2], got [1]",
    ),
    ({"source_lengths": torch.zeros(2)}, TypeError, "source_lengths must be torch.int32, got torch.float32"),
    (
        {"mean_cos": torch.zeros(2, 31)},
        ValueError,
        "mean_cos must be torch.float32 [requests, F] = [2, 32], got",
    ),
    (
        {"mean_sin": torch.zeros(1, 32)},
        ValueError,
        "mean_sin must be torch.float32 [requests, F] = [2, 32], got",
    ),
    (
        {"q_mean_real": torch.zeros(2, 7, 32)},
        ValueError,
        "q_mean_real must be fp32 [layers, q_heads, F] with a multiple of 2 heads, got [2, 7, 32]",
    ),
    (
        {"q_mean_real": torch.zeros(2, 0, 32)},
        ValueError,
        "q_mean_real must be fp32 [layers, q_heads, F] with a multiple",
    ),
    (
        {"q_mean_real": torch.zeros(3, 8, 32)},
        ValueError,
        "q_mean_real must be torch.float32 [layers, q_heads, F] = [2, 8, 32], got [3, 8, 32]",
    ),
    (
        {"q_mean_imag": torch.zeros(2, 4, 32)},
        ValueError,
        "q_mean_imag must be torch.float32 [layers, q_heads, F] = [2, 8",
    ),
    (
        {"q_norm_excess": torch.zeros(2, 8, 32).half()},
        TypeError,
        "q_norm_excess must be torch.float32, got torch.float16",
    ),
    (
        {"freq_scale_sq": torch.zeros(64)},
        ValueError,
        "freq_scale_sq must be torch.float32 [F] = [32], got [64]",
    ),
    ({"mode": "mean"}, ValueError, "mode must be union, per_head or per_layer_perhead, got mean"),
    ({"width": -1}, ValueError, "width must be in [0, 2^31), got -1"),
    ({"width": 1 << 31}, ValueError, "width must be in [0, 2^31), got 2147483648"),
    ({"width": 1.5}, TypeError, "width must be a int, got a float"),
    ({"q_mean_real": None}, TypeError, "q_mean_real must be a Tensor, got None"),
    ({"page_table": None}, TypeError, "page_table must be a Tensor, got None"),
    (
        {"out": torch.zeros(2, 2, 96)},
        ValueError,
        "out must be torch.float32 [requests, rows, width] = [2, 1, 96], got [2, 2, 96]",
    ),
    ({"out": torch.zeros(2, 1, 96).half()}, TypeError, "out must be torch.float32, got torch.float16"),
    ({"out": torch.zeros(1).expand(2, 1, 96)}, ValueError, "out must be free of elements that share memory"),
]
NAMES = [
    *("key_pools", "page_table", "prompt_lengths", "source_lengths", "mean_cos", "mean_sin"),
    *("q_mean_real", "q_mean_imag", "q_norm_excess", "freq_scale_sq", "mode", "normalize", "width"),
]


class TestErrors:
    @pytest.mark.parametrize(("changes", "error", "text"), ERRORS, ids=[text[:40] for _, _, text in ERRORS])
    def test_arguments(self, device: torch.device, changes: dict[str, Any], error: type, text: str) -> None:
        given = dict(zip(NAMES, Case().arguments(device), strict=True))
        for name, value in changes.items():
            pools = isinstance(value, list)
            given[name] = (
                [on(v, device) for v in value]
                if pools
                else on(value, device)
                if isinstance(value, Tensor)
                else value
            )
        with pytest.raises(error) as raised:
            ops.triattention_score(**given)
        assert str(raised.value).startswith(f"kvc.triattention_score: {text}")

    def test_no_pools_while_tracing(self) -> None:
        with pytest.raises(ValueError, match="key_pools must be at least one tensor, got none"):
            torch.ops.kvc.triattention_score([], *Case().arguments("meta")[1:])

    def test_output_that_is_an_argument(self, device: torch.device) -> None:
        case = Case(dtype=FP32)
        arguments = case.arguments(device)
        out = arguments[0][1].view(-1)[: 2 * 96].view(2, 1, 96)
        with pytest.raises(ValueError, match="out must be apart from key_pools, got memory that they lie in"):
            ops.triattention_score(*arguments, out=out)
        memory = torch.zeros(2, 128, device=device)
        arguments = (*arguments[:4], memory[:, 96:], *arguments[5:])
        with pytest.raises(ValueError, match="out must be apart from mean_cos, got memory that it lies in"):
            ops.triattention_score(*arguments, out=memory[:, :96].unsqueeze(1))

    @pytest.mark.cuda
    def test_devices(self) -> None:
        arguments = Case().arguments("cuda")
        for i in range(1, 10):
            mixed = [a.cpu() if k == i else a for k, a in enumerate(arguments)]
            with pytest.raises(TypeError, match=rf"{NAMES[i]} must be on cuda:0, got cpu"):
                ops.triattention_score(*mixed)

    def test_debug_mode(self, device: torch.device, debug_mode: None) -> None:
        case = Case(prompts=[20, 40], sources=[70, 60])
        case.table[0, 0] = case.table[1, 4] = -1  # not in the range
        check(case, device)
        check(Case(prompts=[3, 500], sources=[3, 400]), device)
        for changes, text in (
            ({"prompt_lengths": ints([0, -1])}, "prompt_lengths[1] must be at least 0, got -1"),
            (
                {"source_lengths": ints([97, 96])},
                "source_lengths[0] must be at most 96, what the table names, got 97",
            ),
            ({"table": case.table.clone().fill_(15)}, "page_table[0, 1] must be in [0, 15), got 15"),
            ({"table": case.table.clone().fill_(-1)}, "page_table[0, 1] must be in [0, 15), got -1"),
        ):
            bad = Case(prompts=[20, 40], sources=[70, 60])
            for name, value in changes.items():
                setattr(bad, name, value)
            out = torch.full((2, 1, 96), SENTINEL, device=device)
            with pytest.raises(ValueError) as raised:  # noqa: PT011  (the text is compared below)
                ops.triattention_score(*bad.arguments(device), out=out)
            assert str(raised.value) == f"kvc.triattention_score: {text}"
            assert (out == SENTINEL).all()


class TestFramework:
    @pytest.mark.parametrize("mode", MODES)
    def test_opcheck(self, device: torch.device, mode: str) -> None:
        arguments = Case(mode=mode).arguments(device)
        torch.library.opcheck(torch.ops.kvc.triattention_score.default, arguments)
        out = torch.zeros_like(ops.triattention_score(*arguments))
        torch.library.opcheck(torch.ops.kvc.triattention_score.out, arguments, {"out": out})

    def test_compile(self, device: torch.device) -> None:
        case = Case(mode="per_head")
        positions, omega = torch.arange(2) + 9, omegas(32)

        def run(positions: Tensor, omega: Tensor, offsets: Tensor, *arguments: Any) -> Tensor:
            cos, sin = ops.mean_phase(positions, omega, offsets)
            return ops.triattention_score(*arguments[:4], cos, sin, *arguments[6:])

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        first = [t.to(device) for t in (positions, omega, OFFSETS[:5])]
        agree(compiled(*first, *case.arguments(device)), case.expected())

    def test_compile_with_an_output(self, device: torch.device) -> None:
        case = Case()

        def run(*arguments: Any) -> Tensor:
            rows = torch.full((4, 1, 96), SENTINEL, device=device)
            ops.triattention_score(*arguments, out=rows[1:3])
            return rows

        rows = torch.compile(run, fullgraph=True, backend="aot_eager")(*case.arguments(device))
        agree(rows[1:3], case.expected())
        assert (rows[[0, 3]] == SENTINEL).all()

    @pytest.mark.parametrize("mode", MODES)
    def test_same_bits_on_every_run(self, device: torch.device, mode: str) -> None:
        case = Case(4, 3, 2, 4, 128, 32, 20, mode=mode, width=640)
        arguments = case.arguments(device)
        first = ops.triattention_score(*arguments)
        for _ in range(5):
            assert torch.equal(ops.triattention_score(*arguments), first)


@pytest.mark.cuda
class TestCuda:
    @pytest.mark.parametrize("mode", MODES)
    def test_graph_replay_reads_new_contents(self, mode: str) -> None:
        case = Case(3, 2, 2, 4, 128, 32, 20, mode=mode, width=500)
        arguments = case.arguments("cuda")
        ops.triattention_score(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = ops.triattention_score(*arguments)
        for seed, sources in ((1, [640, 10, 300]), (2, [0, 640, 640]), (3, [100, 101, 102])):
            other = Case(
                3, 2, 2, 4, 128, 32, 20, mode=mode, width=500, seed=seed, prompts=[1, 5, 99], sources=sources
            )
            for held, new in zip(arguments[:10], other.arguments()[:10], strict=True):
                for h, n in zip(held, new, strict=True) if isinstance(held, list) else ((held, new),):
                    h.copy_(n)
            graph.replay()
            agree(rows, other.expected())

    def test_side_stream_behind_a_slow_producer(self) -> None:
        case = Case(2, 2, 2, 4, 128, 32, 20, width=640)
        target = [torch.zeros_like(t) for t in (*case.arguments("cuda")[0], *case.arguments("cuda")[1:10])]
        source = [*case.pools, *case.arguments()[1:10]]
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for t, s in zip(target, source, strict=True):
                t.copy_(s, non_blocking=True)
            rows = ops.triattention_score(target[:2], *target[2:], "union", True, 640)
            cos, _ = ops.mean_phase(target[3].long(), omegas(64).cuda(), OFFSETS.cuda())
        stream.synchronize()
        agree(rows, case.expected())
        expected, _ = reference.mean_phase(case.prompt_lengths, omegas(64), OFFSETS)
        torch.testing.assert_close(cos.cpu(), expected, rtol=0, atol=1e-6)

    def test_does_not_wait(self) -> None:
        arguments = Case(2, 2, 2, 4, 128, 32, 20, width=640).arguments("cuda")
        for normalize in (True, False):
            ops.triattention_score(*arguments[:-2], normalize, 640)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        ops.triattention_score(*arguments)
        ops.mean_phase(arguments[2], arguments[9], torch.zeros(3, dtype=torch.int64, device="cuda"))
        assert not torch.cuda.current_stream().query()

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_pool_beyond_2_to_31_elements(self, layout: str) -> None:
        if torch.cuda.mem_get_info()[0] < 6 << 30:
            pytest.skip("needs 6 GiB")
        case = Case(1, 1, 2, 4, 128, 32, 5, E4M3, width=160)
        pages = (1 << 31) // (2 * 32 * 128) + 64
        shape = (pages, 2, 32, 128) if layout == "HND" else (pages, 32, 2, 128)
        memory = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        pool = memory if layout == "HND" else memory.transpose(1, 2)
        table = torch.tensor([pages - 1, 0, pages - 2, 1, pages // 2])
        pool[table.cuda()] = case.pools[0].view(torch.uint8)[case.table[0].long()].cuda()
        arguments = list(case.arguments("cuda"))
        arguments[0], arguments[1] = [pool.view(E4M3)], table.int().cuda()[None]
        agree(ops.triattention_score(*arguments), case.expected())

    @pytest.mark.parametrize("mode", ["union", "per_layer_perhead"])
    def test_scratch_beyond_2_to_31_elements(self, mode: str) -> None:
        layers, heads, columns = 36, 32, 16_384
        requests = (1 << 31) // (layers * heads * columns) + 2
        if torch.cuda.mem_get_info()[0] < 40 << 30:
            pytest.skip("needs 40 GiB")
        case = Case(1, layers, 2, 16, 16, 32, 512, mode=mode, width=columns, prompts=[897], sources=[1_000])
        one = case.arguments("cuda")
        many = [
            one[0],
            *(a.repeat(requests, 1) if a.dim() == 2 else a.repeat(requests) for a in one[1:6]),
            *one[6:],
        ]
        many[3][1:-1] = 0
        rows = ops.triattention_score(*many)
        expected = case.expected()
        for r in (0, requests - 1):
            agree(rows[r : r + 1], expected)
        assert (rows[1:-1] == LOWEST).all()

    @pytest.mark.parametrize(("group", "width"), [(4, 70_400), (8, 70_400), (9, 30_000), (4, 300)])
    @pytest.mark.parametrize("mode", MODES)
    def test_rows_longer_than_shared_memory(self, mode: str, group: int, width: int) -> None:
        case = Case(2, 2, 1, group, 64, 64, 1_100, mode=mode, width=width, sources=[70_400, 21_000])
        check(case, "cuda")

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_device_that_is_not_current(self) -> None:
        assert torch.cuda.current_device() == 0
        check(Case(), "cuda:1")


INTERPRETED = Path(__file__).with_name("interpret_triattention.py")


def test_triton_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(INTERPRETED)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases agree" in done.stdout
