"""Reads records directly from the pages of an SQLite file, without its schema or its B-trees.

In: a file that SQLite reports as damaged, and the write-ahead log beside it. Out: the values of every record on a
readable page. They are not validated here: the caller must check them (``rows.checksum``).

The format is described at sqlite.org/fileformat.html; numbers in parentheses are its sections.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Bytes of a page if the file's header is unreadable: SQLite's default, which the log uses.
PAGE_SIZE = 4096

# Kinds of pages that hold records (1.6): leaves of tables; leaves and inner pages of indices, in which form a table
# WITHOUT ROWID is stored too.
TABLE_LEAF, INDEX_LEAF, INDEX_INNER = 0x0D, 0x0A, 0x02

WAL_MAGIC = (0x377F0682, 0x377F0683)
WAL_HEADER, FRAME_HEADER = 32, 24


def page_size(header: bytes) -> int:
    """Bytes of a page, by the ``header`` of a file (1.3)."""
    said = int.from_bytes(header[16:18], "big")
    return said if said in (512, 1024, 2048, 4096, 8192, 16384, 32768) else PAGE_SIZE


class Pages:
    """The pages of the file at ``path``, with the newer pages of its write-ahead log. A context manager, which closes
    the file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.size = page_size(self._file.read(100))
        self.count = (path.stat().st_size + self.size - 1) // self.size
        wal = path.with_name(path.name + "-wal")
        self._newer: dict[int, bytes] = {}
        if wal.exists():
            for number, page in frames(wal, self.size):
                self._newer[number] = page
        self.count = max(self.count, *self._newer, 0)

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def page(self, number: int) -> bytes:
        """The ``number``-th page, from 1; zeros beyond the end of the file."""
        if number in self._newer:
            return self._newer[number]
        self._file.seek((number - 1) * self.size)
        return self._file.read(self.size).ljust(self.size, b"\0")

    def records(self) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
        """Row id (None in an index) and values of every readable record, in no particular order."""
        for number in range(1, self.count + 1):
            page = self.page(number)
            start = 100 if number == 1 else 0
            if page[start] in (TABLE_LEAF, INDEX_LEAF, INDEX_INNER):
                yield from self._records_of(page, start)

    def _records_of(self, page: bytes, start: int) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
        kind = page[start]
        cells = int.from_bytes(page[start + 3 : start + 5], "big")
        first = start + (12 if kind == INDEX_INNER else 8)
        for place in range(first, min(first + 2 * cells, self.size - 1), 2):
            at = int.from_bytes(page[place : place + 2], "big")
            try:
                yield self._record(page, at, kind)
            except (IndexError, ValueError, struct.error):  # a damaged cell; the next one may be intact
                continue

    def _record(self, page: bytes, at: int, kind: int) -> tuple[int | None, tuple[Any, ...]]:
        """The cell at byte ``at`` (1.6)."""
        if kind == INDEX_INNER:
            at += 4  # skip the number of the child page
        length, at = varint(page, at)
        row = None
        if kind == TABLE_LEAF:
            row, at = varint(page, at)
        return row, values(self._payload(page, at, length, kind))

    def _payload(self, page: bytes, at: int, length: int, kind: int) -> bytes:
        """All bytes of a record: the page holds its beginning, and a chain of overflow pages the rest (1.6). Raises
        ValueError if they are damaged."""
        usable = self.size
        most = usable - 35 if kind == TABLE_LEAF else (usable - 12) * 64 // 255 - 23
        if length <= most:
            return _exactly(page[at : at + length], length)
        least = (usable - 12) * 32 // 255 - 23
        here = least + (length - least) % (usable - 4)
        here = here if here <= most else least
        if length > self.count * usable:
            raise ValueError("longer than the file")
        parts, left = [_exactly(page[at : at + here], here)], length - here
        following = int.from_bytes(page[at + here : at + here + 4], "big")
        while left > 0:
            if not 1 < following <= self.count:
                raise ValueError("the chain is broken")
            page = self.page(following)
            parts.append(page[4 : 4 + min(left, usable - 4)])
            left -= len(parts[-1])
            following = int.from_bytes(page[:4], "big")
        return b"".join(parts)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError("beyond the page")
    return data


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The variable-length integer (1 to 9 bytes, 1.6) at ``at``, and the offset after it."""
    number = 0
    for place in range(8):
        byte = data[at + place]
        number = number << 7 | byte & 0x7F
        if byte < 0x80:
            return number, at + place + 1
    number = number << 8 | data[at + 8]
    return number - (1 << 64 if number >> 63 else 0), at + 9


def values(payload: bytes) -> tuple[Any, ...]:
    """The values of a record (2.1). Text is decoded as UTF-8, damaged bytes as U+FFFD."""
    end, at = varint(payload, 0)
    kinds = []
    while at < end:
        kind, at = varint(payload, at)
        kinds.append(kind)
    found: list[Any] = []
    for kind in kinds:
        width = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)[kind] if kind < 10 else (kind - 12) // 2
        data = _exactly(payload[at : at + width], width)
        at += width
        if kind == 0:
            found.append(None)
        elif kind == 7:
            found.append(struct.unpack(">d", data)[0])
        elif kind < 7:
            found.append(int.from_bytes(data, "big", signed=True))
        elif kind in (8, 9):
            found.append(kind - 8)
        elif kind >= 12:
            found.append(data if kind % 2 == 0 else data.decode("utf-8", "replace"))
        else:
            raise ValueError("no kind of value")
    return tuple(found)


def frames(wal: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Page number and page of the committed frames of a write-ahead log, oldest first (4).

    Frames are returned if their checksum, which continues that of the frame before, is right. This includes frames
    behind a damaged one, where SQLite itself ends the log.
    """
    whole: list[tuple[int, bytes]] = []
    for _, number, page, commit in _frames(wal.read_bytes(), size):
        whole.append((number, page))
        if commit:
            yield from whole
            whole = []


