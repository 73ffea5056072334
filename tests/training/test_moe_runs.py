"""Jobs that train a model with experts and an MTP layer, started as a user starts them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.launch import TINY_BATCH, TINY_MODEL, metrics, train

pytestmark = pytest.mark.claims(
    "Layers",
    "experts, a shared expert, an MTP layer and optimistic steps in whole jobs: ZBV against stock 1F1B; auxiliary losses on "
    "the progress line and in `--metrics-jsonl`; with expert parallelism 2 saved, continued bit for bit, and "
    "under ZB-H2 without it (`make test-slow`)",
    "works, 1e-4 (other layout 1e-3)",
)

MODEL: list[Any] = [
    *(*TINY_MODEL, *TINY_BATCH, "--pipeline-model-parallel-size", 2, "--num-experts", 4, "--moe-layer-freq", "[0,1,1,1]"),
    *("--moe-router-load-balancing-type", "aux_loss", "global_aux_loss", "--moe-aux-loss-coeff", "1e-2", "1e-2"),
    *("--moe-z-loss-coeff", "1e-3", "--moe-token-dispatcher-type", "alltoall", "--moe-shared-expert-intermediate-size", 32),
    *("--disable-bias-linear", "--hidden-dropout", 0, "--attention-dropout", 0, "--train-iters", 6, "--eval-iters", 0),
]
HEAD = ["--mtp-num-layers", 1, "--position-embedding-type", "rope"]
EARLY_V = ["--zero-bubble-v-schedule", "--enable-optimizer-post-validation"]
EXTRAS = ("load_balancing_loss", "global_load_balancing_loss", "z_loss")


def _told(path: Path) -> list[dict[str, float]]:
    """The metrics of each iteration, without times."""
    names = ("loss", "grad_norm", *EXTRAS, "mtp_1 loss")
    return [{name: fields[name] for name in names if name in fields} for _, fields in sorted(metrics(path).items())]


def _assert_equal(ours: list[dict[str, float]], theirs: list[dict[str, float]], *, rel: float) -> None:
    assert len(ours) == len(theirs)
    for iteration, (mine, yours) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert mine == pytest.approx(yours, rel=rel), iteration


@pytest.mark.sampled(0.4, group="whole jobs")
def test_experts_and_an_mtp_layer_under_zbv_and_stock_1f1b(corpus: str, tmp_path: Path) -> None:
    """Tied embeddings, three router losses, optimistic steps. Stock 1F1B continues from iteration 2, where both have the same
    weights; gradients of the tied weight are summed in another order, which grows over the steps: 1e-4. Under the default --split
    the corpus has no document for testing."""
    flags = [*MODEL, *HEAD, "--data-path", corpus]
    zbv, stock = tmp_path / "zbv.jsonl", tmp_path / "stock.jsonl"
    saves = ["--save", tmp_path / "save", "--save-interval", 2]
    said = train([*flags, *EARLY_V, *saves, "--metrics-jsonl", zbv])
    train([*flags, "--load", tmp_path / "save", "--ckpt-step", 2, "--metrics-jsonl", stock])
    _assert_equal(_told(stock), _told(zbv)[2:], rel=1e-4)
    assert _told(zbv)[-1]["loss"] < _told(zbv)[0]["loss"] - 0.3, "it learns"
    pattern = r"iteration +\d/ +6 .*" + "".join(rf"\| {name}: (\S+) " for name in (*EXTRAS, "mtp_1 loss"))
    lines = re.findall(pattern, said)
    assert len(lines) == 6, said
    for balance, over_all, logits, further in lines:
        assert 0.9 < float(balance) < 2.0, "1 is a load that is spread evenly, 4 all tokens to one expert"
        assert 0.9 < float(over_all) < 2.0
        assert 0.0 < float(logits) < 10.0
        assert 3.0 < float(further) < 6.0


@pytest.mark.slow
def test_a_checkpoint_of_experts_continues_bit_for_bit_and_with_another_layout(corpus: str, tmp_path: Path) -> None:
    """Saved by two expert-parallel ranks under V. Under ZB-H2 with all experts on every rank tokens are summed in another
    order."""
    whole, again, other = (tmp_path / f"{name}.jsonl" for name in ("whole", "again", "other"))
    flags = [*MODEL, *HEAD, "--data-path", corpus]
    shared = [*EARLY_V, "--expert-model-parallel-size", 2]
    load = ["--load", tmp_path / "save", "--ckpt-step", 3]
    train([*flags, *shared, "--save", tmp_path / "save", "--save-interval", 3, "--metrics-jsonl", whole], num_ranks=4)
    train([*flags, *shared, *load, "--metrics-jsonl", again], num_ranks=4)
    train([*flags, "--zero-bubble-max-pending-backward", "2p", *load, "--metrics-jsonl", other], num_ranks=4)
    assert _told(again) == _told(whole)[3:]
    _assert_equal(_told(other), _told(whole)[3:], rel=1e-3)
