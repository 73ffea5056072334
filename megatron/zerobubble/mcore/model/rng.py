"""A stream of random numbers for each chunk of a rank.

Dropout draws in the order of a rank's F ops. With several chunks that order is the plan's, so that another plan would draw other
masks. Here each chunk of an iteration continues a stream of its own: what a chunk draws depends on the state of the rank's
generators at the start of the iteration and on the chunk, not on how the plan interleaves chunks.

A stream begins with the hash of the rank's state and the chunk's number; so tensor-parallel ranks, which share some generators
and not others, share the same ones of the streams, and nothing has to be kept between iterations or saved. Nothing is copied
from the device: a generator's state, seed and offset on CUDA, lives on the host.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core.tensor_parallel import random as mcore_random
from torch import Tensor

States = tuple[Any, Any, dict[str, Any]]
"""megatron-core's three: the CPU generator, the device's, and those of its tracker by name."""


class ChunkStreams:
    """The streams of one iteration. The rank's generators are those of the chunk that was entered last.

    Args:
        num_chunks: how many; a single chunk draws from the rank's generators as they are.
        device: where the device's generator lives.
    """

    def __init__(self, num_chunks: int, device: torch.device) -> None:
        self._device = device
        self._states: list[States] = []
        self._entered: int | None = None
        if num_chunks > 1:
            begin = mcore_random._get_all_rng_states()
            self._states = [self._derived(begin, chunk) for chunk in range(num_chunks + 1)]

    def enter(self, chunk: int) -> None:
        """What follows draws from this chunk's stream."""
        if not self._states or chunk == self._entered:
            return
        if self._entered is not None:
            self._states[self._entered] = mcore_random._get_all_rng_states()
        mcore_random._set_all_rng_states(*self._states[chunk])
        self._entered = chunk

    def finish(self) -> None:
        """After the iteration: the rank's generators go on with a stream that no chunk had."""
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
    """A fresh state that follows from another one and a number. Of a state as well as of a generator that holds one."""
    generator = torch.Generator(device)
    held: Tensor = state if isinstance(state, Tensor) else state.get_state()
    digest = hashlib.blake2b(held.cpu().numpy().tobytes(), digest_size=8, salt=number.to_bytes(8, "little"))
    generator.manual_seed(int.from_bytes(digest.digest(), "little") >> 1)
    return generator.get_state() if isinstance(state, Tensor) else generator
