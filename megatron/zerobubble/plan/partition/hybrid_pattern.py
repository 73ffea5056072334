"""The layer kinds of a model that mixes them, in the text of megatron-core's ``--hybrid-layer-pattern``.

One letter is one layer, in the order data flows, and a bar separates two stages::

    *-*|-*E|*-|*-*-     four stages of 3, 3, 2 and 4 layers

    *   attention
    -   MLP
    E   MLP with experts
    M   Mamba

Attention and MLP are layers of their own here: ``*-`` is what a GPT calls one transformer layer. Behind the last stage the layers
of multi-token prediction (MTP) may follow, a slash and the same letters for each depth: ``*-*|-*E/*-/*-``.

Invariant: only the first and the last stage can be without layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["HybridPattern"]

_STAGE_BOUNDARY, _MTP_SEPARATOR = "|", "/"


@dataclass(frozen=True, kw_only=True)
class HybridPattern:
    """The kind of every layer, and where stages begin."""

    segments: tuple[str, ...]
    """One letter per layer, in one string per stage; a single string if the text has no bar."""
    mtp: str = ""
    """The text from the first slash on: MTP layers, which are on the last stage."""

    @staticmethod
    def parse(text: str) -> HybridPattern:
        """Parse a pattern. Which letters there are is for the model to check.

        Raises:
            ConfigError: the pattern has no layer, or a stage without layers inside the pipeline.
        """
        decoder, slash, depths = text.partition(_MTP_SEPARATOR)
        pattern = HybridPattern(segments=tuple(decoder.split(_STAGE_BOUNDARY)), mtp=slash + depths)
        if not pattern.num_layers:
            raise ConfigError(f"hybrid layer pattern {text!r} has no layer")
        for stage, segment in enumerate(pattern.segments[1:-1], start=1):
            if not segment:
                raise ConfigError(
                    f"hybrid layer pattern {text!r}: stage {stage} of {len(pattern.segments)} would hold 0 layers; it needs at "
                    "least 1, because it has neither the embedding nor the head"
                )
        return pattern

    @property
    def text(self) -> str:
        """The pattern as `parse` and megatron-core read it."""
        return _STAGE_BOUNDARY.join(self.segments) + self.mtp

    @property
    def layers(self) -> str:
        """One letter per layer of the whole model, without MTP layers."""
        return "".join(self.segments)

    @property
    def num_layers(self) -> int:
        """Number of layers in the model, without MTP layers."""
        return len(self.layers)

    @property
    def names_stages(self) -> bool:
        """Whether the text says where stages begin."""
        return len(self.segments) > 1

    def over(self, placement: Placement) -> HybridPattern:
        """This pattern with one segment per stage of `placement`; without bars, `StageLayers.spread` divides the layers.

        Raises:
            ConfigError: the pattern has another number of segments, the layers do not divide, or see `check_mtp`.
        """
        self.check_mtp(placement)
        if self.names_stages and len(self.segments) != placement.num_stages:
            raise ConfigError(
                f"hybrid layer pattern {self.text!r} has {len(self.segments)} segments, and {placement.num_ranks} pipeline ranks "
                f"with {placement.num_chunks} stage(s) each need {placement.num_stages}"
            )
        if self.names_stages:
            return self
        try:
            return self._cut(StageLayers.spread(self.num_layers, placement))
        except ConfigError as error:
            raise ConfigError(f"hybrid layer pattern {self.text!r}: {error}; or write | between its stages") from None

    def check_mtp(self, placement: Placement) -> None:
        """Raise ConfigError for MTP layers under a placement with several stages per rank."""
        if self.mtp and placement.num_chunks > 1:
            raise ConfigError(
                f"hybrid layer pattern {self.text!r} has MTP layers (after {_MTP_SEPARATOR}), which need a schedule with one "
                "model chunk per rank, such as zb-h1 or zb-h2: take one of these, leave them out, or train a GPTModel"
            )

    def regrouped(self, num_stages: int) -> HybridPattern:
        """This pattern with another number of segments, see `StageLayers.regrouped`; a text without bars is cut evenly."""
        return self._cut(self.stage_layers.regrouped(num_stages))

    def _cut(self, layers: StageLayers) -> HybridPattern:
        ends = itertools.accumulate(layers.per_stage)
        segments = tuple(self.layers[end - count : end] for count, end in zip(layers.per_stage, ends, strict=True))
        return HybridPattern(segments=segments, mtp=self.mtp)

    def first_layer(self, stage: int) -> int:
        """Number of layers in all stages before `stage`."""
        return sum(map(len, self.segments[:stage]))

    @property
    def stage_layers(self) -> StageLayers:
        """The number of layers of every stage."""
        return StageLayers(per_stage=tuple(map(len, self.segments)))
