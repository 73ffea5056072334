"""The double of Transformer Engine's kernels against what its own Python computes without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zerobubble.mcore.cpu.streams import InertStream
from tests.support.ranks import RankPool

CASES = [("sbhd", 1), ("bshd", 1), ("thd", 1), ("sbhd", 2), ("bshd", 2), ("thd", 2)]


def rope_differences(rank: int, tensor_format: str, interleaved: bool, cp_size: int) -> tuple[float, float]:
    """Largest differences of fused and unfused rotary embeddings and of their gradients, on the last context-parallel rank."""
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([0, 4, 12, 24], dtype=torch.int32)  # of three packed sequences, over all ranks
    shape = {"sbhd": (8, 2), "bshd": (2, 8), "thd": (24 // cp_size,)}[tensor_format]
    freqs = RotaryPositionEmbedding(6, interleaved=interleaved)(16)
    where: dict[str, Any] = {"cp_size": cp_size, "cp_rank": cp_size - 1} | (
        {"cu_seqlens": lengths} if tensor_format == "thd" else {}
    )
    found = []
    for fused in (False, True):
        t = torch.randn(*shape, 3, 8, generator=generator.manual_seed(1)).requires_grad_()
        output = apply_rotary_pos_emb(t, freqs, tensor_format, None, interleaved, fused=fused, **where)
        output.backward(torch.randn(output.shape, generator=generator.manual_seed(2)))
        found.append((output.detach(), t.grad))
    (output, gradient), (fused_output, fused_gradient) = found
    return float((output - fused_output).abs().max()), float((gradient - fused_gradient).abs().max())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tensor_format", "cp_size"), CASES)
def test_fused_rotary_embeddings_are_those_without_the_kernel(
    engine_ranks: RankPool, tensor_format: str, cp_size: int, interleaved: bool
) -> None:
    for differences in engine_ranks.run(rope_differences, tensor_format, interleaved, cp_size)[:1]:
        assert max(differences) < 1e-6


def context_parallel_differences(rank: int) -> list[float]:
    """Largest differences of attention over a ring of ranks and on one rank: of the output and the gradients of q, k, v."""
    from transformer_engine.pytorch import DotProductAttention

    from tests.support.transformer_engine import attention

    size, generator = dist.get_world_size(), torch.Generator().manual_seed(1)
    whole = [torch.randn(16, 2, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]
    halves = torch.arange(16).view(2 * size, -1)
    own = torch.cat((halves[rank], halves[-1 - rank]))

    def run(module: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        *given, grad = tensors
        given = [each.clone().requires_grad_() for each in given]
        output = module(*given)
        output.backward(grad.flatten(2))
        return [output.detach(), *(each.grad for each in given if each.grad is not None)]

    module = DotProductAttention(4, 8, num_gqa_groups=2, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal")
    expected = [each[own] for each in run(module, whole)]
    with attention.enabled():
        module.set_context_parallel_group(dist.group.WORLD, list(range(size)), InertStream(), "p2p")
        found = run(module, [each[own] for each in whole])
    return [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]


def test_attention_over_a_ring_of_ranks_is_that_of_one_rank(engine_ranks: RankPool) -> None:
    """Outputs and gradients of order 1 in bf16, summed over the ring in another order: a few of its last bits, 2^-8."""
    from tests.support.transformer_engine import NEWEST, chosen_version

    if chosen_version() != NEWEST:
        pytest.skip(f"fused attention has the signature of {NEWEST}")
    for differences in engine_ranks.run(context_parallel_differences):
        assert max(differences) < 0.04


def scaled(rank: int) -> tuple[list[float], int]:
    """Of megatron-core's clipping: a tensor as factor."""
    import transformer_engine.pytorch.optimizers as te

    noop, values = torch.zeros(1, dtype=torch.int), torch.tensor([1.0, -4.0])
    te.multi_tensor_applier(te.multi_tensor_scale_tensor, noop, [[values], [values]], torch.tensor(0.5))
    return values.tolist(), int(noop)


def test_scaling_by_a_tensor(engine_ranks: RankPool) -> None:
    from tests.support.transformer_engine import chosen_version

    if chosen_version() == "2.8.0":
        pytest.skip("2.8.0 scales by numbers only")
    assert engine_ranks.run(scaled)[0] == ([0.5, -2.0], 0)
