"""The check of the installed megatron-core."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import package_info
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import RowParallelLinear
from packaging.requirements import Requirement

from megatron.zerobubble.errors import CompatibilityError
from megatron.zerobubble.mcore import compat

pytestmark = pytest.mark.smoke

_ROOT = Path(__file__).parents[2]


def test_this_release_passes() -> None:
    compat.check_megatron_core()


def test_an_untried_release_that_lacks_nothing_runs_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(package_info, "__version__", "0.99.0+0123abc")
    for _ in range(2):
        compat.check_megatron_core()
    (warning,) = caplog.messages
    assert "megatron-core 0.99.0 was never tried" in warning


def test_the_version_is_that_of_the_imported_megatron_core(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "package_info.py").write_text("__version__ = '0.98.1+abc'")
    code = "from megatron.zerobubble.mcore import compat; print(compat.imported_version())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.98.1"


def test_backward_step_is_called_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_model_type(
        input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any
    ) -> tuple[Any, ...]:
        return input_tensor, output_tensor, output_tensor_grad, model_type, config

    def without(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> tuple[Any, ...]:
        return input_tensor, output_tensor, output_tensor_grad, config

    monkeypatch.setattr(schedules, "backward_step", with_model_type)
    assert compat.backward_step()(1, 2, 3, config=4) == (1, 2, 3, ModelType.encoder_or_decoder, 4)
    monkeypatch.setattr(schedules, "backward_step", without)
    assert compat.backward_step()(1, 2, 3, config=4) == (1, 2, 3, 4)


def test_gradients_of_the_norm_are_found_by_either_name() -> None:
    assert compat.gradients_for_norm(SimpleNamespace(get_main_grads_for_grad_norm=lambda: [1])) == [1]
    assert compat.gradients_for_norm(SimpleNamespace(get_grads_for_grad_norm=lambda: [2])) == [2]


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "backward_step", lambda input_tensor, output_tensor: None)
    monkeypatch.delattr(RowParallelLinear, "_forward_impl")
    with pytest.raises(CompatibilityError) as caught:
        compat.check_megatron_core()
    assert "schedules.backward_step has no parameter output_tensor_grad, config" in str(caught.value)
    assert "RowParallelLinear._forward_impl does not exist" in str(caught.value)


def test_the_range_is_the_one_in_the_metadata() -> None:
    project = tomllib.loads(_ROOT.joinpath("pyproject.toml").read_text())["project"]
    (requirement,) = [Requirement(text) for text in project["optional-dependencies"]["train"] if text.startswith("megatron-core")]
    assert requirement.specifier == compat.SUPPORTED
