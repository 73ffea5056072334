"""Writes `layers.json` beside a trace: the layers of the model with measured times and bytes, for `zerobubble plan --layers`.

What is measured are stages, in the iterations that are profiled for planning. Stages differ in what they hold, so the costs of a
layer of every kind, of the embedding and of the head (with MTP layers) follow from them. Weights, gradients and optimizer state
are measured per rank, and divided over its stages in proportion to their weights. Tied word embeddings count twice,
because they are on two ranks under linear and interleaved placements.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.replanner import Replanner
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.partition.balance import PartTimes
from megatron.zerobubble.plan.partition.layers import EMBEDDING, HEAD, LETTERS, LayerCosts, Model
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.memory_estimate import stage_weights

__all__ = ["layer_kinds", "measured_model", "static_bytes", "write_layers_file"]

_log = logging.getLogger(__name__)

FILE = "layers.json"


def write_layers_file(settings: Settings, replanner: Replanner | None, *, vocab_size: int) -> None:
    """Write the file with --zero-bubble-trace, if iterations were profiled and their memory measured. Rank 0 writes.

    Args:
        settings: flags of the run.
        replanner: has the measured costs.
        vocab_size: the tokenizer's vocabulary size, before padding.
    """
    directory = settings.zero_bubble.zero_bubble_trace
    if directory is None or dist.get_rank() != 0:
        return
    if replanner is None or replanner.costs is None or replanner.memory is None:
        return
    placement = settings.placement
    layers = settings.stage_layers(placement)
    static = static_bytes(settings, [rank.state_bytes for rank in replanner.memory], vocab_size=vocab_size)
    path = Path(directory) / FILE
    try:
        model = measured_model(layer_kinds(settings), layers, replanner.costs.plain, replanner.unit_bytes, static)
        body = {"source": f"measured with {placement.num_stages} stages on {placement.num_ranks} ranks, {layers.text}"}
        path.write_text(json.dumps(body | model.to_json(), indent=1) + "\n", encoding="utf-8")
    except ConfigError as error:
        _log.warning("no %s: %s", path, error)
    except OSError as error:  # must not make a run that is done a failed one
        _log.warning("%s cannot be written: %s", path, error.strerror or error)


def layer_kinds(settings: Settings) -> tuple[str, ...]:
    """The kind of every decoder layer, as a layer file names it."""
    pattern = settings.model.hybrid_layer_pattern
    if pattern is not None:
        names = {letter: name for name, letter in LETTERS.items()}
        return tuple(names[letter] for letter in pattern.replace("|", ""))
    has_experts = settings.moe_layer_pattern
    if len(set(has_experts)) == 1:
        return ("layer",) * len(has_experts)
    return tuple("moe_layer" if one else "dense" for one in has_experts)


def static_bytes(settings: Settings, state_bytes: Sequence[float], *, vocab_size: int) -> list[float]:
    """Weights, gradients and optimizer state of every stage: its share of its rank's, and tied word embeddings at both ends.

    Args:
        settings: flags of the run.
        state_bytes: measured, per pipeline rank.
        vocab_size: the tokenizer's vocabulary size, before padding.
    """
    placement, weights = settings.placement, stage_weights(settings, vocab_size=vocab_size)
    of_rank = [sum(weights[stage] for stage in stages) for stages in placement.rank_to_stages]
    per_weight = [held / count if count else 0.0 for held, count in zip(state_bytes, of_rank, strict=True)]
    found = [per_weight[rank] * count for rank, count in zip(placement.stage_to_rank, weights, strict=True)]
    if not settings.model.untie_embeddings_and_output_weights and placement.stage_to_rank[0] == placement.stage_to_rank[-1]:
        words = settings.padded_vocab_size(vocab_size) * settings.model.hidden_size
        found[-1] += per_weight[0] * words / settings.parallel.tensor_model_parallel_size
    return found


def measured_model(
    kinds: Sequence[str], layers: StageLayers, costs: CostModel, unit_bytes: float, static_bytes: Sequence[float]
) -> Model:
    """The model that was profiled.

    Args:
        kinds: the kind of every decoder layer.
        layers: the layers of the profiled stages.
        costs: their profiled costs.
        unit_bytes: bytes of one unit of the costs' activation memory.
        static_bytes: weights, gradients and optimizer state of every stage.

    Raises:
        ConfigError: the stages are too few or too alike to tell the kinds of layers apart.
    """
    measured: dict[str, Sequence[float]] = {
        "forward_ms": costs.forward_ms,
        "backward_ms": costs.backward_ms,
        "wgrad_ms": costs.wgrad_ms,
        "activation_bytes": [value * unit_bytes for value in costs.activation],
        "after_backward_bytes": [value * unit_bytes for value in costs.activation_after_backward],
        "static_bytes": static_bytes,
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
            f"the layers of {layers.num_stages} stages ({', '.join(map(str, layers.per_stage))}) do not tell {', '.join(names)}, "
            f"the embedding and the head apart; profile with more stages per rank, or stages that differ in what they hold"
        )
    found = torch.linalg.lstsq(matrix, torch.tensor(values, dtype=torch.float64).unsqueeze(1)).solution.flatten()
    return dict(zip(columns, found.clamp(min=0.0).tolist(), strict=True))