def cut_short(data: bytes, size: int = PAGE_SIZE) -> bool:
    """Whether a write-ahead log has intact transactions behind a damaged frame, where SQLite ends the log.

    A last frame that a killed process left half written does not count, as no intact transaction is behind it.
    """
    gap, last = not _header_is_whole(data), 0
    for place, _, _, commit in _frames(data, size):
        gap, last = gap or place != last + 1, place
        if gap and commit:
            return True
    return False


def _header_is_whole(data: bytes) -> bool:
    magic = int.from_bytes(data[:4], "big")
    if magic not in WAL_MAGIC:
        return False
    order = ">" if magic & 1 else "<"
    return _sum(order, data[:24], (0, 0)) == struct.unpack(">II", data[24:32])


def _frames(data: bytes, size: int) -> Iterator[tuple[int, int, bytes, bool]]:
    """Place (from 1), page number, page, and whether a transaction ends there, of each intact frame."""
    whole = _header_is_whole(data)
    salts = data[16:24] if whole else data[WAL_HEADER + 8 : WAL_HEADER + 16]
    order = ">" if whole and data[3] & 1 else "<"
    before = struct.unpack(">II", data[24:32]) if whole else None
    starts = range(WAL_HEADER, len(data) - FRAME_HEADER - size + 1, FRAME_HEADER + size)
    for place, start in enumerate(starts, start=1):
        head, page = data[start : start + FRAME_HEADER], data[start + FRAME_HEADER : start + FRAME_HEADER + size]
        told = struct.unpack(">II", head[16:24])
        # Without the header the first frame cannot be checked, but the records in it have checksums of their own.
        if head[8:16] == salts and (before is None or _sum(order, head[:8] + page, before) == told):
            yield place, int.from_bytes(head[:4], "big"), page, head[4:8] != b"\0\0\0\0"
        before = told


def _sum(order: str, data: bytes, before: tuple[int, int]) -> tuple[int, int]:
    """The checksum of a write-ahead log (4.2), continued from ``before``."""
    one, two = before
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        one = (one + even + two) & 0xFFFFFFFF
        two = (two + odd + one) & 0xFFFFFFFF
    return one, two
