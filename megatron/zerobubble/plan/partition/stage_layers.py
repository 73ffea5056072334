"""The number of decoder layers of each stage, and its layout text.

The text is that of Megatron's ``--pipeline-model-parallel-layout``: stages in the order data flows, independent of their ranks,
with a bar between two of them. A letter is a part of the model, and ``*n`` repeats the letter or group before it::

    Et|(ttt|)*2ttL      four stages of 1, 3, 3 and 2 layers

    E   the embedding, first in the first stage
    t   a decoder layer
    m   an MTP layer (multi-token prediction): all in one stage, behind the last t; may be left out
    L   the head and its loss, last in the last stage

A stage without layers passes on what it gets: ``Et||tL``.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement

__all__ = ["StageLayers", "regrouped_text"]

_REPEATED = re.compile(r"(?:\((?P<group>[^()]+)\)(?=\*)|(?P<part>[EtmL|]))(?:\*(?P<times>[1-9][0-9]{0,3})(?![0-9]))?")
"""A letter or a group with its repetition count. A group without a count does not match, as Megatron cannot parse it."""

_SPELLED_OUT = 4
"""Up to this number layers are written as ``tttt``, beyond it as ``t*5``."""


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The number of decoder layers of every stage, 0 or more. Raises ConfigError for less, or for no stage at all."""

    per_stage: tuple[int, ...]
    """One number per stage, in the order data flows."""

    def __post_init__(self) -> None:
        if not self.per_stage:
            raise ConfigError("a model has at least one stage, none was given")
        for stage, count in enumerate(self.per_stage):
            if count < 0:
                raise ConfigError(f"stage {stage} of {self.num_stages} would hold {count} layers; it needs 0 or more")

    @property
    def num_stages(self) -> int:
        """Number of stages in the pipeline."""
        return len(self.per_stage)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers in the model."""
        return sum(self.per_stage)

    @property
    def is_even(self) -> bool:
        """Whether all stages have the same number of layers."""
        return len(set(self.per_stage)) == 1

    @property
    def text(self) -> str:
        """The layout text in its usual short form, which `parse` and Megatron read."""
        stages = [_layers_text(count) for count in self.per_stage]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
        if len(stages) == 1:
            return stages[0]
        inside = ""
        for stage, same in itertools.groupby(stages[1:-1]):
            times = len(list(same))
            inside += f"{stage}|" if times == 1 else f"({stage}|)*{times}"
        return f"{stages[0]}|{inside}{stages[-1]}"

    @staticmethod
    def parse(text: str) -> StageLayers:
        """Parse a layout text.

        Raises:
            ConfigError: it is malformed, or has parts that no schedule here can run. The message names the place.
        """
        stages = _unrolled(text.replace(",", ""), text).split("|")
        whole = "|".join(stages)
        if whole.count("E") != 1 or not whole.startswith("E"):
            raise ConfigError(f"layout {text!r} must have one E (embedding), at the very beginning")
        if whole.count("L") != 1 or not whole.endswith("L"):
            raise ConfigError(f"layout {text!r} must have one L (loss), at the very end")
        if "m" in whole and not re.fullmatch(r"[^m]*m+[|]*L", whole):
            own = next(stage for stage, parts in enumerate(stages) if "m" in parts)
            raise ConfigError(
                f"layout {text!r} has an m (multi-token prediction) in stage {own}: put all of them in one stage, behind the "
                "last t, for example directly before the L"
            )
        return StageLayers(per_stage=tuple(stage.count("t") for stage in stages))

    @staticmethod
    def mtp_layers(text: str) -> tuple[int, int] | None:
        """(stage, number) of the MTP layers in a layout text that `parse` reads; None: it leaves them out."""
        stages = _unrolled(text.replace(",", ""), text).split("|")
        return next(((stage, parts.count("m")) for stage, parts in enumerate(stages) if "m" in parts), None)

    @staticmethod
    def spread(num_layers: int, placement: Placement) -> StageLayers:
        """The same number of layers on every rank, and in every stage if the layers divide evenly.

        On the V placement they may divide over the ranks only: then the stages on the way down (0..p-1) have one layer more than
        those on the way up. Rank 0's larger stage is then the one with the embedding, not the one with the costlier head, and in
        the simulator the hand-written V patterns lose less this way than with the larger stages elsewhere.

        Raises:
            ConfigError: the layers do not divide; the message names the nearest numbers that do.
        """
        stages, ranks = placement.num_stages, placement.num_ranks
        each, over = divmod(num_layers, stages)
        if over == 0 and each > 0:
            return StageLayers(per_stage=(each,) * stages)
        if placement.name == "V" and over == ranks and (each > 0 or ranks == 1):
            return StageLayers(per_stage=(each + 1,) * ranks + (each,) * ranks)
        unit = ranks if placement.name == "V" else stages
        above = max(stages, -(-num_layers // unit) * unit)
        below = num_layers // unit * unit
        near = f"{below} or {above}" if stages <= below < above else f"{above}"
        raise ConfigError(f"{num_layers} layers do not divide over {stages} stages ({placement.name} placement); {near} would")

    @staticmethod
    def balanced(num_layers: int, placement: Placement, *, first: int = 0, last: int = 0) -> StageLayers:
        """Stages that differ by one layer at most, for any number of layers on the V placement.

        The stages with one layer fewer are the last one, with the head, then the first one, with the embedding, then one per rank
        on the way up from the end. 61 layers on 16 stages are ``Ettt|(tttt|)*13ttt|tttL``.

        Args:
            num_layers: of the model.
            placement: stage -> rank.
            first: layers that the embedding counts for.
            last: layers that the head counts for, or MTP layers.
        """
        stages = placement.num_stages
        preferred = [*range(1, stages - 1), 0, stages - 1]
        loads, per_stage = [0] * stages, [0] * stages
        loads[0] += first
        loads[-1] += last
        for _ in range(num_layers):
            least = min(preferred, key=loads.__getitem__)
            loads[least] += 1
            per_stage[least] += 1
        return StageLayers(per_stage=tuple(per_stage))

    def regrouped(self, num_stages: int) -> StageLayers:
        """The same layers over another number of stages: neighboring stages are merged, and stages are cut.

        What the first and the last stage have less than the largest is what the embedding and the head count for: their parts
        have so much less, and the others are equal, or have one layer more on the first ones. So ranks stay as even under a V as
        they were, because it has stages i and 2p-1-i on one rank.

        Raises:
            ConfigError: a stage that had layers would be left without one.
        """
        common = math.gcd(self.num_stages, num_stages)
        merged, parts = self.num_stages // common, num_stages // common
        counts = [sum(self.per_stage[start : start + merged]) for start in range(0, self.num_stages, merged)]
        if parts == 1:
            return StageLayers(per_stage=tuple(counts))
        most, cut = max(counts), []
        for stage, count in enumerate(counts):
            before = most - count if stage == 0 else 0
            behind = most - count if stage == common - 1 > 0 else 0
            sizes = [(before + count + behind + parts - 1 - part) // parts for part in range(parts)]
            cut += _less(_less(sizes, before)[::-1], behind)[::-1]
        empty = [stage for stage, size in enumerate(cut[1:-1], start=1) if not size and counts[stage // parts]]
        if empty:
            raise ConfigError(
                f"{self.text!r} cut into {num_stages} stages leaves stage {empty[0]} without a layer; use fewer pipeline ranks"
            )
        return StageLayers(per_stage=tuple(cut))


def regrouped_text(text: str, num_stages: int) -> str:
    """A layout text over another number of stages (`StageLayers.regrouped`); MTP layers stay behind the same layers.

    Raises:
        ConfigError: `StageLayers.parse` cannot read it, or a stage would be left without layers.
    """
    given = StageLayers.parse(text)
    layers, mtp = given.regrouped(num_stages), StageLayers.mtp_layers(text)
    if mtp is None:
        return layers.text
    common = math.gcd(given.num_stages, num_stages)
    stages = _unrolled(layers.text, text).split("|")
    stage = (mtp[0] * common // given.num_stages + 1) * num_stages // common - 1
    if stage == num_stages - 1:
        return layers.text[:-1] + "m" * mtp[1] + "L"
    stages[stage] += "m" * mtp[1]
    return "|".join(stages)


def _less(sizes: list[int], missing: int) -> list[int]:
    """Sizes from which a number is taken, from the first ones on."""
    left = []
    for size in sizes:
        left.append(max(0, size - missing))
        missing = max(0, missing - size)
    return left


def _layers_text(count: int) -> str:
    return "t" * count if count <= _SPELLED_OUT else f"t*{count}"


def _unrolled(text: str, whole: str) -> str:
    """`text` with every repetition written out; `whole` is what the user gave, for messages."""
    parts, position = [], 0
    while position < len(text):
        item = _REPEATED.match(text, position)
        if item is None:
            raise _unreadable(text[position:], whole)
        part = item["part"] or _unrolled(item["group"], whole)
        parts.append(part * int(item["times"] or 1))
        position = item.end()
    return "".join(parts)


def _unreadable(rest: str, whole: str) -> ConfigError:
    return ConfigError(
        f"layout {whole!r} cannot be read from {rest!r} on; write E (embedding), t (layer), m (MTP layer), L (loss), | between "
        "two stages, and (tt|)*3 or t*3 for a repetition, 1 to 9999 times and not inside another one's parentheses"
    )
