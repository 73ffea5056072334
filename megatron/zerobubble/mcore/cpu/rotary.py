"""Rotary embeddings of a context-parallel rank's tokens, on the CPU.

megatron-core selects them by an index that it copies to the device from pinned memory, which does not exist without a driver.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def own_positions(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """The part of a sequence that a context-parallel rank has, as megatron-core's `get_pos_emb_on_this_cp_rank` returns it: of
    2n parts for n ranks one from the front and one from the back, so that all ranks have the same work in causal attention.

    Args:
        pos_emb: embeddings, or anything else, of a whole sequence.
        seq_dim: the dimension of positions.
        cp_group: the context-parallel group.
    """
    parts = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim)
    return torch.cat([parts[cp_group.rank()], parts[-1 - cp_group.rank()]], dim=seq_dim)
