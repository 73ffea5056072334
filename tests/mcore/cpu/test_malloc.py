"""Freed memory stays in the process: no fresh pages for tensors of a size that was there before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory

COUNT_FAULTS = """
import resource, sys, torch
from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory

def fresh_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        tensors = [torch.ones(2**20) for _ in range(10)]  # 4 MiB each
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    assert keep_freed_memory()
fresh_pages()
print(fresh_pages())
"""
MAPS_EACH = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""glibc's own threshold, which it would raise with use; what lies on top of its heap depends on what the process did before."""
PAGES = 10 * 4 * 2**20 // 4096
"""Of ten tensors."""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts Linux's pages")
def test_freed_tensors_are_not_mapped_anew() -> None:
    def fresh_pages(how: str) -> int:
        command = [sys.executable, "-c", COUNT_FAULTS, how]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | MAPS_EACH)
        return int(done.stdout)

    assert fresh_pages("as it is") > PAGES, "else there is nothing to keep"
    assert fresh_pages("keep") < PAGES // 100


def test_other_systems_return_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
