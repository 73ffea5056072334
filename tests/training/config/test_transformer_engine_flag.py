"""--transformer-impl transformer_engine: errors in flags are reported before the job starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training import validate as checks
from tests.training.test_arguments import settings

FLAG = "--transformer-impl transformer_engine --pipeline-model-parallel-size 4"


def test_it_has_to_be_installed() -> None:
    with pytest.raises(ConfigError, match=r"which is not installed: pip install 'transformer-engine\[pytorch\]>=2.3'"):
        settings(FLAG, world_size=4)


@pytest.mark.parametrize(
    ("version", "more", "message"),
    [
        ("2.2.0", "--enable-zero-bubble", r"version 2\.2\.0 is installed, which cannot defer.* schedule zb-h1 needs 2\.3\.0"),
        ("2.3.0", "--enable-zero-bubble --distributed-backend gloo", "needs CUDA, and --distributed-backend is gloo"),
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
