"""The loss of a microbatch from those of its slices.

A microbatch's loss is the sum over its tokens, divided by their number. megatron-core divides the loss of each call of
`forward_step` by that call's tokens, so here it divides by one; B divides by the tokens of the whole microbatch. They are known
then, because the B of a slice comes after the Fs of all of them. Reports are put together, so that there is one per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.zerobubble.errors import ConfigError

__all__ = ["SlicedLosses"]

_TAKES = "a loss function must return (sum of the losses, number of tokens, report)"


class _SliceLoss(NamedTuple):
    """What the loss function returned for one slice."""

    num_tokens: Tensor
    report: Any


class SlicedLosses:
    """The losses of one iteration, on the rank with the last stage.

    Args:
        slices: number of slices of each microbatch.
        per_token: whether losses are divided by the tokens of the global batch (`config.calculate_per_token_loss`).
    """

    def __init__(self, slices: Sequence[int], *, per_token: bool) -> None:
        self._num_slices = slices
        self._per_token = per_token
        self._losses: dict[int, list[_SliceLoss]] = {}

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
        self._losses.setdefault(microbatch, []).append(_SliceLoss(counted, report))
        return total, num_tokens if self._per_token else torch.ones_like(counted), report

    def counted(self, microbatch: int) -> Tensor:
        """The tokens of the last slice that ran, an integer scalar."""
        return self._losses[microbatch][-1].num_tokens

    def report(self, microbatch: int) -> list[Any]:
        """The microbatch's report, once the loss of its last slice has been computed; before that, nothing."""
        slices = self._losses[microbatch]
        if len(slices) < self._num_slices[microbatch]:
            return []
        return [_together([each.report for each in slices], [each.num_tokens for each in slices])]

    def scaled(self, microbatch: int, loss: Tensor) -> Tensor:
        """A slice's loss, from which B starts."""
        if self._per_token:
            return loss
        total = torch.stack([each.num_tokens for each in self._losses[microbatch]]).sum()
        return loss / total.clamp(min=1)


def _together(reports: Sequence[Any], num_tokens: Sequence[Tensor]) -> Any:
    """One report from those of slices.

    Vectors, such as (sum of losses, number of tokens), are summed. Single numbers are means over tokens, and become that over
    all of them.
    """
    first = reports[0]
    if isinstance(first, dict):
        return {key: _together([each[key] for each in reports], num_tokens) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(sum(each) for each in zip(*reports, strict=True))
    if isinstance(first, Tensor) and first.numel() > 1:
        return torch.stack(list(reports)).sum(dim=0, dtype=first.dtype)
    if isinstance(first, (Tensor, int, float)) and not isinstance(first, bool):
        weights = torch.stack([each.to(torch.float64) for each in num_tokens])
        values = torch.stack([torch.as_tensor(each, device=weights.device) for each in reports])
        mean = (values.squeeze(-1) if values.dim() > 1 else values).to(torch.float64) @ weights / weights.sum().clamp(min=1)
        return mean.to(first.dtype).reshape(first.shape) if isinstance(first, Tensor) else mean.item()
    return first
