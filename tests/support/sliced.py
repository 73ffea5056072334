"""The small models of `gpt` and `moe`, whose microbatches are cut into slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from tests.support.gpt import MICRO_BATCH, SEQUENCE, Case, Trainer
from tests.support.moe import MoeCase, MoeTrainer
from tests.support.unequal import UnequalCase, UnequalTrainer


@dataclass(frozen=True)
class Sliced(Case):
    """What cases with slices have in common."""

    num_slices: int = 1
    slice_lengths: tuple[int, ...] = ()
    """Tokens of each slice; empty: all have the same length."""

    @property
    def spec(self) -> ScheduleSpec:
        return replace(super().spec, num_slices=self.num_slices)

    @property
    def unpipelined(self) -> Any:
        return replace(super().unpipelined, num_slices=1, slice_lengths=())


@dataclass(frozen=True)
class SlicedCase(Sliced):
    """A dense model."""


@dataclass(frozen=True)
class SlicedMoeCase(Sliced, MoeCase):
    """A model with experts."""


class SlicedBatches(Trainer):
    """Batches are dictionaries with a loss mask, of which slices have unequal shares, and the loss is a sum and its tokens."""

    case: Any

    def close(self) -> None:
        """Also restore what slices replace in the model."""
        self.schedule.restore_model()
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
        batch = self.unpacked(next(iterator))
        given = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], **given)

        def loss_func(per_token: torch.Tensor) -> tuple[Any, ...]:
            total = (per_token.float() * batch["loss_mask"]).sum()
            num_tokens = batch["loss_mask"].sum().to(torch.int)
            return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}

        return output, loss_func

    def unpacked(self, batch: Any) -> dict[str, Any]:
        """What `batches` yielded, or a slice's part of it, as the arguments of the model."""
        return dict(batch)

    def loss_of(self, result: Any) -> float:
        total, num_tokens = result["lm loss"]
        return float(total / num_tokens)


class SlicedTrainer(SlicedBatches, trains=SlicedCase):
    """Trains a `SlicedCase`."""


@dataclass(frozen=True)
class SlicedUnequalCase(Sliced, UnequalCase):
    """A dense model whose microbatches have lengths of their own."""


class SlicedUnequalTrainer(SlicedBatches, UnequalTrainer, trains=SlicedUnequalCase):
    case: SlicedUnequalCase

    def _schedule_options(self) -> dict[str, Any]:
        options = UnequalTrainer._schedule_options(self)
        if "unequal" not in options:
            return {}
        unequal = replace(options["unequal"], tokens_of=lambda item: int(item["tokens"].size(1)))
        return SlicedBatches._schedule_options(self) | {"unequal": unequal}


class SlicedMoeTrainer(SlicedBatches, MoeTrainer, trains=SlicedMoeCase):
    """Trains a `SlicedMoeCase`."""


@dataclass(frozen=True)
class SlicedPositionsCase(Sliced):
    """A model that takes position ids, from a loop that reads or counts them."""

    positions: str = "restart"
    """Which the batch has: `restart` inside of a row, or `restart-in-the-middle` of each, or `plain` ones that the loop does not
    read, or `none`; the loop then counts them."""
    batch: str = "positions"
    """What a batch is: a dictionary in which they have this name, or a `tuple`."""
    counts_up: bool = False
    """Whether the tokens of each row are 0, 1, ..."""
    copies: bool = False
    """Whether the loop copies what it reads, as to a device."""

    @property
    def are_read(self) -> bool:
        """Whether the loop reads them from its batch."""
        return self.positions.startswith("restart")


class SlicedPositionsTrainer(SlicedTrainer, trains=SlicedPositionsCase):
    case: SlicedPositionsCase

    def batches(self, step: int) -> Iterator[Any]:
        for number, batch in enumerate(super().batches(step)):
            yield self._packed(batch, number)

    def _packed(self, batch: dict[str, Any], number: int) -> Any:
        case, positions = self.case, batch.pop("position_ids")
        every = {"restart": 5 + number % 3, "restart-in-the-middle": SEQUENCE // 2}.get(case.positions)
        if every:
            positions = (
                positions + torch.arange(MICRO_BATCH, device=self.device)[:, None] * (case.positions == "restart")
            ) % every
        if case.counts_up:
            batch["tokens"] = torch.arange(SEQUENCE, device=self.device).expand(MICRO_BATCH, -1).contiguous()
        if case.batch == "tuple":
            batch["loss_mask"] = batch["loss_mask"].to(torch.int)
            values = (batch["tokens"], batch["labels"], batch["loss_mask"])
            return values if case.positions == "none" else (*values, positions)
        return batch if case.positions == "none" else batch | {case.batch: positions}

    def unpacked(self, batch: Any) -> dict[str, Any]:
        case = self.case
        if case.batch == "tuple":
            batch = dict(zip(("tokens", "labels", "loss_mask", "positions"), batch, strict=False))
        batch = {"attention_mask": None} | batch
        positions = batch.pop(case.batch if case.batch != "tuple" else "positions", None)
        if not case.are_read:
            positions = torch.arange(batch["tokens"].size(1), device=self.device).expand(batch["tokens"].shape)
        return batch | {"position_ids": positions.clone() if case.copies else positions}
