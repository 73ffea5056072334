"""Rewinding to the start of an iteration restores what its forwards wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties

with quiet_third_parties():
    from megatron.core.transformer.moe import moe_utils

    from megatron.zerobubble.mcore.post_validation.rewind import Replayed, Rewind


@pytest.fixture
def tracker() -> Iterator[dict[str, dict[str, torch.Tensor]]]:
    """megatron-core's sums of router losses, empty before and afterwards."""
    with HostDevice():
        sums = moe_utils.get_moe_layer_wise_logging_tracker()
        sums.clear()
        yield sums
        sums.clear()


def test_everything_is_restored(tracker: dict[str, dict[str, torch.Tensor]]) -> None:
    chunk = torch.nn.BatchNorm1d(2)
    iterator = Replayed(iter(range(5)))
    moe_utils.save_to_aux_losses_tracker("known", torch.tensor(2.0), layer_number=1, num_layers=2)
    rewind = Rewind([iterator, None], [chunk])

    def forwards() -> tuple[list[int], float]:
        taken = [next(iterator), next(iterator)]
        drawn = torch.rand(4, 2)
        chunk(drawn)
        moe_utils.save_to_aux_losses_tracker("known", torch.tensor(5.0), layer_number=1, num_layers=2)
        moe_utils.save_to_aux_losses_tracker("new", torch.tensor(7.0), layer_number=2, num_layers=2)
        return taken, float(drawn.sum())

    first = forwards()
    written = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    rewind.rewind()
    assert int(chunk.num_batches_tracked) == 0
    assert tracker["known"]["values"].tolist() == [2.0, 0.0]
    assert tracker["new"]["values"].tolist() == [0.0, 0.0]
    assert forwards() == first
    assert all(torch.equal(buffer, written[name]) for name, buffer in chunk.named_buffers())
    assert tracker["known"]["values"].tolist() == [7.0, 0.0]
    assert tracker["new"]["values"].tolist() == [0.0, 7.0]
    assert next(iterator) == 2
