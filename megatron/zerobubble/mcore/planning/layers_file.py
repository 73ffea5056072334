"""Writes `layers.json` beside a trace: the layers of the model with measured times and bytes, for `zerobubble layout --layers`.

What is measured are stages, in the iterations that are profiled for planning; `Model.measured` has the parts from them. Weights,
gradients and optimizer state are measured per rank, and divided over its stages in proportion to their weights. Tied word
embeddings count twice, because they are on two ranks under linear and interleaved placements.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.planning.stage_contents import StageContents
from megatron.zerobubble.mcore.replanner import Replanner
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import Model

__all__ = ["static_bytes", "write_layers_file"]

_log = logging.getLogger(__name__)

FILE = "layers.json"


def write_layers_file(directory: str, contents: StageContents, replanner: Replanner, placement: Placement) -> None:
    """Write the file, if the memory of the profiled iterations was measured. Rank 0 calls it.

    Args:
        directory: of --zero-bubble-trace.
        contents: of the stages.
        replanner: has the measured costs.
        placement: stage -> rank.
    """
    if replanner.costs is None or replanner.memory is None or not contents.layer_kinds:
        return
    layers, path = contents.layers, Path(directory) / FILE
    try:
        model = Model.measured(
            contents.layer_kinds,
            layers,
            replanner.costs.whole.plain,
            unit_bytes=replanner.unit_bytes,
            static_bytes=static_bytes(contents.weights, [rank.state_bytes for rank in replanner.memory], placement),
        )
        body = {"source": f"measured with {placement.num_stages} stages on {placement.num_ranks} ranks, {layers.text}"}
        path.write_text(json.dumps(body | model.to_json(), indent=1) + "\n", encoding="utf-8")
    except ConfigError as error:
        _log.warning("no %s: %s", path, error)
    except OSError as error:  # must not make a run that is done a failed one
        _log.warning("%s cannot be written: %s", path, error.strerror or error)


def static_bytes(weights: Sequence[int], state_bytes: Sequence[float], placement: Placement) -> list[float]:
    """Weights, gradients and optimizer state of every stage: its share of its rank's.

    Args:
        weights: number of weights of every stage.
        state_bytes: measured, per pipeline rank.
        placement: stage -> rank.
    """
    of_rank = [sum(weights[stage] for stage in stages) for stages in placement.rank_to_stages]
    per_weight = [held / count if count else 0.0 for held, count in zip(state_bytes, of_rank, strict=True)]
    return [per_weight[rank] * count for rank, count in zip(placement.stage_to_rank, weights, strict=True)]
