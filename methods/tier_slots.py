"""The slots of each tier and what is in them; :mod:`kvc.methods.tiers` moves the pages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from .page_file import PageFile

__all__ = ["DiskTier", "Event", "HostTier", "HotSlot", "HotTier", "Key"]

Key = tuple[int, bytes]  # life cycle and the caller's key
Event = torch.cuda.Event | None


class Slots:
    """Slots of one tier in one group: free ones, and those with a page from the least to the most recently used."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.pages: OrderedDict[Key, int] = OrderedDict()

    def touch(self, key: Key) -> None:
        if key in self.pages:
            self.pages.move_to_end(key)

    def drop(self, key: Key) -> None:
        self.free.append(self.pages.pop(key))


@dataclass
class HotSlot:
    """A slot of the pools. `used` is when its last user will be done with it."""

    key: Key | None = None
    pins: int = 0
    used: Event = None


class HotTier(Slots):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.slots = [HotSlot() for _ in range(count)]
        self.idle: OrderedDict[Key, int] = OrderedDict()  # those that nobody has pinned

    def reachable(self) -> int:
        return len(self.free) + len(self.idle)


class HostTier(Slots):
    def __init__(self, count: int, page_bytes: int, pinned: bool) -> None:
        super().__init__(count)
        self.memory = torch.empty(
            count, page_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned and count > 0
        )
        self.used: list[Event] = [None] * count  # the GPU's last access
        self.locked: set[Key] = set()  # about to be read

    def settle(self, slot: int) -> Tensor:
        """The page of a slot once the GPU is done with it."""
        if (event := self.used[slot]) is not None:
            event.synchronize()
            self.used[slot] = None
        return self.memory[slot]


class DiskTier(Slots):
    def __init__(self, file: PageFile) -> None:
        super().__init__(file.slots)
        self.file = file
        self.unread: set[Key] = set()  # found by their headers; whether the pages are whole is not known yet
        newest: dict[Key, int] = {}
        for _, slot, cycle, key in sorted(file.records()):
            newest.pop((cycle, key), None)
            newest[cycle, key] = slot
        self.pages.update(newest)
        self.unread.update(newest)
        taken = set(newest.values())
        self.free = [slot for slot in self.free if slot not in taken]

    def drop(self, key: Key) -> None:
        super().drop(key)
        self.unread.discard(key)

    def read(self, key: Key, page: Tensor) -> bool:
        """Read a page, and forget it when it is not whole."""
        if not self.file.read(self.pages[key], *key, page):
            self.drop(key)
            return False
        self.unread.discard(key)
        return True
