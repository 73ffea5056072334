"""Import megatron-core where `triton` is not installed: a build of torch for the CPU comes without it.

From 0.18 on megatron-core imports `triton` unconditionally in one file, the paged stash of experts, which its schedules import;
0.16 does so in its batch-invariant kernels, which Megatron-LM's training scripts import. It only decorates the kernels of these
files, which run on a GPU. So if one of them fails for want of `triton`, it is given one that decorates functions and runs none.
No other module sees it: there `import triton` still fails, and megatron-core's guards fall back as they should.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

__all__ = ["allow_missing_triton"]

_MODULES = (
    "megatron.core.transformer.moe.paged_stash",  # 0.18
    "megatron.core.transformer.moe.ops.paged_stash",  # from 0.19 on
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",  # up to 0.18; later ones do without triton themselves
    "megatron.core.ssm.ops.common.",  # all modules of these packages, which come after 0.19
    "megatron.core.ssm.ops.mamba2.",
)


def allow_missing_triton() -> None:
    """Make `megatron.core` of 0.18 and later importable without triton. Does nothing where triton is installed."""
    if importlib.util.find_spec("triton") is None and not any(isinstance(finder, _TritonFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TritonFinder())


class _TritonFinder:
    """Finds the modules that import triton unconditionally."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        if not any(name.startswith(module) if module.endswith(".") else name == module for module in _MODULES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a module for which, alone, `import triton` gives the stand-in."""

    def exec_module(self, module: types.ModuleType) -> None:
        """As `importlib.abc.Loader.exec_module`."""
        try:
            super().exec_module(module)
            return
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    if name in ("triton", "triton.language"):
        return _StandIn("triton")
    return __import__(name, *args, **kwargs)


class _StandIn(types.ModuleType):
    """triton, as far as a module needs it that defines kernels: `triton.jit`, and any name of `triton.language`."""

    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: object) -> Any:
        """A decorator of kernels, such as `triton.autotune` with its options, or what it is given."""
        return args[0] if len(args) == 1 and isinstance(args[0], _Kernel) else self

    @staticmethod
    def jit(function: Any = None, **options: object) -> Any:
        """A kernel that cannot be launched, or with `options` a decorator that makes one."""
        return _StandIn.jit if function is None else _Kernel(function.__name__)


class _Kernel:
    """A kernel without triton.

    Args:
        name: of its function, for the error.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> Any:
        raise ModuleNotFoundError(f"the kernel {self._name} needs triton, which is not installed: pip install triton")
