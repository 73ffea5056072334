"""What `megatron.zerobubble` offers, and that offering it costs nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import megatron.zerobubble


def test_importing_the_package_imports_neither_torch_nor_megatron_core() -> None:
    script = "import sys, megatron.zerobubble; print(sorted({'torch', 'megatron.core'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", megatron.zerobubble.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(megatron.zerobubble, name)
    assert name == "__version__" or (value.__name__ == name and value.__doc__)


def test_no_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the place of the name."""
    modules = {module.name for module in pkgutil.iter_modules(megatron.zerobubble.__path__)}
    assert not modules & set(megatron.zerobubble.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'instal'"):
        _ = megatron.zerobubble.instal
