"""The tiered page store: what it finds again, where, in how many bytes, and what a killed process leaves behind."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

NEEDS = "needs kvc[methods]"
pytest.importorskip("pydantic", reason=NEEDS)
pytest.importorskip("safetensors", reason=NEEDS)
pytest.importorskip("xxhash", reason=NEEDS)

from kvc.methods import (  # noqa: E402
    CacheRows,
    ColdPageCodec,
    ColdPageConfig,
    HotBuffer,
    LayerBuffers,
    LifeCycle,
    NoFreePagesError,
    TieredPageStore,
    prefix_keys,
)
from kvc.methods.page_file import PageFile  # noqa: E402
from kvc.methods.staging import StagingExhaustedError, StagingLease, StagingRing  # noqa: E402

HEADS, HEAD_DIM, TOKENS, LAYERS = 2, 32, 4, 2
BF16 = torch.bfloat16


def make_codec(
    slots: int,
    *,
    quantized: bool = False,
    device: str | torch.device = "cpu",
    cycles: int = 1,
    tokens: int = TOKENS,
) -> ColdPageCodec:
    rows = CacheRows.gqa(HEADS, HEAD_DIM, tokens, BF16)
    pools = [
        torch.zeros(slots, HEADS, tokens, HEAD_DIM, dtype=BF16, device=device) for _ in range(2 * LAYERS)
    ]
    layers = [
        LayerBuffers(
            layer=layer,
            rows=rows if quantized else None,
            buffers=tuple(
                HotBuffer(role=role, pool=2 * layer + i, nbytes=rows.nbytes)
                for i, role in enumerate(("key", "value"))
            ),
        )
        for layer in range(LAYERS)
    ]
    return ColdPageCodec(
        ColdPageConfig(), [pools], [LifeCycle(id=c, layers=tuple(layers)) for c in range(cycles)]
    )


def content(number: int, tokens: int = TOKENS) -> torch.Tensor:
    """The page of a key, ``[pools, heads, tokens, head_dim]``; small, so that a second trip would move values."""
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(2 * LAYERS, HEADS, tokens, HEAD_DIM, generator=generator) * 0.02).to(BF16)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def read(store: TieredPageStore, slot: int) -> torch.Tensor:
    return torch.stack([pool[slot] for pool in store.codec.pools[0]]).cpu()


def write(store: TieredPageStore, slot: int, number: int) -> None:
    page = content(number, store.codec.pools[0][0].shape[2])
    for pool, part in zip(store.codec.pools[0], page, strict=True):
        pool[slot] = part.to(pool.device)


def add(store: TieredPageStore, *numbers: int, cycle: int = 0) -> None:
    slots = store.allocate(cycle, len(numbers))
    for slot, number in zip(slots, numbers, strict=True):
        write(store, slot, number)
    store.commit(cycle, slots, [key(n) for n in numbers])
    store.release(cycle, slots)


def get(store: TieredPageStore, *numbers: int, cycle: int = 0) -> list[torch.Tensor]:
    slots = store.acquire(cycle, [key(n) for n in numbers])
    pages = [read(store, slot) for slot in slots]
    store.release(cycle, slots)
    return pages


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def after_one_trip(number: int) -> torch.Tensor:
    codec = make_codec(1, quantized=True)
    for pool, part in zip(codec.pools[0], content(number), strict=True):
        pool[0] = part
    cold = torch.empty(1, codec.cold_page_bytes(0), dtype=torch.uint8)
    pairs = torch.zeros(1, 2, dtype=torch.int32)
    codec.encode(0, cold, pairs)
    codec.decode(0, cold, pairs)
    return torch.stack([pool[0] for pool in codec.pools[0]])


def bytes_for(codec: ColdPageCodec, pages: int, disk: bool = False) -> int:
    page = codec.cold_page_bytes(0)
    return pages * (4096 + -(-page // 4096) * 4096 if disk else page)


def make_store(
    codec: ColdPageCodec, host: int, disk: int = 0, folder: Path | None = None, identity: str = ""
) -> TieredPageStore:
    return TieredPageStore(
        codec,
        host_bytes=bytes_for(codec, host),
        disk_bytes=bytes_for(codec, disk, disk=True),
        folder=folder,
        identity=identity,
    )


class TestTiers:
    def test_a_page_is_found_in_the_fastest_tier_that_has_it(
        self, device: torch.device, tmp_path: Path
    ) -> None:
        codec = make_codec(2, device=device)
        with make_store(codec, 2, 8, tmp_path) as store:
            for number in range(6):
                add(store, number)
            # Slots hold the last two, host memory the two before, the disk the first two.
            assert store.stats.gpu.pages == 2
            for number, tier in ((5, "gpu"), (4, "gpu"), (3, "host"), (0, "disk")):
                before = getattr(store.stats, tier).hits
                (page,) = get(store, number)
                assert same_bytes(page, content(number))
                assert getattr(store.stats, tier).hits == before + 1
            assert store.stats.misses == 0
            assert get(store, 99) == []
            assert store.stats.misses == 1

    def test_bytes_are_counted_where_they_pass(self, tmp_path: Path) -> None:
        codec = make_codec(1)
        page = codec.cold_page_bytes(0)
        with make_store(codec, 1, 4, tmp_path) as store:
            add(store, 0)
            add(store, 1)  # 0 to host memory
            add(store, 2)  # 1 to host memory, 0 to the disk
            assert (store.stats.host.offloaded_bytes, store.stats.disk.offloaded_bytes) == (2 * page, page)
            assert get(store, 0)
            # 2 and then 1 have left for it; 0 has come through host memory.
            assert store.stats.disk.onboarded_bytes == page
            assert store.stats.host.onboarded_bytes == page
            assert store.stats.encoded_pages == 3
            assert store.stats.decoded_pages == 1

    def test_the_least_recently_used_leaves_first_and_the_end_before_the_beginning(self) -> None:
        codec = make_codec(4)
        with make_store(codec, 4) as store:
            add(store, 0, 1, 2)
            add(store, 3)
            get(store, 0)
            add(store, 4)
            assert [n for n in range(5) if (0, key(n)) in store._hot[0].pages] == [0, 1, 3, 4]
            add(store, 5)
            assert [n for n in range(6) if (0, key(n)) in store._hot[0].pages] == [0, 3, 4, 5]

    @pytest.mark.parametrize("host", [0, 1])
    def test_pages_are_encoded_once_however_often_they_travel(
        self, device: torch.device, host: int, tmp_path: Path
    ) -> None:
        codec = make_codec(1, quantized=True, device=device)
        with make_store(codec, host, 8, tmp_path) as store:
            for number in range(4):
                add(store, number)
            for _ in range(3):
                for number in range(3):
                    (page,) = get(store, number)
                    assert same_bytes(page, after_one_trip(number))
            assert store.stats.encoded_pages == 4

    def test_a_cold_page_comes_back_as_far_as_it_is_found(self, tmp_path: Path) -> None:
        codec = make_codec(3)
        with make_store(codec, 2, 0) as store:
            add(store, 0, 1, 2)
            add(store, 3, 4, 5)  # two of the first three fit into host memory
            kept = [n for n in range(3) if store.lookup(0, [key(n)])]
            assert len(kept) == 2
            (lost,) = set(range(3)) - set(kept)
            pages = get(store, 0, 1, 2)
            assert len(pages) == lost
            assert all(same_bytes(page, content(n)) for n, page in enumerate(pages))
            assert store._hot[0].reachable() == 3

    def test_too_many_pinned_pages_change_nothing(self, tmp_path: Path) -> None:
        codec = make_codec(3)
        with make_store(codec, 4) as store:
            add(store, 0, 1, 2)
            add(store, 3)
            pinned = store.acquire(0, [key(3)])
            more = store.allocate(0, 1)

            def state() -> object:
                hot = store._hot[0]
                return dict(hot.pages), set(hot.idle), list(hot.free), [s.pins for s in hot.slots]

            before = state()
            with pytest.raises(NoFreePagesError, match="are needed"):
                store.allocate(0, 2)
            with pytest.raises(NoFreePagesError):
                store.acquire(0, [key(0), key(1), key(2)])
            assert state() == before
            store.release(0, [*pinned, *more])
            assert len(get(store, 0, 1, 2)) == 3

    def test_a_page_may_be_pinned_twice_and_shared(self) -> None:
        codec = make_codec(2)
        with make_store(codec, 2) as store:
            add(store, 0)
            first, second = store.acquire(0, [key(0)]), store.acquire(0, [key(0)])
            assert first == second
            store.release(0, first)
            store.allocate(0, 1)
            with pytest.raises(NoFreePagesError):
                store.allocate(0, 1)
            store.release(0, second)
            store.allocate(0, 1)
            with pytest.raises(ValueError, match="pinned"):
                store.release(0, [0, 0, 0])

    def test_a_second_page_of_a_key_is_forgotten(self) -> None:
        codec = make_codec(2)
        with make_store(codec, 2) as store:
            add(store, 0)
            add(store, 0)
            assert store.stats.gpu.pages == 1
            assert len(store._hot[0].free) == 1
            with pytest.raises(ValueError, match="keys must be"):
                store.commit(0, store.allocate(0, 1), [b""])

    def test_life_cycles_with_the_same_pages_share_slots_and_not_keys(self) -> None:
        codec = make_codec(2, cycles=2)
        with make_store(codec, 4) as store:
            add(store, 0, cycle=0)
            add(store, 1, cycle=1)
            add(store, 2, cycle=1)
            add(store, 3, cycle=1)
            assert store.lookup(1, [key(0)]) == 0
            assert same_bytes(get(store, 0, cycle=0)[0], content(0))
            assert same_bytes(get(store, 1, cycle=1)[0], content(1))
            with pytest.raises(ValueError, match="life_cycle"):
                store.acquire(7, [key(0)])

    @pytest.mark.parametrize("quantized", [False, True], ids=["lossless", "nvfp4"])
    def test_random_walk(self, device: torch.device, quantized: bool, tmp_path: Path) -> None:
        """Whatever is found has the bytes of the page or, quantized, of the page after one trip."""
        rng = random.Random(5)
        codec = make_codec(6, quantized=quantized, device=device)
        known = 0
        with make_store(codec, 5, 12, tmp_path) as store:
            pinned: list[int] = []
            for _ in range(150):
                choice = rng.random()
                if choice < 0.4:
                    count = rng.randint(1, 2)
                    try:
                        add(store, *range(known, known + count))
                    except NoFreePagesError:
                        store.release(0, pinned)
                        pinned = []
                    else:
                        known += count
                elif choice < 0.8 and known:
                    first = rng.randrange(max(0, known - 20), known)
                    numbers = list(range(first, min(known, first + rng.randint(1, 3))))
                    for number, page in zip(numbers, get_or_nothing(store, numbers), strict=False):
                        fine = same_bytes(page, content(number))
                        assert fine or (quantized and same_bytes(page, after_one_trip(number)))
                elif choice < 0.9 and known and len(pinned) < 3:
                    pinned += (
                        store.acquire(0, [key(rng.randrange(known))]) if store._hot[0].reachable() > 1 else []
                    )
                else:
                    store.flush()
                hot = store._hot[0]
                assert sorted([*hot.free, *hot.pages.values()]) == list(range(6))
                for tier in (store._host[0], store._disk[0]):
                    assert sorted([*tier.free, *tier.pages.values()]) == list(range(tier.count))
                assert not store._host[0].locked
            assert all(tier.hits for tier in (store.stats.gpu, store.stats.host, store.stats.disk))
            assert store.stats.broken == 0


class TestGroups:
    """Three life cycles: 0 and 2 share their slots on the GPU, 1 and 2 those in host memory and on the disk."""

    TOKENS = (4, 2, 2)  # of a page of each cycle; those of cycle 2 fill half a slot

    def codec(self, device: torch.device) -> ColdPageCodec:
        def cycle(number: int, hot_group: int, cold_group: int) -> LifeCycle:
            nbytes = CacheRows.gqa(HEADS, HEAD_DIM, self.TOKENS[number], BF16).nbytes
            buffers = tuple(
                HotBuffer(role=role, pool=i, nbytes=nbytes) for i, role in enumerate(("key", "value"))
            )
            layer = LayerBuffers(layer=number, rows=None, buffers=buffers)
            return LifeCycle(id=number, hot_group=hot_group, cold_group=cold_group, layers=(layer,))

        pools = [
            [torch.zeros(slots, HEADS, tokens, HEAD_DIM, dtype=BF16, device=device) for _ in range(2)]
            for slots, tokens in ((4, 4), (3, 2))
        ]
        return ColdPageCodec(ColdPageConfig(), pools, [cycle(0, 0, 0), cycle(1, 1, 5), cycle(2, 0, 5)])

    def store(self, device: torch.device, folder: Path) -> TieredPageStore:
        codec = self.codec(device)
        host = {0: 3 * codec.cold_page_bytes(0), 5: 2 * codec.cold_page_bytes(1)}
        return TieredPageStore(codec, host_bytes=host, disk_bytes={0: 1 << 16, 5: 1 << 17}, folder=folder)

    def page(self, store: TieredPageStore, cycle: int, slot: int) -> torch.Tensor:
        """``[2, elements]`` of a slot that belong to the cycle's page."""
        pools = store.codec.pools[store.codec.life_cycles[cycle].hot_group]
        return torch.stack([pool[slot].view(-1)[: HEADS * self.TOKENS[cycle] * HEAD_DIM] for pool in pools])

    def content(self, cycle: int, number: int) -> torch.Tensor:
        return content(1000 * cycle + number, self.TOKENS[cycle])[:2].flatten(1)

    def add(self, store: TieredPageStore, cycle: int, number: int) -> None:
        (slot,) = store.allocate(cycle, 1)
        pools = store.codec.pools[store.codec.life_cycles[cycle].hot_group]
        for pool, part in zip(pools, self.content(cycle, number), strict=True):
            pool[slot].view(-1)[: len(part)] = part.to(pool.device)
        store.commit(cycle, [slot], [key(number)])
        store.release(cycle, [slot])

    def found(self, store: TieredPageStore, cycle: int, number: int) -> bool:
        slots = store.acquire(cycle, [key(number)])
        assert all(same_bytes(self.page(store, cycle, s).cpu(), self.content(cycle, number)) for s in slots)
        store.release(cycle, slots)
        return bool(slots)

    def test_random_walk(self, device: torch.device, tmp_path: Path) -> None:
        """Keys are the same numbers in every cycle; none is found in another's place."""
        rng = random.Random(1)
        known = [0, 0, 0]
        with self.store(device, tmp_path) as store:
            assert len(list(tmp_path.iterdir())) == 2
            for _ in range(600):
                cycle = rng.randrange(3)
                if rng.random() < 0.3 or not known[cycle]:
                    self.add(store, cycle, known[cycle])
                    known[cycle] += 1
                else:
                    self.found(store, cycle, rng.randrange(max(0, known[cycle] - 12), known[cycle]))
                if rng.random() < 0.02:
                    store.flush()
                for hot, slots in zip(store._hot, (4, 3), strict=True):
                    assert sorted([*hot.free, *hot.pages.values()]) == list(range(slots))
                for tier in (*store._host.values(), *store._disk.values()):
                    assert sorted([*tier.free, *tier.pages.values()]) == list(range(tier.count))
            assert all(tier.hits for tier in (store.stats.gpu, store.stats.host, store.stats.disk))
            assert store.stats.broken == 0
            store.flush(sync=True)
            kept = {(c, n) for c in range(3) for n in range(known[c]) if store.on_disk(c, key(n))}
        assert {cycle for cycle, _ in kept} == {0, 1, 2}
        with self.store(device, tmp_path) as store:
            assert all(self.found(store, cycle, number) for cycle, number in kept)


