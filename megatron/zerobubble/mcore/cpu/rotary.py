"""Rotary embeddings of a context-parallel rank's tokens, on the CPU.

megatron-core selects them by an index that it copies to the device from pinned memory, which does not exist without a driver.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.zerobubble.mcore.attention.sequence_parts import SequenceParts, slices


def own_positions(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """The rows of a rank's two slices, as megatron-core's `get_pos_emb_on_this_cp_rank` returns them.

    Args:
        pos_emb: embeddings of a whole sequence.
        seq_dim: the dimension of positions.
        cp_group: the context-parallel group.
    """
    return slices(pos_emb, SequenceParts(rank=cp_group.rank(), size=cp_group.size()), dim=seq_dim)
