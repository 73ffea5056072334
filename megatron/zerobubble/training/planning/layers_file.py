"""Writes `layers.json` beside a trace: the layers of the model with measured times and bytes, for `zerobubble plan --layers`.

What is measured are stages, in the iterations that are profiled for planning; `measured_layers` has the parts from them. Weights,
gradients and optimizer state are measured per rank, and divided over its stages in proportion to their weights. Tied word
embeddings count twice, because they are on two ranks under linear and interleaved placements.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.replanner import Replanner
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.estimate.memory_estimate import stage_weights
from megatron.zerobubble.training.planning.measured_layers import layer_kinds, measured_model

__all__ = ["static_bytes", "write_layers_file"]

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
        model = measured_model(
            layer_kinds(settings), layers, replanner.costs.plain, unit_bytes=replanner.unit_bytes, static_bytes=static
        )
        body = {"source": f"measured with {placement.num_stages} stages on {placement.num_ranks} ranks, {layers.text}"}
        path.write_text(json.dumps(body | model.to_json(), indent=1) + "\n", encoding="utf-8")
    except ConfigError as error:
        _log.warning("no %s: %s", path, error)
    except OSError as error:  # must not make a run that is done a failed one
        _log.warning("%s cannot be written: %s", path, error.strerror or error)


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
