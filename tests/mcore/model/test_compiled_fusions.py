"""Activations and residuals compiled by torch, the default on GPUs: B and W give the gradients of the full backward, to the bit.

Compiled by inductor for the CPU, in this process: the ranks of other tests start with compilation off.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch._dynamo

from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from tools.benchmarks.one_gpu import stack
from tools.benchmarks.one_gpu.layer_shape import LayerShape

NUM_MICROBATCHES = 3


@pytest.mark.claims("Layers", "activations and residuals compiled by torch, the default on GPUs", "works, bit for bit")
@pytest.mark.parametrize("is_llama", [True, False], ids=["Llama", "GPT"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.sampled(0.5)
def test_a_split_layer_has_the_bits_of_a_whole_one(is_llama: bool) -> None:
    cpu, groups = torch.device("cpu"), 2 if is_llama else 4
    sizes = {"num_attention_heads": 4, "num_query_groups": groups, "ffn_hidden_size": 96, "seq_length": 16}
    shape = LayerShape(hidden_size=64, **sizes, is_llama=is_llama)
    kernel = WgradKernel(KernelKind.PLAIN, plain_accumulate)
    config = stack._config
    num_compiled = torch._dynamo.utils.counters["frames"]["ok"]
    with stack.world_of_one(cpu) as host:
        with mock.patch.object(stack, "_config", lambda *args, **_: config(*args, on_gpu=True)):
            split, whole = (stack.Stack(shape, 2, torch.float32, cpu, host, each) for each in (kernel, None))
        whole.chunk.module.load_state_dict(split.chunk.module.state_dict(), strict=False)
        for _ in range(NUM_MICROBATCHES):
            inputs, gradient = torch.randn(16, 1, 64), torch.randn(16, 1, 64)
            for each in (split, whole):
                each.backward(each.forward(inputs.clone().requires_grad_()), gradient, fused=False)
            split.weight_gradient()
        pairs = list(zip(split.chunk.parameters(), whole.chunk.parameters(), strict=True))
        assert all(torch.equal(ours.main_grad, theirs.main_grad) for ours, theirs in pairs)
        assert all(bool(ours.main_grad.any()) for ours, _ in pairs)
        split.close()
        whole.close()
    assert torch._dynamo.utils.counters["frames"]["ok"] > num_compiled
