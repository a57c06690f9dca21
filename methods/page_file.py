"""A file of cold pages that says of every page whether it is whole."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash
from torch import Tensor

__all__ = ["PageFile"]

_MAGIC = b"kvcpage1"
# Magic, identity, life cycle, length of the key, the key, sequence number, bytes and checksum of the page.
_HEADER = struct.Struct("<8s16sII64sQQ16s")
_HEADER_BYTES = 4096
MAX_KEY_BYTES = 64
_MAX_CALL_BYTES = 0x7FFFF000  # that Linux reads or writes in one call


def _bytes_of(page: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array = (ctypes.c_char * page.numel()).from_address(page.data_ptr())
    return memoryview(array).cast("B")


class PageFile:
    """Slots for cold pages of one size, each a record that describes itself; there is no index to lose.

    A record is a header block of 4,096 bytes and the page, and is written and read by one call each. The header
    names the page and carries checksums of itself and of the page, so that a record which was cut off, overwritten
    or written by somebody else is recognised, and its slot counts as free. The file is locked: a second process
    that opens it is refused.

    Parameters
    ----------
    path : Path
        Created when missing.
    page_bytes, slots : int
    identity : bytes
        16 bytes that stand for everything which gives the pages their meaning. Records with another are foreign.
    """

    def __init__(self, path: Path, page_bytes: int, slots: int, identity: bytes) -> None:
        self.path, self.page_bytes, self.slots = path, page_bytes, slots
        self._identity = identity
        self._record_bytes = _HEADER_BYTES + -(-page_bytes // 4096) * 4096
        self._sequence = 0
        if _HEADER_BYTES + page_bytes > _MAX_CALL_BYTES:
            raise ValueError(
                f"kvc.methods.PageFile: page_bytes must be at most {_MAX_CALL_BYTES - _HEADER_BYTES}, what one call"
                f" writes, got {page_bytes}"
            )
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            if not isinstance(error, BlockingIOError):
                raise
            raise RuntimeError(
                f"kvc.methods.PageFile: {path} must be free, got one that another store has open"
            ) from None

    def records(self) -> Iterator[tuple[int, int, int, bytes]]:
        """(sequence number, slot, life cycle, key) of every slot with a sound header; the pages are not read."""
        present = min(self.slots, -(-os.fstat(self._file).st_size // self._record_bytes))
        for slot in range(present):
            found = self._parse(os.pread(self._file, _HEADER_BYTES, slot * self._record_bytes))
            if found is not None:
                cycle, key, sequence, _ = found
                self._sequence = max(self._sequence, sequence)
                yield sequence, slot, cycle, key

    def write(self, slot: int, life_cycle: int, key: bytes, page: Tensor) -> None:
        """Store a page, uint8 ``[page_bytes]`` on the CPU. It survives this process; see :meth:`sync`."""
        payload = _bytes_of(page)
        self._sequence += 1
        fields = (_MAGIC, self._identity, life_cycle, len(key), key, self._sequence, len(payload))
        header = _HEADER.pack(*fields, xxhash.xxh3_128_digest(payload))
        header += xxhash.xxh3_128_digest(header)
        blocks = [header.ljust(_HEADER_BYTES, b"\0"), payload]
        written = os.pwritev(self._file, blocks, slot * self._record_bytes)
        if written != _HEADER_BYTES + len(payload):
            raise OSError(
                f"kvc.methods.PageFile: {written} of {_HEADER_BYTES + len(payload)} bytes written to {self.path}"
            )

    def read(self, slot: int, life_cycle: int, key: bytes, page: Tensor) -> bool:
        """Read a slot into `page`; False unless it holds the whole page of that key."""
        header, payload = bytearray(_HEADER_BYTES), _bytes_of(page)
        got = os.preadv(self._file, [header, payload], slot * self._record_bytes)
        found = self._parse(bytes(header))
        if got != _HEADER_BYTES + len(payload) or found is None or found[:2] != (life_cycle, key):
            return False
        return xxhash.xxh3_128_digest(payload) == found[3]

    def _parse(self, block: bytes) -> tuple[int, bytes, int, bytes] | None:
        """(life cycle, key, sequence number, checksum of the page), or None for what this file did not write."""
        header, rest = block[: _HEADER.size], block[_HEADER.size :]
        if not header.startswith(_MAGIC) or rest[:16] != xxhash.xxh3_128_digest(header):
            return None
        _, identity, cycle, length, key, sequence, nbytes, checksum = _HEADER.unpack(header)
        if identity != self._identity or nbytes != self.page_bytes:
            return None
        return cycle, key[:length], sequence, checksum

    def sync(self) -> None:
        """Wait until everything written survives a loss of power."""
        os.fdatasync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