def get_or_nothing(store: TieredPageStore, numbers: list[int]) -> list[torch.Tensor]:
    try:
        return get(store, *numbers)
    except NoFreePagesError:
        return []


class TestDisk:
    def test_flushed_pages_are_there_for_the_next_store(self, device: torch.device, tmp_path: Path) -> None:
        codec = make_codec(4, quantized=True, device=device)
        with make_store(codec, 2, 16, tmp_path) as store:
            add(store, *range(4))
            add(store, *range(4, 8))
            assert store.flush(sync=True) == 6  # host memory held two, so two were there already
            assert all(store.on_disk(0, key(n)) for n in range(8))
            assert store.flush() == 0
        assert len(list(tmp_path.iterdir())) == 1
        with make_store(make_codec(4, quantized=True, device=device), 2, 16, tmp_path) as store:
            assert store.stats.disk.pages == 8
            for number in range(8):
                assert same_bytes(get(store, number)[0], after_one_trip(number))
            assert store.stats.disk.hits == 8

    @pytest.mark.parametrize("host", [0, 1])
    def test_without_room_in_host_memory_pages_pass_through_staging(
        self, device: torch.device, host: int, tmp_path: Path
    ) -> None:
        codec = make_codec(3, device=device)
        with make_store(codec, host, 16, tmp_path) as store:
            for first in range(0, 9, 3):
                add(store, first, first + 1, first + 2)
            for first in range(0, 9, 3):
                pages = get(store, first, first + 1, first + 2)
                assert [same_bytes(p, content(first + i)) for i, p in enumerate(pages)] == [True] * 3
            assert store._staging is not None
            assert store._staging.nbytes == 64 << 20
            assert not store._staging._held

    def test_staging_holds_three_pages_of_any_size(self) -> None:
        codec = make_codec(1, tokens=120_000)  # 61 MB a page
        with make_store(codec, 0) as store:
            assert store._ring().nbytes >= 3 * codec.cold_page_bytes(0)

    def test_other_identities_and_layouts_do_not_meet(self, tmp_path: Path) -> None:
        with make_store(make_codec(2), 0, 4, tmp_path, identity="a") as store:
            add(store, 0)
            store.flush()
        for codec, identity in ((make_codec(2), "b"), (make_codec(2, quantized=True), "a")):
            with make_store(codec, 0, 4, tmp_path, identity=identity) as store:
                assert get(store, 0) == []
        with make_store(make_codec(2), 0, 4, tmp_path, identity="a") as store:
            assert len(get(store, 0)) == 1

    @pytest.mark.parametrize("damage", ["payload", "header", "cut", "foreign", "moved", "empty"])
    def test_a_damaged_record_is_a_miss(self, damage: str, tmp_path: Path) -> None:
        with make_store(make_codec(4), 0, 4, tmp_path) as store:
            add(store, 0, 1, 2)
            store.flush()
            slots = {n: store._disk[0].pages[0, key(n)] for n in range(3)}
            record = store._disk[0].file._record_bytes
        (path,) = tmp_path.iterdir()
        blob = bytearray(path.read_bytes())
        at = slots[1] * record
        if damage == "payload":
            blob[at + 4096 + 100] ^= 1
        elif damage == "header":
            blob[at + 40] ^= 1
        elif damage == "cut":
            last = max(slots, key=lambda n: slots[n])
            del blob[slots[last] * record + 4096 + 50 :]
        elif damage == "moved":  # a sound record in a slot where it was not written is found there
            blob[at : at + 4096] = blob[slots[0] * record : slots[0] * record + 4096]
        else:
            blob = bytearray(os.urandom(len(blob)) if damage == "foreign" else b"")
        path.write_bytes(blob)
        broken = {"cut": [max(slots, key=lambda n: slots[n])], "foreign": [0, 1, 2], "empty": [0, 1, 2]}
        with make_store(make_codec(4), 0, 4, tmp_path) as store:
            for number in range(3):
                pages = get(store, number)
                if damage == "moved" and number == 0:
                    continue  # two slots claim it; found or not, it is not the wrong page
                assert len(pages) == (number not in broken.get(damage, [1])), number
                assert all(same_bytes(p, content(number)) for p in pages)
                assert store._hot[0].reachable() == 4
            assert store.stats.broken == (damage in ("payload", "cut", "moved"))
            # Its slot is used again.
            add(store, 3, 4)
            store.flush()
            assert same_bytes(get(store, 3)[0], content(3))

    def test_a_file_has_one_owner(self, tmp_path: Path) -> None:
        with (
            make_store(make_codec(1), 0, 4, tmp_path),
            pytest.raises(RuntimeError, match="another store has open"),
        ):
            make_store(make_codec(1), 0, 4, tmp_path)
        make_store(make_codec(1), 0, 4, tmp_path).close()

    def test_a_full_file_forgets_the_least_recently_used(self, tmp_path: Path) -> None:
        with make_store(make_codec(1), 0, 3, tmp_path) as store:
            for number in range(5):
                add(store, number)
            store.flush()
            assert [n for n in range(5) if store.on_disk(0, key(n))] == [2, 3, 4]

    def test_a_full_disk_loses_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        codec = make_codec(2)
        with make_store(codec, 2, 8, tmp_path) as store:
            add(store, 0, 1)
            add(store, 2, 3)

            def full(*_: object) -> int:
                raise OSError(errno.ENOSPC, "no space left on device")

            monkeypatch.setattr(os, "pwritev", full)
            with pytest.raises(OSError, match="no space"):
                store.allocate(0, 1)
            with pytest.raises(OSError, match="no space"):
                store.flush()
            monkeypatch.undo()
            assert store.lookup(0, [key(n) for n in range(4)]) == 4
            assert store._hot[0].reachable() == 2
            add(store, 4, 5)
            for number in range(6):
                assert same_bytes(get(store, number)[0], content(number))

    def test_a_page_may_be_dropped_for_the_one_that_makes_room_for_it(self, tmp_path: Path) -> None:
        with make_store(make_codec(2), 1, 1, tmp_path) as store:
            pinned = store.allocate(0, 1)
            for number in range(3):
                add(store, number)  # 0 is on the disk, 1 in host memory, 2 on the GPU
            store.release(0, pinned)
            assert get(store, 0) == []  # its way leads through host memory, and 1 takes its place on the disk
            assert store._host[0].free == [0]
            assert store._hot[0].reachable() == 2
            assert same_bytes(get(store, 1)[0], content(1))

    def test_bad_arguments(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="folder"):
            TieredPageStore(make_codec(1), disk_bytes=1 << 20)
        with pytest.raises(ValueError, match="sizes"):
            TieredPageStore(make_codec(1), host_bytes=-1)
        with make_store(make_codec(1), 1) as store, pytest.raises(ValueError, match="different"):
            store.acquire(0, [key(0), key(0)])
        with pytest.raises(ValueError, match="max_ctas"):
            TieredPageStore(make_codec(1), max_ctas=-1)
        with pytest.raises(TypeError, match="integer"):
            TieredPageStore(make_codec(1), host_bytes=1e9)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="what one call writes"):
            PageFile(tmp_path / "large", 1 << 31, 1, bytes(16))
        with pytest.raises(ValueError, match="tokens_per_page"):
            prefix_keys([1], 0)
        TieredPageStore(make_codec(1), disk_bytes=1 << 20, folder=str(tmp_path)).close()

    def test_slots_that_cannot_be_change_nothing(self) -> None:
        with make_store(make_codec(3), 1) as store:
            slots = store.allocate(0, 2)
            for wrong in (-1, 3):
                with pytest.raises(ValueError, match=r"slots must be in \[0, 3\)"):
                    store.release(0, [slots[0], wrong])
                with pytest.raises(ValueError, match=r"slots must be in \[0, 3\)"):
                    store.commit(0, [slots[0], wrong], [key(0), key(1)])
            with pytest.raises(ValueError, match="slots must be different"):
                store.commit(0, [slots[0]] * 2, [key(0), key(1)])
            with pytest.raises(ValueError, match="count"):
                store.allocate(0, -1)
            assert store.lookup(0, [key(0)]) == store.lookup(0, [key(1)]) == 0
            store.release(0, slots)
            assert sorted(store.allocate(0, 3)) == [0, 1, 2]

    def test_an_unreadable_disk_costs_no_slot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_store(make_codec(2), 2, 8, tmp_path) as store:
            add(store, 0, 1)
            store.flush()
        with make_store(make_codec(2), 2, 8, tmp_path) as store:

            def unreadable(*_: object) -> int:
                raise OSError(errno.EIO, "input/output error")

            monkeypatch.setattr(os, "preadv", unreadable)
            for _ in range(4):
                with pytest.raises(OSError, match="input/output"):
                    store.acquire(0, [key(0), key(1)])
            monkeypatch.undo()
            assert (len(store._host[0].free), store._hot[0].reachable()) == (2, 2)
            assert same_bytes(get(store, 0)[0], content(0))

    @pytest.mark.parametrize("host", [0, 2])
    @pytest.mark.parametrize("leave", [False, True], ids=["flush", "evict"])
    def test_a_torn_record_is_no_reason_not_to_write(self, host: int, leave: bool, tmp_path: Path) -> None:
        with make_store(make_codec(1), 0, 4, tmp_path) as store:
            add(store, 0)
            store.flush()
        os.truncate(next(tmp_path.glob("*.kvc")), 4096 + 100)
        with make_store(make_codec(1), host, 4, tmp_path) as store:
            add(store, 0)  # computed anew, without a look at the disk
            if leave:
                store.release(0, store.allocate(0, 1))
            store.flush()
            assert store.on_disk(0, key(0))
            assert store.stats.broken == 1
        with make_store(make_codec(1), 0, 4, tmp_path) as store:
            assert same_bytes(get(store, 0)[0], content(0))

    def test_whether_an_inherited_page_is_on_disk_is_read(self, tmp_path: Path) -> None:
        with make_store(make_codec(1), 0, 4, tmp_path) as store:
            add(store, 0)
            add(store, 1)
            store.flush()
        file = next(tmp_path.glob("*.kvc"))
        os.truncate(file, file.stat().st_size - 1)
        with make_store(make_codec(1), 0, 4, tmp_path) as store:
            assert [store.on_disk(0, key(n)) for n in range(3)] == [True, False, False]

    def test_a_flush_keeps_what_is_still_on_the_gpu(self, tmp_path: Path) -> None:
        with make_store(make_codec(3), 0, 3, tmp_path) as store:
            add(store, 0)
            pinned = store.acquire(0, [key(0)])
            store.flush()
            add(store, 1)
            add(store, 2)
            add(store, 3)  # 1 leaves; the file is full with the next
            store.flush()
            assert [store.on_disk(0, key(n)) for n in range(4)] == [True, False, True, True]
            store.release(0, pinned)

    def test_one_call_a_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = {"pwritev": 0, "preadv": 0}
        for name in calls:
            real = getattr(os, name)

            def counting(*arguments: object, name: str = name, real: object = real) -> object:
                calls[name] += 1
                return real(*arguments)  # type: ignore[operator]

            monkeypatch.setattr(os, name, counting)
        with make_store(make_codec(4), 0, 8, tmp_path) as store:
            add(store, *range(4))
            add(store, *range(4, 8))
            assert calls["pwritev"] == 4
            assert len(get(store, *range(4))) == 4
            assert calls == {"pwritev": 8, "preadv": 4}


