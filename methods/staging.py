"""A bounded ring of host memory through which pages pass between a GPU and a disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["StagingExhaustedError", "StagingLease", "StagingRing"]


class StagingExhaustedError(RuntimeError):
    """There is no room, and waiting for it would mean waiting for a lease of the same thread."""


@dataclass(eq=False)
class StagingLease:
    """Bytes `[start, stop)` of a ring, held until :meth:`release`. As a context manager it releases at the end."""

    ring: StagingRing
    start: int
    stop: int
    owner: int
    tensor: Tensor

    def release(self, after: torch.cuda.Event | None = None) -> None:
        """Give the bytes back; who gets them next waits for the event `after`."""
        self.ring._release(self, after)

    def __enter__(self) -> StagingLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class StagingRing:
    """Leases of contiguous bytes, next-fit: each starts behind the one before, wrapping around at the end.

    Threads may share a ring. One that finds no room waits for the others' leases; if it holds one itself it gets a
    :class:`StagingExhaustedError` instead, since it would wait for itself.

    Parameters
    ----------
    nbytes : int
        Size of the ring.
    pinned : bool
        Whether a GPU reads and writes the memory.
    """

    ALIGNMENT = 4096

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._changed = threading.Condition()
        self._held: list[StagingLease] = []
        self._in_use: list[tuple[int, int, torch.cuda.Event]] = []  # given back, perhaps not done with
        self._cursor = 0

    def lease(self, nbytes: int) -> StagingLease:
        """`nbytes` of the ring as ``.tensor``, uint8; its address is a multiple of :attr:`ALIGNMENT` from the first.

        Raises
        ------
        ValueError
            More than the ring has.
        StagingExhaustedError
            No room, and this thread holds a lease.
        """
        size = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        if not 0 < size <= self.nbytes:
            raise ValueError(f"kvc.methods.StagingRing: nbytes must be in [1, {self.nbytes}], got {nbytes}")
        me = threading.get_ident()
        with self._changed:
            while (start := self._find(size)) is None:
                if any(lease.owner == me for lease in self._held):
                    raise StagingExhaustedError(
                        f"kvc.methods.StagingRing: no {nbytes} of {self.nbytes} bytes are free and this thread holds"
                        " a lease"
                    )
                self._changed.wait()
            stop = start + size
            lease = StagingLease(self, start, stop, me, self._buffer[start : start + nbytes])
            self._held.append(lease)
            self._cursor = stop
            before = [entry for entry in self._in_use if entry[0] < stop and start < entry[1]]
            self._in_use = [entry for entry in self._in_use if entry not in before]
        for _, _, event in before:
            event.synchronize()
        return lease

    def _find(self, size: int) -> int | None:
        """The first place behind the cursor, then from the start, that no lease holds."""
        ends = sorted(lease.stop for lease in self._held)
        behind = [self._cursor, *(end for end in ends if end > self._cursor)]
        for start in (*behind, 0, *ends):
            stop = start + size
            if stop <= self.nbytes and all(h.stop <= start or stop <= h.start for h in self._held):
                return start
        return None

    def _release(self, lease: StagingLease, after: torch.cuda.Event | None) -> None:
        with self._changed:
            if lease not in self._held:
                return
            self._held.remove(lease)
            if after is not None:
                self._in_use.append((lease.start, lease.stop, after))
            self._changed.notify_all()
