"""Freed memory that stays with the process: fewer pages asked for, in a process of its own."""

import subprocess
import sys

import pytest
import torch

from hotpot.models import keep_freed_memory

CHILD = """
import resource, sys, torch
from hotpot.models import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def work():
    held = [torch.zeros(700_000) for _ in range(20)]
    while held:
        held.pop()
for _ in range(5):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))
"""


def page_faults(way: str) -> int:
    done = subprocess.run([sys.executable, "-c", CHILD, way], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not keep_freed_memory(), reason="this C library is not glibc")
def test_tensors_are_made_of_pages_that_are_there_already() -> None:
    kept, given_back = page_faults("kept"), page_faults("given back")
    assert kept < 700, "about one tensor's pages, of four hundred tensors"
    assert given_back > 100_000


def test_it_may_be_told_twice() -> None:
    assert keep_freed_memory() == keep_freed_memory()
    assert torch.ones(3).sum() == 3