# A process that stores pages for as long as it lives and says which ones are stored; the file holds those of two.
CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_methods_tiers import add, make_codec, make_store, key
folder, first = Path(sys.argv[1]), int(sys.argv[2])
store = make_store(make_codec(2, tokens=1024), 3, 240, folder)
for number in range(first, first + 120, 2):
    add(store, number, number + 1)
    if number % 4 == 2:
        store.flush()
    print(*[n for n in range(first, number + 2) if store.on_disk(0, key(n))][-6:], flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL")
def test_a_killed_process_loses_nothing_it_reported(tmp_path: Path) -> None:
    rng = random.Random()  # any moment will do
    script = CHILD.format(tests=str(Path(__file__).parent))
    reported: set[int] = set()
    for round_ in range(2):
        first = 1000 * round_
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(first)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        report = next(line for line in child.stdout if line.strip())
        time.sleep(rng.uniform(0.0, 0.25))
        child.send_signal(signal.SIGKILL)
        lines = [report, *child.stdout.read().split("\n")[:-1]]  # the last may be cut off
        child.wait()
        reported |= {int(n) for line in lines for n in line.split()}
        with make_store(make_codec(2, tokens=1024), 3, 240, tmp_path) as store:
            for number in sorted(reported):
                (page,) = get(store, number)
                assert same_bytes(page, content(number, 1024)), number
            # What was not reported is whole or missing.
            for number in range(first, first + 120):
                assert all(same_bytes(page, content(number, 1024)) for page in get(store, number))


class TestStaging:
    def test_leases_follow_each_other_and_wrap_around(self) -> None:
        ring = StagingRing(3 * 4096, pinned=False)
        first, second = ring.lease(4096), ring.lease(100)
        assert (first.start, second.start) == (0, 4096)
        assert (second.stop, second.tensor.numel()) == (8192, 100)
        first.release()
        third = ring.lease(4096)
        assert third.start == 8192
        fourth = ring.lease(4096)
        assert fourth.start == 0
        second.release()
        third.release()
        assert ring.lease(8192).start == 4096

    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * 4096)), max_size=40))
    @settings(max_examples=50)
    def test_leases_never_overlap(self, steps: list[tuple[bool, int]]) -> None:
        ring = StagingRing(8 * 4096, pinned=False)
        held: list[StagingLease] = []
        for give_back, size in steps:
            if give_back and held:
                held.pop(size % len(held)).release()
                continue
            try:
                held.append(ring.lease(size))
            except StagingExhaustedError:
                gaps = sorted([(0, 0), *((h.start, h.stop) for h in held), (ring.nbytes, ring.nbytes)])
                needed = -(-size // 4096) * 4096
                assert all(b[0] - a[1] < needed for a, b in itertools.pairwise(gaps))
            spans = sorted((h.start, h.stop) for h in held)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            assert all(
                0 <= h.start < h.stop <= ring.nbytes and h.tensor.numel() <= h.stop - h.start for h in held
            )

    def test_waiting_for_oneself_fails(self) -> None:
        ring = StagingRing(2 * 4096, pinned=False)
        with ring.lease(4096) as held:
            with pytest.raises(StagingExhaustedError):
                ring.lease(8192)
            assert held.start == 0
        ring.lease(8192).release()
        with pytest.raises(ValueError, match="nbytes"):
            ring.lease(8193)

    def test_waiting_for_another_thread_works(self) -> None:
        ring = StagingRing(4096, pinned=False)
        held = ring.lease(10)
        order: list[str] = []

        def other() -> None:
            with ring.lease(10):
                order.append("other")

        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        order.append("released")
        held.release()
        thread.join(10)
        assert order == ["released", "other"]

    @pytest.mark.cuda
    def test_the_next_owner_waits_for_the_event(self) -> None:
        ring = StagingRing(1 << 20, pinned=True)
        lease = ring.lease(1 << 20)
        source = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            lease.tensor.copy_(source, non_blocking=True)
            lease.release(stream.record_event())
        again = ring.lease(1 << 20)
        assert bool((again.tensor == 7).all())


def test_prefix_keys_stand_for_all_tokens_before_them() -> None:
    tokens = list(range(100, 140))
    keys = prefix_keys(tokens, 16)
    assert len(keys) == 2
    assert len(set(keys)) == 2
    assert prefix_keys(tokens[:32], 16) == keys
    assert prefix_keys([0, *tokens[1:]], 16)[1] != keys[1]
    assert prefix_keys(tokens, 16, b"other")[0] != keys[0]
    assert prefix_keys(tokens[:15], 16) == []


def test_page_file_keeps_the_newer_of_two_records(tmp_path: Path) -> None:
    file = PageFile(tmp_path / "f", 100, 4, b"i" * 16)
    pages = [torch.full((100,), n, dtype=torch.uint8) for n in range(2)]
    file.write(2, 0, b"k", pages[0])
    file.write(1, 0, b"k", pages[1])
    assert [r[1:] for r in sorted(file.records())] == [(2, 0, b"k"), (1, 0, b"k")]
    back = torch.zeros(100, dtype=torch.uint8)
    assert file.read(1, 0, b"k", back)
    assert torch.equal(back, pages[1])
    assert not file.read(1, 1, b"k", back)
    assert not file.read(0, 0, b"k", back)
    file.close()
    foreign = PageFile(tmp_path / "f", 100, 4, b"j" * 16)
    assert list(foreign.records()) == []
    assert not foreign.read(1, 0, b"k", back)
    foreign.close()


@pytest.mark.cuda
class TestStreams:
    def test_pages_written_late_on_another_stream_are_complete(self, tmp_path: Path) -> None:
        codec = make_codec(4, device="cuda")
        with make_store(codec, 8, 16, tmp_path) as store:
            stream = torch.cuda.Stream()
            for first in range(0, 8, 4):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
                    add(store, *range(first, first + 4))
            for first in range(0, 8, 4):
                for i, page in enumerate(get(store, *range(first, first + 4))):
                    assert same_bytes(page, content(first + i))

    def test_a_page_on_the_gpu_is_read_after_its_writer_on_another_stream(self) -> None:
        codec = make_codec(2, device="cuda")
        with make_store(codec, 2) as store:
            writer, bystander, reader = (torch.cuda.Stream() for _ in range(3))
            with torch.cuda.stream(writer):
                slots = store.allocate(0, 1)
                torch.cuda._sleep(50_000_000)
                write(store, slots[0], 3)
                store.commit(0, slots, [key(3)])
            with torch.cuda.stream(bystander):
                store.release(0, slots)
            with torch.cuda.stream(reader):
                (page,) = get(store, 3)
            assert same_bytes(page, content(3))

    def test_a_slow_reader_keeps_its_page(self) -> None:
        codec = make_codec(1, device="cuda")
        with make_store(codec, 4) as store:
            add(store, 0)
            reader = torch.cuda.Stream()
            with torch.cuda.stream(reader):
                slots = store.acquire(0, [key(0)])
                torch.cuda._sleep(50_000_000)
                seen = torch.stack([pool[slots[0]] for pool in codec.pools[0]])
                store.release(0, slots)
            add(store, 1)  # on the current stream, into the same slot
            reader.synchronize()
            assert same_bytes(seen.cpu(), content(0))
            assert same_bytes(get(store, 1)[0], content(1))

    def test_nothing_but_the_disk_makes_the_host_wait(self) -> None:
        codec = make_codec(2, device="cuda")
        with make_store(codec, 8) as store:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for number in range(4):
                    slots = store.allocate(0, 1)
                    store.commit(0, slots, [key(number)])
                    store.release(0, slots)
                store.release(0, store.acquire(0, [key(0)]))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert store._host[0].memory.is_pinned()
