"""Ready functions for `MicrobatchLengths`, by name: lengths of THD (packed) batches and of nested tensors.

Both look at what `next` of the data iterator returns: a mapping such as a dict or a TensorDict, an object with attributes, a
tuple or list with one of these in it, or the tensor itself. They read shapes, and values of tensors in host memory only: for a
value on a GPU the host would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.loop_options import TokensOf

__all__ = ["READY", "nested_tokens", "thd_tokens"]

_TOKENS = ("tokens", "input_ids", "packed_input_ids")
_CUMULATIVE = ("cu_seqlens", "cu_seqlens_q")
_REMEDY = "give a function that takes what the data iterator returns and returns the length of its rows"


def thd_tokens(item: Any) -> int | tuple[int, float]:
    """Length of the row of a packed microbatch, and the squared lengths of its sequences where `cu_seqlens` is in host memory.

    Args:
        item: with `tokens`, `input_ids` or `packed_input_ids`, integers [..., length], padding included; and if it has them,
            `cu_seqlens`, `cu_seqlens_q` or `packed_seq_params`, the bounds of the sequences, filled up with -1 or the last one.

    Raises:
        ConfigError: there are no tokens, or they are a nested tensor.
    """
    tokens = _named(item, _TOKENS, lambda value: isinstance(value, Tensor) and value.dim() > 0)
    if tokens is None or tokens.is_nested:
        raise ConfigError(
            f"lengths 'thd' found {'no' if tokens is None else 'a nested'} tensor named {' or '.join(_TOKENS)} in "
            f"{_described(item)}: {_REMEDY}{'' if tokens is None else ', or MicrobatchLengths(' + repr('nested') + ')'}"
        )
    length = tokens.shape[-1]
    bounds = _named(item, _CUMULATIVE, _is_on_host)
    if bounds is None:
        packed = _named(item, ("packed_seq_params",), lambda value: value is not None)
        bounds = None if packed is None else _named(packed, _CUMULATIVE, _is_on_host)
    if bounds is None:
        return length
    rows = torch.as_tensor(bounds, dtype=torch.float64)
    lengths = rows.reshape(-1, rows.shape[-1]).diff(dim=-1).clamp(min=0)
    squares = float(lengths.square().sum(dim=-1).max())
    return (length, squares) if squares > 0 else length


def nested_tokens(item: Any) -> int | tuple[int, float]:
    """Length of the row into which the sequences of a nested tensor are packed, and their squared lengths.

    Each sequence is padded to a multiple of the tensor-parallel size, and with context parallelism of two times both sizes, as
    verl does. Without either nothing is padded.

    Args:
        item: with a nested (jagged) tensor [sequences, (length), ...], named `tokens`, `input_ids` or `packed_input_ids`, or
            else the first one in it.

    Raises:
        ConfigError: there is none, or its lengths are on a GPU and have to be known.
    """
    tokens = _named(item, _TOKENS, _is_nested)
    if tokens is None:
        tokens = next(filter(_is_nested, _values(item)), None)
    if tokens is None:
        raise ConfigError(f"lengths 'nested' found no nested tensor in {_described(item)}: {_REMEDY}")
    context = parallel_state.get_context_parallel_world_size()
    multiple = parallel_state.get_tensor_model_parallel_world_size() * (2 * context if context > 1 else 1)
    offsets, given = tokens.offsets(), tokens.lengths()
    if offsets.device.type != "cpu":
        if multiple > 1 or given is not None:
            raise ConfigError(
                f"lengths 'nested' found a nested tensor on {tokens.device}, whose sequences are padded to a multiple "
                f"of {multiple}: reading their lengths would wait for it. Move the batch there in the forward step, not before"
            )
        return int(tokens.values().shape[0])
    lengths = (offsets.diff() if given is None else given).tolist()
    row = sum(-(-length // multiple) * multiple for length in lengths)
    return row, float(sum(length**2 for length in lengths))


READY: dict[str, TokensOf] = {"nested": nested_tokens, "thd": thd_tokens}
"""By the name that `install` and `zerobubble run` take."""


def _is_on_host(value: Any) -> bool:
    return value.device.type == "cpu" if isinstance(value, Tensor) else isinstance(value, Sequence)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested and value.layout is torch.jagged


def _values(item: Any) -> Iterator[Any]:
    """The item and what is in it."""
    yield item
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, tuple | list):
        for each in item:
            yield from _values(each)


def _named(item: Any, names: Sequence[str], is_right: Callable[[Any], bool]) -> Any:
    """The first value with one of these names that is right; None if there is none."""
    for each in _values(item) if isinstance(item, tuple | list) else (item,):
        for name in names:
            value = each.get(name) if isinstance(each, Mapping) else getattr(each, name, None)
            if value is not None and is_right(value):
                return value
    return None


def _described(item: Any) -> str:
    names = f" with {', '.join(sorted(map(str, item)))}" if isinstance(item, Mapping) else ""
    return f"the {type(item).__name__}{names} that the data iterator returned"
