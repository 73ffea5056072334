"""Builds the planner's search core; everything else about the package is in pyproject.toml.

The core is a library with a C interface (`plan/search/core.py` loads it), so one wheel per kind of machine serves every Python.
CXX chooses the compiler; without one pip fetches zig's for the build. Where compiling fails the install succeeds, and a search
says in one line what to do. `-ffp-contract=off` keeps a*b+c from being fused, so that every machine finds the same plans. Debug
information and local symbols are left out: they would be nineteen twentieths of the file.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NAME = "megatron.zerobubble.plan.search._core"
FOLDER = "megatron/zerobubble/plan/search"
FLAGS = ["-O3", "-g0", "-DNDEBUG", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared"]
ZIG = [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
COMPILER = shlex.split(os.environ.get("CXX", "")) or next(
    ([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), ZIG
)


class BuildCore(build_ext):
    """Compiles and links in one command."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the core; raise what setuptools takes for an optional extension that cannot be built."""
        target = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        strips = "-Wl,-S" if sys.platform == "darwin" else "-Wl,-s"
        try:
            subprocess.run([*COMPILER, *FLAGS, *ext.sources, strips, "-o", target], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"the search core was not built: {error}")

    def get_ext_filename(self, fullname: str) -> str:
        """Without the version of Python, and no name of a module."""
        return os.path.join(*fullname.split(".")) + ".native.so"

    def get_outputs(self) -> list[str]:
        """What was built."""
        return [path for path in super().get_outputs() if os.path.exists(path)]


class AnyPython(bdist_wheel):
    """A wheel for one kind of machine and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Its tag."""
        return "py3", "none", super().get_tag()[2]


headers = [f"{FOLDER}/{name}.hpp" for name in ("decode", "evaluate", "moves", "problem")]
setup(
    ext_modules=[Extension(NAME, sources=[f"{FOLDER}/core.cpp"], depends=headers, language="c++", optional=True)],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": AnyPython},
    setup_requires=["ziglang>=0.13"] if COMPILER == ZIG else [],  # pip adds it to what the build needs
)
