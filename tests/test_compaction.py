"""Paged compaction against the reference, whole storages compared: sentinels around the pools must survive
too."""

from __future__ import annotations

import itertools
from typing import Any

import kvc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc.reference import compaction as reference
from torch import Tensor

BF16, U8, E4M3 = torch.bfloat16, torch.uint8, torch.float8_e4m3fn
ops: Any = kvc  # called with unpacked arguments, which a type checker cannot follow
CUDA = torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if CUDA else ["cpu"]


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(counts: list[int], first: int = 0) -> Tensor:
    return ints(list(itertools.accumulate(counts, initial=first)))


def storage(pool: Tensor) -> Tensor:
    return torch.empty(0, dtype=U8, device=pool.device).set_(pool.untyped_storage()).cpu()


def twin(pool: Tensor, device: torch.device | str) -> Tensor:
    """The same view of a copy of the whole storage."""
    memory = torch.empty(0, dtype=U8, device=pool.device).set_(pool.untyped_storage()).clone().to(device)
    copy = torch.empty(0, dtype=pool.dtype, device=device)
    return copy.set_(memory.untyped_storage(), pool.storage_offset(), pool.shape, pool.stride())


def random_pool(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int, shift: int = 0) -> Tensor:
    """``[pages, planes, heads, tokens, D]`` of random bytes; `shift` elements in front move it off its
    alignment."""
    pages, planes, heads, tokens, width = shape
    pad = 3 if layout == "padded" else 0
    count = pages * planes * heads * tokens * (width + pad) + shift + 2
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=U8).view(dtype)[
        shift:-2
    ]
    if layout == "NHD":
        return memory.view(pages, planes, tokens, heads, width).transpose(2, 3)
    return memory.view(pages, planes, heads, tokens, width + pad)[..., pad // 2 : pad // 2 + width]


def random_table(requests: int, columns: int, pages: int, seed: int = 0) -> Tensor:
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    return order[: requests * columns].view(requests, columns).int()


def random_sources(heads: int, length: int, base: int, moves: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(length - base, generator=generator)[:moves].sort()[0] + base for _ in range(heads)]
    return torch.stack(rows).int()


def check(
    device: torch.device | str, pools: list[Tensor], *arguments: Tensor | None, op: Any = None
) -> list[Tensor]:
    """Run op and reference on copies; every byte of every storage must agree. Returns the compacted pools."""
    expected = [twin(pool, "cpu") for pool in pools]
    assert all(e.data_ptr() != p.data_ptr() for e, p in zip(expected, pools, strict=True) if p.numel())
    reference.compact_pages_(expected, *arguments)  # type: ignore[arg-type]
    actual = [twin(pool, device) for pool in pools]
    (op or ops.compact_pages_)(actual, *(a if a is None else a.to(device) for a in arguments))
    for layer, (a, e) in enumerate(zip(actual, expected, strict=True)):
        differ = (storage(a) != storage(e)).nonzero()
        assert len(differ) == 0, f"layer {layer}: {len(differ)} bytes differ, first at {differ[0].item()}"
    return actual


class TestKnownAnswers:
    def test_by_hand(self, device: torch.device) -> None:
        # Two pages of four tokens, listed backwards; token t of the request holds t.
        pool = torch.tensor([[4, 5, 6, 7], [0, 1, 2, 3]], dtype=U8, device=device).view(2, 1, 1, 4, 1)
        ops.compact_pages_(
            [pool], ints([[1, 0]]).to(device), ints([[1, 2, 5, 7]]).to(device), *at(device, [0, 4], [1])
        )
        assert pool.flatten().tolist() == [7, 5, 6, 7, 0, 1, 2, 5]

    def test_destinations_by_hand(self, device: torch.device) -> None:
        pool = torch.arange(8, dtype=U8, device=device).view(2, 1, 1, 4, 1)
        sources, destinations = ints([[7, -1, 2, 5]]).to(device), ints([[0, 3, 4, -1]]).to(device)
        table = ints([[0, 1]]).to(device)
        ops.compact_pages_([pool], table, sources, *at(device, [0, 4], [9]), destinations=destinations)
        assert pool.flatten().tolist() == [7, 1, 2, 3, 2, 5, 6, 7]

    def test_returns_nothing(self, device: torch.device) -> None:
        pool = torch.zeros(1, 1, 1, 4, 1, device=device)
        assert (
            ops.compact_pages_(
                [pool], ints([[0]]).to(device), ints([[1]]).to(device), *at(device, [0, 1], [0])
            )
            is None
        )


def at(device: torch.device | str, *values: Any) -> list[Tensor]:
    return [ints(value).to(device) for value in values]


class TestOverlap:
    """Sources as close to their destinations as the contract allows, and every way to cross a page."""

    @pytest.mark.parametrize("tokens", [1, 2, 16, 32, 64, 128])
    @pytest.mark.parametrize("distance", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 129])
    def test_shifted_run(self, device: torch.device, tokens: int, distance: int) -> None:
        moves, base = 300, 3
        length = base + moves + distance
        columns = -(-length // tokens)
        pool = random_pool((columns + 2, 2, 2, tokens, 64), BF16, "HND", seed=1)
        sources = torch.arange(moves).int() + base + distance
        table = random_table(1, columns, columns + 2)
        check(device, [pool], table, sources.expand(2, moves), ints([0, moves]), ints([base]))

    @pytest.mark.parametrize("first_hole", [0, 1, 30, 31, 32, 33, 127, 255, 256, 257, 290])
    def test_leading_run_stays(self, device: torch.device, first_hole: int) -> None:
        moves = 300
        sources = torch.arange(moves).int()
        sources[first_hole:] += 1
        pool = random_pool((12, 2, 1, 32, 128), BF16, "HND", seed=2)
        check(device, [pool], random_table(1, 12, 12), sources[None], ints([0, moves]), ints([0]))

    @pytest.mark.parametrize("width", [1, 4, 16, 24, 64, 100, 128, 256, 640])
    def test_growing_distance(self, device: torch.device, width: int) -> None:
        # Every second token stays: distances run from 0 to 200, through every alignment of tiles and pages.
        sources = (torch.arange(200) * 2).int().expand(3, 200)
        pool = random_pool((26, 1, 3, 16, width), U8, "HND", seed=3)
        check(device, [pool], random_table(1, 26, 26), sources, ints([0, 200]), ints([0]))

    def test_missing_moves_between(self, device: torch.device) -> None:
        sources = random_sources(4, 400, 5, 300, seed=4)
        sources[torch.rand(sources.shape, generator=torch.Generator().manual_seed(5)) < 0.3] = -1
        pool = random_pool((14, 2, 4, 32, 64), BF16, "NHD", seed=6)
        check(device, [pool], random_table(1, 13, 14), sources, ints([0, 300]), ints([5]))


class TestGeometry:
    @pytest.mark.parametrize("layout", ["HND", "NHD", "padded"])
    @pytest.mark.parametrize(
        ("width", "dtype"),
        [
            (1, U8),
            (3, U8),
            (2, torch.int16),
            (5, torch.int16),
            (6, torch.float32),
            (33, torch.float64),
            (80, BF16),
            (64, BF16),
            (128, BF16),
            (256, BF16),
            (128, E4M3),
            (64, E4M3),
            (576, BF16),
            (20, torch.bool),
            (7, torch.cfloat),
        ],
        ids=lambda v: str(v).removeprefix("torch."),
    )
    def test_rows(self, device: torch.device, width: int, dtype: torch.dtype, layout: str) -> None:
        if dtype == torch.bool:
            pools = [random_pool((10, 2, 3, 8, width), U8, layout, seed=7) % 2 == 1]
        else:
            pools = [random_pool((10, 2, 3, 8, width), dtype, layout, seed=s) for s in (7, 8)]
        sources = torch.cat((random_sources(3, 30, 1, 20, 9), random_sources(3, 40, 4, 36, 10)), 1)
        check(device, pools, random_table(2, 5, 10), sources, cumulative([20, 36]), ints([1, 4]))

    @pytest.mark.parametrize("shift", [1, 2, 4, 8, 12])
    def test_misaligned_pools(self, device: torch.device, shift: int) -> None:
        pools = [
            random_pool((9, 2, 2, 16, 64), U8, layout, seed=11, shift=shift) for layout in ("HND", "NHD")
        ]
        check(
            device,
            pools,
            random_table(1, 9, 9),
            random_sources(2, 144, 0, 100, 12),
            ints([0, 100]),
            ints([0]),
        )

    def test_layers_that_differ(self, device: torch.device) -> None:
        shapes = [
            (40, 2, 2, 16, 64),
            (40, 2, 2, 16, 64),
            (22, 1, 2, 32, 128),
            (41, 2, 2, 16, 64),
            (40, 2, 2, 16, 3),
        ]
        pools = [random_pool(s, BF16, "HND" if i % 2 else "NHD", seed=i) for i, s in enumerate(shapes)]
        pools += [
            random_pool((300, 1, 2, 1, 24), U8, "HND", seed=9),
            random_pool((20, 2, 2, 16, 32), torch.float32, "HND", 8),
        ]
        sources = torch.cat((random_sources(2, 140, 2, 100, 13), random_sources(2, 90, 0, 80, 14)), 1)
        table = random_table(2, 10, 20)
        check(device, pools, table, sources, cumulative([100, 80]), ints([2, 0]))

    def test_separate_keys_and_values(self, device: torch.device) -> None:
        both = random_pool((8, 2, 2, 16, 64), BF16, "HND", seed=15)
        keys, values = twin(both, device)[:, :1], twin(both, device)[:, 1:]
        arguments = random_table(1, 8, 8), random_sources(2, 128, 3, 90, 16), ints([0, 90]), ints([3])
        ops.compact_pages_([keys, values], *(a.to(device) for a in arguments))
        (together,) = check(device, [both], *arguments)
        assert torch.equal(torch.cat((keys, values), 1).view(torch.int16), together.view(torch.int16))

    def test_more_layers_than_one_launch_takes(self, device: torch.device) -> None:
        pools = [random_pool((4, 1, 1, 8, 16), U8, "HND", seed=i) for i in range(500)]
        check(
            device, pools, random_table(1, 4, 4), random_sources(1, 32, 0, 20, 17), ints([0, 20]), ints([0])
        )

    @pytest.mark.parametrize("free", [False, True])
    def test_strided_arguments(self, device: torch.device, free: bool) -> None:
        pools = [random_pool((20, 2, 2, 8, 64), BF16, "HND", seed=i) for i in range(3)]
        ordered = torch.cat([random_sources(2, 70, 0, 60, s) for s in (18, 19)], 1)
        # Without order: token 69 - i of a request to token i.
        falling = (69 - torch.arange(120) % 60 % 35).int().expand(2, 120)
        falling = torch.where(torch.arange(120) % 60 < 35, falling, -1)
        sources = torch.full((240, 2, 2), -7, dtype=torch.int32)
        sources[::2] = (falling if free else ordered).view(1, 2, 120).expand(2, 2, 120).permute(2, 0, 1)
        destinations = (69 - falling).int().expand(2, 2, 120) if free else None
        table = torch.full((18, 4), -9, dtype=torch.int32)
        table[::2, ::2] = random_table(2, 9, 20).t()
        small = torch.full((6, 3), -3, dtype=torch.int32)
        small[::2, 0], small[:2, 1], small[:3, 2] = cumulative([60, 60]), ints([0, 0]), ints([1, 0, 1])
        moves = sources[::2].permute(1, 2, 0), small[::2, 0], small[:2, 1], small[:3, 2]
        check(device, pools, table[::2, ::2].t(), *moves, destinations)

    @settings(max_examples=60 if CUDA else 30)
    @given(st.data())
    def test_anything(self, data: st.DataObject) -> None:
        draw = data.draw
        heads, layers, requests = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
        length = draw(st.integers(1, 150))
        shapes = draw(
            st.lists(
                st.tuples(
                    st.integers(1, 2),
                    st.sampled_from([1, 3, 16, 32]),
                    st.sampled_from([1, 6, 16, 40, 64, 128, 300]),
                ),
                min_size=1,
                max_size=layers,
            )
        )
        columns = -(-length // min(tokens for _, tokens, _ in shapes)) + 1
        pages = requests * columns + 1
        pools = [
            random_pool(
                (pages + layer, planes, heads, tokens, width),
                U8,
                draw(st.sampled_from(["HND", "NHD", "padded"])),
                layer,
            )
            for layer, (planes, tokens, width) in enumerate((shapes * layers)[:layers])
        ]
        free = draw(st.booleans())
        bases = [draw(st.integers(0, length - 1)) for _ in range(requests)]
        counts = [draw(st.integers(0, (length - base) // (2 if free else 1))) for base in bases]
        planes = draw(st.integers(1, 2))
        mapped = draw(st.booleans())
        offsets = cumulative(counts, draw(st.integers(0, 2)))
        sources = torch.full(
            (planes, heads, int(offsets[-1]) + draw(st.integers(0, 3))), -1, dtype=torch.int32
        )
        destinations = sources.clone()
        generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        for r, s, h in itertools.product(range(requests), range(planes), range(heads)):
            tokens = torch.randperm(length - bases[r], generator=generator).int() + bases[r]
            there = slice(int(offsets[r]), int(offsets[r + 1]))
            sources[s, h, there] = tokens[: counts[r]] if free else tokens[: counts[r]].sort()[0]
            if free:
                destinations[s, h, there] = tokens[counts[r] : 2 * counts[r]]
        layer_map = ints([draw(st.integers(-1, planes)) for _ in range(layers)]) if mapped else None
        table = random_table(requests, columns, pages)
        if not mapped:
            sources, destinations = sources[0], destinations[0]
        for device in DEVICES:
            check(
                device, pools, table, sources, offsets, ints(bases), layer_map, destinations if free else None
            )


class TestRequests:
    def test_per_layer_sources(self, device: torch.device) -> None:
        pools = [random_pool((18, 2, 2, 32, 64), BF16, "HND", seed=i) for i in range(3)]
        counts, bases = [71, 0, 29], [3, 9, 17]
        sources = torch.full((3, 2, 137), -1, dtype=torch.int32)  # 37 columns more than moves
        for plane in range(3):
            sources[plane, :, :5] = torch.arange(3, 8)  # a leading run that stays
            sources[plane, :, 5:71] = random_sources(2, 190, 8, 66, plane)
            sources[plane, :, 71:100] = random_sources(2, 120, 17, 29, plane + 5)
        table = random_table(3, 6, 18)
        check(device, pools, table, sources, cumulative(counts), ints(bases), ints([2, 0, 2]))

    def test_thousands(self, device: torch.device) -> None:
        requests = 5000
        generator = torch.Generator().manual_seed(20)
        counts = torch.randint(0, 4, (requests,), generator=generator).tolist()
        counts[::3] = [0] * len(counts[::3])
        sources = torch.cat([torch.arange(n) * 2 + 1 for n in counts]).int().expand(2, -1)
        pool = random_pool((2 * requests, 1, 2, 4, 16), U8, "HND", seed=21)
        table = random_table(requests, 2, 2 * requests)
        check(device, [pool], table, sources, cumulative(counts), torch.zeros(requests, dtype=torch.int32))
        check(device, [pool], table, sources, cumulative(counts), ints([0] * requests), None, sources - 1)

    def test_table_wider_than_used(self, device: torch.device) -> None:
        table = torch.full((2, 1000), -12345, dtype=torch.int32)
        table[:, :4] = random_table(2, 4, 8)
        table[:, 4:500] = 2**31 - 1
        sources = torch.cat((random_sources(1, 64, 0, 40, 22), random_sources(1, 64, 2, 30, 23)), 1)
        check(
            device,
            [random_pool((8, 2, 1, 16, 32), BF16, "HND", 24)],
            table,
            sources,
            cumulative([40, 30]),
            ints([0, 2]),
        )

    @pytest.mark.parametrize("free", [False, True])
    def test_values_out_of_range_are_skipped(self, device: torch.device, free: bool) -> None:
        pool = random_pool((6, 2, 1, 8, 32), U8, "HND", seed=25)
        table = ints([[0, 1, 99], [3, -1, 4]])
        sources = ints([[1, 3, 9, 17, 23, 24, -5, 2**31 - 1, -(2**31), 2, 5, 7, 8, 12, 19, 20]])
        destinations = ints([[0, 2, 24, -1, 4, 5, 6, 7, 8, 1, -9, 10, 9, 2**31 - 1, 17, 3]])
        offsets = ints([0, 9, 16])
        check(device, [pool], table, sources, offsets, ints([0, 1]), None, destinations if free else None)
        check(
            device,
            [pool, pool],
            table,
            sources[None],
            offsets,
            ints([0, 1]),
            ints([1, -1]),
            destinations[None] if free else None,
        )

    @pytest.mark.parametrize(
        "offsets", [[0, 5, 3, 9], [9, 0, 0, 0], [-4, 3, 5, 40], [2, 2, 2, 2], [-(2**31), 2**31 - 1, 0, 4]]
    )
    def test_offsets_that_decrease_or_leave_the_buffer(
        self, device: torch.device, offsets: list[int]
    ) -> None:
        sources = (torch.arange(10) * 3 + 6).int()[None]
        pool = random_pool((9, 1, 1, 16, 8), U8, "HND", seed=26)
        check(device, [pool], random_table(3, 3, 9), sources, ints(offsets), ints([0, 1, 2]))

    @pytest.mark.parametrize("bases", [[-3, 0], [2**31 - 1, -(2**31)], [46, 47]])
    def test_bases_out_of_range(self, device: torch.device, bases: list[int]) -> None:
        sources = ints([[4, 9, 20, 21, 30, 6, 7, 47]])
        pool = random_pool((6, 1, 1, 16, 8), U8, "HND", seed=27)
        check(device, [pool], random_table(2, 3, 6), sources, ints([0, 5, 8]), ints(bases))

    @pytest.mark.parametrize(
        ("shape", "requests", "columns", "total"),
        [
            ((0, 2, 2, 4, 8), 1, 2, 3),
            ((4, 0, 2, 4, 8), 1, 2, 3),
            ((4, 2, 0, 4, 8), 1, 2, 3),
            ((4, 2, 2, 0, 8), 1, 2, 3),
            ((4, 2, 2, 4, 0), 1, 2, 3),
            ((4, 2, 2, 4, 8), 0, 2, 3),
            ((4, 2, 2, 4, 8), 1, 0, 3),
            ((4, 2, 2, 4, 8), 1, 2, 0),
        ],
    )
    def test_nothing_to_do(
        self, device: torch.device, shape: tuple[int, ...], requests: int, columns: int, total: int
    ) -> None:
        pool = torch.ones(shape, device=device)
        sources = torch.arange(total).int().expand(shape[2], total)
        arguments = (
            torch.zeros(requests, columns),
            sources,
            cumulative([total] * requests),
            torch.zeros(requests),
        )
        ops.compact_pages_([pool], *(a.int().to(device) for a in arguments))
        assert bool((pool == 1).all())


def request_tokens(pool: Tensor, pages: Tensor, head: int, tokens: Tensor) -> Tensor:
    slots = pool.shape[3]
    return pool[pages[tokens // slots].long(), :, head, tokens % slots]


class TestWholeRounds:
    """Decision, packing and compaction together, judged by what a request's tokens are afterwards."""

    LENGTHS, PROMPTS, TAILS, KEEP = (80, 75), (2, 5), (2, 1), 40

    def decision(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(30)
        picks = [
            torch.randperm(length - prompt, generator=generator)[: self.KEEP].sort()[0] + prompt
            for length, prompt in zip(self.LENGTHS, self.PROMPTS, strict=True)
            for _ in range(rows)
        ]
        return torch.stack(picks).int().view(2, rows, self.KEEP)

    @pytest.mark.parametrize("rows", [1, 2, 6], ids=["union", "per_head", "per_layer"])
    def test_ordered(self, device: torch.device, rows: int) -> None:
        layers, heads = 3, 2
        pools = [random_pool((12, 2, heads, 16, 32), BF16, "HND", seed=i) for i in range(layers)]
        table, kept = random_table(2, 6, 12), self.decision(rows)
        offsets = cumulative([self.KEEP + tail for tail in self.TAILS])
        moved = [twin(pool, device) for pool in pools]
        dense, _ = ops.pack_move_sources(
            kept.to(device),
            *at(device, self.LENGTHS, offsets.tolist()),
            None,
            0,
            layers,
            heads,
            int(offsets[-1]),
            0,
        )
        layer_map = ints(range(layers)).to(device) if rows == 6 else None
        ops.compact_pages_(
            moved, table.to(device), dense, *at(device, offsets.tolist(), self.PROMPTS), layer_map
        )
        for layer, r, head in itertools.product(range(layers), range(2), range(heads)):
            row = {1: 0, 2: head, 6: layer * heads + head}[rows]
            prompt, length, tail = self.PROMPTS[r], self.LENGTHS[r], self.TAILS[r]
            source = torch.cat((torch.arange(prompt), kept[r, row], torch.arange(length, length + tail)))
            now = request_tokens(moved[layer].cpu(), table[r], head, torch.arange(len(source)))
            assert torch.equal(
                now.view(torch.int16), request_tokens(pools[layer], table[r], head, source).view(torch.int16)
            )

    def test_sliding_window(self, device: torch.device) -> None:
        pools = [random_pool((12, 2, 2, 16, 32), BF16, "NHD", seed=i) for i in range(2)]
        table, window = random_table(2, 6, 12), 24
        offsets = cumulative([window + tail for tail in self.TAILS])
        moved = [twin(pool, device) for pool in pools]
        bases = [prompt + self.KEEP - window for prompt in self.PROMPTS]
        _, swa = ops.pack_move_sources(
            self.decision(1).to(device),
            *at(device, self.LENGTHS, [0, 0, 0], offsets.tolist()),
            window,
            2,
            2,
            0,
            int(offsets[-1]),
        )
        ops.compact_pages_(moved, table.to(device), swa, *at(device, offsets.tolist(), bases))
        for r, head in itertools.product(range(2), range(2)):
            source = torch.arange(self.LENGTHS[r] - window, self.LENGTHS[r] + self.TAILS[r])
            now = request_tokens(moved[1].cpu(), table[r], head, torch.arange(len(source)) + bases[r])
            assert torch.equal(
                now.view(torch.int16), request_tokens(pools[1], table[r], head, source).view(torch.int16)
            )

    @pytest.mark.parametrize("rows", [1, 2, 6], ids=["union", "per_head", "per_layer"])
    def test_filling_holes(self, device: torch.device, rows: int) -> None:
        layers, heads = 3, 2
        pools = [random_pool((12, 2, heads, 16, 8), BF16, "HND", seed=i) for i in range(layers)]
        table, kept = random_table(2, 6, 12), self.decision(rows)
        most = [min(self.KEEP, n - p - self.KEEP) for n, p in zip(self.LENGTHS, self.PROMPTS, strict=True)]
        fill, tail = cumulative(most), cumulative(list(self.TAILS))
        moved = [twin(pool, device) for pool in pools]
        sources, destinations, tail_sources = ops.pack_fill_moves(
            kept.to(device),
            *at(device, self.LENGTHS, self.PROMPTS, fill.tolist(), tail.tolist()),
            layers,
            heads,
            int(fill[-1]),
            int(tail[-1]),
        )
        layer_map = ints(range(layers)).to(device) if rows == 6 else None
        ends = [prompt + self.KEEP for prompt in self.PROMPTS]
        ops.compact_pages_(
            moved, table.to(device), sources, *at(device, fill.tolist(), ends), layer_map, destinations
        )
        ops.compact_pages_(moved, table.to(device), tail_sources, *at(device, tail.tolist(), ends))
        for layer, r, head in itertools.product(range(layers), range(2), range(heads)):
            row = {1: 0, 2: head, 6: layer * heads + head}[rows]
            length, prompt = self.LENGTHS[r], self.PROMPTS[r]
            before = {
                int(t): request_tokens(pools[layer], table[r], head, t.view(1))
                .view(torch.int16)
                .flatten()
                .tolist()
                for t in torch.arange(length + 2)
            }
            now = request_tokens(moved[layer].cpu(), table[r], head, torch.arange(ends[r] + self.TAILS[r]))
            rows_now = now.view(torch.int16).flatten(1).tolist()
            assert rows_now[:prompt] == [before[t] for t in range(prompt)]
            assert sorted(rows_now[prompt : ends[r]]) == sorted(before[t] for t in kept[r, row].tolist())
            assert rows_now[ends[r] :] == [before[t] for t in range(length, length + self.TAILS[r])]
            stayers = [t for t in kept[r, row].tolist() if t < ends[r]]
            assert all(rows_now[t] == before[t] for t in stayers)


def arguments() -> dict[str, Any]:
    return {
        "pools": [torch.zeros(6, 2, 2, 4, 8), torch.zeros(6, 1, 2, 8, 4)],
        "page_table": random_table(2, 3, 6),
        "sources": random_sources(2, 12, 0, 9, seed=40),
        "offsets": ints([0, 5, 9]),
        "bases": ints([0, 0]),
    }


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("no pool", {"pools": []}, ValueError, "pools must be at least one tensor, got none"),
    (
        "rank",
        {"pools": [torch.zeros(2, 3)]},
        ValueError,
        "pools[0] must be [pages, planes, heads, tokens_per_page, D], got [2, 3] with strides [3, 1]",
    ),
    (
        "last dim",
        {"pools": [torch.zeros(6, 2, 2, 4, 8), torch.zeros(6, 2, 2, 8, 4).transpose(3, 4)]},
        ValueError,
        "pools[1] must be contiguous in its last dimension, got [6, 2, 2, 4, 8] with strides [128, 64, 32, "
        "1, 4]",
    ),
    (
        "heads",
        {"pools": [torch.zeros(6, 2, 2, 4, 8), torch.zeros(6, 2, 3, 4, 8)]},
        ValueError,
        "pools[1] must be of 2 heads, as pools[0], got 3",
    ),
    (
        "shared memory",
        {"pools": [torch.zeros(6, 1, 2, 4, 8).expand(6, 2, 2, 4, 8)]},
        ValueError,
        "pools[0] must be free of elements that share memory, got [6, 2, 2, 4, 8] with strides [64, 0, 32, "
        "8, 1]",
    ),
    (
        "table dtype",
        {"page_table": torch.zeros(2, 3, dtype=torch.int64)},
        TypeError,
        "page_table must be torch.int32, got torch.int64",
    ),
    (
        "table rank",
        {"page_table": ints([0, 1])},
        ValueError,
        "page_table must be int32 [requests, max_pages], got [2] with strides [1]",
    ),
    (
        "sources dtype",
        {"sources": torch.zeros(2, 9)},
        TypeError,
        "sources must be torch.int32, got torch.float32",
    ),
    (
        "sources heads",
        {"sources": ints([[1]])},
        ValueError,
        "sources must be int32 [heads, total] without layer_map, with 2 heads, got [1, 1] with strides [1, "
        "1]",
    ),
    (
        "planes without map",
        {"sources": torch.zeros(1, 2, 9, dtype=torch.int32)},
        ValueError,
        "sources must be int32 [heads, total] without layer_map, with 2 heads, got [1, 2, 9] with strides "
        "[18, 9, 1]",
    ),
    (
        "map without planes",
        {"layer_map": ints([0, 0])},
        ValueError,
        "sources must be int32 [S, heads, total] beside layer_map, with 2 heads, got [2, 9] with strides "
        "[9, 1]",
    ),
    (
        "map length",
        {"sources": torch.zeros(1, 2, 9, dtype=torch.int32), "layer_map": ints([0])},
        ValueError,
        "layer_map must be int32 [layers] = [2], got [1] with strides [1]",
    ),
    (
        "offsets length",
        {"offsets": ints([0, 5])},
        ValueError,
        "offsets must be int32 [requests + 1] = [3], got [2] with strides [1]",
    ),
    (
        "offsets dtype",
        {"offsets": torch.zeros(3, dtype=torch.int64)},
        TypeError,
        "offsets must be torch.int32, got torch.int64",
    ),
    (
        "bases length",
        {"bases": ints([[0, 0]])},
        ValueError,
        "bases must be int32 [requests] = [2], got [1, 2] with strides [2, 1]",
    ),
    (
        "destinations shape",
        {"destinations": torch.zeros(2, 8, dtype=torch.int32)},
        ValueError,
        "destinations must be of the shape of sources, [2, 9] with strides [9, 1], got [2, 8] with strides "
        "[8, 1]",
    ),
    (
        "destinations rank",
        {"destinations": torch.zeros(1, 2, 9, dtype=torch.int32)},
        ValueError,
        "destinations must be int32 [heads, total] without layer_map, with 2 heads, got [1, 2, 9] with "
        "strides [18, 9, 1]",
    ),
]


DEBUG: list[tuple[str, dict[str, Any], str]] = [
    (
        "order",
        {"sources": ints([[0, 2, 3, 5, 9, 1, 2, 7, 8], [0, 2, 3, 5, 9, 1, 4, 4, 8]])},
        "sources (request 1, layer 0, head 1, index 2) must be above the source before it, 4, got 4",
    ),
    (
        "order past a missing move",
        {"sources": ints([[0, 2, 3, 5, 9, 1, 4, -1, 3]] * 2)},
        "sources (request 1, layer 0, head 0, index 3) must be above the source before it, 4, got 3",
    ),
    (
        "destination behind",
        {"bases": ints([0, 2])},
        "sources (request 1, layer 0, head 0, index 0) must be at or above its destination, 2, got 1",
    ),
    (
        "source range",
        {"sources": ints([[0, 2, 3, 5, 12, 1, 2, 7, 8]] * 2)},
        "sources (request 0, layer 0, head 0, index 4) must be in [0, 12) or -1, got 12",
    ),
    (
        "negative source",
        {"sources": ints([[0, 2, -2, 5, 9, 1, 2, 7, 8]] * 2)},
        "sources (request 0, layer 0, head 0, index 2) must be in [0, 12) or -1, got -2",
    ),
    (
        "base",
        {"bases": ints([-1, 0])},
        "bases (request 0, layer 0, head 0, index 0) must be such that the destination is in [0, 12), got -1",
    ),
    ("offsets", {"offsets": ints([0, 5, 4])}, "offsets[2] must be in [5, 9], got 4"),
    ("offsets end", {"offsets": ints([0, 5, 10])}, "offsets[2] must be in [5, 9], got 10"),
    ("offsets start", {"offsets": ints([-1, 5, 9])}, "offsets[0] must be in [0, 9], got -1"),
    (
        "page",
        {"page_table": ints([[0, 1, 2], [3, 6, 5]])},
        "page_table (request 1, layer 0, head 0, index 2) for token 7 must be in [0, 6), got 6",
    ),
    (
        "page of the second layer",
        {
            "page_table": ints([[0, 1, 2], [3, 5, 6]]),
            "pools": [torch.zeros(7, 2, 2, 4, 8), torch.zeros(6, 1, 2, 4, 8)],
        },
        "page_table (request 1, layer 1, head 0, index 3) for token 8 must be in [0, 6), got 6",
    ),
    (
        "shared page",
        {"page_table": ints([[0, 1, 2], [3, 4, 1]])},
        "page_table (request 1, layer 0, head 0, index 3) for token 8 must be a page of this request alone, "
        "as one of "
        "its tokens is written, got page 1 of request 0",
    ),
    (
        "layer map",
        {"layer_map": ints([0, 1]), "sources": ints([[[0, 2, 3, 5, 9, 1, 2, 7, 8]] * 2])},
        "layer_map[1] must be in [0, 1), got 1",
    ),
    (
        "destination range",
        {"destinations": ints([[1, 4, 6, 7, 12, 0, 3, 4, 5]] * 2)},
        "destinations (request 0, layer 0, head 0, index 4) must be in [0, 12) or -1, got 12",
    ),
    (
        "destination twice",
        {"destinations": ints([[1, 4, 6, 7, 8, 0, 3, 4, 5], [1, 4, 6, 4, 8, 0, 3, 4, 5]])},
        "destinations (request 0, layer 0, head 1, index 3) must be named once, got token 4 again",
    ),
    (
        "destination is a source",
        {"destinations": ints([[1, 4, 6, 7, 3, 0, 3, 4, 5]] * 2)},
        "destinations (request 0, layer 0, head 0, index 4) must be no source of the same request, got "
        "token 3",
    ),
]


class TestErrors:
    @pytest.mark.parametrize(("changes", "kind", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
    def test_arguments(
        self, device: torch.device, changes: dict[str, Any], kind: type[Exception], text: str
    ) -> None:
        given = arguments() | changes
        given = {k: [t.to(device) for t in v] if k == "pools" else v.to(device) for k, v in given.items()}
        if "share" in text:  # moving to the device made it dense
            given["pools"] = [torch.zeros(6, 1, 2, 4, 8, device=device).expand(6, 2, 2, 4, 8)]
        with pytest.raises(kind) as error:
            ops.compact_pages_(**given)
        assert str(error.value) == f"kvc.compact_pages_: {text}"
        with pytest.raises((ValueError, RuntimeError)) as raw:
            torch.ops.kvc.compact_pages_(**given)
        assert f"kvc.compact_pages_: {text}" in str(raw.value)

    @pytest.mark.cuda
    @pytest.mark.parametrize("name", ["page_table", "sources", "offsets", "bases"])
    def test_devices(self, name: str) -> None:
        given = arguments()
        given = {k: [t.cuda() for t in v] if k == "pools" else v.cuda() for k, v in given.items()}
        given[name] = given[name].cpu()
        with pytest.raises(TypeError, match=rf"^kvc.compact_pages_: {name} must be on cuda:0, got cpu$"):
            ops.compact_pages_(**given)
        given = arguments()
        given["pools"] = [given["pools"][0].cuda(), given["pools"][1]]
        with pytest.raises(TypeError, match=r"^kvc.compact_pages_: pools\[1\] must be on cuda:0, got cpu$"):
            ops.compact_pages_(**given)

    @pytest.mark.parametrize(("changes", "text"), [d[1:] for d in DEBUG], ids=[d[0] for d in DEBUG])
    def test_debug_mode(
        self, device: torch.device, debug_mode: None, changes: dict[str, Any], text: str
    ) -> None:
        usual = arguments() | {"sources": ints([[0, 2, 3, 5, 9, 1, 2, 7, 8]] * 2)}
        usual["pools"] = [
            random_pool((6, 2, 2, 4, 8), BF16, "HND", 41),
            random_pool((6, 1, 2, 4, 4), BF16, "HND", 42),
        ]
        given = usual | changes
        given = {k: [twin(t, device) for t in v] if k == "pools" else v.to(device) for k, v in given.items()}
        before = [storage(pool).clone() for pool in given["pools"]]
        with pytest.raises(ValueError) as error:  # noqa: PT011  (the text is compared below)
            ops.compact_pages_(**given)
        assert str(error.value) == f"kvc.compact_pages_: {text}"
        assert all(torch.equal(storage(pool), b) for pool, b in zip(given["pools"], before, strict=True))

    @pytest.mark.parametrize("free", [False, True])
    def test_debug_mode_accepts_what_is_right(
        self, device: torch.device, debug_mode: None, free: bool
    ) -> None:
        pools = [
            random_pool((12, 2, 2, 16, 8), BF16, "HND", 43),
            random_pool((24, 2, 2, 8, 8), BF16, "NHD", 44),
        ]
        sources = torch.cat((random_sources(2, 40, 0, 30, 45), random_sources(2, 40, 1, 20, 46)), 1)
        destinations = None
        if free:
            sources = (torch.arange(50) % 25 + 20).int().expand(2, 50)
            destinations = sources - 20
            sources = torch.where(sources < 40, sources, -1)
            destinations = torch.where(destinations < 20, destinations, -1)
        sources = sources.clone()
        sources[:, [3, 44]] = -1
        spread = [25, 25] if free else [30, 20]
        table = torch.cat((random_table(2, 5, 12), ints([[-1, 77], [99, -5]])), 1)  # behind the last token
        check(device, pools, table, sources, cumulative(spread), ints([0, 1]), None, destinations)


class TestFramework:
    def test_opcheck(self, device: torch.device) -> None:
        given = arguments()
        pools = [p.to(device) for p in given.pop("pools")]
        rest = [v.to(device) for v in given.values()]
        torch.library.opcheck(torch.ops.kvc.compact_pages_.default, (pools, *rest))
        planes = [*rest[:1], rest[1].expand(2, 2, 9).contiguous(), *rest[2:], ints([0, 1]).to(device)]
        torch.library.opcheck(torch.ops.kvc.compact_pages_.default, (pools, *planes))
        free = rest[1].clone()
        free[:, 1:] = -1
        torch.library.opcheck(
            torch.ops.kvc.compact_pages_.default,
            (pools, *rest),
            {"destinations": torch.where(free < 0, -1, free % 2)},
        )

    def test_compile(self, device: torch.device) -> None:
        pools = [random_pool((8, 2, 2, 8, 16), BF16, "HND", seed=i) for i in range(2)]
        rest = random_table(1, 8, 8), random_sources(2, 64, 0, 40, 47), ints([0, 40]), ints([0])
        compiled = torch.compile(lambda *a: ops.compact_pages_(*a), fullgraph=True, backend="aot_eager")
        check(device, pools, *rest, op=lambda p, *a: compiled(p, *a))

    def test_same_bytes_on_every_run(self, device: torch.device) -> None:
        pools = [random_pool((70, 2, 4, 32, 64), BF16, "NHD", seed=48)]
        rest = random_table(1, 68, 70), random_sources(4, 2176, 0, 2048, 49), ints([0, 2048]), ints([0])
        first = check(device, pools, *rest)
        for _ in range(5):
            assert torch.equal(storage(check(device, pools, *rest)[0]), storage(first[0]))


@pytest.mark.cuda
class TestCuda:
    def test_graph_replay_reads_new_contents(self) -> None:
        pools = [random_pool((70, 2, 2, 32, 128), BF16, "HND", seed=i) for i in range(3)]
        held = [twin(p, "cuda") for p in pools]
        table, sources = random_table(2, 34, 70).cuda(), random_sources(2, 1000, 0, 800, 50).cuda()
        offsets, bases = ints([0, 400, 800]).cuda(), ints([0, 3]).cuda()
        sources[:, 400:] = sources[:, 400:] - sources[:, 400:401] + 5
        ops.compact_pages_(held, table, sources, offsets, bases)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.compact_pages_(held, table, sources, offsets, bases)
        for seed in (51, 52):
            table.copy_(random_table(2, 34, 70, seed))
            sources[:, :300] = random_sources(2, 900, 1, 300, seed).cuda()
            offsets.copy_(ints([0, 300, 300]))
            bases.copy_(ints([1, 0]))
            for h, p in zip(held, pools, strict=True):
                h.copy_(p.cuda())
            graph.replay()
            expected = [twin(p, "cpu") for p in pools]
            reference.compact_pages_(expected, table.cpu(), sources.cpu(), offsets.cpu(), bases.cpu())
            for h, e in zip(held, expected, strict=True):
                assert torch.equal(h.cpu().view(torch.int16), e.view(torch.int16))

    def test_side_stream_behind_a_slow_producer(self) -> None:
        pool = random_pool((70, 2, 2, 32, 128), BF16, "HND", seed=53)
        rest = random_table(1, 68, 70), random_sources(2, 2176, 0, 2048, 54), ints([0, 2048]), ints([0])
        held, inputs = (
            torch.zeros_like(pool, device="cuda"),
            [torch.zeros_like(r, device="cuda") for r in rest],
        )
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            held.copy_(pool, non_blocking=True)
            for i, r in zip(inputs, rest, strict=True):
                i.copy_(r, non_blocking=True)
            ops.compact_pages_([held], *inputs)
        stream.synchronize()
        expected = twin(pool, "cpu")
        reference.compact_pages_([expected], *rest)
        assert torch.equal(held.cpu().view(torch.int16), expected.view(torch.int16))

    def test_allocates_nothing_and_does_not_wait(self) -> None:
        pool = random_pool((70, 2, 2, 32, 128), BF16, "HND", seed=55).cuda()
        rest = random_table(1, 68, 70), random_sources(2, 2176, 0, 2048, 56), ints([0, 2048]), ints([0])
        inputs = [r.cuda() for r in rest]
        ops.compact_pages_([pool], *inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda._sleep(200_000_000)
        ops.compact_pages_([pool], *inputs)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    @pytest.mark.parametrize(
        ("widths", "count"), [([128] * 36, 1), ([128] * 20 + [64] * 16, 2), ([8] * 241, 2)]
    )
    def test_launches(self, launches: Any, widths: list[int], count: int) -> None:
        pools = [torch.zeros(8, 2, 2, 16, width, dtype=BF16, device="cuda") for width in widths]
        rest = random_table(1, 8, 8), random_sources(2, 128, 0, 90, 60), ints([0, 90]), ints([0])
        inputs = [r.cuda() for r in rest]
        kernels = launches(lambda: ops.compact_pages_(pools, *inputs))
        assert len(kernels) == count, kernels
        assert all("compact_kernel" in name for name in kernels)

    @pytest.mark.parametrize("free", [False, True])
    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_pool_beyond_2_to_31_elements(self, layout: str, free: bool) -> None:
        pages, tokens, width = (1 << 31) // (32 * 128) + 64, 32, 64
        shape = (pages, 1, 2, tokens, width) if layout == "HND" else (pages, 1, tokens, 2, width)
        if torch.cuda.mem_get_info()[0] < 6 << 30:
            pytest.skip("needs 6 GiB")
        pool = torch.zeros(shape, dtype=U8, device="cuda")
        pool = pool.transpose(2, 3) if layout == "NHD" else pool
        table = ints([[pages - 1, 0, pages - 2, 1, pages // 2]])
        values = torch.randint(0, 256, (5, 1, 2, tokens, width), dtype=U8)
        pool[table[0].long().cuda()] = values.cuda()
        sources, destinations = random_sources(2, 160, 3, 120, 57), None
        if free:
            order = torch.stack([torch.randperm(160) for _ in range(2)]).int()
            sources, destinations = order[:, :70], order[:, 70:140]
        moves = sources, ints([0, sources.shape[1]]), ints([3]), None, destinations
        ops.compact_pages_([pool], table.cuda(), *(m if m is None else m.cuda() for m in moves))
        reference.compact_pages_([values], ints([[0, 1, 2, 3, 4]]), *moves)
        assert torch.equal(pool[table[0].long().cuda()].cpu(), values)
        assert int(pool.count_nonzero()) == int(values.count_nonzero())

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_device_that_is_not_current(self) -> None:
        assert torch.cuda.current_device() == 0
        pool = random_pool((9, 2, 2, 16, 64), BF16, "HND", seed=58)
        check(
            "cuda:1",
            [pool],
            random_table(1, 9, 9),
            random_sources(2, 144, 0, 100, 59),
            ints([0, 100]),
            ints([0]),
        )
