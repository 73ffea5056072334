"""A checkpoint can be loaded with any other layout, and saved again: training continues as if uninterrupted.

A chain of jobs on four ranks, each with another schedule, placement, pipeline, tensor or data-parallel size. The
first one trains, each loads what the one before it saved and saves it again, and the last one trains on. After every load all
weights, master weights, moments and step counts of the whole job are those of the first one, bit for bit, by their global names;
and the losses of the last job's next iterations are those of the first job's, up to the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from megatron.zerobubble.training.checkpoint.load import RestoredProgress, load_checkpoint
from megatron.zerobubble.training.checkpoint.save import save_checkpoint

from megatron.zerobubble.errors import CheckpointError
from tests.support.ranks import RankPool
from tests.support.tolerances import curve
from tests.support.training_states import VOCABULARY, train, training_state_of
from tests.support.whole_state import Tensors, whole_state
from tests.training.launch import LR

pytestmark = pytest.mark.claims(
    "Layers",
    "checkpoints of experts between expert-parallel sizes, and where a pipeline rank has none, with the plain and the distributed"
    " optimizer (`make test-slow`)",
    "works, bit for bit; the losses after 4e-6, a step of Adam later 2e-5 (bf16 1e-3)",
)


P2, P4, T2 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--tensor-model-parallel-size 2"
INTERLEAVED = f"{P2} --num-virtual-stages-per-pipeline-rank 2"
V2, V4 = f"{P2} --zero-bubble-v-schedule", f"{P4} --zero-bubble-v-schedule"
H1 = f"{P2} --enable-zero-bubble"
DISTRIBUTED = "--use-distributed-optimizer"

CHAINS = {
    "fp32": [INTERLEAVED, V2, V4, f"{H1} {T2}", "--tensor-model-parallel-size 1", INTERLEAVED],
    "bf16": [H1, f"{V2} {T2}", V4, T2, V2, H1],
    "fp16": [V2, f"{P4} --enable-zero-bubble", INTERLEAVED, f"{V2} {T2}", V4],
    "sgd": [V2, H1, f"{P2} {T2}", V4, f"{P4} --zero-bubble-max-pending-backward 2p"],
    "uneven": [
        f"{P2} --enable-zero-bubble --pipeline-model-parallel-layout Et|t*7L",
        f"{P2} --zero-bubble-v-schedule --pipeline-model-parallel-layout E|ttt|tttt|tL",
        f"{P4} --zero-bubble-schedule v-half",
        f"{P2} --pipeline-model-parallel-layout Ettt|t|tt|ttL",
        f"{P4} --zero-bubble-schedule v-min --pipeline-model-parallel-layout E|t|tt|t|t|t|tt|L",
        f"{T2} {P2} --zero-bubble-schedule 1f1b-v",
        f"{T2} --sequence-parallel {P2} --zero-bubble-schedule zb-interleaved",
    ],
    "sharded": [
        H1,
        f"{V2} --enable-optimizer-post-validation",
        f"{V2} --overlap-grad-reduce --overlap-param-gather",
        V4,
    ],
}
"""fp32 first, which the plain run uses."""

LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --group-query-attention"
LLAMA += " --num-query-groups 2 --untie-embeddings-and-output-weights"
COMMON = {
    "fp32": DISTRIBUTED,
    "bf16": "--bf16",
    "fp16": f"--fp16 --initial-loss-scale 1024 --loss-scale-window 1 {DISTRIBUTED}",
    "sgd": f"--optimizer sgd {LLAMA}",
    "uneven": f"{LLAMA} --make-vocab-size-divisible-by 32",
    "sharded": f"--untie-embeddings-and-output-weights --bf16 {DISTRIBUTED}",
}
"""What all jobs of a chain are given. Where the first and the last one differ in tensor parallelism the vocabulary must not be
padded: megatron-core's loss counts the padding, of which there is more with more ranks."""


@dataclass
class Walk:
    """Results of one rank."""

    expected: list[float] = field(default_factory=list)
    """Losses of iterations 3 and 4 in the first job, which saves after 2."""
    actual: list[float] = field(default_factory=list)
    """The same of the last job."""
    states: list[set[str]] = field(default_factory=list)
    """On rank 0, per job, the kinds of state there are."""
    differing: list[list[str]] = field(default_factory=list)
    """On rank 0, per job, names of what is not as in the first one, or is not there."""


