"""Activations and residuals compiled by torch, the default on GPUs: B and W give the gradients of the full backward, to the bit.

Compiled by inductor for the CPU, in this process: the ranks of other tests start with compilation off.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from tests.support.layer_stack import FFN_HIDDEN_SIZE, HEADS, HIDDEN_SIZE, SEQ_LENGTH, Stack, world_of_one
from tests.support.pending import pending_bytes

NUM_MICROBATCHES = 3


@pytest.mark.claims("Layers", "activations and residuals compiled by torch, the default on GPUs", "works, bit for bit")
@pytest.mark.parametrize("is_llama", [True, False], ids=["Llama", "GPT"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.sampled(0.5)
def test_a_split_layer_has_the_bits_of_a_whole_one(is_llama: bool) -> None:
    """Between B and W the store holds each linear's input and output gradient once: nothing is copied, nothing is in excess."""
    kernel = WgradKernel(KernelKind.PLAIN, plain_accumulate)
    num_compiled = torch._dynamo.utils.counters["frames"]["ok"]
    with world_of_one() as host:
        split, whole = (Stack(host, each, is_llama=is_llama, is_fused=True) for each in (kernel, None))
        assert split.store is not None
        whole.chunk.module.load_state_dict(split.chunk.module.state_dict(), strict=False)
        for _ in range(NUM_MICROBATCHES):
            inputs, gradient = (torch.randn(SEQ_LENGTH, 1, HIDDEN_SIZE) for _ in range(2))
            for each in (split, whole):
                each.backward(each.forward(inputs.clone().requires_grad_()), gradient)
            assert pending_bytes(split.store) == _operand_bytes(is_llama)
            split.weight_gradient()
        pairs = list(zip(split.chunk.parameters(), whole.chunk.parameters(), strict=True))
        assert all(torch.equal(ours.main_grad, theirs.main_grad) for ours, theirs in pairs)
        assert all(bool(ours.main_grad.any()) for ours, _ in pairs)
        split.close()
        whole.close()
    assert torch._dynamo.utils.counters["frames"]["ok"] > num_compiled


def _operand_bytes(is_llama: bool) -> int:
    """Inputs and output gradients of QKV, projection and MLP of two layers, fp32."""
    keys, fc1 = (HIDDEN_SIZE // HEADS * 2, 2 * FFN_HIDDEN_SIZE) if is_llama else (HIDDEN_SIZE, FFN_HIDDEN_SIZE)
    widths = (HIDDEN_SIZE, HIDDEN_SIZE + 2 * keys, HIDDEN_SIZE, HIDDEN_SIZE, HIDDEN_SIZE, fc1, FFN_HIDDEN_SIZE, HIDDEN_SIZE)
    return 2 * 4 * SEQ_LENGTH * sum(widths)
