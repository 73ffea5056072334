"""The module `transformer_engine_torch`: what Transformer Engine's Python asks of its compiled extension.

The names and signatures are those that the Python of 2.8 to 2.20 calls. Types that only appear in annotations are empty classes;
a function that is not answered raises `NotImplementedError` with its name when it is called, so that no result is made up.
"""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
from packaging.version import Version

from tests.support.transformer_engine import activations, attention, float8, gemm, multi_tensor, norms

__all__ = ["Extension"]


class DType(enum.IntEnum):
    kByte = 0  # noqa: N815 - the extension's own names, here and below
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    [f"GEMM{number}_{role}" for number in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", [f"GRAD_{role}{number}" for number in (1, 2, 3) for role in ("OUTPUT", "INPUT")], start=0
)


class Float8BlockScaleTensorFormat(enum.IntEnum):
    """Layouts of blockwise scales; 2.8 names them in signatures."""

    GEMM_READY = 0
    COMPACT = 1


class FP8TensorMeta:
    """Scales and amax history of the tensors of a module, for delayed scaling."""


def _attention_backends(version: str) -> type[enum.IntEnum]:
    """The fused attention backends, of which none is used unless `attention.enabled`; 2.20 checks that it knows each."""
    dropped_later = ["NVTE_F16_max512_seqlen"] if Version(version) < Version("2.20") else []
    names = ["NVTE_No_Backend", *dropped_later, "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"]
    return enum.IntEnum("NVTE_Fused_Attn_Backend", names, start=-1)


class _Member(int):
    """A member of an enumeration that is only compared, or asked for its name."""

    name: str


class _Enumeration:
    """An enumeration of which any member can be named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._members: dict[str, _Member] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = self._members.setdefault(name, _Member(len(self._members)))
        member.name = name
        return member


_ANSWERS: dict[str, Any] = {
    "DType": DType,
    "FP8FwdTensors": FP8FwdTensors,
    "FP8BwdTensors": FP8BwdTensors,
    "Float8BlockScaleTensorFormat": Float8BlockScaleTensorFormat,
    "FP8TensorMeta": FP8TensorMeta,
    "generic_gemm": gemm.generic_gemm,
    "te_general_grouped_gemm": gemm.te_general_grouped_gemm,
    "layernorm_fwd": norms.layernorm_fwd,
    "layernorm_bwd": norms.layernorm_bwd,
    "rmsnorm_fwd": norms.rmsnorm_fwd,
    "rmsnorm_bwd": norms.rmsnorm_bwd,
    "convert_thd_to_bshd": attention.convert_thd_to_bshd,
    "convert_bshd_to_thd": attention.convert_bshd_to_thd,
    "fused_attn_fwd": attention.fused_attn_fwd,
    "fused_attn_bwd": attention.fused_attn_bwd,
    **{name: getattr(activations, name) for name in activations.__all__},
    "quantize": float8.quantize,
    "dequantize": float8.dequantize,
    "split_quantize": float8.split_quantize,
    "bgrad_quantize": float8.bgrad_quantize,
    "fp8_transpose": float8.fp8_transpose,
    "compute_amax": float8.compute_amax,
    "fused_amax_and_scale_update_after_reduction": float8.fused_amax_and_scale_update_after_reduction,
    "multi_tensor_adam": multi_tensor.adam,
    "multi_tensor_compute_scale_and_scale_inv": multi_tensor.compute_scale_and_scale_inv,
    "multi_tensor_scale": multi_tensor.scale,
    "multi_tensor_scale_tensor": multi_tensor.scale,
    "multi_tensor_l2norm": multi_tensor.l2norm,
    "get_num_cublas_streams": lambda: 1,
    "get_cublasLt_version": lambda: 130000,
    "get_cudnn_version": lambda: 91200,
    "get_stream_priority_range": lambda *_: (0, 0),
    "device_supports_multicast": lambda *_: False,
    "ubuf_built_with_mpi": lambda: False,
}
_ENUMERATIONS = (
    *("CommOverlapType", "NVTEScalingMode", "NVTERoutingMapFormat", "NVTEQBHistogramMode"),
    *("NVTE_QKV_Layout", "NVTE_QKV_Format", "NVTE_Mask_Type", "NVTE_Bias_Type", "NVTE_Softmax_Type"),
)


class Extension(types.ModuleType):
    """The stand-in for the compiled module.

    Args:
        version: of Transformer Engine.
    """

    def __init__(self, version: str) -> None:
        super().__init__("transformer_engine_torch", self.__doc__)
        vars(self).update({name: _answer(answer) for name, answer in _ANSWERS.items()})
        backends = _attention_backends(version)
        none = backends["NVTE_No_Backend"]
        explains = Version(version) >= Version("2.20")
        self.NVTE_Fused_Attn_Backend = backends
        self.get_fused_attn_backend = lambda *_, **__: (none, "there is no GPU") if explains else none
        vars(self).update({name: _Enumeration(name) for name in _ENUMERATIONS})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {}) if name[0].isupper() else _missing(name)
        setattr(self, name, found)
        return found


def _answer(answer: Any) -> Any:
    """A class as it is; a function outside of autograd, which does not see what the extension does."""
    return answer if isinstance(answer, type) else torch.no_grad()(answer)


def _missing(name: str) -> Any:
    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine_torch.{name} is not answered on the CPU (tests/support/transformer_engine)"
        )

    return missing
