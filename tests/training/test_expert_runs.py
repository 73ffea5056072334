"""Jobs that train models with experts and an MTP layer, one of them with multi-latent attention, started as a user starts them.

The latter is like a small DeepSeek-V3: a dense first layer, then experts in groups with a shared one, sigmoid scores with a bias
per expert that is updated from the load, and an MTP layer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import read_plan
from tests.support.plans import paired
from tests.support.tolerances import after_steps
from tests.training.launch import LR, TINY_BATCH, TINY_MODEL, metrics, train

pytestmark = pytest.mark.claims(
    "Layers",
    "a small model like DeepSeek-V3 in whole jobs (MLA, a dense layer, experts in groups with a shared one, sigmoid scores, "
    "expert bias, two router losses, an MTP layer): ZB-H1 with optimistic steps against stock 1F1B; its checkpoint continued "
    "by ZBV; on 4 ranks with tensor and expert parallelism 2, saved, continued, and on 2 ranks under ZB-H2 (`make test-slow`)",
    "works: 4e-6, after steps of Adam in proportion to them; bit for bit, other layout 1e-3",
)


ATTENTION: list[Any] = [
    *("--multi-latent-attention", "--q-lora-rank", 24, "--kv-lora-rank", 16, "--qk-head-dim", 8, "--qk-pos-emb-head-dim", 4),
    *("--v-head-dim", 6, "--qk-layernorm"),
]
EXPERTS: list[Any] = [
    *("--num-experts", 8, "--moe-layer-freq", "[0]+[1]*3", "--moe-ffn-hidden-size", 16, "--moe-router-topk", 2),
    *("--moe-shared-expert-intermediate-size", 16, "--moe-router-score-function", "sigmoid", "--moe-router-dtype", "fp32"),
    *("--moe-router-enable-expert-bias", "--moe-router-topk-scaling-factor", 2.5),
    *("--moe-router-num-groups", 4, "--moe-router-group-topk", 2),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "global_aux_loss", "--moe-aux-loss-coeff", 1e-2, 1e-2),
    *("--moe-token-dispatcher-type", "alltoall"),
]
JOB: list[Any] = [
    *(*TINY_MODEL, *TINY_BATCH, *ATTENTION, *EXPERTS, "--mtp-num-layers", 1, "--position-embedding-type", "rope"),
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--train-iters", 6, "--eval-iters", 0),
    *("--pipeline-model-parallel-size", 2),
]
POST_VALIDATED = ["--enable-zero-bubble", "--enable-optimizer-post-validation"]


def _losses(path: Path) -> list[dict[str, float]]:
    names = ("loss", "grad_norm")
    return [{name: fields[name] for name in names} for _, fields in sorted(metrics(path).items())]


def _printed(said: str) -> list[list[float]]:
    """Losses and gradient norm of each progress line."""
    names = ("lm loss", "grad norm")
    found = re.findall(".*".join(rf"\| {name}: (\S+) " for name in names), said)
    return [list(map(float, values)) for values in found]


@pytest.fixture(scope="module")
def stock(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """megatron-core's own 1F1B: its directory, with a checkpoint at iteration 3, and what it printed."""
    folder = tmp_path_factory.mktemp("stock")
    files = ["--data-path", corpus, "--save", folder, "--save-interval", 3, "--metrics-jsonl", folder / "metrics.jsonl"]
    return folder, train([*JOB, *files])


