"""The double of Transformer Engine's kernels against what its own Python computes without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
