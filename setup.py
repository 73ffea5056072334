"""Builds the planner's optional compiled core; everything else about the package is in pyproject.toml.

`optional=True`: without a compiler, or where compiling fails, the install succeeds and the planner uses its Python twin.
`-ffp-contract=off` keeps a*b+c from being fused, so that both twins compute the same numbers. Debug information and local symbols
are left out: they would be nineteen twentieths of the file.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """The compiled core, where pybind11 can be imported while building."""
    try:
        from pybind11 import get_include
    except ImportError:
        return []
    return [
        Extension(
            "megatron.zerobubble.plan.search._core",
            sources=["megatron/zerobubble/plan/search/core.cpp"],
            depends=[f"megatron/zerobubble/plan/search/{name}.hpp" for name in ("decode", "evaluate", "moves", "problem")],
            include_dirs=[get_include()],
            extra_compile_args=["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden"],
            extra_link_args=["-Wl,-S" if sys.platform == "darwin" else "-Wl,-s"],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=extensions())
