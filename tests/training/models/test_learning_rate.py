"""What megatron-core's schedule of the learning rate is given."""

from __future__ import annotations

from types import SimpleNamespace

from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from tests.training.launch import TINY_MODEL

with quiet_third_parties():
    from megatron.zerobubble.training.models.mcore_config import scheduler


def test_it_advances_in_samples() -> None:
    flags = "--micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-3 --lr-warmup-iters 3 --lr-decay-iters 8"
    settings = settings_from_argv([*TINY_MODEL, *flags.split(), "--mock-data"], world_size=1)
    made = scheduler(settings, SimpleNamespace(param_groups=[]))
    assert (made.lr_warmup_steps, made.lr_decay_steps, made.wd_incr_steps) == (12, 32, 40)
