"""megatron-core's sums of MTP losses for the log, on the rank where a loop for megatron-core looks for them.

megatron-core adds the loss of each MTP layer (and from 0.19 on counts of its predictions) to a record of the rank that computes
them, and `MTPLossLoggingHelper.track_mtp_metrics` reduces that over the data-parallel replicas, not over the pipeline: a loop
logs it on the last pipeline rank. Under V the head is on the first rank. So what the passes of a call add there is added to the
last rank's record, too. Which ranks' records a loop clears, and how often, does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.zerobubble.mcore.compat import mtp_entries, mtp_sums

__all__ = ["AddedMtpSums", "add_mtp_sums"]


class AddedMtpSums:
    """A context around passes: what they add to the sums of this rank.

    The sums are zero meanwhile, so that what is added has the same bits as in a record that was cleared.
    """

    def __init__(self) -> None:
        self.added: dict[str, Tensor] = {}
        """By name, [MTP layers]; from `note` on."""
        self._before: dict[str, Tensor] = {}

    def __enter__(self) -> AddedMtpSums:
        self._before = {name: values.clone() for name, values in mtp_sums().items()}
        for values in mtp_sums().values():
            values.zero_()
        return self

    def note(self) -> None:
        """The last pass that adds has been issued."""
        self.added = {name: values.clone() for name, values in mtp_sums().items()}

    def __exit__(self, *_: Any) -> None:
        for name, values in mtp_sums().items():
            if name in self._before:
                values.add_(self._before[name])


def add_mtp_sums(added: Mapping[str, Tensor]) -> None:
    """Add to the sums of this rank what the passes on another rank of its pipeline have added there."""
    if not added:
        return
    entries = mtp_entries()
    for name, values in added.items():
        entries[name] = entries.get(name, torch.zeros_like(values)) + values
    entries["reduce_group"] = None
    entries["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
