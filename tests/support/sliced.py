"""The small models of `gpt`, `mla` and `moe`, whose microbatches are cut into slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from tests.support.gpt import Case, Tensors, Trainer
from tests.support.mla import MlaCase, MlaTrainer
from tests.support.moe import MoeCase, MoeTrainer
from tests.support.mtp import MtpCase, MtpTrainer
from tests.support.unequal import UnequalCase, UnequalTrainer


@dataclass(frozen=True)
class Sliced(Case):
    """What cases with slices have in common."""

    num_slices: int = 1
    slice_lengths: tuple[int, ...] = ()
    """Tokens of each slice; empty: all have the same length."""

    def __str__(self) -> str:
        return f"{super().__str__()}-n{self.num_slices}" + ("-" + self.recompute.replace(" ", "+") if self.recompute else "")

    @property
    def spec(self) -> ScheduleSpec:
        return replace(super().spec, num_slices=self.num_slices)

    @property
    def unpipelined(self) -> Any:
        return replace(super().unpipelined, num_slices=1, slice_lengths=())


@dataclass(frozen=True)
class SlicedCase(Sliced):
    """A dense model."""

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return SlicedTrainer(self, initial)


@dataclass(frozen=True)
class SlicedMlaCase(Sliced, MlaCase):
    """A model with multi-latent attention."""

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return SlicedMlaTrainer(self, initial)


@dataclass(frozen=True)
class SlicedMoeCase(Sliced, MoeCase):
    """A model with experts."""

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return SlicedMoeTrainer(self, initial)


@dataclass(frozen=True)
class SlicedMtpCase(Sliced, MtpCase):
    """A model with MTP layers."""

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return SlicedMtpTrainer(self, initial)


class SlicedBatches(Trainer):
    """Batches are dictionaries with a loss mask, of which slices have unequal shares, and the loss is a sum and its tokens."""

    case: Any

    def close(self) -> None:
        """Also restore what slices replace in megatron-core."""
        self.schedule.remove_slices()
        super().close()

    def _schedule_options(self) -> dict[str, Any]:
        return {"slicing": SliceOptions(lengths=self.case.slice_lengths)}

    def batches(self, step: int) -> Iterator[Any]:
        for number, (tokens, labels) in enumerate(super().batches(step)):
            generator = torch.Generator().manual_seed(step * 100 + number)
            mask = (torch.rand(tokens.shape, generator=generator) < 0.7).float().to(self.device)
            positions = torch.arange(tokens.size(1), device=self.device).expand(tokens.shape)
            yield {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions, "attention_mask": None}

    def forward_step(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        given = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], **given)

        def loss_func(per_token: torch.Tensor) -> tuple[Any, ...]:
            total = (per_token.float() * batch["loss_mask"]).sum()
            num_tokens = batch["loss_mask"].sum().to(torch.int)
            return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}

        return output, loss_func

    def loss_of(self, result: Any) -> float:
        total, num_tokens = result["lm loss"]
        return float(total / num_tokens)


class SlicedTrainer(SlicedBatches):
    """Trains a `SlicedCase`."""


@dataclass(frozen=True)
class SlicedUnequalCase(Sliced, UnequalCase):
    """A dense model whose microbatches have lengths of their own."""

    def trainer(self, initial: Tensors | None = None) -> UnequalTrainer:
        return SlicedUnequalTrainer(self, initial)


class SlicedUnequalTrainer(SlicedBatches, UnequalTrainer):
    """Trains a `SlicedUnequalCase`."""

    case: SlicedUnequalCase

    def _schedule_options(self) -> dict[str, Any]:
        options = UnequalTrainer._schedule_options(self)
        if "unequal" not in options:
            return {}
        unequal = replace(options["unequal"], tokens_of=lambda item: int(item["tokens"].size(1)))
        return SlicedBatches._schedule_options(self) | {"unequal": unequal}


class SlicedMlaTrainer(SlicedBatches, MlaTrainer):
    """Trains a `SlicedMlaCase`."""


class SlicedMtpTrainer(MtpTrainer, SlicedBatches):
    """Trains a `SlicedMtpCase`."""


class SlicedMoeTrainer(SlicedBatches, MoeTrainer):
    """Trains a `SlicedMoeCase`."""
