"""The flags of FP8: as Megatron-LM spells them, what they become, and which do not go together."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config import model as checks
from megatron.zerobubble.training.config.settings import Settings
from tests.training.test_arguments import settings

ENGINE = "--transformer-impl transformer_engine --pipeline-model-parallel-size 4 --enable-zero-bubble --bf16"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine as if it were installed."""
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: object()), metadata=importlib.metadata)
    monkeypatch.setattr(checks, "importlib", found)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.20.2")


def parse(flags: str) -> Settings:
    return settings(f"{ENGINE} {flags}", world_size=4)


def test_without_a_format_megatron_cores_defaults_stay() -> None:
    assert parse("").fp8.model_options() == {}


def test_what_the_flags_become() -> None:
    options = parse("--fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max").fp8.model_options()
    history = {"fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
    assert options == {"fp8": "hybrid", "fp8_recipe": "delayed", **history}
    from megatron.core.transformer import TransformerConfig

    assert set(options) <= set(TransformerConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-recipe tensorwise", "--fp8-recipe needs --fp8-format e4m3 or hybrid"),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-history-len 2",
            "--fp8-amax-history-len has no effect with --fp8-recipe tensorwise",
        ),
        ("--fp8-format hybrid --fp8-amax-history-len 0", "--fp8-amax-history-len 0 must be greater than 0"),
        (
            "--fp8-format hybrid --recompute-granularity selective --recompute-modules layernorm",
            "--recompute-modules layernorm does not go with --fp8-recipe delayed",
        ),
    ],
)
def test_what_does_not_go_together(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--transformer-impl local --bf16", "--fp8-format hybrid needs --transformer-impl transformer_engine, not local"),
        ("--transformer-impl transformer_engine", "--fp8-format hybrid needs --bf16 or --fp16"),
    ],
)
def test_what_it_needs(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(f"--pipeline-model-parallel-size 4 --fp8-format hybrid {flags}", world_size=4)
