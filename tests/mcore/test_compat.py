"""The check of the installed megatron-core."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron.zerobubble.errors import CompatibilityError
from megatron.zerobubble.mcore import compat


def test_the_tested_version_passes() -> None:
    compat.check_megatron_core()


def test_an_untried_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda _: "0.99.0")
    with pytest.raises(CompatibilityError, match=r"megatron-core 0\.99\.0 is installed.*never tried.*pip install"):
        compat.check_megatron_core()


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    monkeypatch.setattr(schedules, "backward_step", lambda input_tensor, output_tensor: None)
    monkeypatch.delattr(RowParallelLinear, "_forward_impl")
    with pytest.raises(CompatibilityError) as caught:
        compat.check_megatron_core()
    assert "schedules.backward_step has no parameter output_tensor_grad, model_type, config" in str(caught.value)
    assert "RowParallelLinear._forward_impl does not exist" in str(caught.value)


def test_the_range_is_the_one_in_the_metadata() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    (requirement,) = [Requirement(text) for text in project["dependencies"] if text.startswith("megatron-core")]
    assert requirement.specifier == compat.SUPPORTED
