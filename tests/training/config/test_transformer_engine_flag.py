"""--transformer-impl transformer_engine: errors in flags are reported before the job starts."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config import model as checks
from megatron.zerobubble.training.models import mcore_config
from tests.support.apex_double import APEX
from tests.training.test_arguments import settings

FLAG = "--transformer-impl transformer_engine --pipeline-model-parallel-size 4"


def test_it_has_to_be_installed() -> None:
    with pytest.raises(ConfigError, match=r"which is not installed: pip install 'transformer-engine\[pytorch\]>=2\.8\.0'"):
        settings(FLAG, world_size=4)


@pytest.mark.parametrize(
    ("version", "more", "message"),
    [
        ("2.7.0", "--enable-zero-bubble", r"version 2\.7\.0 is installed, .* schedule zb-h1 needs 2\.8\.0 or later"),
        ("2.8.0", "--enable-zero-bubble", None),
        ("2.8.0", "--enable-zero-bubble --distributed-backend gloo", "needs CUDA, and --distributed-backend is gloo"),
        ("2.2.0", "", None),
        ("2.10.0", "--zero-bubble-schedule zb-h2", None),
    ],
)
def test_it_has_to_fit(monkeypatch: pytest.MonkeyPatch, version: str, more: str, message: str | None) -> None:
    found = SimpleNamespace(find_spec=lambda _: object())
    monkeypatch.setattr(checks, "importlib", SimpleNamespace(util=found, metadata=SimpleNamespace(version=lambda _: version)))
    if message is None:
        settings(f"{FLAG} {more}", world_size=4)
    else:
        with pytest.raises(ConfigError, match=message):
            settings(f"{FLAG} {more}", world_size=4)


@pytest.mark.parametrize(
    ("flags", "apex", "fused"),
    [
        (FLAG, False, True),
        (f"{FLAG} --no-gradient-accumulation-fusion", True, False),
        ("--transformer-impl local", False, False),
        ("--transformer-impl local", True, True),
    ],
)
def test_its_fused_accumulation_needs_no_apex(monkeypatch: pytest.MonkeyPatch, flags: str, apex: bool, fused: bool) -> None:
    monkeypatch.setattr(
        checks, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: object()), metadata=importlib.metadata)
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.8.0")
    parsed = settings(flags, world_size=4)
    monkeypatch.setattr(mcore_config, "_is_installed", lambda package: apex or package != APEX)
    assert mcore_config._kernels(parsed.model, on_gpu=True)["gradient_accumulation_fusion"] is fused
    assert mcore_config._kernels(parsed.model, on_gpu=False)["gradient_accumulation_fusion"] is False