def walk(rank: int, chain: list[str], folder: str) -> Walk:
    """Run the jobs of a chain."""
    seen, first = Walk(), Tensors()
    for number, flags in enumerate(chain):
        load = ["--load", f"{folder}/{number - 1}"] if number else []
        with training_state_of(rank, [*flags.split(), "--save", f"{folder}/{number}", *load]) as training_state:
            if load:
                restored = load_checkpoint(training_state)
                assert restored == RestoredProgress(2, 16)
            else:
                train(training_state, first=1, last=2)
            state = whole_state(training_state, vocabulary=VOCABULARY)
            if rank == 0:
                state["loss/scale"] = training_state.optimizer.get_loss_scale()
            first = first or state
            seen.differing.append([name for name in sorted(first.keys() | state.keys()) if not _same(name, first, state)])
            seen.states.append({name.partition("/")[2] for name, tensor in state.items() if tensor.any()})
            save_checkpoint(training_state, run="a", iteration=2, consumed_samples=16)
            if number == 0:
                seen.expected = train(training_state, first=3, last=4)
            if number == len(chain) - 1:
                seen.actual = train(training_state, first=3, last=4)
    return seen


def _same(name: str, one: Tensors, other: Tensors) -> bool:
    return name in one and name in other and one[name].dtype is other[name].dtype and torch.equal(one[name], other[name])


@pytest.mark.claims(
    "Long runs",
    "checkpoints: any schedule, placement, p, TP, DP, uneven layout, into any other, with the plain and the distributed "
    "optimizer: weights, main weights, moments, step counts and loss scale bit for bit by global name, the same losses after; "
    "resumed bit for bit where the layout is the same",
    "works (fp32 in each run; bf16, fp16, SGD, uneven stages of a modern layer with `make test-slow`)",
    also=("training/test_runs.py",),
)
@pytest.mark.parametrize("name", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in CHAINS if name != "fp32")])
def test_a_checkpoint_loads_with_any_layout(name: str, four_ranks: RankPool, tmp_path: Path) -> None:
    chain = [f"{flags} {COMMON.get(name, '')}" for flags in CHAINS[name]]
    walks = four_ranks.run(walk, chain, str(tmp_path))
    moments = {"momentum_buffer"} if name == "sgd" else {"exp_avg", "exp_avg_sq", "step"}
    for flags, states, differing in zip(chain, walks[0].states, walks[0].differing, strict=True):
        assert states == {"weight", "master", "scale"} | moments, flags
        assert differing == [], flags
    for seen in walks:
        assert seen.actual == (
            curve(seen.expected, LR) if name in ("fp32", "sgd", "uneven") else pytest.approx(seen.expected, rel=1e-3)
        )


EXPERTS = "--num-experts 4 --moe-layer-freq [0,0,0,0,1,1,1,1]"
SHARED = f"{EXPERTS} --expert-model-parallel-size 2"
DENSE_FIRST, BOTH = f"{H1} {SHARED}", f"{V2} {SHARED}"
"""The first pipeline rank has no experts, so that its optimizer's second part is empty; every rank has some."""
EXPERT_CHAIN = [DENSE_FIRST, BOTH, f"{H1} {EXPERTS}", DENSE_FIRST]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["", DISTRIBUTED], ids=["plain", "distributed"])
def test_a_checkpoint_of_experts_loads_with_any_layout(
    optimizer: str, precision: str, four_ranks: RankPool, tmp_path: Path
) -> None:
    """Weights, master weights and optimizer state bit for bit; with expert parallelism tokens are summed in another order."""
    chain = [f"{flags} {precision} {optimizer}" for flags in EXPERT_CHAIN]
    walks = four_ranks.run(walk, chain, str(tmp_path))
    for flags, differing in zip(chain, walks[0].differing, strict=True):
        assert differing == [], flags
    for seen in walks:
        assert seen.actual == (pytest.approx(seen.expected, rel=1e-3) if precision else curve(seen.expected, LR))


def saved(flags: list[str], folder: Path) -> None:
    with training_state_of(0, [*flags, "--save", str(folder)]) as training_state:
        train(training_state, first=1, last=2)
        save_checkpoint(training_state, run="a", iteration=2, consumed_samples=16)


def continued(flags: list[str], folder: Path) -> list[float]:
    with training_state_of(0, [*flags, "--load", str(folder)]) as training_state:
        assert load_checkpoint(training_state) == RestoredProgress(2, 16)
        return train(training_state, first=3, last=4)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("writes", "kind", "reads"),
    [
        (["--bf16"], "plain optimizer with master weights", []),
        (["--bf16"], "plain optimizer with master weights", ["--bf16", DISTRIBUTED]),
        ([DISTRIBUTED], "distributed optimizer", []),
    ],
)
def test_another_kind_of_optimizer_is_an_error(writes: list[str], kind: str, reads: list[str], tmp_path: Path) -> None:
    saved(writes, tmp_path)
    with pytest.raises(CheckpointError, match=rf"written by the {kind} .* --no-load-optim"):
        continued(reads, tmp_path)
    continued([*reads, "--no-load-optim"], tmp_path)
