"""Everything that a job trains, put together from all of its ranks: what two jobs must share, however they divide it.

Nothing here uses a checkpoint, or the functions that write one: weights are identified by the layer number that the layer was
built with, master weights and moments by torch's optimizer. So a checkpoint that puts a tensor in the wrong place is detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from megatron.zerobubble.training.step import TrainingState

Tensors = dict[str, Tensor]
"""By global name of the parameter, `/`, and what it is: `weight`, `master`, or a state of the optimizer such as `exp_avg`."""

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of one tensor, on one rank."""

    name: str
    shape: tuple[int, ...]
    """Of the tensor-parallel shard that the piece is of; () of a number that a parameter has once."""
    first: int
    """Index of the piece's first element in that shard."""
    values: Tensor
    shard: int
    """Which shard it is."""
    axis: int | None
    """Along which shards are put together; None where all ranks hold the same."""
    is_gated: bool
    """Whether a shard is a part of the gate above a part of what it gates."""


def whole_state(training_state: TrainingState, *, vocabulary: int) -> Tensors:
    """Weights, master weights and optimizer state of the whole job, by global name. All ranks must call this.

    Args:
        training_state: this rank's part of the job.
        vocabulary: rows of embedding and head that are no padding, which depends on the tensor-parallel size.

    Returns:
        On rank 0 all of it, empty on the others. Where the weights are the master weights they are there twice.
    """
    own = list(_pieces(training_state))
    everybody: list[list[_Piece]] | None = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object(own, everybody, dst=0)
    by_name: dict[str, list[_Piece]] = {}
    for pieces in everybody or ():
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
    kinds: dict[str, set[str]] = {}
    for name in by_name:
        parameter, _, kind = name.rpartition("/")
        kinds.setdefault(parameter, set()).add(kind)
    assert len(set(map(frozenset, kinds.values()))) <= 1, f"not all weights have the same kinds of state: {kinds}"
    found = {name: _whole(name, pieces) for name, pieces in by_name.items()}
    return {
        name: value[:vocabulary] if value.dim() and name.startswith((_EMBEDDING, _HEAD)) else value
        for name, value in found.items()
    }


def _pieces(training_state: TrainingState) -> Iterator[_Piece]:
    for chunk in training_state.chunks:
        stage = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        for name, parameter in stage.named_parameters():
            about = _about(stage, _global_name(stage, name), parameter)
            yield _piece("weight", parameter, 0, about)
            first, master, states = _optimized(training_state.optimizer, parameter)
            if master is not None:
                yield _piece("master", master, first, about)
                for kind, value in states.items():
                    yield _piece(kind, value, first, about)


def _piece(kind: str, value: Tensor, first: int, about: dict[str, Any]) -> _Piece:
    name, values = f"{about['name']}/{kind}", value.detach().clone().reshape(-1)
    if value.dim() == 0:
        return _Piece(name=name, shape=(), first=0, values=values, shard=0, axis=None, is_gated=False)
    return _Piece(**(about | {"name": name}), first=first, values=values)


def _about(stage: Any, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "name": name,
        "shape": tuple(parameter.shape),
        "shard": parallel_state.get_tensor_model_parallel_rank(),
        "axis": parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
        "is_gated": bool(stage.config.gated_linear_unit) and ".linear_fc1." in name,
    }


def _global_name(stage: Any, name: str) -> str:
    """A layer by its number in the model; a head that is tied to the embedding is the embedding."""
    if name == _HEAD and stage.share_embeddings_and_output_weights:
        return _EMBEDDING
    head, found, tail = name.partition("decoder.layers.")
    if not found:
        return name
    index, _, rest = tail.partition(".")
    return f"{head}{found}{stage.decoder.layers[int(index)].layer_number}.{rest}"


def _optimized(optimizer: Any, parameter: nn.Parameter) -> tuple[int, Tensor | None, Tensors]:
    """What the optimizer has of a parameter on this rank: the first element, master weight and states; None if it has nothing."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(part, DistributedOptimizer):
            master = getattr(parameter, "main_param", parameter)
            if master in part.optimizer.state:
                return 0, master, dict(part.optimizer.state[master])
        elif parameter in part.model_param_group_index_map:
            group, place = part.model_param_group_index_map[parameter]
            master = part.optimizer.param_groups[group]["params"][place]
            return part._get_model_param_range_map(parameter)["param"].start, master, dict(part.optimizer.state[master])
    return 0, None, {}


def _whole(name: str, pieces: list[_Piece]) -> Tensor:
    """One tensor from its pieces; replicated elements must be equal, and no element may be missing."""
    dtype, length = pieces[0].values.dtype, torch.Size(pieces[0].shape).numel()
    shards: dict[int, tuple[Tensor, Tensor]] = {}
    for piece in pieces:
        key = piece.shard if piece.axis is not None else 0
        if key not in shards:
            shards[key] = torch.empty(length, dtype=dtype), torch.zeros(length, dtype=torch.bool)
        shard, is_there = shards[key]
        where = slice(piece.first, piece.first + piece.values.numel())
        known = is_there[where]
        assert torch.equal(shard[where][known], piece.values[known]), f"ranks differ in {name}"
        shard[where], is_there[where] = piece.values, True
    assert all(bool(is_there.all()) for _, is_there in shards.values()), f"no ranks together have all of {name}"
    first, parts = pieces[0], [shards[key][0].reshape(pieces[0].shape) for key in sorted(shards)]
    if first.axis is None:
        return parts[0]
    if first.is_gated:
        parts = [half for halves in zip(*(part.chunk(2, first.axis) for part in parts), strict=True) for half in halves]
    return torch.cat(parts, first.axis)
