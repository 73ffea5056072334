"""A model as a list of layers of several kinds, with their times and bytes: the file format `zerobubble-layers/1`.

::

    {"format": "zerobubble-layers/1", "comm_ms": 0.2,
     "kinds": {"embedding": {"forward_ms": 0.1, "backward_ms": 0.0, "wgrad_ms": 0.1, "activation_bytes": 0,
                             "after_backward_bytes": 0, "static_bytes": 3.2e9},
               "attention": {...}, "mlp": {...}, "mamba": {...}, "head": {...}},
     "layers": ["mamba", "mlp", "attention*2", "mlp"]}

`Model.measured` derives the parts from profiled stages: as stages have different parts, the costs of a layer of every kind, of
the embedding and of the head (with MTP layers) follow from theirs.

`layers` has the decoder layers in the order data flows. The embedding is in the first stage and the head in the last; MTP layers
(`num_mtp_layers` of kind `mtp`) stay with the head, as training has them. The kinds attention, mlp, moe and mamba are layers of a
hybrid model; any other name is a transformer layer. Unknown keys are ignored, so that a file can name its source.

Invariant: every number is finite and not negative, every layer's kind is known, and the model has at least one layer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import parse_json, quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import LARGEST, check_number
from megatron.zerobubble.plan.costs.length_model import least_squares
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["EMBEDDING", "FORMAT", "HEAD", "LETTERS", "MTP", "LayerCosts", "Model"]

FORMAT = "zerobubble-layers/1"
"""Version tag of the JSON form; readers refuse any other."""

EMBEDDING, HEAD, MTP = "embedding", "head", "mtp"
"""Kinds that are no decoder layers: parts of the first and of the last stage."""

LETTERS = {"attention": "*", "mlp": "-", "moe": "E", "mamba": "M"}
"""Kinds of a hybrid model, in the letters of `--hybrid-layer-pattern`."""

_REPEATED = re.compile(r"([A-Za-z][A-Za-z0-9_.-]{0,39})(?:\*([1-9][0-9]{0,3}))?")
_MOST_LAYERS = 2000
_MOST_BYTES = 1e18
"""Of a layer, or of a whole model, whose layers are added up: 70 billion parameters are over a terabyte with optimizer state."""


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Times and bytes of one layer on one rank, of one microbatch. Raises ConfigError for a negative or infinite number."""

    forward_ms: float = 0.0
    """F in milliseconds."""
    backward_ms: float = 0.0
    """B (dgrad) in milliseconds."""
    wgrad_ms: float = 0.0
    """W (wgrad) in milliseconds."""
    activation_bytes: float = 0.0
    """Activations from the start of F to the end of B."""
    after_backward_bytes: float = 0.0
    """What is kept from the end of B to the end of W."""
    static_bytes: float = 0.0
    """Weights, gradients and optimizer state, the same for every schedule."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, most=_MOST_BYTES if name.endswith("_bytes") else LARGEST)

    @property
    def work_ms(self) -> float:
        """F, B and W together, in milliseconds."""
        return self.forward_ms + self.backward_ms + self.wgrad_ms

    @staticmethod
    def of(*values: float) -> LayerCosts:
        """From the values of the fields, in their order."""
        return LayerCosts(**dict(zip(_NAMES, values, strict=True)))

    @staticmethod
    def total(parts: Sequence[LayerCosts]) -> LayerCosts:
        """The sum of several layers; of none, zeros."""
        return LayerCosts.of(*(sum(getattr(part, name) for part in parts) for name in _NAMES))

    def to_json(self) -> dict[str, float]:
        """One entry of `kinds`."""
        return dict(vars(self))


_NAMES = tuple(field.name for field in fields(LayerCosts))


@dataclass(frozen=True, kw_only=True)
class Model:
    """The layers of a model, in the order data flows."""

    layers: tuple[str, ...]
    """The kind of every decoder layer."""
    kinds: Mapping[str, LayerCosts]
    """Kind -> its costs; of the ends only those that cost anything."""
    num_mtp_layers: int = 0
    """MTP layers (multi-token prediction), in the last stage before the head."""
    comm_ms: float = 0.0
    """P2P latency of a message between two ranks, in milliseconds."""

    def __post_init__(self) -> None:
        check_number("comm_ms", self.comm_ms)
        if not self.layers:
            raise ConfigError("the model has no layer; name at least one in layers")
        if len(self.layers) > _MOST_LAYERS:
            raise ConfigError(f"the model has {len(self.layers):,} layers; give at most {_MOST_LAYERS:,}")
        for kind in self.layers:
            if kind in (EMBEDDING, HEAD, MTP):
                raise ConfigError(f"layers names {kind!r}, which is part of the first or the last stage; leave it out of layers")
            if kind not in self.kinds:
                raise ConfigError(f"layers names {quoted(kind)}, and kinds has {', '.join(sorted(self.kinds))}; add its costs")
        if self.num_mtp_layers and MTP not in self.kinds:
            raise ConfigError(f"num_mtp_layers is {self.num_mtp_layers}, and kinds has no {MTP!r}; add its costs")
        letters = {kind in LETTERS for kind in self.layers}
        if len(letters) > 1:
            raise ConfigError(
                f"layers mixes {', '.join(sorted(set(self.layers)))}: {', '.join(LETTERS)} are layers of a hybrid model, and "
                "all others transformer layers; use one or the other"
            )

    @staticmethod
    def measured(
        kinds: Sequence[str],
        layers: StageLayers,
        costs: CostModel,
        *,
        unit_bytes: float = 1.0,
        static_bytes: Sequence[float] = (),
    ) -> Model:
        """The model that was profiled.

        Args:
            kinds: the kind of every decoder layer.
            layers: the layers of the profiled stages.
            costs: their profiled costs.
            unit_bytes: bytes of one unit of the costs' activation memory; 1: the model has such units in place of bytes.
            static_bytes: weights, gradients and optimizer state of every stage; by default none.

        Raises:
            ConfigError: the stages are too few or too alike to distinguish the kinds of layers.
        """
        lists = [*costs.lists.values(), static_bytes or (0.0,) * layers.num_stages]
        units = (1.0, 1.0, 1.0, unit_bytes, unit_bytes, 1.0)
        parts = [_parts([unit * value for value in values], kinds, layers) for values, unit in zip(lists, units, strict=True)]
        return Model(
            layers=tuple(kinds),
            kinds={name: LayerCosts.of(*(part[name] for part in parts)) for name in (EMBEDDING, *dict.fromkeys(kinds), HEAD)},
            comm_ms=costs.comm_ms,
        )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def is_hybrid(self) -> bool:
        """Whether `--hybrid-layer-pattern` describes it."""
        return self.layers[0] in LETTERS

    def letters(self, begin: int, end: int) -> str:
        """The layers [begin, end) in the letters of `--hybrid-layer-pattern`."""
        return "".join(LETTERS[kind] for kind in self.layers[begin:end])

    @cached_property
    def costs(self) -> tuple[LayerCosts, ...]:
        """Costs of every decoder layer."""
        return tuple(self.kinds[kind] for kind in self.layers)

    @cached_property
    def first(self) -> LayerCosts:
        """What the first stage has before its layers: the embedding."""
        return self.kinds.get(EMBEDDING, LayerCosts())

    @cached_property
    def last(self) -> LayerCosts:
        """What the last stage has after its layers: MTP layers and the head."""
        mtp = [self.kinds[MTP]] * self.num_mtp_layers if self.num_mtp_layers else []
        return LayerCosts.total([*mtp, self.kinds.get(HEAD, LayerCosts())])

    @cached_property
    def total(self) -> LayerCosts:
        """The whole model."""
        return LayerCosts.total([self.first, *self.costs, self.last])

    @cached_property
    def sums(self) -> Mapping[str, tuple[float, ...]]:
        """Field of `LayerCosts` -> its sums over the first 0, 1, 2, ... decoder layers."""
        return {name: (0.0, *itertools.accumulate(getattr(one, name) for one in self.costs)) for name in _NAMES}

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "format": FORMAT,
            "comm_ms": self.comm_ms,
            "num_mtp_layers": self.num_mtp_layers,
            "kinds": {name: costs.to_json() for name, costs in self.kinds.items()},
            "layers": [_repeat(kind, len(list(same))) for kind, same in itertools.groupby(self.layers)],
        }

    @staticmethod
    def from_json(text: str | bytes) -> Model:
        """Parse the JSON form.

        Raises:
            ConfigError: it is not JSON, of another version, or lacks something; the message names the entry and what is allowed.
        """
        body = parse_json(text, "the layer file", ConfigError)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            given = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise ConfigError(f"the layer file has format {quoted(given)}; this version reads {FORMAT}")
        kinds, layers = body.get("kinds"), body.get("layers")
        if not isinstance(kinds, dict) or not kinds:
            raise ConfigError(f"the layer file's kinds is {quoted(kinds)}; give an object of kind -> costs")
        if not isinstance(layers, list):
            raise ConfigError(f"the layer file's layers is {quoted(layers)}; give a list such as {_example()}")
        if len(layers) > _MOST_LAYERS:
            raise ConfigError(f"the layer file's layers has {len(layers):,} entries; give at most {_MOST_LAYERS:,} layers")
        num_mtp = body.get("num_mtp_layers", 0)
        if isinstance(num_mtp, bool) or not isinstance(num_mtp, int) or not 0 <= num_mtp <= _MOST_LAYERS:
            raise ConfigError(f"the layer file's num_mtp_layers is {quoted(num_mtp)}; give a whole number, 0 or more")
        comm_ms = body.get("comm_ms", 0.0)
        try:
            return Model(
                layers=tuple(kind for entry in layers for kind in _unrolled(entry)),
                kinds={name: _costs(name, value) for name, value in kinds.items()},
                num_mtp_layers=num_mtp,
                comm_ms=comm_ms,
            )
        except ConfigError as error:
            raise ConfigError(f"the layer file: {error}") from None


def _parts(values: Sequence[float], kinds: Sequence[str], layers: StageLayers) -> Mapping[str, float]:
    """Part of the model -> its share in the values of the stages.

    A layer has the median over the stages with nothing but layers; what the first and the last stage have beyond their layers is
    the embedding's and the head's. Two stages cannot distinguish all three: then the one with less per layer is assumed to have
    layers only. Layers of several kinds follow by least squares.
    """
    names, last = sorted(set(kinds)), layers.num_stages - 1
    columns = (EMBEDDING, *names, HEAD)
    if not any(values):
        return dict.fromkeys(columns, 0.0)
    if len(names) == 1:
        per_layer = [value / count if count else math.inf for value, count in zip(values, layers.per_stage, strict=True)]
        inner = [value for value in per_layer[1:last] if math.isfinite(value)]
        layer = median(inner) if inner else min(per_layer)
        beyond = [max(0.0, values[stage] - layers.per_stage[stage] * layer) for stage in (0, last)]
        return dict(zip(columns, (beyond[0], layer, beyond[1]), strict=True))
    held, begin = [], 0
    for stage, count in enumerate(layers.per_stage):
        counts = Counter(kinds[begin : begin + count]) | Counter({EMBEDDING: int(stage == 0), HEAD: int(stage == last)})
        held.append([float(counts[name]) for name in columns])
        begin += count
    found = least_squares(list(zip(*held, strict=True)), values)
    if found is None:
        raise ConfigError(
            f"the layers of {layers.num_stages} stages ({', '.join(map(str, layers.per_stage))}) do not "
            f"distinguish {', '.join(names)}, the embedding and the head; "
            "profile with more stages per rank, or stages that differ in what they hold"
        )
    return {name: max(0.0, value) for name, value in zip(columns, found, strict=True)}


def _costs(kind: str, body: object) -> LayerCosts:
    if not isinstance(body, dict):
        raise ConfigError(f"kind {quoted(kind)} is {quoted(body)}; give an object with {', '.join(_NAMES)}")
    missing = [name for name in _NAMES if name not in body]
    if missing:
        raise ConfigError(f"kind {quoted(kind)} has no {', '.join(missing)}; give all of {', '.join(_NAMES)}")
    try:
        return LayerCosts.of(*(body[name] for name in _NAMES))
    except ConfigError as error:
        raise ConfigError(f"kind {quoted(kind)}: {error}") from None


def _unrolled(entry: object) -> list[str]:
    match = _REPEATED.fullmatch(entry) if isinstance(entry, str) else None
    if match is None:
        raise ConfigError(f"layers has {quoted(entry)}; write a kind, or a kind and how often, such as {_example()}")
    return [match[1]] * int(match[2] or 1)


def _repeat(kind: str, times: int) -> str:
    return kind if times == 1 else f"{kind}*{times}"


def _example() -> str:
    return '["dense*3", "moe_layer*58"]'
