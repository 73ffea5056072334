"""Who can take part in the real mode, and with which model. Without torch and megatron-core, so that input is checked first."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import placement_of, schedule_info


class Runtime(enum.Enum):
    """Whose code runs a schedule."""

    STOCK = "megatron-core"
    OURS = "zerobubble"
    TORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """Who takes part."""

    name: str
    """As on the command line."""
    runtime: Runtime
    schedule: str
    """A name of `megatron.zerobubble.plan.registry`: the order of passes, for the simulator as well."""
    baseline: str
    """Name of the entrant that its speed-up is over."""
    peer: str | None = None
    """Name of the entrant of somebody else that its speed-up is compared with, where that takes part."""

    def placement(self, num_ranks: int) -> Placement:
        """Stage -> rank."""
        return placement_of(self.schedule, num_ranks=num_ranks)


STOCK_1F1B, TORCH_1F1B, TORCH_ZBV = "stock-1f1b", "torch-1f1b", "torch-zbv"
_STOCK, _TORCH = Runtime.STOCK, Runtime.TORCH
GUESTS = (
    Entrant(name=STOCK_1F1B, runtime=_STOCK, schedule="1f1b", baseline=STOCK_1F1B),
    Entrant(name="stock-interleaved-1f1b", runtime=_STOCK, schedule="interleaved-1f1b", baseline=STOCK_1F1B),
    Entrant(name=TORCH_1F1B, runtime=_TORCH, schedule="1f1b", baseline=TORCH_1F1B),
    Entrant(name=TORCH_ZBV, runtime=_TORCH, schedule="zbv", baseline=TORCH_1F1B),
)
"""Schedules of others. Any other name is one of ours."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and its microbatches. Raises ConfigError on what cannot be built."""

    num_layers: int = 4
    """Layers of the whole model."""
    hidden_size: int = 512
    """Width of the model."""
    num_attention_heads: int = 8
    """Heads of a layer's attention."""
    seq_length: int = 256
    """Tokens of a sample."""
    micro_batch_size: int = 3
    """Samples of a microbatch."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} is {getattr(self, field.name)}; it must be 1 or more")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} attention heads")


def entrants(names: Sequence[str], num_ranks: int, numbers_of_microbatches: Sequence[int], sizes: Sizes) -> list[Entrant]:
    """Who takes part, each after its baseline. Raises ConfigError on a name or a number that somebody cannot run."""
    guests = {guest.name: guest for guest in GUESTS}
    chosen: dict[str, Entrant] = {}
    for name in names:
        entrant = guests.get(name) or _ours(name, has_peer=TORCH_ZBV in names)
        chosen[entrant.baseline] = guests[entrant.baseline]
        chosen[name] = entrant
    for entrant in chosen.values():
        _check(entrant, num_ranks, numbers_of_microbatches, sizes)
    return list(chosen.values())


def _ours(name: str, *, has_peer: bool) -> Entrant:
    schedule = schedule_info(name).name
    is_v = placement_of(schedule, num_ranks=2) == Placement.v(2)  # as torch-zbv's, so that stages are of the same size
    peer = TORCH_ZBV if has_peer and is_v else None
    return Entrant(name=name, runtime=Runtime.OURS, schedule=schedule, baseline=STOCK_1F1B, peer=peer)


def _check(entrant: Entrant, num_ranks: int, numbers_of_microbatches: Sequence[int], sizes: Sizes) -> None:
    num_stages = entrant.placement(num_ranks).num_stages
    if sizes.num_layers % num_stages:
        raise ConfigError(f"{entrant.name} has {num_stages} stages; num_layers {sizes.num_layers} does not divide by that")
    for count in numbers_of_microbatches:
        if entrant.runtime is Runtime.TORCH and count < num_ranks:
            raise ConfigError(f"{entrant.name} wants at least as many microbatches as ranks, {num_ranks}; got {count}")
        if entrant.runtime is Runtime.STOCK and num_stages > num_ranks and count % num_ranks:
            raise ConfigError(f"{entrant.name} wants a multiple of {num_ranks} microbatches, the number of ranks; got {count}")
