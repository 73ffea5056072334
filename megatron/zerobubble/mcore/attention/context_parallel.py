"""Attention over sequences that are shared by context-parallel ranks: keys and values are all-gathered.

Each rank has the queries, keys and values of its two slices of every sequence (`sequence_parts`). Keys and values of all slices
are all-gathered, and each slice of queries attends to the keys up to its own end. For two ranks, with ``#`` for all keys of a
slice and ``\\`` for those up to the query's own:

    keys of slice       0   1   2   3
    rank 0, queries 0   \\
                    3   #   #   #   \\
    rank 1, queries 1   #   \\
                    2   #   #   \\

In B the gradients of keys and values, in which all ranks have a share, are reduce-scattered. What a layer keeps from F to B grows
with the rank's own slices only: autograd keeps the rank's keys and values in place of the gathered ones, and B all-gathers them
again.

Invariant: F and B of a layer issue the same collectives in the same order on all ranks of the group, for any slices: one
all-gather in F; one all-gather and one reduce-scatter in B. W has none. See ADR 28.

Shapes: ``s`` tokens on this rank, ``S`` tokens of the sequence, ``b`` microbatch, ``n`` heads per tensor-parallel rank, ``g`` key
and value heads per rank, ``d`` head size of queries and keys, ``e`` head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention.sequence_parts import SequenceParts, by_rank, in_order
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.wgrad.sharing import Gathered, reduce_scatter

__all__ = ["ContextParallelAttention"]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class ContextParallelAttention(TorchDotProductAttention):
    """`TorchDotProductAttention` for sequences that are shared by context-parallel ranks.

    The core attention of a layer spec with `config.context_parallel_size` above 1, in the place of Transformer Engine's. Batches
    must have the slices of megatron-core's `get_batch_on_this_cp_rank`. Arguments are those of `TorchDotProductAttention`. The
    group is the ``cp`` of `pg_collection`, or that of `parallel_state`; every rank of it must call the module at the same points.

    Raises:
        ConfigError: the model needs something that torch's attention does not have, or `cp_comm_type` is not all_gather.
    """

    shares_sequences = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        how = kwargs.get("cp_comm_type") or "all_gather"
        if how != "all_gather":
            raise ConfigError(
                f"cp_comm_type {how} is Transformer Engine's: ContextParallelAttention gathers keys and values; give all_gather"
            )
        given = getattr(kwargs.get("pg_collection"), "cp", None)
        group = parallel_state.get_context_parallel_group() if given is None else given
        self._shared = _Shared(group=group, size=group.size())
        self._parts = SequenceParts(rank=group.rank(), size=group.size())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """The attention of this rank's queries to the keys of all ranks.

        Args:
            query: [s, b, n, d], the rank's two slices, one behind the other.
            key: [s, b, g, d], of the same slices.
            value: [s, b, g, e], of the same slices.
            attention_mask: True where a query must not see a key, [b or 1, 1, s, S], keys in the order of the sequence; None for
                the mask of the mask type. It alone decides; there may be no window beside it.
            attn_mask_type: in place of the constructor's.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            [s, b, n * e].

        Raises:
            ConfigError: packed sequences, a window beside a mask, or what `TorchDotProductAttention` does not support.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        is_causal = attention_mask is None and mask_type in _CAUSAL
        self._check(mask_type, is_packed=packed_seq_params is not None, has_window=self.window is not None, is_causal=is_causal)
        length = query.shape[0] * self._parts.size
        ends = [length // (2 * self._parts.size) * (number + 1) for number in self._parts.numbers] if is_causal else [length]
        kept = _Kept(self._shared)
        keys_values = _Prefixes.apply(key, value, kept, ends)
        attend = super().forward
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            if not is_causal:
                whole_key, whole_value = keys_values
                return attend(query, whole_key, whole_value, attention_mask, AttnMaskType.no_mask, attention_bias)
            # The queries of a slice are the last of the tokens up to its end.
            (early, late), (early_key, early_value, late_key, late_value) = query.chunk(2), keys_values
            last = AttnMaskType.causal_bottom_right
            return torch.cat(
                [
                    attend(early, early_key, early_value, None, last, attention_bias),
                    attend(late, late_key, late_value, None, last, attention_bias),
                ]
            )

    @staticmethod
    def _check(mask_type: AttnMaskType, *, is_packed: bool, has_window: bool, is_causal: bool) -> None:
        if is_packed:
            raise ConfigError(
                "packed sequences cannot be combined with context parallelism here: ranks share one sequence, not several; leave "
                "out one of them, or choose Transformer Engine's layers"
            )
        if not is_causal and (has_window or mask_type is AttnMaskType.padding_causal):
            what = "a window" if has_window else "a padding_causal mask type"
            raise ConfigError(
                f"{what} beside a mask is not supported with context parallelism: let the mask [b, 1, s, S] hide these keys"
            )


@dataclass(frozen=True)
class _Shared:
    """The collectives of one attention. A tensor has keys beside values, [tokens, b, g, d + e]."""

    group: Any
    """The context-parallel group."""
    size: int
    """Number of its ranks."""

    def gather(self, own: Tensor) -> Tensor:
        """[S, b, g, d + e] in the order of the sequence, from this rank's [s, b, g, d + e]."""
        return in_order(Gathered(own, self.group).wait(), self.size)

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's [s, b, g, d + e] of the sum over all ranks of [S, b, g, d + e] in the order of the sequence."""
        own, reducing = reduce_scatter(by_rank(whole, self.size), self.group)
        reducing.wait()
        return own


@dataclass(frozen=True)
class _View:
    """What autograd keeps in place of a view of gathered keys and values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Kept:
    """The keys and values of one layer and microbatch, between F and B: this rank's own, from which B gathers those of all."""

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self._own: Tensor | None = None
        self._whole: Tensor | None = None
        """From B's first use to `release`."""
        self._address = 0
        """Of what F gathered. Valid while F runs, which is when autograd saves tensors."""

    def gather(self, own: Tensor) -> Tensor:
        """All-gather in F, and keep `own` for B."""
        self._own = own
        whole = self.shared.gather(own)
        self._address = whole.untyped_storage().data_ptr()
        return whole

    def release(self) -> None:
        """Free what B gathered: all that need it have run."""
        self._own = self._whole = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """What autograd keeps of a tensor that F saves."""
        if tensor.untyped_storage().data_ptr() != self._address:
            return tensor
        return _View(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """The tensor that F saved."""
        if isinstance(packed, Tensor):
            return packed
        if self._whole is None:
            assert self._own is not None, "the backward pass of attention runs once"
            self._whole = self.shared.gather(self._own)
        return self._whole.as_strided(packed.size, packed.stride, packed.offset)


class _Prefixes(torch.autograd.Function):
    """The keys and values of all ranks up to each of the given ends; in B, the sum of their gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, kept: _Kept, ends: Sequence[int]) -> tuple[Tensor, ...]:
        """Views of one tensor: keys [end, b, g, d] and values [end, b, g, e] up to the first end, then up to the second."""
        ctx.kept, ctx.ends, ctx.split = kept, ends, (key.shape[-1], value.shape[-1])
        whole = kept.gather(torch.cat([key, value], dim=-1))
        ctx.length = whole.shape[0]
        return tuple(each for end in ends for each in whole[:end].split(ctx.split, dim=-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.release()
        total = gradients[0].new_zeros(ctx.length, *gradients[0].shape[1:-1], sum(ctx.split))
        for number, end in enumerate(ctx.ends):
            for part, gradient in zip(total[:end].split(ctx.split, dim=-1), gradients[2 * number : 2 * number + 2], strict=True):
                part += gradient
        key, value = ctx.kept.shared.scatter(total).split(ctx.split, dim=-1)
        return key, value, None, None
