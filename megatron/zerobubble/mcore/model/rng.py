"""A stream of random numbers per chunk of a rank.

Dropout masks are drawn in the order of a rank's F ops. With several chunks the plan decides that order, so another plan would
give other masks. Here each chunk has its own stream in every iteration: its random numbers depend on the state of the rank's
generators at the start of the iteration and on the chunk, not on how the plan interleaves chunks.

A stream is seeded by a hash of the rank's RNG state and the chunk's number. So tensor-parallel ranks, which share some generators
and not others, share the same ones of the streams, and there is no further state to keep between iterations or to save. Nothing
is copied from the device: a CUDA generator's state (seed and offset) is on the host. On CUDA a model without dropout (`draws`)
uses the rank's generators as they are: there is nothing to keep apart, and a switch costs the host time in every other F.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core.tensor_parallel import random as mcore_random
from torch import Tensor, nn

_DRAWS = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
"""Options of a TransformerConfig with which F draws random numbers, if they are neither 0 nor None."""

States = tuple[Any, Any, dict[str, Any]]
"""megatron-core's RNG states: of the CPU generator, of the device's generator, and of its tracker's generators by name."""


def draws(chunk: nn.Module) -> bool:
    """Whether F of a chunk draws random numbers: by its config, or by a layer of torch's. A layer of somebody else's that calls
    torch's functions is not seen."""
    configs = {id(config): config for each in chunk.modules() if (config := getattr(each, "config", None)) is not None}
    by_config = any(getattr(config, name, None) for config in configs.values() for name in _DRAWS)
    return by_config or any(getattr(each, "p", 0) for each in chunk.modules() if "Dropout" in type(each).__name__)


class ChunkStreams:
    """The RNG streams of one iteration. The rank's generators have the state of the chunk that was entered last.

    Args:
        num_chunks: chunks of this rank; a single chunk uses the rank's generators as they are.
        device: of the device's generator.
    """

    def __init__(self, num_chunks: int, device: torch.device) -> None:
        self._device = device
        self._states: list[States] = []
        self._entered: int | None = None
        if num_chunks > 1:
            begin = mcore_random._get_all_rng_states()
            self._states = [self._derived(begin, chunk) for chunk in range(num_chunks + 1)]

    def enter(self, chunk: int) -> None:
        """Switch the rank's generators to this chunk's stream."""
        if not self._states or chunk == self._entered:
            return
        if self._entered is not None:
            self._states[self._entered] = mcore_random._get_all_rng_states()
        mcore_random._set_all_rng_states(*self._states[chunk])
        self._entered = chunk

    def finish(self) -> None:
        """Call after the iteration: the rank's generators continue with a stream that no chunk used."""
        if self._states:
            mcore_random._set_all_rng_states(*self._states[-1])

    def _derived(self, states: States, number: int) -> States:
        cpu, device, tracked = states
        return (
            _derived(cpu, number, torch.device("cpu")),
            _derived(device, number, self._device),
            {name: _derived(state, number, self._device) for name, state in tracked.items()},
        )


def _derived(state: Any, number: int, device: torch.device) -> Any:
    """A new state seeded by a hash of `state` and `number`; a generator if `state` is one, otherwise a state tensor."""
    generator = torch.Generator(device)
    current: Tensor = state if isinstance(state, Tensor) else state.get_state()
    digest = hashlib.blake2b(current.cpu().numpy().tobytes(), digest_size=8, salt=number.to_bytes(8, "little"))
    generator.manual_seed(int.from_bytes(digest.digest(), "little") >> 1)
    return generator.get_state() if isinstance(state, Tensor) else generator
