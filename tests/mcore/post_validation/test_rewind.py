"""Rewinding to the start of an iteration restores what its forwards wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties

with quiet_third_parties():
    from megatron.zerobubble.mcore.compat import router_loss_entries, router_loss_sums
    from megatron.zerobubble.mcore.post_validation.rewind import Replayed, Rewind


@pytest.fixture
def _no_router_losses() -> Iterator[None]:
    """megatron-core's sums of router losses, empty before and afterwards."""
    with HostDevice():
        router_loss_entries().clear()
        yield
        router_loss_entries().clear()


def record(name: str, loss: float, *, layer_number: int) -> None:
    """As a router does in its forward pass, with two layers."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker as tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

        save_to_aux_losses_tracker(name, torch.tensor(loss), layer_number, 2)
    else:
        tracker().record(name, torch.tensor(loss), layer_number, 2)


@pytest.mark.usefixtures("_no_router_losses")
def test_everything_is_restored() -> None:
    chunk = torch.nn.BatchNorm1d(2)
    iterator = Replayed(iter(range(5)))
    record("known", 2.0, layer_number=1)
    rewind = Rewind([iterator, None], [chunk])

    def forwards() -> tuple[list[int], float]:
        taken = [next(iterator), next(iterator)]
        drawn = torch.rand(4, 2)
        chunk(drawn)
        record("known", 5.0, layer_number=1)
        record("new", 7.0, layer_number=2)
        return taken, float(drawn.sum())

    first = forwards()
    written = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    rewind.rewind()
    assert int(chunk.num_batches_tracked) == 0
    assert router_loss_sums()["known"].tolist() == [2.0, 0.0]
    assert router_loss_sums()["new"].tolist() == [0.0, 0.0]
    assert forwards() == first
    assert all(torch.equal(buffer, written[name]) for name, buffer in chunk.named_buffers())
    assert router_loss_sums()["known"].tolist() == [7.0, 0.0]
    assert router_loss_sums()["new"].tolist() == [0.0, 7.0]
    assert next(iterator) == 2
