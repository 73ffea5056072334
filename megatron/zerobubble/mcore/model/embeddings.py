"""Finalizing gradients under any placement: tied embeddings in two chunks of a rank, and the token count of the per-token loss.

Under V the embedding (stage 0) and the output layer (stage 2p-1) are both on rank 0, in two chunks. Tied, they are two tensors
with the same values on one rank. megatron-core would all-reduce their gradients between the first and the last pipeline rank,
which is wrong for this placement. So rank 0 copies the values once and adds the two gradients every iteration. The same holds for
the embedding of MTP layers (multi-token prediction) on the last stage. Where they are on another rank's stage, rank 0 sends
its values there, and the two ranks exchange gradients: megatron-core's group for this is made before the layout is known.

This works with the distributed optimizer, too: megatron-core puts a weight marked `shared_embedding` into a bucket of its own, so
both weights are sharded alike and the sum of the buffers is the sum of each rank's shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads as stock_finalize_model_grads
from megatron.core.transformer.enums import LayerType
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn

from megatron.zerobubble.mcore.model.stage_layout import StageLayout
from megatron.zerobubble.plan.ir import Placement

Finalize = Callable[..., None]
"""The signature of `megatron.core.distributed.finalize_model_grads`."""


def tie_chunks(chunks: Sequence[nn.Module]) -> None:
    """Copy the embedding's values to the weight tied to it in another chunk of this rank: output layer or MTP embedding.

    Does nothing where this rank has no such pair. Call it before DDP wraps the chunks.
    """
    pair = _tied_pair(chunks)
    if pair is None:
        return
    embedding, head = pair
    with torch.no_grad():
        head.copy_(embedding)
    for weight in pair:
        weight.shared_embedding = True  # type: ignore[attr-defined]
    head.shared = True  # type: ignore[attr-defined]  # the gradient norm counts it once


def copy_to_mtp_stage(chunks: Sequence[nn.Module], config: Any) -> None:
    """Copy the embedding's values to the MTP layers' copy, where a V has them on another rank.

    Both ranks must call it, before DDP wraps the last of their chunks. Does nothing on other ranks and for other layouts.

    Args:
        chunks: all of this rank's.
        config: TransformerConfig of the model.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks = _ranks_of_copies(config, pipeline)
    if ranks is None or dist.get_rank() not in ranks:
        return
    weight = _copy_of_embedding(chunks)
    values = weight.detach().to(torch.cuda.current_device())
    _send_or_receive(values, ranks[0], ranks[1], pipeline)
    with torch.no_grad():
        weight.copy_(values)
    weight.shared_embedding = True  # type: ignore[attr-defined]


def release_unused_head(model: nn.Module) -> None:
    """Drop the output layer's unused weight on a last stage with MTP layers and tied embeddings. Does nothing on other stages.

    There the output layer uses the weight of the MTP embedding, but megatron-core 0.16.1 allocates one for it all the same. That
    weight would count in the gradient norm and be decayed, DDP would never get a gradient for it, and saving a checkpoint asserts
    that it does not exist. Call it before DDP wraps the model.
    """
    stage: Any = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    if getattr(stage, "mtp_process", False) and stage.share_embeddings_and_output_weights and stage.post_process:
        stage.output_layer.weight = None


class FinalizeGradients:
    """A `finalize_model_grads` for a placement, as the value of `config.finalize_model_grads_func`.

    Args:
        placement: stage -> rank.
        finalize: the training loop's, called for everything else: megatron-core's `finalize_model_grads`, or one around it.
    """

    def __init__(self, placement: Placement, finalize: Finalize) -> None:
        self._source = placement.stage_to_rank[-1]
        self._is_last = self._source == placement.num_ranks - 1
        self.finalize = finalize
        """The function that was given."""

    @property
    def takes_total(self) -> bool:
        """Whether `num_tokens` may be an int: not with a training loop's own function, which knows tensors only."""
        finalize: Any = self.finalize
        while isinstance(finalize, functools.partial):
            finalize = finalize.func
        return finalize is stock_finalize_model_grads

    def __call__(
        self, model: list[nn.Module], num_tokens: torch.Tensor | int | None = None, pg_collection: Any = None, **kwargs: Any
    ) -> None:
        """megatron-core's arguments.

        Args:
            model: this rank's chunks.
            num_tokens: with per-token loss, what gradients are divided by: an int is the number of tokens of the global batch; an
                integer scalar tensor is this replica's, on the rank of the last stage, and is summed over the world first.
            pg_collection: process groups; None: those of `parallel_state`.
            **kwargs: passed on.
        """
        pipeline = pg_collection.pp if pg_collection is not None else parallel_state.get_pipeline_model_parallel_group()
        if isinstance(num_tokens, torch.Tensor) and not self._is_last:
            # megatron-core broadcasts the count from the last rank; under V the last stage, which has it, is elsewhere.
            dist.broadcast(num_tokens, src=dist.get_global_rank(pipeline, self._source), group=pipeline)
        if isinstance(num_tokens, int):
            self.finalize(model, None, pg_collection=pg_collection, **kwargs)
            for chunk in model if num_tokens > 0 else ():
                chunk.scale_gradients(1.0 / num_tokens)  # type: ignore[operator]
        else:
            self.finalize(model, num_tokens, pg_collection=pg_collection, **kwargs)
        _sum_tied_gradients(model, pipeline)


