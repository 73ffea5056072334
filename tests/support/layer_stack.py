"""Two small transformer layers in this process alone, set up as on a pipeline rank: DDP, fp32 main gradients, our split."""

from __future__ import annotations

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

with quiet_third_parties():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
    from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
    from megatron.zerobubble.training.models.layer_specs import LocalNorm

SEQ_LENGTH, HIDDEN_SIZE, HEADS, FFN_HIDDEN_SIZE = 16, 64, 4, 96
SEED = 1234


@contextmanager
def world_of_one() -> Iterator[HostDevice]:
    """Set up megatron-core's process groups for this process alone, and the host-device layer."""
    with HostDevice() as host, warnings.catch_warnings():
        # megatron-core warns on import and on every config about what is deprecated or not installed.
        warnings.filterwarnings("ignore", module=r"megatron\.core\.")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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

    def __init__(self, config: TransformerConfig, *, is_llama: bool) -> None:
        super().__init__()
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        spec.submodules.input_layernorm = LocalNorm
        spec.submodules.pre_mlp_layernorm = LocalNorm
        spec.submodules.self_attention.submodules.core_attention = TorchDotProductAttention
        self.layers = nn.ModuleList(build_module(spec, config=config, layer_number=n + 1) for n in range(config.num_layers))
        self.rotary: Tensor | None = None
        if is_llama:
            rotary = RotaryEmbedding(config.kv_channels, rotary_percent=1.0, use_cpu_initialization=True)
            self.rotary = rotary(SEQ_LENGTH)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Apply all layers."""
        for layer in self.layers:
            x_sbh, _ = layer(x_sbh, attention_mask=None, rotary_pos_emb=self.rotary)
        return x_sbh


class Stack:
    """A chunk as the schedules build it, whose passes are called one by one.

    Args:
        host: the installed host-device layer.
        kernel: kernel of W; None keeps megatron-core's own full backward.
        is_llama: GQA, SwiGLU, RMSNorm, rotary positions and no biases; otherwise a GPT.
        is_fused: whether residuals and activations are compiled, as on a GPU.
    """

    def __init__(self, host: HostDevice, kernel: WgradKernel | None, *, is_llama: bool, is_fused: bool) -> None:
        self.store = None if kernel is None else WeightGradStore(kernel)
        with host.on_host():
            config = _config(is_llama=is_llama, is_fused=is_fused)
            model = LayerStack(config, is_llama=is_llama)
            if self.store is not None:
                split_weight_gradients(model, self.store)
            # No bucket and no overlap: one data-parallel replica, nothing to reduce.
            ddp_config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, delay_wgrad_compute=self.store is not None, bucket_size=None
            )
            self.chunk = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
        self.chunk.zero_grad_buffer()

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Run F. [s, b, h] -> [s, b, h]"""
        output: Tensor = self.chunk(x_sbh)
        return output

    def backward(self, output: Tensor, grad_output: Tensor) -> None:
        """Run B, or megatron-core's own full backward if there is no store."""
        if self.store is not None:
            self.store.begin(0, 0, fused=False)
        output.backward(grad_output)
        if self.store is not None:
            self.store.end()

    def weight_gradient(self) -> None:
        """Run W."""
        assert self.store is not None
        self.store.run(0, 0)

    def close(self) -> None:
        """Free the memory. DDP's hooks on autograd nodes refer back to the chunk: a cycle that Python cannot detect."""
        self.chunk.grad_accs.clear()
        del self.chunk


def _config(*, is_llama: bool, is_fused: bool) -> TransformerConfig:
    kind: dict[str, Any] = {}
    if is_llama:
        kind = {
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN_SIZE,
        ffn_hidden_size=FFN_HIDDEN_SIZE,
        num_attention_heads=HEADS,
        num_query_groups=2 if is_llama else HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=is_fused,
        bias_dropout_fusion=is_fused,
        persist_layer_norm=False,
        **kind,
    )
