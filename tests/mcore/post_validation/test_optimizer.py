"""Options of an optimizer that a split step would ignore are rejected."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

with quiet_third_parties():
    from megatron.zerobubble.mcore.post_validation.optimizer import MegatronRollbackOptimizer


def _split(parameter: torch.Tensor, **options: Any) -> None:
    optimizer = SimpleNamespace(config=SimpleNamespace(**options), get_parameters=lambda: [parameter])
    MegatronRollbackOptimizer(optimizer, rollback="exact", snapshot_on_host=False, on_host=nullcontext, timeout=None)


@pytest.mark.parametrize(
    "options",
    [{"use_precision_aware_optimizer": True}, {"optimizer_cpu_offload": True}, {"grad_norm_skip_threshold": 10.0}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_stock_step_are_rejected_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} works with the stock schedule only"):
        _split(torch.nn.Parameter(torch.zeros(1)), **options)


def test_parameters_with_a_norm_of_their_own_are_rejected() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(1))
    parameter.grad_norm_group = "mtp"
    with pytest.raises(ConfigError, match="mtp_detach_heads clips MTP layers by a norm of their own"):
        _split(parameter, grad_norm_skip_threshold=math.inf)
