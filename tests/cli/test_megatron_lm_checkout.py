"""Megatron-LM's own scripts, unedited, from the checkout that MEGATRON_LM names: `zerobubble run` against the stock schedule.

Nothing is fetched or copied. The checkout's scripts need six, regex, einops, pydantic and the like, as their own documentation
says, and its data set helpers a compiler. Its pretrain_hybrid.py cannot run here: all of its layer specs are of Transformer
Engine, which needs CUDA.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.megatron_lm import LR, SMALL, WITHOUT_KERNELS, logged
from tests.support.tolerances import after_steps
from tests.training.launch import environment, launch

pytestmark = [
    pytest.mark.claims(
        "Your own script",
        "Megatron-LM's `pretrain_gpt.py` from the checkout that MEGATRON_LM names, unedited, with `zerobubble run --cpu` "
        "(`make test-slow`)",
        "works, as `pretrain()`",
    ),
    pytest.mark.claims(
        "Your own script",
        "Megatron-LM's own tests of its schedules from the checkout that MEGATRON_LM names, on two CPU ranks: ZB-H1, "
        "interleaved ZB, ZBV (`make test-slow`)",
        "works, but for tests of mocked 1F1B internals, and under V of models that do not say which stage they are (rejected)",
    ),
]


_CHECKOUT = os.environ.get("MEGATRON_LM", "")
_TWO, _CHUNKS = "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"
_STOCK = "--zero-bubble-schedule stock"


@pytest.fixture(autouse=True)
def python_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout compiles its helpers with the first python3 of the path."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _run(script: str, zero_bubble: str, flags: str, *, num_ranks: int = 2) -> dict[str, tuple[str, ...]]:
    words = f"--cpu {zero_bubble} {Path(_CHECKOUT, script)} {SMALL} {WITHOUT_KERNELS} {flags}".split()
    done = launch(words, num_ranks=num_ranks, module="megatron.zerobubble.run")
    missing = re.search(r"^ModuleNotFoundError: No module named '(?!megatron)(\S+)'", done.stderr, re.MULTILINE)
    if done.returncode and missing:
        pytest.skip(f"the checkout needs {missing[1]}, which is not installed")
    if done.returncode and "cannot import name 'override' from 'typing'" in done.stderr:
        pytest.skip("the checkout needs Python 3.12")
    assert done.returncode == 0, done.stderr[-4000:]
    return logged(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not _CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "model"),
    [
        (2, _TWO, ""),
        (2, _TWO, "--untie-embeddings-and-output-weights"),
        (4, f"{_TWO} --tensor-model-parallel-size 2", ""),
    ],
    ids=["tied", "untied", "tp-2"],
)
def test_pretrain_gpt(tmp_path: Path, num_ranks: int, parallel: str, model: str) -> None:
    """Each schedule goes on from the checkpoint of stock 1F1B: initial weights depend on the placement."""
    flags = f"{parallel} {model} --train-iters 4 --eval-interval 3"
    start = _run(
        "pretrain_gpt.py", _STOCK, f"{flags} --save {tmp_path} --save-interval 100 --exit-interval 2", num_ranks=num_ranks
    )
    assert len(start) == 2
    flags += f" --load {tmp_path}"
    expected = _run("pretrain_gpt.py", _STOCK, flags, num_ranks=num_ranks)
    assert len(expected) == 2 + 1 + 2
    assert _run("pretrain_gpt.py", "--enable-zero-bubble", flags, num_ranks=num_ranks) == expected
    actual = _run("pretrain_gpt.py", "--zero-bubble-v-schedule", f"{flags} {_CHUNKS}", num_ranks=num_ranks)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():  # gradients of tied embeddings are sums in another order
        assert float(actual[name][0]) == pytest.approx(float(values[0]), rel=after_steps(len(expected), LR)), name


_TESTS = Path("tests/unit_tests/pipeline_parallel/test_schedules.py")
_PLUGIN = Path(__file__).parents[1] / "support" / "schedule_tests"

_MOCKS = "its model, communicator and passes are mocks, and it looks at the order of calls inside of 1F1B"
_UNKNOWN = "its model does not say which stage it is (vp_stage, pre_process); built for a loop of stages, it would not run in a V"
_OTHER = {
    "test_schedule_enables_grad_sync_on_first_stage": (_MOCKS, ("zb-h1", "zb-interleaved", "zbv")),
    **dict.fromkeys(
        (
            "test_forward_backward_func_with_pipeline_parallel",
            "test_forward_backward_func_with_interleaving",
            "test_forward_backward_func_with_uneven_interleaving",
            "test_forward_backward_pipelining_without_interleaving_with_custom_pgs",
            "test_forward_backward_pipelining_with_interleaving_with_custom_pgs",
        ),
        (_UNKNOWN, ("zbv",)),
    ),
}
"""By test, why it does not pass with a schedule, and with which ones."""


@functools.cache
def _outcomes(schedule: str) -> dict[str, str]:
    """How each test ends on the two ranks: passed, skipped, or failed and why. Empty: with megatron-core's own schedules."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [_CHECKOUT, str(_PLUGIN)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest", "-q"]
        tests = [str(_TESTS), "-k", "not test_get_pipeline_parallel_order"]  # 56 cases of a function that no schedule replaces
        plain = ["-p", "zero_bubble_on_two_ranks", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts="]
        done = subprocess.run(
            [*torchrun, *plain, *tests],
            capture_output=True,
            text=True,
            check=False,
            cwd=_CHECKOUT,
            env=environment()
            | {"PYTHONPATH": os.pathsep.join(paths), "ZERO_BUBBLE_SCHEDULE": schedule, "ZERO_BUBBLE_OUTCOMES": folder},
        )
        missing = re.search(r"ModuleNotFoundError: No module named '(?!megatron)(\S+)'", done.stdout)
        if done.returncode and missing:
            pytest.skip(f"the checkout needs {missing[1]}, which is not installed")
        files = sorted(Path(folder).iterdir())
        assert len(files) == 2, done.stdout[-4000:] + done.stderr[-4000:]
        first, second = (json.loads(path.read_text()) for path in files)
    assert first.keys() == second.keys()
    return {name: first[name] if first[name] != "passed" else second[name] for name in first}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not _CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_all_run_on_two_ranks_with_its_own_schedules() -> None:
    outcomes = _outcomes("")
    assert outcomes
    assert {name: why for name, why in outcomes.items() if why != "passed"} == {}
    assert {name.partition("[")[0] for name in outcomes} >= _OTHER.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not _CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-interleaved", "zbv"])
def test_the_same_pass_with_a_schedule_installed(schedule: str) -> None:
    failed = {name.partition("[")[0]: why for name, why in _outcomes(schedule).items() if why != "passed"}
    expected = {name for name, (_, schedules) in _OTHER.items() if schedule in schedules}
    assert failed.keys() == expected, {name: why for name, why in failed.items() if name not in expected}
    assert all("ConfigError: schedule" in why for why in failed.values()), "refused in one line"
    assert _outcomes(schedule).keys() == _outcomes("").keys()
