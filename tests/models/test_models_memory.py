"""Freed memory that stays with the process: fewer pages asked for, in a process of its own."""

import subprocess
import sys

import pytest
import torch

from hotpot.models import keep_freed_memory

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
