"""Where pages go when the GPU is full: pinned host memory, then a disk, and back when they are asked for.

For engines that have no page store of their own. A page is committed under a key that stands for its tokens and
all before them (:func:`prefix_keys`); from then on it is found in the fastest tier that still has it. It is encoded
when it first leaves the GPU; host and disk move the same bytes, and a page that comes back keeps its cold copy while
there is room for it, so that leaving again changes nothing.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .cold_pages import ColdPageCodec
from .page_file import MAX_KEY_BYTES, PageFile
from .staging import StagingRing
from .tier_slots import DiskTier, Event, HostTier, HotSlot, HotTier, Key

__all__ = ["NoFreePagesError", "StoreStats", "TierStats", "TieredPageStore", "prefix_keys"]

MINIMUM_STAGING = 64 << 20


class NoFreePagesError(RuntimeError):
    """Every slot of a hot group is pinned by a request. Nothing has changed."""


def prefix_keys(tokens: Sequence[int], tokens_per_page: int, salt: bytes = b"") -> list[bytes]:
    """One key for each full page of a sequence, equal exactly for equal tokens up to the end of the page.

    Parameters
    ----------
    tokens : sequence of int
    tokens_per_page : int
    salt : bytes
        Whatever else tells caches apart, such as an adapter or a tenant.

    Returns
    -------
    list of bytes
        16 bytes each.
    """
    chain, keys = hashlib.blake2b(salt, digest_size=16).digest(), []
    if tokens_per_page < 1:
        raise ValueError(f"kvc.methods.prefix_keys: tokens_per_page must be >= 1, got {tokens_per_page}")
    for end in range(tokens_per_page, len(tokens) + 1, tokens_per_page):
        page = b"".join(int(t).to_bytes(8, "little") for t in tokens[end - tokens_per_page : end])
        chain = hashlib.blake2b(chain + page, digest_size=16).digest()
        keys.append(chain)
    return keys


@dataclass
class TierStats:
    """What passed through one tier.

    Attributes
    ----------
    hits : int
        Pages that were asked for and found here first.
    pages : int
        Pages here now.
    offloaded_bytes, onboarded_bytes : int
        Cold bytes that arrived from the tiers above, and that went up from here. A page that goes from the disk
        through host memory to the GPU counts in both.
    """

    hits: int = 0
    pages: int = 0
    offloaded_bytes: int = 0
    onboarded_bytes: int = 0


@dataclass
class StoreStats:
    """Counters since the store was made. `broken` counts disk records that turned out torn or foreign."""

    gpu: TierStats = field(default_factory=TierStats)
    host: TierStats = field(default_factory=TierStats)
    disk: TierStats = field(default_factory=TierStats)
    misses: int = 0
    encoded_pages: int = 0
    decoded_pages: int = 0
    broken: int = 0


class TieredPageStore:
    """Slots of the GPU's pools as the first tier, pinned host memory as the second, files as the third.

    Pages are allocated, committed under a key, and released; what nobody has pinned may leave the GPU when its slot
    is needed, the least recently used first. Transfers run on a stream of their own; the current stream waits for
    them where it must, and the host waits for the GPU only for what goes to the disk or comes from it. On CPU pools
    the host tier is plain memory. May be used by several threads.

    Parameters
    ----------
    codec : ColdPageCodec
        Its pools are the first tier. All of their slots belong to the store.
    host_bytes : int or mapping of int to int
        Host memory of every cold group, or by cold group.
    disk_bytes : int or mapping of int to int
        The same for the files, headers of 4,096 bytes a page included.
    folder : str or Path, optional
        Where the files are, one for each cold group; needed when there is a disk tier. Pages that an earlier store
        left there are found again.
    identity : str
        What gives pages a meaning beside the layout, above all the model: pages on disk that were written under
        another identity or layout are not found.
    max_ctas : int
        Most thread blocks a transfer may occupy, as for :func:`kvc.encode_pages_`.

    Raises
    ------
    ValueError
        A disk tier without a folder, a negative size or number of thread blocks, or pages too large for one write.
    TypeError
        A size is no integer.
    RuntimeError
        Another store has a file of the folder open.

    Notes
    -----
    A page counts as stored when :meth:`flush` has returned or :meth:`on_disk` says so; from then on it survives the
    process, however that ends, until the file is full and the page the least recently used one. Surviving a loss of
    power takes ``flush(sync=True)``.
    """

    def __init__(
        self,
        codec: ColdPageCodec,
        *,
        host_bytes: int | Mapping[int, int] = 0,
        disk_bytes: int | Mapping[int, int] = 0,
        folder: str | Path | None = None,
        identity: str = "",
        max_ctas: int = 0,
    ) -> None:
        if max_ctas < 0:
            raise ValueError(f"kvc.methods.TieredPageStore: max_ctas must be >= 0, got {max_ctas}")
        self.codec = codec
        self.stats = StoreStats()
        self.max_ctas = max_ctas
        self._lock = threading.RLock()
        self._cuda = codec.device.type == "cuda"
        self._stream = torch.cuda.Stream(codec.device) if self._cuda else None
        self._hot = [HotTier(codec.hot_slots(g)) for g in range(len(codec.pools))]
        self._host: dict[int, HostTier] = {}
        self._disk: dict[int, DiskTier] = {}
        self._staging: StagingRing | None = None
        try:
            for group in sorted({c.cold_group for c in codec.life_cycles.values()}):
                self._add_cold_group(
                    group, _share(host_bytes, group), _share(disk_bytes, group), folder, identity
                )
        except BaseException:
            self.close()
            raise
        self._count_pages()

    def _add_cold_group(
        self, group: int, host_bytes: int, disk_bytes: int, folder: str | Path | None, identity: str
    ) -> None:
        if host_bytes < 0 or disk_bytes < 0:
            raise ValueError(
                f"kvc.methods.TieredPageStore: sizes must be >= 0, got {min(host_bytes, disk_bytes)}"
            )
        cycles = sorted(c.id for c in self.codec.life_cycles.values() if c.cold_group == group)
        page = self.codec.cold_page_bytes(cycles[0])
        self._host[group] = HostTier(host_bytes // page, page, self._cuda)
        slots = disk_bytes // (4096 + -(-page // 4096) * 4096)
        if not slots:
            return
        if folder is None:
            raise ValueError("kvc.methods.TieredPageStore: folder must be given for a disk tier, got None")
        described = repr([("cold page 1", identity)] + [(c, self.codec.layouts[c].layers) for c in cycles])
        digest = hashlib.sha256(described.encode()).digest()[:16]
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = PageFile(folder / f"group{group}-{digest.hex()}.kvc", page, slots, digest)
        try:
            self._disk[group] = DiskTier(file)
        except BaseException:
            file.close()
            raise

    # What an engine calls.

    def lookup(self, life_cycle: int, keys: Sequence[bytes]) -> int:
        """How many pages of a sequence are in some tier, from the first on.

        Parameters
        ----------
        life_cycle : int
        keys : sequence of bytes
            One for each page, in the order of the sequence, as :func:`prefix_keys` returns them.

        Returns
        -------
        int
            At most ``len(keys)``. Nothing is moved, pinned or counted as a hit.

        Raises
        ------
        ValueError
            There is no such life cycle.
        """
        with self._lock:
            hot, host, disk = self._tiers(life_cycle)
            for count, key in enumerate(keys):
                name = (life_cycle, key)
                if name not in hot.pages and name not in host.pages and not (disk and name in disk.pages):
                    return count
            return len(keys)

    def acquire(self, life_cycle: int, keys: Sequence[bytes]) -> list[int]:
        """Bring the pages of `keys` to the GPU, as far as they are found from the first on, and pin them.

        Parameters
        ----------
        life_cycle : int
        keys : sequence of bytes
            One for each page, in the order of the sequence; none twice.

        Returns
        -------
        list of int
            Their hot slots; shorter than `keys` by what is missing. Work on the current stream may read them.
            Each needs one :meth:`release`.

        Raises
        ------
        ValueError
            There is no such life cycle, or a key is given twice.
        NoFreePagesError
            Found pages need more slots than are free or unpinned.
        OSError
            The disk failed to take a page that makes room, or to give one. Nothing stays pinned.
        """
        with self._lock, self._counted():
            hot, host, disk = self._tiers(life_cycle)
            if len(set(keys)) < len(keys):
                raise ValueError("kvc.methods.TieredPageStore: keys must be different, got one twice")
            names = [(life_cycle, key) for key in keys[: self.lookup(life_cycle, keys)]]
            if disk is not None:
                for name in reversed(names):  # out of the way of pages that go to the disk meanwhile
                    disk.touch(name)
            pinned: list[Key] = []
            try:
                for name in names:
                    if name in hot.pages:
                        self._pin(hot, name)
                        pinned.append(name)
                    elif name in host.pages:
                        host.locked.add(name)
                absent = [name for name in names if name not in hot.pages]
                slots = self._take(life_cycle, len(absent))
                try:
                    brought = self._onboard(life_cycle, absent, slots)
                except BaseException:
                    hot.free.extend(slots)
                    raise
            except BaseException:
                self._unpin(hot, [hot.pages[name] for name in pinned], None)
                raise
            finally:
                host.locked.difference_update(names)
            hot.free.extend(slots[brought:])
            missing = absent[brought] if brought < len(absent) else None
            found = names[: names.index(missing)] if missing else names
            behind = [name for name in names[len(found) :] if name in hot.pages]
            for name, slot in zip(absent[:brought], slots, strict=False):
                hot.pages[name] = slot
                hot.slots[slot].key, hot.slots[slot].pins = name, 1
            self._unpin(hot, [hot.pages[name] for name in behind], None)
            self.stats.misses += len(keys) - len(found)
            self._follow(*(hot.slots[hot.pages[name]].used for name in found))
            self.stats.gpu.hits += len(set(pinned).intersection(found))
            for name in reversed(found):  # the end of a sequence is to leave before its beginning
                host.touch(name)
            return [hot.pages[name] for name in found]

    def allocate(self, life_cycle: int, count: int) -> list[int]:
        """Pin free hot slots to write new pages into, in work on the current stream.

        Pages that nobody has pinned leave the GPU for them, the least recently used first.

        Parameters
        ----------
        life_cycle : int
        count : int
            Slots, one for each page.

        Returns
        -------
        list of int
            `count` hot slots. Each needs one :meth:`release`.

        Raises
        ------
        ValueError
            There is no such life cycle, or `count` is negative.
        NoFreePagesError
            Not enough slots are free or unpinned.
        OSError
            The disk took no page. Nothing was allocated and nothing lost.
        """
        if count < 0:
            raise ValueError(f"kvc.methods.TieredPageStore: count must be >= 0, got {count}")
        with self._lock, self._counted():
            hot = self._tiers(life_cycle)[0]
            slots = self._take(life_cycle, count)
            self._follow(*(hot.slots[slot].used for slot in slots))
            for slot in slots:
                hot.slots[slot] = HotSlot(pins=1)
            return slots

    def commit(self, life_cycle: int, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Name pinned slots whose pages are written, by work on the current stream, and will not change any more.

        A key that another slot has already is left to that one.

        Parameters
        ----------
        life_cycle : int
        slots : sequence of int
            Hot slots from :meth:`allocate`, none twice and none named before, unless by the same key.
        keys : sequence of bytes
            As many: the name of each page, from 1 byte to the longest that the file format has room for.

        Raises
        ------
        ValueError
            There is no such life cycle, or slots or keys are not as above. Nothing has been named.
        """
        with self._lock, self._counted():
            hot = self._tiers(life_cycle)[0]
            self._check_slots(hot, slots)
            if len(set(slots)) < len(slots):
                raise ValueError(f"kvc.methods.TieredPageStore: slots must be different, got {list(slots)}")
            for slot, key in zip(slots, keys, strict=True):
                if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
                    raise ValueError(
                        f"kvc.methods.TieredPageStore: keys must be 1 to {MAX_KEY_BYTES} bytes, got {key!r}"
                    )
                if hot.slots[slot].pins < 1 or hot.slots[slot].key not in (None, (life_cycle, key)):
                    raise ValueError(
                        f"kvc.methods.TieredPageStore: slots must be pinned and unnamed, got {slot}"
                    )
            written = self._mark_after(hot, slots)
            for slot, key in zip(slots, keys, strict=True):
                name = (life_cycle, key)
                hot.slots[slot].used = written
                if name not in hot.pages:
                    hot.slots[slot].key = name
                    hot.pages[name] = slot

    def release(self, life_cycle: int, slots: Sequence[int]) -> None:
        """Take one pin off each slot. Named pages stay until their slot is needed, others are forgotten.

        Of pages released together the last is the first to leave, as it is of use only with those before it. Who gets
        a slot next waits for the work that is on the current stream now.

        Parameters
        ----------
        life_cycle : int
        slots : sequence of int
            Hot slots, each as often as it is to lose a pin.

        Raises
        ------
        ValueError
            There is no such life cycle, or a slot has fewer pins. No pin has been taken.
        """
        with self._lock:
            hot = self._tiers(life_cycle)[0]
            self._check_slots(hot, slots)
            if any(hot.slots[slot].pins < slots.count(slot) for slot in slots):
                raise ValueError(f"kvc.methods.TieredPageStore: slots must be pinned, got {list(slots)}")
            self._unpin(hot, list(reversed(slots)), self._mark_after(hot, slots))
            for slot in reversed(slots):
                if (name := hot.slots[slot].key) is not None:
                    _, host, disk = self._tiers(name[0])
                    host.touch(name)
                    if disk is not None:
                        disk.touch(name)

    def on_disk(self, life_cycle: int, key: bytes) -> bool:
        """Whether a page would survive the process now. One that an earlier store left is read to see.

        Parameters
        ----------
        life_cycle : int
        key : bytes
            As given to :meth:`commit`.

        Returns
        -------
        bool
            False without a disk tier.

        Raises
        ------
        ValueError
            There is no such life cycle.
        OSError
            The disk failed to give the record.
        """
        with self._lock:
            return self._is_stored((life_cycle, key))

    def flush(self, sync: bool = False) -> int:
        """Write every committed page that is not on disk yet, as far as the files have slots for all.

        The most recently used pages are written when not all of them fit. The host waits for their transfers.

        Parameters
        ----------
        sync : bool
            Wait for the disk too, so that the pages survive a loss of power.

        Returns
        -------
        int
            How many pages were written; 0 without a disk tier.

        Raises
        ------
        OSError
            The disk took no page. Those it has taken are stored.
        """
        written = 0
        with self._lock, self._counted():
            for group, disk in self._disk.items():
                cycles = [c for c in self.codec.life_cycles.values() if c.cold_group == group]
                hot = [n for c in cycles for n in self._tiers(c.id)[0].pages if n[0] == c.id]
                known = dict.fromkeys([*self._host[group].pages, *hot])
                for name in known:  # what a faster tier has is not to make room for the rest of it
                    disk.touch(name)
                for cycle in cycles:
                    names = [n for n in known if n[0] == cycle.id and not self._is_stored(n)][-disk.count :]
                    written += self._write_out(cycle.id, names)
                if sync:
                    disk.file.sync()
        return written

    def close(self) -> None:
        """Give the files back. Pages that are not on disk are lost; call :meth:`flush` before."""
        with self._lock:  # a transfer of another thread still uses the files
            if self._stream is not None:
                self._stream.synchronize()
            for disk in self._disk.values():
                disk.file.close()

    def __enter__(self) -> TieredPageStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Slots.

    def _tiers(self, life_cycle: int) -> tuple[HotTier, HostTier, DiskTier | None]:
        cycle = self.codec.life_cycles.get(life_cycle)
        if cycle is None:
            known = sorted(self.codec.life_cycles)
            raise ValueError(
                f"kvc.methods.TieredPageStore: life_cycle must be one of {known}, got {life_cycle}"
            )
        return self._hot[cycle.hot_group], self._host[cycle.cold_group], self._disk.get(cycle.cold_group)

    def _check_slots(self, hot: HotTier, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < hot.count:
                raise ValueError(
                    f"kvc.methods.TieredPageStore: slots must be in [0, {hot.count}), got {slot}"
                )

    def _is_stored(self, name: Key) -> bool:
        """Whether the disk has the page, whole. Nothing may rely on a record that this store has neither written nor
        read: an earlier process may have died while it wrote it.
        """
        disk = self._tiers(name[0])[2]
        if disk is None or name not in disk.pages:
            return False
        if name not in disk.unread:
            return True
        page = self.codec.cold_page_bytes(name[0])
        with self._ring().lease(page) as lease:
            whole = disk.read(name, lease.tensor)
        self.stats.broken += not whole
        return whole

    def _pin(self, hot: HotTier, name: Key) -> None:
        hot.slots[hot.pages[name]].pins += 1
        hot.idle.pop(name, None)
        hot.touch(name)

    def _unpin(self, hot: HotTier, slots: Iterable[int], used: Event) -> None:
        for index in slots:
            slot = hot.slots[index]
            slot.pins -= 1
            slot.used = used or slot.used
            if slot.pins == 0:
                if slot.key is None:
                    hot.free.append(index)
                else:
                    hot.idle[slot.key] = index

    def _take(self, life_cycle: int, count: int) -> list[int]:
        """`count` slots that hold nothing any more."""
        hot = self._tiers(life_cycle)[0]
        if count > hot.reachable():
            raise NoFreePagesError(
                f"kvc.methods.TieredPageStore: {count} pages of life cycle {life_cycle} are needed, {len(hot.free)} are"
                f" free and {len(hot.idle)} unpinned"
            )
        victims = list(hot.idle)[: max(0, count - len(hot.free))]
        batches: dict[int, list[Key]] = {}
        for name in victims:
            batches.setdefault(self.codec.batching_id(name[0]), []).append(name)
        for cycle, names in batches.items():
            self._offload(cycle, names)
        for name in victims:
            slot = hot.idle.pop(name)
            hot.drop(name)
            hot.slots[slot].key = None
        return [hot.free.pop() for _ in range(count)]

    def _host_slot(self, group: int) -> int | None:
        """A free host slot; the least recently used page goes to the disk for it. None if all are locked."""
        host, disk = self._host[group], self._disk.get(group)
        if host.free:
            return host.free.pop()
        name = next((n for n in host.pages if n not in host.locked), None)
        if name is None:
            return None
        if disk is not None and not self._is_stored(name):
            self._to_disk(group, name, host.settle(host.pages[name]))
        host.drop(name)
        return host.free.pop()

    # Transfers.

    def _offload(self, life_cycle: int, names: Sequence[Key]) -> None:
        """Encode pages that have no cold copy, into host memory or, without room there, to the disk."""
        hot, host, disk = self._tiers(life_cycle)
        group = self.codec.life_cycles[life_cycle].cold_group
        missing = [n for n in names if n not in host.pages and not self._is_stored(n)]
        todo: list[tuple[Key, int]] = []
        try:
            while len(todo) < len(missing) and (slot := self._host_slot(group)) is not None:
                todo.append((missing[len(todo)], slot))
                # With a slot of its own the page is safe from the next one's search.
                host.pages[todo[-1][0]] = slot
                host.locked.add(todo[-1][0])
            done = self._encode(life_cycle, host.memory, todo)
        except BaseException:
            for name, _ in todo:
                host.drop(name)
            raise
        finally:
            host.locked.difference_update(name for name, _ in todo)
        for name, slot in todo:
            host.used[slot] = hot.slots[hot.pages[name]].used = done
        self.stats.host.offloaded_bytes += len(todo) * host.memory.shape[1]
        if disk is not None:
            self._through_staging(life_cycle, missing[len(todo) :])

    def _through_staging(self, life_cycle: int, names: Sequence[Key]) -> None:
        group = self.codec.life_cycles[life_cycle].cold_group
        for first, count, ring, page in self._chunks(life_cycle, len(names)):
            with ring.lease(count * page) as lease:
                pages = lease.tensor.view(count, page)
                part = names[first : first + count]
                done = self._encode(life_cycle, pages, [(name, i) for i, name in enumerate(part)])
                if done is not None:
                    done.synchronize()
                for name, blob in zip(part, pages, strict=True):
                    self._to_disk(group, name, blob)

    def _write_out(self, life_cycle: int, names: Sequence[Key]) -> int:
        """Put pages on disk, from their cold copy where there is one."""
        host = self._tiers(life_cycle)[1]
        group = self.codec.life_cycles[life_cycle].cold_group
        self._through_staging(life_cycle, [n for n in names if n not in host.pages])
        for name in names:
            if name in host.pages:
                self._to_disk(group, name, host.settle(host.pages[name]))
        return len(names)

    def _to_disk(self, group: int, name: Key, page: Tensor) -> None:
        disk = self._disk[group]
        if not disk.free:
            disk.drop(next(iter(disk.pages)))
        slot = disk.free.pop()
        try:
            disk.file.write(slot, *name, page)
        except BaseException:
            disk.free.append(slot)
            raise
        disk.pages[name] = slot
        self.stats.disk.offloaded_bytes += page.numel()

    def _onboard(self, life_cycle: int, names: Sequence[Key], slots: Sequence[int]) -> int:
        """Decode pages from host memory and disk into hot slots, up to the first that is broken; how many."""
        _, host, disk = self._tiers(life_cycle)
        group = self.codec.life_cycles[life_cycle].cold_group
        page = host.memory.shape[1]
        in_host: list[tuple[int, int]] = []  # (hot slot, host slot)
        hits = {"host": 0, "disk": 0}
        brought = 0
        for name, slot in zip(names, slots, strict=True):
            if name in host.pages:
                hits["host"] += 1
                in_host.append((slot, host.pages[name]))
            elif disk is not None and name in disk.pages:
                target = self._host_slot(group)
                if name not in disk.pages:  # it was dropped for the page whose slot this is
                    host.free += [] if target is None else [target]
                    break
                if target is not None:
                    whole = False
                    try:
                        whole = self._from_disk(disk, name, host.settle(target))
                    finally:
                        if not whole:
                            host.free.append(target)
                    if not whole:
                        break
                    host.pages[name] = target
                    host.locked.add(name)
                    in_host.append((slot, target))
                else:
                    ring = self._ring()
                    with ring.lease(page) as lease:
                        blob = lease.tensor.view(1, page)
                        if not self._from_disk(disk, name, blob[0]):
                            break
                        lease.release(self._decode(life_cycle, blob, [(slot, 0)]))
                hits["disk"] += 1
            else:  # it was dropped for another page of this call
                break
            brought += 1
        if in_host:
            done = self._decode(life_cycle, host.memory, in_host)
            for _, host_slot in in_host:
                host.used[host_slot] = done
        self.stats.host.hits += hits["host"]
        self.stats.disk.hits += hits["disk"]
        self.stats.host.onboarded_bytes += len(in_host) * page
        return brought

    def _from_disk(self, disk: DiskTier, name: Key, page: Tensor) -> bool:
        if not disk.read(name, page):
            self.stats.broken += 1
            return False
        self.stats.disk.onboarded_bytes += page.numel()
        return True

    def _encode(self, life_cycle: int, cold: Tensor, pages: Sequence[tuple[Key, int]]) -> Event:
        hot = self._tiers(life_cycle)[0]
        pairs = [(slot, hot.pages[name]) for name, slot in pages]
        self.stats.encoded_pages += len(pairs)
        with self._transfer(hot.slots[slot].used for _, slot in pairs):
            if pairs:
                self.codec.encode(life_cycle, cold, torch.tensor(pairs, dtype=torch.int32), self.max_ctas)
            return self._mark()

    def _decode(self, life_cycle: int, cold: Tensor, pairs: Sequence[tuple[int, int]]) -> Event:
        hot = self._tiers(life_cycle)[0]
        self.stats.decoded_pages += len(pairs)
        with self._transfer(hot.slots[slot].used for slot, _ in pairs):
            self.codec.decode(life_cycle, cold, torch.tensor(pairs, dtype=torch.int32), self.max_ctas)
            done = self._mark()
        for slot, _ in pairs:
            hot.slots[slot].used = done
        return done

    def _chunks(self, life_cycle: int, count: int) -> Iterator[tuple[int, int, StagingRing, int]]:
        """(first, count, ring, bytes of a page) of runs that take a third of the staging memory at most."""
        page = self.codec.cold_page_bytes(life_cycle)
        first = 0
        while first < count:
            ring = self._ring()
            run = min(count - first, max(1, ring.nbytes // 3 // page))
            yield first, run, ring, page
            first += run

    def _ring(self) -> StagingRing:
        if self._staging is None:
            largest = max(layout.cold_page_bytes for layout in self.codec.layouts.values())
            self._staging = StagingRing(
                max(MINIMUM_STAGING, 3 * (largest + StagingRing.ALIGNMENT)), pinned=self._cuda
            )
        return self._staging

    # Streams.

    @contextmanager
    def _transfer(self, after: Iterable[Event]) -> Iterator[None]:
        """The store's own stream, behind what is named."""
        if self._stream is None:
            yield
            return
        for event in {id(e): e for e in after if e is not None}.values():
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self) -> Event:
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self.codec.device).record_event()

    def _mark_after(self, hot: HotTier, slots: Iterable[int]) -> Event:
        """An event behind the current stream's work and behind all earlier users of the slots, on any stream."""
        self._follow(*(hot.slots[slot].used for slot in slots))
        return self._mark()

    def _follow(self, *events: Event) -> None:
        for event in {id(e): e for e in events if e is not None}.values():
            torch.cuda.current_stream(self.codec.device).wait_event(event)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._count_pages()

    def _count_pages(self) -> None:
        self.stats.gpu.pages = sum(len(hot.pages) for hot in self._hot)
        self.stats.host.pages = sum(len(host.pages) for host in self._host.values())
        self.stats.disk.pages = sum(len(disk.pages) for disk in self._disk.values())


def _share(sizes: int | Mapping[int, int], group: int) -> int:
    return operator.index(sizes.get(group, 0) if isinstance(sizes, Mapping) else sizes)
