"""A few transformer layers of megatron-core on one device, set up as on a pipeline rank: DDP, fp32 main gradients, our split."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.wgrad.gemm import WgradKernel
from megatron.zerobubble.wgrad.store import WeightGradStore
from tools.benchmarks.one_gpu.layer_shape import LayerShape
from tools.benchmarks.one_gpu.setting import Setting

with quiet_third_parties():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.spec_utils import build_module

    from megatron.zerobubble.mcore.attention.core_attention import core_attention
    from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
    from megatron.zerobubble.training.models.layer_specs import LocalNorm

SEED = 1234


@contextmanager
def world_of_one(device: torch.device) -> Iterator[HostDevice]:
    """Set up megatron-core's process groups for this process alone, and the host-device layer on the CPU."""
    host = HostDevice(enabled=device.type == "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with host, warnings.catch_warnings():
        # megatron-core warns on import and on every config about what is deprecated or not installed.
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            parallel_state.initialize_model_parallel(1, 1)
            torch.manual_seed(SEED)
            model_parallel_cuda_manual_seed(SEED)
            yield host
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class LayerStack(nn.Module):
    """Transformer layers in sequence. [s, b, h] -> [s, b, h]"""

    def __init__(self, shape: LayerShape, config: TransformerConfig) -> None:
        super().__init__()
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        spec.submodules.input_layernorm = LocalNorm
        spec.submodules.pre_mlp_layernorm = LocalNorm
        spec.submodules.self_attention.submodules.core_attention = core_attention(config)
        self.layers = nn.ModuleList(build_module(spec, config=config, layer_number=n + 1) for n in range(config.num_layers))
        self.rotary: Tensor | None = None
        if shape.is_llama:
            rotary = RotaryEmbedding(config.kv_channels, rotary_percent=1.0, use_cpu_initialization=True)
            self.rotary = rotary(shape.seq_length)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Apply all layers."""
        for layer in self.layers:
            x_sbh, _ = layer(x_sbh, attention_mask=None, rotary_pos_emb=self.rotary)
        return x_sbh


class Stack:
    """A chunk as the schedules build it, whose passes are called one by one.

    Args:
        shape: shape of a layer and its microbatch.
        count: number of layers.
        dtype: dtype of weights and activations.
        device: device of weights and activations.
        host: the installed host-device layer.
        kernel: kernel of W; None keeps megatron-core's own full backward.
    """

    def __init__(
        self,
        shape: LayerShape,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        host: HostDevice,
        kernel: WgradKernel | None,
    ) -> None:
        self.store = None if kernel is None else WeightGradStore(kernel)
        with host.on_host():
            config = _config(shape, count, dtype, on_gpu=device.type == "cuda")
            model = LayerStack(shape, config).to(device)
            if model.rotary is not None:
                model.rotary = model.rotary.to(device)
            if self.store is not None:
                split_weight_gradients(model, self.store)
            # No bucket and no overlap: one data-parallel replica, nothing to reduce.
            self.chunk = DistributedDataParallel(
                config=config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, delay_wgrad_compute=self.store is not None, bucket_size=None
                ),
                module=model,
            )
        self.chunk.zero_grad_buffer()

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Run F. [s, b, h] -> [s, b, h]"""
        output: Tensor = self.chunk(x_sbh)
        return output

    def backward(self, output: Tensor, grad_output: Tensor, *, fused: bool, microbatch: int = 0) -> None:
        """Run B, or with `fused` the full backward: through the store, or megatron-core's own if there is no store."""
        if self.store is None:
            output.backward(grad_output)  # type: ignore[no-untyped-call]
            return
        self.store.begin(0, microbatch, fused=fused)
        output.backward(grad_output)  # type: ignore[no-untyped-call]
        self.store.end()

    def weight_gradient(self, microbatch: int = 0) -> None:
        """Run W."""
        assert self.store is not None
        self.store.run(0, microbatch)

    def close(self) -> None:
        """Free the memory. DDP's hooks on autograd nodes refer back to the chunk: a cycle that Python cannot detect."""
        self.chunk.grad_accs.clear()
        del self.chunk


@contextmanager
def stacks(shape: LayerShape, count: int, setting: Setting, *kernels: WgradKernel | None) -> Iterator[list[Stack]]:
    """A stack of `count` layers per kernel of W, in a world of one."""
    with world_of_one(setting.device) as host:
        made = [Stack(shape, count, setting.dtype, setting.device, host, each) for each in kernels]
        yield made
        for each in made:
            each.close()
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()


def _config(shape: LayerShape, count: int, dtype: torch.dtype, *, on_gpu: bool) -> TransformerConfig:
    kind: dict[str, Any] = {}
    if shape.is_llama:
        kind = {
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
        }
    softmax = all(map(_is_installed, ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")))
    return TransformerConfig(
        num_layers=count,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=AttnBackend.auto,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=on_gpu and softmax,
        gradient_accumulation_fusion=on_gpu and _is_installed("fused_weight_gradient_mlp_cuda"),
        persist_layer_norm=False,
        **kind,
    )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
