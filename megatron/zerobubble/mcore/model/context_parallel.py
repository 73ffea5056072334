"""Attention over sequences that are shared by context-parallel ranks: keys and values are all-gathered.

Each rank has the queries, keys and values of its two slices of every sequence (`sequence_parts`). Keys and values of all slices
are all-gathered, and each slice of queries attends to the keys up to its own end:

    n = 2, rank 0 (slices 0 and 3)            keys    0 1 2 3
                                   queries 0          \
                                   queries 3          . . . \

In B the gradients of keys and values, which all ranks have a share in, are reduce-scattered. What a layer keeps from F to B grows
with the rank's own slices only: autograd keeps the rank's keys and values in place of the gathered ones, and B all-gathers them
again.

Invariant: F and B of a layer issue the same collectives in the same order on all ranks of the group, whatever their slices: one
all-gather in F; one all-gather and one reduce-scatter in B.

Shapes: ``s`` tokens on this rank, ``S`` tokens of the sequence, ``b`` microbatch, ``n`` heads per tensor-parallel rank, ``g`` key and
value heads per rank, ``d`` head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.model.attention import TorchDotProductAttention, _attend
from megatron.zerobubble.mcore.model.sequence_parts import SequenceParts, by_rank, in_order
from megatron.zerobubble.wgrad.sharing import Gathered, reduce_scatter

__all__ = ["ContextParallelAttention"]


class ContextParallelAttention(TorchDotProductAttention):
    """`TorchDotProductAttention` whose key and value heads are all-gathered over the context-parallel group.

    Arguments are those of megatron-core's `DotProductAttention`. The group is the ``cp`` of `pg_collection`, or that of
    `parallel_state`. Every rank of it must call the module at the same point. With one rank it is `TorchDotProductAttention`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = getattr(kwargs.get("pg_collection"), "cp", None)
        self._group = parallel_state.get_context_parallel_group() if given is None else given
        self._parts = SequenceParts(rank=self._group.rank(), size=self._group.size())

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
            value: [s, b, g, d of values], of the same slices.
            attention_mask: True where a query must not see a key, [b or 1, 1, s, S], keys in the order of the sequence; None for
                the mask of `attn_mask_type`.
            attn_mask_type: in place of the constructor's.
            attention_bias: None.
            packed_seq_params: None.

        Returns:
            [s, b, n * d of values].

        Raises:
            ConfigError: packed sequences.
        """
        others = {"attn_mask_type": attn_mask_type, "attention_bias": attention_bias}
        if self._parts.size == 1:
            return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **others)
        if packed_seq_params is not None:
            raise ConfigError(
                "packed sequences cannot be combined with context parallelism: its slices are of one sequence, not of several; "
                "leave out one of them, or use --transformer-impl transformer_engine"
            )
        whole = query.shape[0] * self._parts.size
        is_causal = attention_mask is None and (attn_mask_type or self.attn_mask_type) is AttnMaskType.causal
        ends = [whole // (2 * self._parts.size) * (number + 1) for number in self._parts.numbers] if is_causal else [whole]
        kept = _Kept(self._parts.size, self._group)
        prefixes = _Prefixes.apply(key, value, kept, ends)
        with kept.instead_of_whole_sequences():
            if not is_causal:
                return super().forward(query, *prefixes, attention_mask, **others)
            early, late = query.chunk(2)
            return torch.cat([self._causal(early, *prefixes[:2], kept), self._causal(late, *prefixes[2:], kept)])

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, kept: _Kept) -> Tensor:
        """The attention of one slice of queries to all keys up to its end, whose last ones are the slice's own."""
        options: dict[str, Any] = {"is_causal": True}
        if key.shape[0] > query.shape[0]:
            options = {"attn_mask": kept.late_mask(query, key.shape[0])}
        heads_bnsd = _attend(*(each.permute(1, 2, 0, 3) for each in (query, key, value)), scale=self.softmax_scale, **options)
        return heads_bnsd.permute(2, 0, 1, 3).flatten(start_dim=2)


