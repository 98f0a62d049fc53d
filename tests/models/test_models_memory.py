"""Freed memory that stays with the process, in a process of its own; cyclic garbage that is looked for seldom."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

from hotpot.models import collect_young, keep_freed_memory, seldom_collected
from hotpot.models.memory import COLLECT_AFTER

CHILD = """
import os, sys, torch
from hotpot.models import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def resident_bytes():
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident_bytes()
held = [torch.ones(700_000) for _ in range(20)]
while held:
    held.pop()
sys.stdout.write(str(resident_bytes() - before))
"""
HELD_BYTES = 20 * 700_000 * 4


def bytes_left_after_freeing(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", CHILD, way], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not keep_freed_memory(), reason="this C library is not glibc")
def test_the_next_tensors_find_the_pages_of_freed_ones() -> None:
    assert bytes_left_after_freeing("kept") > 0.9 * HELD_BYTES
    assert bytes_left_after_freeing("given back") < 0.2 * HELD_BYTES


def test_it_may_be_told_twice() -> None:
    assert keep_freed_memory() == keep_freed_memory()
    assert torch.ones(3).sum() == 3


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize(
    ("told", "inside"), [(700, COLLECT_AFTER), (10 * COLLECT_AFTER, 10 * COLLECT_AFTER), (0, 0)]
)
def test_the_collector_is_told_for_a_while_and_never_to_look_more_often(told: int, inside: int) -> None:
    gc.set_threshold(told, 7, 5)
    found = []

    def run() -> None:
        with seldom_collected(), seldom_collected():
            found.append(gc.get_threshold())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert found == [(inside, 7, 5)]
    assert gc.get_threshold() == (told, 7, 5)


def test_what_is_young_and_in_a_cycle_is_freed() -> None:
    with seldom_collected():
        held = [torch.ones(3)]
        held.append(held)  # type: ignore[arg-type]
        seen = weakref.ref(held[0])
        del held
        assert seen() is not None
        collect_young()
        assert seen() is None
