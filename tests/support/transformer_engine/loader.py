"""Imports `transformer_engine` so that its modules find what they need of CUDA, and nothing else in the process does.

Its modules are run with an `import` of their own: `import torch` gives the torch module with a `cuda` that is there and does
nothing, and with factories that put ``device="cuda"`` on the CPU; `triton`, `onnx`, `onnxscript` and `einops`, whose names are
only used by functions that do not run here, are stand-ins; `transformer_engine_torch` is `extension.Extension`. The attribute
`is_cuda` of a tensor reads `is_cpu`: two modules refuse tensors elsewhere than on CUDA.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.zerobubble.mcore.cpu.streams import InertStream, cuda_without_streams
from megatron.zerobubble.mcore.cpu.triton_import import _StandIn
from tests.support.transformer_engine import graphs
from tests.support.transformer_engine.extension import Extension

__all__ = ["install"]

_PACKAGE = "transformer_engine"
_DECORATING = ("triton", "onnx", "onnxscript", "einops")
"""Packages of which only decorators and names are used at import."""


def install(version: str) -> None:
    """Make `import transformer_engine` of this version work on the CPU."""
    sys.modules["transformer_engine_torch"] = Extension(version)
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _PACKAGE and not name.startswith(f"{_PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)
        for name, replacement in _REPLACED.get(module.__name__, {}).items():
            setattr(module, name, replacement)

    def get_code(self, fullname: str) -> types.CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else _on_cpu(code)


def _on_cpu(code: types.CodeType) -> types.CodeType:
    """The code with the attribute `is_cuda` read as `is_cpu`."""
    names = tuple("is_cpu" if name == "is_cuda" else name for name in code.co_names)
    constants = tuple(_on_cpu(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_names=names, co_consts=constants)


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    top = name.partition(".")[0]
    if top in _DECORATING and importlib.util.find_spec(top) is None:
        return _Decorators(top)
    found = __import__(name, *args, **kwargs)
    return _TORCH if found is torch else found


class _Decorators(_StandIn):
    """A package that is not installed: any name, and decorators that leave what they decorate."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Decorators(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self


class _Cuda(types.ModuleType):
    """`torch.cuda` as Transformer Engine sees it: one device that is the CPU, without streams."""

    CUDAGraph = graphs.CUDAGraph
    graph = staticmethod(graphs.graph)
    is_current_stream_capturing = staticmethod(graphs.is_capturing)
    _STREAM = InertStream()

    def __init__(self) -> None:
        super().__init__("torch.cuda", self.__doc__)
        self._inert = cuda_without_streams()
        self.nvtx = types.SimpleNamespace(
            range=lambda *_: contextlib.nullcontext(), range_push=lambda *_: None, range_pop=lambda *_: None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inert, name)

    @staticmethod
    def is_available() -> bool:
        return True

    @classmethod
    def current_stream(cls, _device: object = None) -> InertStream:
        return cls._STREAM

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def device(_device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def get_device_capability(_device: object = None) -> tuple[int, int]:
        return 9, 0

    @staticmethod
    def get_device_properties(_device: object = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="CPU", major=9, minor=0, multi_processor_count=1, total_memory=0)

    @staticmethod
    def synchronize(_device: object = None) -> None:
        """Nothing to wait for."""


class _Torch(types.ModuleType):
    """torch with a device called cuda, which is the CPU."""

    _FACTORIES = (
        *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "linspace"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "load"),
    )

    def __init__(self) -> None:
        super().__init__("torch", torch.__doc__)
        self.cuda = _Cuda()
        for name in self._FACTORIES:
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        for key in ("device", "map_location"):
            if kwargs.get(key) is not None and str(kwargs[key]).startswith("cuda"):
                kwargs[key] = "cpu"
        return factory(*args, **kwargs)

    return made


_TORCH = _Torch()


def _empty_tensor() -> torch.Tensor:
    return torch.empty(0)


def _get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    torch.default_generator.set_state(new_state)


def _canonicalize_device(device: Any) -> torch.device:
    return torch.device("meta" if str(device) == "meta" else "cpu")


_REPLACED: dict[str, dict[str, Any]] = {
    "transformer_engine.common": {"load_framework_extension": lambda _framework: None},
    "transformer_engine.pytorch.utils": {
        "_empty_tensor": _empty_tensor,
        "canonicalize_device": _canonicalize_device,
        "make_weak_ref": graphs.make_weak_ref,
    },
    "transformer_engine.pytorch.graph": {"graph_pool_handle": tuple},
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention": {"is_graph_capturing": lambda: False},
    "transformer_engine.pytorch.distributed": {"_get_cuda_rng_state": _get_rng_state, "_set_cuda_rng_state": _set_rng_state},
}
"""module -> name -> what replaces it before other modules import it."""
