"""Megatron-LM's own scripts, unedited, from the checkout that MEGATRON_LM names: `zerobubble run` against the stock schedule.

Nothing is fetched or copied. The checkout's scripts need six, regex, einops, pydantic and the like, as their own documentation
says, and its data set helpers a compiler. Its pretrain_hybrid.py cannot run here: all of its layer specs are of Transformer
Engine, which needs CUDA.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.megatron_lm import SMALL, WITHOUT_KERNELS, logged
from tests.training.launch import launch

_CHECKOUT = os.environ.get("MEGATRON_LM", "")
_TWO, _CHUNKS = "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"
_STOCK = "--zero-bubble-schedule stock"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM"),
    pytest.mark.claims(
        "Your own script",
        "Megatron-LM's `pretrain_gpt.py` from the checkout that MEGATRON_LM names, unedited, with `zerobubble run --cpu` "
        "(`make test-slow`)",
        "works, as `pretrain()`",
    ),
]


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
    for name, values in expected.items():  # seven digits
        assert float(actual[name][0]) == pytest.approx(float(values[0]), rel=2e-6), name
