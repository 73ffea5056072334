"""--hybrid-layer-pattern: its checks, and jobs that train a HybridModel, started as a user starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config import model
from megatron.zerobubble.training.config.settings import Settings
from tests.support.hybrid import HAS_HYBRID_MODEL, WHY_NOT
from tests.training.launch import TINY_BATCH, metrics, train

BASE = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --train-iters 10 --mock-data "
    "--global-batch-size 8 --pipeline-model-parallel-size 2 "
)
V = "--zero-bubble-v-schedule "
PATTERN = "--hybrid-layer-pattern "


def settings(flags: str) -> Settings:
    return settings_from_argv((BASE + flags).split(), world_size=4)


@pytest.fixture
def with_hybrid_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the flags as with a megatron-core that has HybridModel, whatever is installed."""
    monkeypatch.setattr(model, "has_hybrid_model", lambda: True)


@pytest.mark.usefixtures("with_hybrid_model")
@pytest.mark.parametrize(
    ("flags", "per_stage", "num_chunks"),
    [
        ("*-*-", (2, 2), 1),
        ("*-*|- --num-layers 4", (3, 1), 1),
        ("*-*-*-*- " + V, (2, 2, 2, 2), 2),
        ("|*-*|E| --num-experts 4 " + V, (0, 3, 1, 0), 2),
        ("*-|*|-*|- --zero-bubble-schedule zb-interleaved", (2, 1, 2, 1), 2),
        ("*-*-*- --zero-bubble-schedule zb-interleaved", None, 2),
        ("*-|*|-*|-", (2, 1, 2, 1), 2),
    ],
)
def test_stages_follow_from_the_pattern(flags: str, per_stage: tuple[int, ...] | None, num_chunks: int) -> None:
    if per_stage is None:
        with pytest.raises(ConfigError, match="6 layers do not divide over 4 stages"):
            settings(PATTERN + flags)
        return
    made = settings(PATTERN + flags)
    assert made.stage_layers(made.placement).per_stage == per_stage
    assert made.num_layers == sum(per_stage)
    assert made.num_chunks == num_chunks


@pytest.mark.claims(
    "Layers",
    "in a `--hybrid-layer-pattern`: MTP layers, other kinds of layers (`G`, `D`, `+`), another number of stages than the "
    "schedule's; with it: layout flags, `--zero-bubble-balance-stages`; without `HybridModel` in megatron-core",
    "rejected",
    also=("plan/partition/test_hybrid_pattern.py",),
)
@pytest.mark.usefixtures("with_hybrid_model")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("*-G-", "'G' is not a kind of layer; write .* .attention., - .MLP., E .experts., M .Mamba., and . between stages"),
        ("*-*-/*-", "has MTP layers .after /., which are not supported here"),
        ("*-*- --mtp-num-layers 1 --position-embedding-type rope", "does not support --mtp-num-layers"),
        ("*-||*-", "stage 1 of 3 would hold 0 layers"),
        ("*-*- --num-layers 8", "has 4 layers, --num-layers is 8; leave --num-layers out"),
        ("*-|* " + V, "has 2 segments, and 2 pipeline ranks with 2 stage.s. each need 4 .schedule zbv."),
        ("*|-|* --enable-zero-bubble", "has 3 segments, and 2 pipeline ranks with 1 stage.s. each need 2 .schedule zb-h1."),
        ("*|-|*", "has 3 segments, .* .schedule stock."),
        ("*-*-* " + V, "5 layers do not divide over 4 stages .*; or write . between its stages"),
        ("*-*- --pipeline-model-parallel-layout Ett|ttL", "leave out --pipeline-model-parallel-layout"),
        ("*-*- --num-virtual-stages-per-pipeline-rank 2", "leave out --num-virtual-stages-per-pipeline-rank"),
        ("*-*- --allow-padding-num-layers", "leave out --allow-padding-num-layers"),
        ("*-*E", "E .a layer with experts. and --num-experts need each other"),
        ("*-*- --num-experts 4", "E .a layer with experts. and --num-experts need each other"),
        ("*-*E --num-experts 4 --moe-layer-freq [0,0,0,1]", "leave out --moe-layer-freq"),
        ("*-*- --enable-zero-bubble --zero-bubble-balance-stages", "--zero-bubble-balance-stages needs layers of one kind"),
        ("*-M- --enable-zero-bubble", "M in --hybrid-layer-pattern needs the package mamba_ssm"),
        ("*-*- --transformer-impl transformer_engine --qk-layernorm", "ignores --qk-layernorm"),
    ],
)
def test_bad_patterns_are_refused_in_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        settings(PATTERN + flags)
    assert "\n" not in str(raised.value)
    assert "--hybrid-layer-pattern" in str(raised.value)


def test_a_megatron_core_without_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "has_hybrid_model", lambda: False)
    with pytest.raises(ConfigError, match=r"needs megatron-core >= 0\.18, which has HybridModel"):
        settings(PATTERN + "*-*-")


def test_layers_are_required() -> None:
    with pytest.raises(ConfigError, match=r"--num-layers is required \(or --hybrid-layer-pattern"):
        settings("")


MODEL: list[Any] = [
    *(*TINY_BATCH, "--hidden-size", 32, "--num-attention-heads", 4, "--seq-length", 32, "--pipeline-model-parallel-size", 2),
    *(
        "--num-experts",
        4,
        "--moe-token-dispatcher-type",
        "alltoall",
        "--disable-bias-linear",
        "--position-embedding-type",
        "rope",
    ),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2", "--moe-z-loss-coeff", "1e-3"),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--train-iters", 6, "--eval-iters", 0),
]


@pytest.mark.claims(
    "Layers",
    "`--hybrid-layer-pattern` in whole jobs: ZBV with experts, its checkpoint continued by stock 1F1B with other stages",
    "works, 1e-4",
)
@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)
def test_zbv_learns_and_stock_1f1b_continues_from_its_checkpoint(corpus: str, tmp_path: Path) -> None:
    """Tied embeddings, uneven stages, another number of stages after loading. 1e-4: gradients of the tied weight are summed in
    another order, which grows over the steps."""
    flags = [*MODEL, "--data-path", corpus]
    zbv, stock = tmp_path / "zbv.jsonl", tmp_path / "stock.jsonl"
    saves = ["--save", tmp_path / "save", "--save-interval", 2]
    train([*flags, "--zero-bubble-v-schedule", "--hybrid-layer-pattern", "*-|*E|-|*E", *saves, "--metrics-jsonl", zbv])
    loads = ["--load", tmp_path / "save", "--ckpt-step", 2]
    train([*flags, "--hybrid-layer-pattern", "*-*E-|*E", *loads, "--metrics-jsonl", stock])
    ours, theirs = _logged(zbv), _logged(stock)
    assert len(ours) == 6
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.3, "it learns"
    for number, (mine, yours) in enumerate(zip(ours[2:], theirs, strict=True), start=3):
        assert mine == pytest.approx(yours, rel=1e-4), number
    assert 0.9 < ours[0]["load_balancing_loss"] < 2.0, "a mean over the layers with experts: 1 is a load that is spread evenly"


def _logged(path: Path) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "load_balancing_loss", "z_loss")
    return [{name: fields[name] for name in names} for _, fields in sorted(metrics(path).items())]
