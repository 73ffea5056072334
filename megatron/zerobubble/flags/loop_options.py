"""What `install` takes besides flags, since a command line cannot say it: lengths of microbatches, cuts of batches, seeds.

Each record checks its own fields; whether it goes with the flags is checked by `install`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted

__all__ = ["READY_LENGTHS", "Cut", "MicrobatchLengths", "Seeds", "Slices", "TokensOf"]

_Ready = Literal["thd", "nested"]
READY_LENGTHS: tuple[str, ...] = get_args(_Ready)
"""Names of the ready functions for `MicrobatchLengths.tokens` (`mcore.microbatches.ready`)."""

TokensOf = Callable[[Any], int | tuple[int, float]]
"""An item of the data iterator -> its tokens, or (tokens, sum of the squared lengths of its sequences)."""


class Cut(Protocol):
    """Cuts what an iterator returns."""

    def __call__(self, batch: Any, offset: int, length: int, /) -> Any:
        """The part of a batch that has the tokens from `offset` on, `length` of them."""


@dataclass(frozen=True)
class MicrobatchLengths:
    """Microbatches have lengths of their own: `install(lengths=MicrobatchLengths("thd"))`.

    Each iteration is planned for its own lengths, which all ranks exchange before it begins, and config's variable_seq_lengths
    may be on.

    Args:
        tokens: takes what `next` of the data iterator returns and returns the length of its rows, padding included, or that and
            the sum of the squared lengths of the sequences in a row, where several are packed. It must not read the values of
            tensors on a GPU, which would wait for the GPU. Two are ready, by name: "thd" for packed sequences (the last dimension
            of `tokens`, `input_ids` or `packed_input_ids`, and `cu_seqlens` if it is in host memory), "nested" for nested
            tensors, whose sequences the loop packs into one row, each padded to a multiple of the tensor-parallel size, with
            context parallelism of twice both sizes.
        reorder: run the microbatches of a global batch in the order that suits their lengths. Results come back in the order of
            the data. Gradients are a sum in another order.

    Raises:
        ConfigError: `tokens` is neither.
    """

    tokens: TokensOf | _Ready
    reorder: bool = True

    def __post_init__(self) -> None:
        if not callable(self.tokens) and self.tokens not in READY_LENGTHS:
            raise ConfigError(
                f"tokens of MicrobatchLengths is {quoted(self.tokens)}; give {' or '.join(map(repr, READY_LENGTHS))}, or a "
                "function that takes what the data iterator returns and returns the length of its rows"
            )


@dataclass(frozen=True)
class Slices:
    """Every microbatch is cut into slices along its sequence: `install(schedule="zbv", slices=Slices(8))`.

    The function that the loop gives to the schedule runs once per slice, with the part of the batch that its iterator returns,
    and its loss function must return the sum of the losses, the number of tokens and a report. The reports of a microbatch's
    slices become one: tensors [b, tokens, ...] are put together along the tokens; pairs (sum, number) are added; any other single
    number must be a float, and is taken for a mean over the slice's tokens, or for a sum where it is the sum of the losses or the
    number of tokens itself; anything else is refused.

    Args:
        number: of slices, or with "auto" as many as are fastest by what is measured in the first iterations, see
            --zero-bubble-slices. With `MicrobatchLengths` it is a number, that of the longest microbatch, and shorter ones have
            as many as make about the same work. None: that of the flags, or of the plan.
        cut: a function that takes what `next` of the data iterator returns, the first token of a slice, and its number of
            tokens, and returns the slice's part. None: a batch is a tensor, or a dictionary, tuple or list of them, and what is
            not certain to have something per token is refused. Cut are integers and booleans [b, sequence], or
            [b, sequence + 1] where each token is followed by the next one, and by their names position_ids or positions
            [..., sequence], and tokens, labels, loss_mask, advantages, log_probs and such [b, sequence, ...]. An attention mask
            must be None.

    Raises:
        ConfigError: `cut` is not a function. The number is checked with the flags.
    """

    number: int | Literal["auto"] | None = None
    cut: Cut | None = None

    def __post_init__(self) -> None:
        if not (self.cut is None or callable(self.cut)):
            raise ConfigError(f"cut of Slices is {quoted(self.cut)}; give a function that cuts batches, or None")


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Random numbers that do not depend on the schedule: `install(schedule="zbv", seeds=Seeds(weights=1234))`.

    Args:
        weights: draw each first weight by this seed and its name, so that every schedule and parallel layout begins with the same
            weights; None: as megatron-core does, where they depend on the rank.
        dropout: draw dropout masks by this seed, the layer, and the number of the microbatch's first sample, counted from the
            first iteration after the call of `install`, so that every schedule has the same ones; None: as megatron-core does, in
            the order of each rank's passes.

    Raises:
        ConfigError: a seed is no whole number.
    """

    weights: int | None = None
    dropout: int | None = None

    def __post_init__(self) -> None:
        for name, seed in vars(self).items():
            if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
                raise ConfigError(f"{name} of Seeds is {quoted(seed)}; give a whole number")
