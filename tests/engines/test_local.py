"""What the engines share."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# How often the system has to give the process a page, while large tensors come and go.
COUNT_PAGES = """
import resource
import torch
from fedsc.engines.local import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

without = pages()
keep_freed_memory()
torch.ones(2**24)
print(without, pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_of_freed_tensors_is_kept_for_the_next() -> None:
    # In a process of its own, as it cannot be undone.
    command = [sys.executable, "-c", COUNT_PAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    without, kept = map(int, done.stdout.split())
    assert kept < without / 10
