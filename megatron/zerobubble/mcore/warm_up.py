"""Communicators of the groups whose collectives run inside passes, opened before the first transfer.

NCCL opens a communicator at a group's first use: it allocates memory and blocks the hosts of all members, and on the device it
can wait for everything that runs there. From 2.22 on it opens the connections of an algorithm at the algorithm's first use, and
chooses the algorithm by collective and size. Inside a pass the device also runs receives that were posted early, which end only
when another rank gets somewhere. So each group is used here, by each collective and in each order of magnitude, while nothing is
under way (ADR 3).

Every rank goes through the groups in the same order, each of which divides the world: no two ranks wait for each other in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import roll_tensor

__all__ = ["warm_up_groups"]

_SIZES = tuple(4**power for power in range(0, 14, 2))
"""Numbers in a message: from one to 64 MiB of float32, beyond which NCCL's choice is the same."""


def warm_up_groups(config: Any, chunks: Sequence[Any], device: torch.device) -> list[str]:
    """Use once each group on which collectives run inside passes. Every rank of the world must call it at the same point.

    Args:
        config: TransformerConfig of the chunks.
        chunks: this rank's model chunks, wrapped by DDP.
        device: of the tensors.

    Returns:
        What the groups are for, in the order of their use.
    """
    used, names = set(), []
    for name, group in _groups(config, chunks):
        if group is not None and group.size() > 1 and id(group) not in used:
            used.add(id(group))
            names.append(name)
            _use(group, device, exchanges=name in ("ep", "tp_ep"))
    context = parallel_state.get_context_parallel_group()
    if context.size() > 1:
        names += _warm_up_context(config, context, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return names


def _use(group: dist.ProcessGroup, device: torch.device, *, exchanges: bool) -> None:
    """Run what passes run on a group: with gloo, whose connections do not depend on it, one all-reduce of one number."""
    if dist.get_backend(group) == "gloo":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return
    for size in _SIZES:
        part = torch.zeros(-(-size // group.size()), device=device)
        whole = torch.zeros(part.numel() * group.size(), device=device)
        dist.all_reduce(whole, group=group)
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.broadcast(part, dist.get_global_rank(group, 0), group=group)
        if exchanges:
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


def _warm_up_context(config: Any, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """What context parallelism uses beside the collectives of its group; returns what it is for, as `warm_up_groups`."""
    if (
        device.type == "cuda"
    ):  # rotary embeddings pin an index in the first F; that may wait for the device, unless a block is free
        torch.zeros(2, dtype=torch.int64, pin_memory=True)
    if getattr(config, "mtp_num_layers", None) is None:
        return []
    # MTP layers shift tokens over the ends of slices: transfers between neighbors, on pairs of ranks of the world's group.
    roll_tensor(torch.zeros(1, 2, device=device), shifts=-1, dims=-1, cp_group=group)
    return ["neighbors in cp"]


def _groups(config: Any, chunks: Sequence[Any]) -> Iterator[tuple[str, dist.ProcessGroup | None]]:
    known = ProcessGroupCollection.use_mpu_process_groups()
    names = ["tp", "cp"]
    if getattr(config, "num_moe_experts", None) is not None:
        names += ["ep", "expt_tp", "tp_ep", "tp_cp", "tp_dp_cp"]  # dispatchers, and the auxiliary losses of routers
    if getattr(config, "fp8", None) is not None:  # Transformer Engine reduces magnitudes at the end of a forward, and in backward
        names.append("tp_cp" if getattr(config, "tp_only_amax_red", False) else "tp_dp_cp")
    yield from ((name, getattr(known, name, None)) for name in names)
    if any(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False) for chunk in chunks):
        for kind in ("buffers", "expert_parallel_buffers"):
            for chunk in chunks:  # the buckets' own groups: a loop may have given DDP others than those of `parallel_state`
                for buffer in getattr(chunk, kind, ()):
                    yield f"gradients in {kind}", buffer.data_parallel_group
