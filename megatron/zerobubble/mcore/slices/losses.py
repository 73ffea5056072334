"""The loss of a microbatch from those of its slices.

A microbatch's loss is the sum over its tokens, divided by their number. megatron-core divides the loss of each call of
`forward_step` by that call's tokens, so here it divides by one; B divides by the tokens of the whole microbatch. They are known
then, because the B of a slice comes after the Fs of all of them.

The reports of a microbatch's slices become one. What that is follows from the shape of what is reported: tensors [b, s, ...] are
concatenated, pairs (sum, number) are added, and single floats are means over tokens. Nothing else has a rule that is certain. A
report that is the loss itself, not a copy, is what megatron-core makes of that in place: the microbatch's share of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.current_slice import SlicePart

__all__ = ["SlicedLosses"]

_TAKES = "a loss function must return (sum of the losses, number of tokens, report)"


class _SliceLoss(NamedTuple):
    """What the loss function returned for one slice."""

    total: Tensor
    num_tokens: Tensor
    report: Any


class SlicedLosses:
    """The losses of one iteration, on the rank with the last stage.

    Args:
        parts: the slices of each microbatch.
        rows: b, sequences of each microbatch.
        per_token: whether losses are divided by the tokens of the global batch (`config.calculate_per_token_loss`).
    """

    def __init__(self, parts: Sequence[Sequence[SlicePart]], rows: Sequence[int], *, per_token: bool) -> None:
        self._parts, self._rows = parts, rows
        self._per_token = per_token
        self._losses: dict[int, list[_SliceLoss]] = {}
        self._reports: dict[int, Any] = {}

    def around(self, forward_step_func: Callable[..., Any], microbatch: int) -> Callable[..., Any]:
        """The loop's function, whose loss function is asked for one slice."""

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            output, loss_function = forward_step_func(*args, **kwargs)
            if loss_function is None:
                raise ConfigError(f"forward_step_func returned no loss function, and with slices {_TAKES}")

            def of_slice(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
                return self._of_slice(microbatch, loss_function(*args, **kwargs))

            return output, of_slice

        return forward_step

    def _of_slice(self, microbatch: int, result: Any) -> tuple[Any, Any, Any]:
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            got = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
            raise ConfigError(
                f"with slices {_TAKES}, not {got}: the mean over a microbatch does not follow from means over its slices"
            )
        total, num_tokens, report = result
        counted = torch.as_tensor(num_tokens, device=total.device)
        slices = self._losses.setdefault(microbatch, [])
        slices.append(_SliceLoss(total.detach().clone(), counted, _without_alias(report, total)))
        lengths = [part.length for part in self._parts[microbatch]]
        is_whole = len(slices) == len(lengths)
        own = slice(None if is_whole else -1, None)  # what has no rule is refused in the first slice
        divisor = None if self._per_token else len(self._parts)
        together = _Together(slices[own], lengths[: len(slices)][own], self._rows[microbatch], divisor)
        found = together.of([each.report for each in slices[own]], "the report")
        if is_whole:
            self._reports[microbatch] = found
            self._losses[microbatch] = [each._replace(report=None) for each in slices]
        return total, num_tokens if self._per_token else torch.ones_like(counted), report

    def counted(self, microbatch: int) -> Tensor:
        """The tokens of the last slice that ran, an integer scalar."""
        return self._losses[microbatch][-1].num_tokens

    def report(self, microbatch: int) -> list[Any]:
        """The microbatch's report, once the loss of its last slice has been computed; before that, nothing."""
        return [self._reports.pop(microbatch)] if microbatch in self._reports else []

    def scaled(self, microbatch: int, loss: Tensor) -> Tensor:
        """A slice's loss, from which B starts."""
        if self._per_token:
            return loss
        total = torch.stack([each.num_tokens for each in self._losses[microbatch]]).sum()
        return loss / total.clamp(min=1)


class _LossItself:
    """In a report: the loss that is returned with it. megatron-core divides that in place."""


def _without_alias(report: Any, total: Tensor) -> Any:
    """The report, with `_LossItself` for each tensor in it that is the loss."""
    if isinstance(report, Mapping):
        return {key: _without_alias(value, total) for key, value in report.items()}
    if isinstance(report, (tuple, list)):
        own = [_without_alias(value, total) for value in report]
        return report._make(own) if hasattr(report, "_make") else type(report)(own)
    is_loss = isinstance(report, Tensor) and report.numel() == 1 and report.data_ptr() == total.data_ptr()
    return _LossItself() if is_loss else report


class _Together:
    """Makes one report of those of slices.

    Args:
        slices: of a microbatch, in their order.
        lengths: tokens of each.
        rows: b.
        num_microbatches: by which the loss of a microbatch, divided by its tokens, is divided; None: by neither.
    """

    def __init__(
        self, slices: Sequence[_SliceLoss], lengths: Sequence[int], rows: int, num_microbatches: int | None = None
    ) -> None:
        self._slices, self._lengths, self._rows, self._num_microbatches = slices, lengths, rows, num_microbatches

    def of(self, each: Sequence[Any], name: str) -> Any:
        """What the slices have reported under a name, put together. Raises ConfigError if that has no rule."""
        first = each[0]
        if any(type(other) is not type(first) for other in each):
            raise ConfigError(f"with slices {name} is a {type(first).__name__} in one slice and not in another: report the same")
        if isinstance(first, Mapping):
            if any(other.keys() != first.keys() for other in each):
                raise ConfigError(f"with slices {name} must have the same names in every slice of a microbatch")
            return {key: self.of([other[key] for other in each], f"{key!r} of the report") for key in first}
        if isinstance(first, (tuple, list)):
            if len(first) == 2 and all(_is_number(value) for value in first):
                columns = list(zip(*each, strict=True))
                found = [self._loss() if isinstance(values[0], _LossItself) else sum(values) for values in columns]
            elif any(_is_number(value) for value in first) or len({len(other) for other in each}) > 1:
                raise ConfigError(self._refusal(f"{len(first)} values", name))
            else:
                found = [self.of(values, f"item {index} of {name}") for index, values in enumerate(zip(*each, strict=True))]
            return first._make(found) if hasattr(first, "_make") else type(first)(found)
        if isinstance(first, _LossItself):
            return self._loss()
        if isinstance(first, Tensor):
            return self._of_tensors(each, name)
        if isinstance(first, float):
            return self._of_numbers(torch.tensor(each, dtype=torch.float64, device=self._slices[0].total.device)).item()
        if not isinstance(first, int) and all(other == first for other in each):
            return first
        raise ConfigError(self._refusal(f"a {type(first).__name__}", name))

    def _loss(self) -> Tensor:
        """What megatron-core makes of a microbatch's loss."""
        total = torch.stack([each.total for each in self._slices]).sum(dim=0)
        if self._num_microbatches is None:
            return total
        tokens = torch.stack([each.num_tokens for each in self._slices]).sum()
        return total / tokens.clamp(min=1) / self._num_microbatches

    def _of_tensors(self, each: Sequence[Tensor], name: str) -> Tensor:
        first = each[0]
        if first.dim() >= 2 and all(
            tensor.shape[:2] == (self._rows, length) and tensor.shape[2:] == first.shape[2:]
            for tensor, length in zip(each, self._lengths, strict=True)
        ):
            return torch.cat(list(each), dim=1)
        if all(tensor.shape == (2,) for tensor in each):
            return torch.stack(list(each)).sum(dim=0, dtype=first.dtype)
        if first.is_floating_point() and all(tensor.numel() == 1 for tensor in each):
            return self._of_numbers(torch.cat([tensor.reshape(1) for tensor in each])).to(first.dtype).reshape(first.shape)
        kind = str(first.dtype).removeprefix("torch.")
        raise ConfigError(self._refusal(f"a tensor of {kind} with shape {tuple(each[-1].shape)}", name))

    def _of_numbers(self, values: Tensor) -> Tensor:
        """Means over the tokens of slices become that over all of them. Sums of the losses, or of tokens, are added.

        Those are known by their values, which are those that the loss function returned besides; a slice of more than one token
        has another mean. A slice without tokens, whose mean may be a quotient of zeros, has no part in a mean.
        """
        values = values.to(torch.float64)
        tokens = torch.stack([each.num_tokens.to(values.device, torch.float64).reshape(()) for each in self._slices])
        totals = torch.stack([each.total.to(values.device, torch.float64).reshape(()) for each in self._slices])
        is_sum = ((values == totals).all() | (values == tokens).all()) & (tokens > 1).any()
        mean = torch.where(tokens > 0, values, 0).mul(tokens).sum() / tokens.sum().clamp(min=1)
        return torch.where(is_sum, values.sum(), mean)

    def _refusal(self, what: str, name: str) -> str:
        return (
            f"with slices {name} is {what}, of {self._rows} rows of {self._lengths[-1]} tokens, and nothing says how it becomes "
            "the microbatch's: report floats that are means over tokens, pairs (sum, number), or tensors [rows, tokens, ...]"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, _LossItself)) or (isinstance(value, Tensor) and value.numel() == 1)
