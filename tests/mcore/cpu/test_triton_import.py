"""megatron-core's unconditional import of triton, where triton is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PAGED_STASH = """
import triton
import triton.language as tl
from megatron.core import fusion

@triton.jit
def copy_kernel(source, BLOCK: tl.constexpr, count: tl.int64):
    pass
"""
_FUSION = """
try:
    import triton
    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False
"""
_USE = """
import megatron.zerobubble.mcore
from megatron.core.transformer.moe.paged_stash import copy_kernel
from megatron.core.transformer.moe.ops.paged_stash import copy_kernel
from megatron.core.fusion import HAVE_TRITON
print(HAVE_TRITON)
try:
    import triton
except ModuleNotFoundError as error:
    print(error)
try:
    copy_kernel[(1,)](None, BLOCK=8, count=1)
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A `megatron.core` of the few modules in question, in a folder that comes first on the path."""
    folder = tmp_path / "megatron" / "core"
    (folder / "transformer" / "moe" / "ops").mkdir(parents=True)
    for package in (folder, folder / "transformer", folder / "transformer" / "moe", folder / "transformer" / "moe" / "ops"):
        (package / "__init__.py").write_text("")
    (folder / "transformer" / "moe" / "paged_stash.py").write_text(_PAGED_STASH)
    (folder / "transformer" / "moe" / "ops" / "paged_stash.py").write_text(_PAGED_STASH)
    (folder / "fusion.py").write_text(_FUSION)
    return tmp_path


def _run(code: str, *folders: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, _ROOT]))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_module_alone_sees_the_stand_in(core: Path) -> None:
    if "None" not in _run("import importlib.util; print(importlib.util.find_spec('triton'))"):
        pytest.skip("triton is installed here")
    assert _run(_USE, core) == [
        "False",
        "No module named 'triton'",
        "the kernel copy_kernel needs triton, which is not installed: pip install triton",
    ]


def test_an_installed_triton_is_used(core: Path) -> None:
    (core / "triton").mkdir()
    (core / "triton" / "__init__.py").write_text("def jit(function):\n    return 'compiled'\n")
    (core / "triton" / "language.py").write_text("constexpr = int64 = int\n")
    code = """
import megatron.zerobubble.mcore
from megatron.core.transformer.moe.paged_stash import copy_kernel
print(copy_kernel)
"""
    assert _run(code, core) == ["compiled"]
