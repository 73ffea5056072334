"""Makes frameworks on megatron-core importable in this process, on a machine without CUDA. `install` before anything of megatron.

What stands in for what is missing here:

===============================  ======================================================================================
Transformer Engine                its Python on the CPU (`tests.support.transformer_engine`)
apex                              its wgrad GEMM, with the operations that W has on the CPU, so that sums have the same bits
triton's kernels of Muon          none, as Muon's package has it without a GPU
`_NOT_INSTALLED`                  packages of which only names are imported: modules in which any name is a class that does
                                  nothing. They train nothing here; the wheels of some need CUDA
`typing.override`                 Python 3.12 has it
megatron-core's compiled helpers  compiled already (`tools.releases`); a wheel has no Makefile to compile them with
===============================  ======================================================================================
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "Module", "install"]

FOLDER = Path(__file__).resolve().parents[2] / ".frameworks"
"""Where `make test-frameworks` installs them."""
_NOT_INSTALLED = ("diffusers", "megatron.energon", "modelopt", "nvidia_resiliency_ext.inprocess", "ray")

_APEX = "fused_weight_gradient_mlp_cuda"
_KERNELS = "emerging_optimizers.triton_kernels"
"""Of Muon, which asks whether there are any."""


def install(*names_only: str) -> None:
    """Put the frameworks on the path, with what they import.

    Args:
        names_only: further packages of which only names are imported.
    """
    import tests.support.python_3_12.sitecustomize  # noqa: F401
    from megatron.zerobubble.wgrad.gemm import plain_accumulate
    from tests.support import transformer_engine

    apex: Any = sys.modules.setdefault(_APEX, types.ModuleType(_APEX))
    apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = lambda input_, grad, out: plain_accumulate(out, grad, input_)
    sys.path.append(str(FOLDER))
    kernels: Any = sys.modules.setdefault(_KERNELS, Module(_KERNELS))
    kernels.HAS_TRITON_340 = False
    transformer_engine.install()
    importlib.import_module("megatron.zerobubble.mcore")  # makes megatron.core importable without triton
    importlib.import_module("megatron.core.dist_checkpointing")  # looks for what is not installed itself
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    sys.meta_path.append(_Finder((*_NOT_INSTALLED, *names_only)))
    distillation: Any = importlib.import_module("modelopt.torch.distill.plugins.megatron")
    distillation.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None  # no model here is distilled


class _Finder:
    """Finds, after all others, what is not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{package}.".startswith(f"{name}.") or name.startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class Module(types.ModuleType):
    """A module in which any name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Inert,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Inert:
    """A class of which objects do nothing; called, as decorators are, they return what they were given."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __call__(self, given: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return given

    def __class_getitem__(cls, _item: Any) -> Any:
        return cls
