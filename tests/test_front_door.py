"""The front door: what `megatron.zerobubble` offers, and that it loads nothing of the trainer."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from megatron.core.pipeline_parallel import schedules

import megatron.zerobubble
from megatron.zerobubble import MicrobatchLengths, Seeds, Slices, ZeroBubbleConfig
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.stock_loop import patches
from megatron.zerobubble.plan.registry import ScheduleName, known_schedules

_LOADED = """
import sys
loaded = sorted(name for name in sys.modules if name.startswith(("megatron.zerobubble.training", "megatron.zerobubble.bench")))
assert not loaded, loaded
"""

_INSTALL = """
import megatron.zerobubble
megatron.zerobubble.install(schedule="zb-h1")
megatron.zerobubble.uninstall()
"""

_FLAGS = """
import argparse
import megatron.zerobubble
parser = megatron.zerobubble.add_zero_bubble_args(argparse.ArgumentParser())
megatron.zerobubble.install(parser.parse_args(["--zero-bubble-v-schedule"]))
megatron.zerobubble.uninstall()
"""

_RUN = """
import contextlib, sys
from pathlib import Path
from megatron.zerobubble.run import main
Path("script.py").write_text("import sys; assert '--theirs' in sys.argv")
main(["--cpu", "--enable-zero-bubble", "script.py", "--theirs"])
"""


@pytest.mark.parametrize("statements", [_INSTALL, _FLAGS, _RUN], ids=["install", "flags", "run"])
@pytest.mark.sampled(0.34)
def test_the_front_door_loads_nothing_of_the_reference_trainer(statements: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", statements + _LOADED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_neither_torch_nor_megatron_core() -> None:
    script = "import sys, megatron.zerobubble; print(sorted({'torch', 'megatron.core'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_completion_lists_what_the_package_offers() -> None:
    assert dir(megatron.zerobubble) == sorted(megatron.zerobubble.__all__)


def test_types_of_schedules_are_those_of_the_flag() -> None:
    assert list(get_args(ScheduleName)) == ["stock", "auto", *(info.name for info in known_schedules())]


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        (["zb-h1"], {}, r"install takes a schedule by keyword: install\(schedule='zb-h1'\)"),
        ([], {"schedle": "zb-h1"}, "install has no argument 'schedle'; did you mean schedule?"),
        ([], {"schedule": "zb-h1", "zero_bubble_replan_intervall": 5}, "did you mean zero_bubble_replan_interval?"),
        ([], {"replan_interval": 5}, r"write install\(ZeroBubbleConfig\(zero_bubble_replan_interval=...\)\), with the schedule"),
        ([], {"enable_zero_bubble": True}, r"write install\(ZeroBubbleConfig\(enable_zero_bubble=...\)\)"),
        ([], {"trace": "."}, r"write install\(ZeroBubbleConfig\(zero_bubble_trace=...\)\)"),
        ([], {"microbatch_tokens": "thd"}, r"write install\(lengths=MicrobatchLengths\(...\)\)"),
        ([], {"weights_seed": 1}, r"write install\(seeds=Seeds\(weights=...\)\)"),
        ([], {"cut": {}}, r"write install\(slices=Slices\(cut=...\)\)"),
        ([], {"schedule": "zbv", "slices": 8}, r"slices is 8; write install\(slices=Slices\(8\)\)"),
        ([], {"schedule": "zbv", "lengths": "thd"}, r"write install\(lengths=MicrobatchLengths\('thd'\)\)"),
        ([], {"schedule": "zbv", "seeds": 7}, r"write install\(seeds=Seeds\(weights=7\)\)"),
        ([], {"schedule": "zbh1"}, "did you mean zb-h1?"),
        (
            [],
            {"schedule": "zb-h1", "frobnicate": 1},
            "it takes schedule, memory_limit, .* and flags in a ZeroBubbleConfig",
        ),
    ],
)
def test_what_install_was_meant_to_get_is_said(args: list[Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        megatron.zerobubble.install(*args, **given)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda: MicrobatchLengths(512), "tokens of MicrobatchLengths is 512; give 'thd' or 'nested', or a function"),
        (lambda: Slices(2, cut=3), "cut of Slices is 3; give a function that cuts batches, or None"),
        (lambda: Seeds(weights="x"), "weights of Seeds is 'x'; give a whole number"),
        (lambda: Seeds(dropout=True), "dropout of Seeds is True; give a whole number"),
    ],
)
def test_a_record_checks_its_fields(record: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record()


def _as_it_is(batch: Any, offset: int, length: int) -> Any:
    return batch


def test_flags_go_with_what_a_command_line_cannot_say() -> None:
    config = ZeroBubbleConfig(zero_bubble_schedule="zbv", zero_bubble_slices="2", zero_bubble_replan_interval=5000)
    with megatron.zerobubble.install(config, slices=Slices(cut=_as_it_is), seeds=Seeds(dropout=1)):
        loop = patches._installed()
        assert loop is not None
        given = loop.options
        assert (given.flags, given.cut, given.seeds, given.lengths) == (config, _as_it_is, Seeds(dropout=1), None)
    with pytest.raises(ConfigError, match="install got flags, and zero_bubble_slices beside them: give one of them"):
        megatron.zerobubble.install(config, slices=Slices(4))


def test_the_handle_of_install_undoes_it() -> None:
    before = schedules.forward_backward_pipelining_without_interleaving
    with megatron.zerobubble.install(schedule="zb-h1") as zb:
        assert schedules.forward_backward_pipelining_without_interleaving is not before
        assert zb.status() is None
        zb.settle()
    assert schedules.forward_backward_pipelining_without_interleaving is before


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
