"""States of the random number generators that training uses: torch's, and those of megatron-core's RNG tracker.

Python's and numpy's generators are not among them: training does not use them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import tensor_parallel

__all__ = ["rng_states", "set_rng_states"]


def rng_states() -> dict[str, torch.Tensor]:
    """The states of this rank by name, byte tensors (uint8) of shape [bytes]."""
    tracker: dict[str, torch.Tensor] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(), **tracker}


def set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `rng_states`; the shape may be any."""
    flat = {name: state.reshape(-1).cpu() for name, state in states.items()}
    torch.set_rng_state(flat.pop("cpu"))
    torch.cuda.set_rng_state(flat.pop("device"))
    tensor_parallel.get_cuda_rng_tracker().set_states(flat)