@dataclass(frozen=True)
class _View:
    """What autograd keeps in place of a view of the gathered keys and values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _LateMask:
    """What autograd keeps in place of a mask of late queries, see `_late_mask`."""

    length: int
    num_keys: int
    dtype: torch.dtype
    size: tuple[int, ...]
    """Of the mask that a kernel asked for, which may have leading dimensions."""


class _Kept:
    """The keys and values of one layer and microbatch between F and B: this rank's, from which those of all ranks are gathered.

    Args:
        size: of the context-parallel group.
        group: the context-parallel group.
    """

    def __init__(self, size: int, group: Any) -> None:
        self._size, self._group = size, group
        self._own: Tensor | None = None
        """[s, b, g, 2 d], keys beside values."""
        self._whole: Tensor | None = None
        """[S, b, g, 2 d] in the order of the sequence, from B's first use to `release`."""
        self._address = 0
        """In F, of the gathered keys and values."""
        self._masks: dict[int, Tensor] = {}
        """In F, masks by address. They stay here, so that no other tensor has the address while autograd saves tensors."""

    def gather(self, own: Tensor) -> Tensor:
        """All-gather in F: [S, b, g, 2 d], in the order of the sequence."""
        self._own = own
        whole = self._gathered()
        self._address = whole.untyped_storage().data_ptr()
        return whole

    def release(self) -> None:
        """Free what B gathered."""
        self._whole = None

    def late_mask(self, query: Tensor, num_keys: int) -> Tensor:
        """The causal mask of queries that are the last of `num_keys` tokens: [s, keys], what to add to scores.

        On CUDA it is torch's name for that mask, which kernels take without its entries (not run on a GPU).
        """
        if query.is_cuda:
            return causal_lower_right(query.shape[0], num_keys)
        mask = _late_mask(query.shape[0], num_keys, query.dtype)
        self._masks[mask.data_ptr()] = mask
        return mask

    @contextmanager
    def instead_of_whole_sequences(self) -> Iterator[None]:
        """Inside, autograd keeps neither gathered keys and values, nor masks. Ops must not change them in place."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._masks.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _View | _LateMask:
        if tensor.untyped_storage().data_ptr() == self._address:
            return _View(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))
        mask = self._masks.get(tensor.data_ptr())
        return tensor if mask is None else _LateMask(*mask.shape, mask.dtype, tuple(tensor.size()))

    def _unpack(self, packed: Tensor | _View | _LateMask) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _LateMask):
            return _late_mask(packed.length, packed.num_keys, packed.dtype).expand(packed.size)
        if self._whole is None:
            self._whole = self._gathered()
        return self._whole.as_strided(packed.size, packed.stride, packed.offset)

    def scatter(self, gradient: Tensor) -> Tensor:
        """Reduce-scatter in B, of the gradient [S, b, g, 2 d] of what `gather` returned: [s, b, g, 2 d]."""
        own, reducing = reduce_scatter(by_rank(gradient, self._size), self._group)
        reducing.wait()
        return own

    def _gathered(self) -> Tensor:
        assert self._own is not None
        return in_order(Gathered(self._own, self._group).wait(), self._size)


def _late_mask(length: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """[length, num_keys]: -inf where a key comes after the query, else 0. The queries are the last of `num_keys` tokens."""
    return torch.full((length, num_keys), float("-inf"), dtype=dtype).triu_(num_keys - length + 1)


class _Prefixes(torch.autograd.Function):
    """Keys and values of all ranks, up to each of the given ends; in B the sum of their gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, kept: _Kept, ends: Sequence[int]) -> tuple[Tensor, ...]:
        """Returns views [end, b, g, d] of one tensor: keys and values up to the first end, to the second ..."""
        ctx.kept, ctx.ends, ctx.split = kept, ends, (key.shape[-1], value.shape[-1])
        whole = kept.gather(torch.cat([key, value], dim=-1))
        ctx.length = whole.shape[0]
        return tuple(each for end in ends for each in whole[:end].split(ctx.split, dim=-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept: _Kept = ctx.kept
        kept.release()
        total = gradients[0].new_zeros(ctx.length, *gradients[0].shape[1:-1], sum(ctx.split))
        for number, end in enumerate(ctx.ends):
            for part, gradient in zip(total[:end].split(ctx.split, dim=-1), gradients[2 * number :], strict=False):
                part += gradient
        key, value = kept.scatter(total).split(ctx.split, dim=-1)
        return key, value, None, None
