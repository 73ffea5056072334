"""The layers of a model with measured times and bytes, from the stages that were profiled.

Stages differ in what they hold, so the costs of a layer of every kind, of the embedding and of the head (with MTP layers) follow
from them: of equal layers as in `PartTimes.from_stages`, of several kinds by least squares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.partition.balance import PartTimes
from megatron.zerobubble.plan.partition.layer_costs import EMBEDDING, HEAD, LayerCosts, Model
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

__all__ = ["measured_model"]


def measured_model(
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
    measured: dict[str, Sequence[float]] = {
        "forward_ms": costs.forward_ms,
        "backward_ms": costs.backward_ms,
        "wgrad_ms": costs.wgrad_ms,
        "activation_bytes": [value * unit_bytes for value in costs.activation],
        "after_backward_bytes": [value * unit_bytes for value in costs.activation_after_backward],
        "static_bytes": static_bytes or (0.0,) * layers.num_stages,
    }
    parts = {name: _parts(values, kinds, layers) for name, values in measured.items()}
    names = (EMBEDDING, *dict.fromkeys(kinds), HEAD)
    return Model(
        layers=tuple(kinds),
        kinds={part: LayerCosts(**{name: values[part] for name, values in parts.items()}) for part in names},
        comm_ms=costs.comm_ms,
    )


def _parts(values: Sequence[float], kinds: Sequence[str], layers: StageLayers) -> Mapping[str, float]:
    """Part of the model -> its share in the values of the stages."""
    names = sorted(set(kinds))
    if not any(values):
        return dict.fromkeys((EMBEDDING, *names, HEAD), 0.0)
    if len(names) == 1:
        one = PartTimes.from_stages(values, layers)
        return {EMBEDDING: one.embedding_ms, names[0]: one.layer_ms, HEAD: one.head_ms}
    columns = (EMBEDDING, *names, HEAD)
    rows, begin = [], 0
    for stage, count in enumerate(layers.per_stage):
        held = Counter(kinds[begin : begin + count])
        held[EMBEDDING], held[HEAD] = int(stage == 0), int(stage == layers.num_stages - 1)
        rows.append([float(held[name]) for name in columns])
        begin += count
    matrix = torch.tensor(rows, dtype=torch.float64)
    if int(torch.linalg.matrix_rank(matrix)) < len(columns):
        raise ConfigError(
            f"the layers of {layers.num_stages} stages ({', '.join(map(str, layers.per_stage))}) do not "
            f"distinguish {', '.join(names)}, the embedding and the head; "
            "profile with more stages per rank, or stages that differ in what they hold"
        )
    found = torch.linalg.lstsq(matrix, torch.tensor(values, dtype=torch.float64).unsqueeze(1)).solution.flatten()
    return dict(zip(columns, found.clamp(min=0.0).tolist(), strict=True))