@pytest.mark.sampled(0.07, group="whole jobs")
def test_zero_bubble_prints_the_losses_of_stock_1f1b(stock: tuple[Path, str], corpus: str, tmp_path: Path) -> None:
    """From the first iteration on, with optimistic steps. The MTP layer uses the head a second time, and W adds the two
    gradients one after the other."""
    folder, expected = stock
    said = train([*JOB, *POST_VALIDATED, "--data-path", corpus, "--metrics-jsonl", tmp_path / "metrics.jsonl"])
    assert len(_printed(expected)) == 6, expected
    for done, (mine, yours) in enumerate(zip(_printed(said), _printed(expected), strict=True)):
        assert mine[:-1] == pytest.approx(yours[:-1], rel=after_steps(done, LR))
        assert mine[-1] == pytest.approx(yours[-1], abs=0.0011), "the norm has three digits"
    ours, theirs = _losses(tmp_path / "metrics.jsonl"), _losses(folder / "metrics.jsonl")
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.3, "it learns"
    for done, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == pytest.approx(yours, rel=after_steps(done, LR))


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_checkpoint_continues_under_v(stock: tuple[Path, str], corpus: str, tmp_path: Path) -> None:
    """Saved by stock 1F1B, continued by ZBV, with the experts' bias: without it other experts would be chosen."""
    folder, _ = stock
    load = ["--load", folder, "--ckpt-step", 3, "--data-path", corpus, "--metrics-jsonl", tmp_path / "metrics.jsonl"]
    train([*JOB, "--zero-bubble-v-schedule", *load])
    both = zip(_losses(tmp_path / "metrics.jsonl"), _losses(folder / "metrics.jsonl")[3:], strict=True)
    for done, (mine, yours) in enumerate(both):
        assert mine == pytest.approx(yours, rel=after_steps(done, LR))


ON_FOUR: list[Any] = [
    *(*JOB, "--zero-bubble-v-schedule", "--enable-optimizer-post-validation", "--tensor-model-parallel-size", 2),
    *("--sequence-parallel", "--expert-tensor-parallel-size", 1, "--expert-model-parallel-size", 2),
    *("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj"),
]


@pytest.mark.sampled(0.07, group="whole jobs")
def test_hidden_all_to_alls_change_no_bit(corpus: str, tmp_path: Path) -> None:
    """On four ranks with optimistic steps, of which some are redone: with the pairs of a loaded plan, and from iteration 5
    on with those that pay by the shares that iterations 2 to 4 measured, which are in the plan file."""
    loaded, saved = tmp_path / "loaded.json", tmp_path / "saved.json"
    loaded.write_text(paired(build_plan("zbv", num_ranks=2, num_microbatches=4)).to_json())
    pairs = ["--zero-bubble-overlap-moe", "--zero-bubble-load-plan", loaded, "--zero-bubble-replan-interval", 9]
    job = [*ON_FOUR, "--data-path", corpus, "--clip-grad", 0.5, "--zero-bubble-planning-seconds", 0]
    for name, more in (("apart", []), ("beside", [*pairs, "--zero-bubble-save-plan", saved])):
        said = train([*job, *more, "--metrics-jsonl", tmp_path / f"{name}.jsonl"], num_ranks=4)
        assert ("all-to-alls of experts are" in said) == (name == "beside")
    assert _losses(tmp_path / "beside.jsonl") == _losses(tmp_path / "apart.jsonl")
    plan, costs = read_plan(saved.read_text())
    assert plan.placement.name == "V"
    assert costs is not None
    assert all(0 < share < 1 for share in costs.all_to_all)


@pytest.mark.slow
def test_expert_and_tensor_parallel_on_four_ranks(corpus: str, tmp_path: Path) -> None:
    """Two ranks per stage share experts, and heads along with the sequence; optimistic steps under V. Saved, continued bit for
    bit, and continued on two ranks by ZB-H2 with all of the model on each."""
    on_four = [*ON_FOUR, "--data-path", corpus]
    load = ["--load", tmp_path / "save", "--ckpt-step", 3]
    whole, again, other = (tmp_path / f"{name}.jsonl" for name in ("whole", "again", "other"))
    train([*on_four, "--save", tmp_path / "save", "--save-interval", 3, "--metrics-jsonl", whole], num_ranks=4)
    train([*on_four, *load, "--metrics-jsonl", again], num_ranks=4)
    on_two = [*JOB, "--data-path", corpus, "--zero-bubble-max-pending-backward", "2p", *load, "--metrics-jsonl", other]
    train(on_two, num_ranks=2)
    assert _losses(again) == _losses(whole)[3:]
    for mine, yours in zip(_losses(other), _losses(whole)[3:], strict=True):
        assert mine == pytest.approx(yours, rel=1e-3)
