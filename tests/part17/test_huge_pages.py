"""Memory that is taken inside `huge_pages` lies on huge pages, where the system has them."""

import mmap
import platform
import re
from pathlib import Path

import pytest
import torch

from engine.machine import huge_pages
from engine.machine.huge_pages import HUGE_PAGE, new_regions


@pytest.mark.parametrize(
    ("regions", "before", "new"),
    [
        ([(10, 20)], [], [(10, 20)]),
        ([(10, 20)], [(10, 20)], []),
        ([(10, 30)], [(10, 20)], [(20, 30)]),
        ([(5, 30)], [(10, 20)], [(5, 10), (20, 30)]),
        ([(0, 50)], [(10, 20), (30, 40)], [(0, 10), (20, 30), (40, 50)]),
        ([(10, 20), (30, 40)], [(0, 5), (15, 35)], [(10, 15), (35, 40)]),
        ([(10, 20)], [(0, 10), (20, 30)], [(10, 20)]),
    ],
    ids=["new", "known", "grown up", "grown both ways", "grown together", "overlapping", "neighbours"],
)
def test_what_was_there_before_is_left_alone(regions, before, new):
    assert list(new_regions(regions, before)) == new


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return setting.exists() and "[never]" not in setting.read_text() and release >= (6, 1)


def kib_on_huge_pages(address: int) -> int:
    """Of the region that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError(f"no region holds {address:x}")


@pytest.mark.skipif(not has_huge_pages(), reason="needs Linux 6.1 with transparent huge pages")
def test_weights_that_come_inside_lie_on_huge_pages():
    count = 20 * HUGE_PAGE // 4
    with huge_pages.huge_pages():
        # Straight from the system: malloc may have kept as much of earlier tests, which is not new.
        memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        weights = torch.frombuffer(memory, dtype=torch.int32)
        torch.arange(count, dtype=torch.int32, out=weights)
    assert kib_on_huge_pages(weights.data_ptr()) > 0
    assert weights[::12345].equal(torch.arange(count, dtype=torch.int32)[::12345])


def test_a_file_with_a_name_in_another_encoding_is_no_trouble(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_bytes(b"1000-2000 r-xp 0 08:01 7 /home/j\xfcrgen/lib.so\n4000-5000 rw-p 0 00:00 0\n")
    monkeypatch.setattr(huge_pages, "MAPS", maps)
    assert huge_pages._writable_regions() == [(0x4000, 0x5000)]


def test_a_system_that_does_not_say_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "MAPS", tmp_path / "none")
    with huge_pages.huge_pages():
        assert torch.ones(HUGE_PAGE).sum() == HUGE_PAGE
