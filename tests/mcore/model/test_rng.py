"""Whether a model's forward pass draws random numbers, for which each chunk has a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron.zerobubble.mcore.model.rng import draws


@pytest.mark.parametrize(
    ("options", "layer", "expected"),
    [
        ({"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None}, nn.Dropout(0.0), False),
        ({"hidden_dropout": 0.1}, nn.Identity(), True),
        ({"attention_dropout": 0.1}, nn.Identity(), True),
        ({"moe_input_jitter_eps": 1e-3}, nn.Identity(), True),
        ({}, nn.Dropout(0.1), True),
        ({}, nn.AlphaDropout(0.1), True),
    ],
)
def test_a_model_draws_by_its_config_or_by_a_dropout_layer(options: dict[str, Any], layer: nn.Module, expected: bool) -> None:
    inner = nn.Sequential(layer, nn.Linear(1, 1))
    inner.config = SimpleNamespace(**options)  # type: ignore[assignment]
    assert draws(nn.ModuleList([nn.Linear(1, 1), inner])) is expected
