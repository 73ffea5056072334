"""Tokens behind the end of a slice, for multi-token prediction (MTP).

MTP layer d embeds the tokens d places further on and predicts their labels: megatron-core rolls tokens, labels, loss mask and
position ids by one place per layer (`roll_tensor`) and fills up with zeros. For a slice, what follows is in the batch of the
microbatch, of which the slice has a part, and position ids may be the loop's own count (`PositionIds`). Hidden states are the
slice's own: nothing else crosses its end.

The loss of an MTP layer is divided by the tokens that count, so the number that `roll_tensor` returns is that of the whole
microbatch. Which tensor is rolled is known by its identity, which the model's `forward` notes.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart
from megatron.zerobubble.mcore.slices.positions import PositionIds

__all__ = ["TokensAhead"]

_ROLLING = ("megatron.core.transformer.multi_token_prediction", "megatron.core.models.gpt.gpt_model")
"""Modules that look up `roll_tensor`; from 0.18 on only the first one does."""

_NAMES = {
    "input_ids": ("tokens", "input_ids"),
    "labels": ("labels",),
    "loss_mask": ("loss_mask",),
    "padding_mask": ("padding_mask",),
}
"""Argument of a model's `forward` -> its names in a batch."""
_POSITIONS = "position_ids"


class TokensAhead:
    """Replaces megatron-core's `roll_tensor` while a slice runs in one of the models that it was given.

    Args:
        slices: of the rank.
        positions: finds those behind a slice's end.
    """

    def __init__(self, slices: CurrentSlice, positions: PositionIds) -> None:
        self._slices, self._positions = slices, positions
        self._known: dict[int, tuple[str, int, Tensor]] | None = None
        """By identity: name, how often it was rolled, and the tensor, which keeps its identity; None while no model runs."""
        self._given: dict[str, Tensor] = {}
        """By name, what a model with learned positions is given; empty while none runs."""
        self._originals: list[tuple[Any, Any]] = []

    def install(self, module: nn.Module) -> bool:
        """Note what the module's `forward` is given, if it is a model with MTP layers. Undone by deleting that attribute."""
        if not isinstance(module, GPTModel) or not module.config.mtp_num_layers:
            return False
        module.forward = _Noted(module, self)
        if not self._originals:
            for name in _ROLLING:
                owner: Any = importlib.import_module(name)
                if hasattr(owner, "roll_tensor"):
                    self._originals.append((owner, owner.roll_tensor))
                    owner.roll_tensor = self._roll
        return True

    def remove(self) -> None:
        """Restore `roll_tensor`."""
        for owner, original in reversed(self._originals):
            owner.roll_tensor = original
        self._originals.clear()

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The `forward` of a model."""
        forward = type(model).forward
        if self._slices.part is None:
            return forward(model, *args, **kwargs)
        given = inspect.signature(forward).bind(model, *args, **kwargs).arguments
        if given.get("labels") is not None and given.get("loss_mask") is None:
            raise ConfigError("slices of a model with MTP layers need the loss mask of the batch: give the model loss_mask")
        tensors = {name: tensor for name in (*_NAMES, _POSITIONS) if (tensor := given.get(name)) is not None}
        self._known = {id(tensor): (name, 0, tensor) for name, tensor in tensors.items()}
        embedding = getattr(model, "embedding", None)
        self._given = tensors if getattr(embedding, "add_position_embedding", False) else {}
        try:
            return forward(model, *args, **kwargs)
        finally:
            self._known, self._given = None, {}

    def _roll(self, tensor: Tensor, shifts: int = -1, dims: int = -1, **others: Any) -> tuple[Tensor, Tensor]:
        """megatron-core's `roll_tensor`: the tensor rolled along its last dimension, and the sum of that."""
        part = self._slices.part
        if part is None or self._known is None:
            original = self._originals[0][1]
            return original(tensor, shifts=shifts, dims=dims, **others)
        # Only labels are copied before they are rolled.
        name, times, _ = self._known.get(id(tensor), ("labels", 0, tensor))
        times += 1
        if name == _POSITIONS:
            rolled = self._rolled_positions(tensor, part, times)
            self._known[id(rolled)] = name, times, rolled
            return rolled, rolled.sum()
        whole = self._whole(name)
        rolled = torch.roll(tensor, shifts=-1, dims=-1)
        at = part.end - 1 + times
        if at >= part.whole:
            rolled[:, -1] = 0
        else:
            rolled[:, -1] = whole[:, at].to(rolled.device, non_blocking=True)
        self._known[id(rolled)] = name, times, rolled
        if name != "loss_mask":
            return rolled, rolled.sum()
        return rolled, whole[:, times:].sum().to(rolled.device, non_blocking=True)

    def _rolled_positions(self, tensor: Tensor, part: SlicePart, times: int) -> Tensor:
        """Position ids [b, s], as they were given or rolled before, rolled by one place."""
        if not self._given:
            return tensor  # of a model that does not read them
        given, tokens = self._given[_POSITIONS], self._given.get("input_ids")
        rolled = torch.roll(self._positions.absolute(tensor, tokens), shifts=-1, dims=-1)
        at = part.end - 1 + times
        rolled[..., -1] = 0 if at >= part.whole else self._positions.further(given, tokens, at)
        self._positions.place(rolled)
        return rolled

    def _whole(self, name: str) -> Tensor:
        """A tensor of the microbatch's batch."""
        batch = self._slices.whole_batch
        found = [batch[each] for each in _NAMES[name] if batch.get(each) is not None] if isinstance(batch, Mapping) else []
        if found:
            return found[0]
        raise ConfigError(
            f"slices of a model with MTP layers need the {name} behind a slice's end, and this rank read no batch that is a "
            "dictionary with tokens, labels and loss_mask: give it one, on every tensor-parallel rank, or leave out slices"
        )


class _Noted:
    """The `forward` of a model."""

    def __init__(self, model: nn.Module, ahead: TokensAhead) -> None:
        self._model = weakref.ref(model)
        self._ahead = ahead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        return self._ahead.run(model, args, kwargs)