def _sum_tied_gradients(chunks: Sequence[nn.Module], pipeline: dist.ProcessGroup) -> None:
    """Add the gradients of all copies of the embedding that megatron-core does not know to be copies."""
    embedding, head = _tied_pair(chunks) or (None, None)
    ranks = _ranks_of_copies(get_model_config(chunks[0]), pipeline)
    if ranks is not None and dist.get_rank() in ranks:
        embedding = _copy_of_embedding(chunks)
    else:
        ranks = None
    # No main_grad if it was frozen when DDP wrapped it. If it is frozen since, megatron-core adds them, too.
    if not hasattr(embedding, "main_grad"):
        return
    total: torch.Tensor = embedding.main_grad  # type: ignore[union-attr]
    if head is not None:
        total.add_(head.main_grad)  # type: ignore[attr-defined]
    if ranks is not None:
        first, mtp = ranks
        if dist.get_rank() == first:
            share = torch.empty_like(total)
            _send_or_receive(share, mtp, first, pipeline)
            total.add_(share)
        else:
            _send_or_receive(total, mtp, first, pipeline)
        _send_or_receive(total, first, mtp, pipeline)
    if head is not None:
        head.main_grad.copy_(total)  # type: ignore[attr-defined]


def _ranks_of_copies(config: Any, pipeline: dist.ProcessGroup) -> tuple[int, int] | None:
    """The ranks of the world with the embedding and with the MTP layers' copy of it; None unless a V has them on two ranks."""
    layout = config.pipeline_model_parallel_layout
    if not isinstance(layout, StageLayout):
        return None
    first = layout.placement.stage_to_rank[0]
    mtp = next((rank for rank, chunks in enumerate(layout.layout) if any(LayerType.mtp in chunk for chunk in chunks)), first)
    return None if mtp == first else (dist.get_global_rank(pipeline, first), dist.get_global_rank(pipeline, mtp))


def _copy_of_embedding(chunks: Sequence[nn.Module]) -> nn.Parameter:
    """The weight of the embedding, or of the MTP layers' copy, on a rank that has one of them."""
    stage = next(stage for stage in map(_stage, chunks) if stage.pre_process or getattr(stage, "mtp_process", False))
    weight: nn.Parameter = stage.shared_embedding_or_output_weight()
    return weight


def _send_or_receive(tensor: torch.Tensor, source: int, target: int, pipeline: dist.ProcessGroup) -> None:
    if dist.get_rank() == source:
        dist.send(tensor, target, group=pipeline)
    else:
        dist.recv(tensor, source, group=pipeline)


def _tied_pair(chunks: Sequence[nn.Module]) -> tuple[nn.Parameter, nn.Parameter] | None:
    """(embedding weight, weight tied to it) if they are in two chunks of this rank.

    MTP layers (multi-token prediction) have their own embedding on the last stage, with the values of the first stage's.
    """
    models = [_stage(chunk) for chunk in chunks]
    first = next((model for model in models if model.pre_process), None)
    last = next((model for model in models if model.post_process), None)
    if first is None or last is None or first is last:
        return None
    if not last.share_embeddings_and_output_weights and not getattr(last, "mtp_process", False):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def _stage(chunk: nn.Module) -> Any:
    """The model inside of a chunk."""
    return get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
