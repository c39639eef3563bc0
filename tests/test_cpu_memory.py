"""Memory for packed weights: it uses large pages, pieces do not overlap, and unused memory is freed."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from adaptive.engines.cpu.memory import ALIGNED, LargePages, asked_for

MB = 1 << 20


def flags_at(address: int) -> str:
    """The kernel's ``VmFlags`` line for the memory at this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, _, end = first.partition("-")
            inside = int(begin, 16) <= address < int(end, 16)
        elif inside and first == "VmFlags:":
            return line
    return ""


def test_pieces_are_apart_aligned_and_of_the_shape_asked_for() -> None:
    pages = LargePages(MB)
    shapes = [(3, 5), (1,), (100, 1000), (7, 11, 13), (200, 1000), (1000, 1000), (2, 2)]  # the last but one: own block
    pieces = [pages.words(*shape).fill_(number) for number, shape in enumerate(shapes)]
    for number, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
        assert piece.shape == shape
        assert piece.dtype == torch.int32
        assert piece.data_ptr() % ALIGNED == 0
        assert piece.eq(number).all()
    assert pages.words(0, 4).shape == (0, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what was asked for")
def test_large_pages_are_asked_for_and_memory_goes_with_its_last_piece() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no large pages")
    pages = LargePages(4 * MB)
    first, second = pages.words(MB // 2), pages.words(MB // 4)
    address = first.data_ptr()
    assert " hg" in flags_at(address)
    pages.words(MB)  # does not fit: goes to another block
    del first
    second.fill_(5)
    assert " hg" in flags_at(address)
    del second
    assert " hg" not in flags_at(address)


def test_memory_that_is_not_there_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError, match="could not be allocated"):
        asked_for(1 << 60)


def test_a_system_without_large_pages_has_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert LargePages().words(4, 4).fill_(1).sum() == 16
