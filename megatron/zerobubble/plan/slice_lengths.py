"""How many tokens each slice of a microbatch has."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zerobubble.errors import ConfigError

__all__ = ["check_slice_lengths", "equal_slice_lengths"]


def equal_slice_lengths(tokens: int, num_slices: int, *, multiple: int = 1) -> tuple[int, ...]:
    """The lengths of slices that are equally long.

    Args:
        tokens: of a microbatch's sequences.
        num_slices: n.
        multiple: what each length must be a multiple of.

    Raises:
        ConfigError: there are fewer tokens than slices, or they do not divide.
    """
    if num_slices * multiple > tokens:
        each = "" if multiple == 1 else f" of at least {multiple} tokens"
        raise ConfigError(f"{num_slices} slices{each} are more than the {tokens} tokens of a sequence have: give fewer slices")
    if tokens % (num_slices * multiple):
        unit = "" if multiple == 1 else f" in multiples of {multiple}, which tensor-parallel ranks share,"
        fitting = [n for n in range(num_slices, 0, -1) if tokens % (n * multiple) == 0]
        raise ConfigError(
            f"a sequence of {tokens} tokens cannot be cut into {num_slices} equal slices{unit or ','} but into "
            f"{fitting[0] if fitting else 1}: give that, or another sequence length"
        )
    return (tokens // num_slices,) * num_slices


def check_slice_lengths(lengths: Sequence[int], tokens: int, *, multiple: int = 1) -> None:
    """Check lengths of slices that were planned.

    Args:
        lengths: tokens of each slice.
        tokens: of a microbatch's sequences.
        multiple: what each length must be a multiple of.

    Raises:
        ConfigError: they are for sequences of another length, or a slice is empty or no multiple.
    """
    if sum(lengths) != tokens:
        raise ConfigError(
            f"slices of {list(lengths)} tokens make {sum(lengths)}, and a sequence has {tokens}: plan for its length"
        )
    wrong = next((length for length in lengths if length < 1 or length % multiple), None)
    if wrong is not None:
        raise ConfigError(f"slices of {list(lengths)} tokens: {wrong} is not a positive multiple of {multiple}")
