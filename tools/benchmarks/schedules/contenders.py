"""The contenders of the real mode and the model. Does not import torch or megatron-core, so that input is checked first."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import placement_of, schedule_info


class Runtime(enum.Enum):
    """The project whose runtime runs a schedule."""

    STOCK = "megatron-core"
    OURS = "zerobubble"
    TORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class ContenderSpec:
    """Specification of a contender: a schedule and the runtime that runs it."""

    name: str
    """Name on the command line."""
    runtime: Runtime
    schedule: str
    """A name in `megatron.zerobubble.plan.registry`: the order of passes, also for the simulator."""
    baseline: str
    """Name of the contender that its speed-up is relative to."""
    peer: str | None = None
    """Name of a contender of another runtime with the same placement, if it takes part; the two speed-ups are compared."""

    def placement(self, num_ranks: int) -> Placement:
        """Stage -> rank."""
        return placement_of(self.schedule, num_ranks=num_ranks)


STOCK_1F1B, TORCH_1F1B, TORCH_ZBV = "stock-1f1b", "torch-1f1b", "torch-zbv"
_STOCK, _TORCH = Runtime.STOCK, Runtime.TORCH
REFERENCES = (
    ContenderSpec(name=STOCK_1F1B, runtime=_STOCK, schedule="1f1b", baseline=STOCK_1F1B),
    ContenderSpec(name="stock-interleaved-1f1b", runtime=_STOCK, schedule="interleaved-1f1b", baseline=STOCK_1F1B),
    ContenderSpec(name=TORCH_1F1B, runtime=_TORCH, schedule="1f1b", baseline=TORCH_1F1B),
    ContenderSpec(name=TORCH_ZBV, runtime=_TORCH, schedule="zbv", baseline=TORCH_1F1B),
)
"""Schedules of other runtimes. Any other name is one of ours."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model and its microbatches. Raises ConfigError if the model cannot be built."""

    num_layers: int = 4
    """Layers of the whole model."""
    hidden_size: int = 512
    """Width of the model."""
    num_attention_heads: int = 8
    """Attention heads per layer."""
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


def contender_specs(
    names: Sequence[str], num_ranks: int, numbers_of_microbatches: Sequence[int], sizes: Sizes
) -> list[ContenderSpec]:
    """The contenders of these names, each after its baseline.

    Raises:
        ConfigError: a name is unknown, or a contender cannot run these numbers.
    """
    references = {reference.name: reference for reference in REFERENCES}
    chosen: dict[str, ContenderSpec] = {}
    for name in names:
        spec = references.get(name) or _ours(name, has_peer=TORCH_ZBV in names)
        chosen[spec.baseline] = references[spec.baseline]
        chosen[name] = spec
    for spec in chosen.values():
        _check(spec, num_ranks, numbers_of_microbatches, sizes)
    return list(chosen.values())


def _ours(name: str, *, has_peer: bool) -> ContenderSpec:
    schedule = schedule_info(name).name
    is_v = placement_of(schedule, num_ranks=2) == Placement.v(2)  # like torch-zbv, so that stages have the same size
    peer = TORCH_ZBV if has_peer and is_v else None
    return ContenderSpec(name=name, runtime=Runtime.OURS, schedule=schedule, baseline=STOCK_1F1B, peer=peer)


def _check(spec: ContenderSpec, num_ranks: int, numbers_of_microbatches: Sequence[int], sizes: Sizes) -> None:
    num_stages = spec.placement(num_ranks).num_stages
    if sizes.num_layers % num_stages:
        raise ConfigError(f"{spec.name} has {num_stages} stages; num_layers {sizes.num_layers} is not a multiple of that")
    for count in numbers_of_microbatches:
        if spec.runtime is Runtime.TORCH and count < num_ranks:
            raise ConfigError(f"{spec.name} needs at least {num_ranks} microbatches, the number of ranks; got {count}")
        if spec.runtime is Runtime.STOCK and num_stages > num_ranks and count % num_ranks:
            raise ConfigError(f"{spec.name} needs a multiple of {num_ranks} microbatches, the number of ranks; got {count}")
