"""Compiles and loads `guard.cpp`: afterwards a torch without CUDA takes FakeTensors of `cuda:0`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

__all__ = ["CACHE", "compiler", "load"]

SOURCE = Path(__file__).with_name("guard.cpp")
CACHE = Path(__file__).parents[3] / "build" / "fake_tensors"
"""Where the library is kept, by a hash of its source and of torch's version; git ignores it."""


def compiler() -> str | None:
    """The machine's C++ compiler: $CXX, or one of the usual names; None if there is none."""
    return next(filter(None, map(shutil.which, [os.environ.get("CXX") or "c++", "g++", "clang++"])), None)


def load() -> None:
    """Load the guard into this process, for good. It is compiled on first use, in a few seconds.

    Raises:
        RuntimeError: there is no compiler, or it failed; or torch, which looks for devices once, is imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("load the guard before torch is imported")
    digest = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    library = CACHE / f"guard-{digest}.so"
    if not library.exists():
        _compile(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _compile(library: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("FakeTensors of cuda:0 need a C++ compiler (c++, g++ or clang++, or its path in CXX)")
    spec = find_spec("torch")
    assert spec is not None
    root = Path(str(spec.origin)).parent
    headers = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, "guard.so")
        command = [found, "-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{each}" for each in headers), str(SOURCE)]
        command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
        os.replace(made, library)  # several processes may compile at once
