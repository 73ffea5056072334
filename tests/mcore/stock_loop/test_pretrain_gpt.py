"""pretrain_gpt.py with Megatron-LM's loop: command lines that people have, under megatron-core's schedule and ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from tests.support.command_lines import EVERYDAY, FORK, FORK_ZB, FORK_ZBV, on_cpu
from tests.support.datasets import random_documents, write_documents
from tests.support.hybrid import hybrid_stack
from tests.support.megatron_lm import LR, MISSING, SMALL, WITHOUT_KERNELS, flags_of_script, logged, pretrain_gpt
from tests.support.ranks import RankPool
from tests.support.tolerances import after_steps
from tests.training.launch import ROOT, TIMEOUT_S, command, environment

with quiet_third_parties():
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip(MISSING, allow_module_level=True)

pytestmark = pytest.mark.claims(
    "Your own script",
    "this project's `pretrain_gpt.py`, which runs Megatron-LM's loop: the flags of the authors' fork's example and of "
    "Megatron-LM's for GPT-3, Llama-3 and Mixtral, without FP8; stock, ZB-H1 and ZBV, fp16, bf16, experts, post-validation "
    "(`make test MCORE=0.19.2`)",
    "works; ZB-H1 in every printed digit of stock; a job ran on ranks that shared an H200 ([what was run](benchmarks/gpu.md))",
)


Run = Callable[[int, str], str]
"""(rank, flags) -> what a job printed."""
SAME_WEIGHTS = partial(pretrain_gpt, has_same_weights=True)


def losses(ranks: RankPool, flags: str, schedule: str, run: Run = pretrain_gpt) -> list[tuple[str, ...]]:
    """What the last rank printed of ten iterations and the evaluations behind them; this schedule ran on all ranks."""
    printed = ranks.run(run, flags)
    assert {text.splitlines()[-1] for text in printed} == {f"ran {schedule}"}
    lines = list(logged(printed[-1]).values())
    assert len(lines) >= 10
    return lines


@pytest.mark.parametrize("name", EVERYDAY)
@pytest.mark.sampled(0.3)
def test_a_command_line_trains_under_every_schedule(four_ranks: RankPool, name: str) -> None:
    # in fp16 the usual first loss scale skips all ten steps, which then log no loss
    line = f"{on_cpu(EVERYDAY[name])} --attention-dropout 0 --hidden-dropout 0 --initial-loss-scale 1024"
    zb, zbv = (FORK_ZB, FORK_ZBV) if name == "fork" else ("--enable-zero-bubble", "--zero-bubble-v-schedule")
    expected = losses(four_ranks, line, "stock")
    assert losses(four_ranks, f"{line} {zb}", "zb" if name == "fork" else "zb-h1") == expected
    in_v = losses(four_ranks, f"{line} {zbv}", "zbv")
    # ZBV draws other weights, as chunks are built in another order; both begin at the loss of a guess
    assert float(in_v[0][0]) == pytest.approx(float(expected[0][0]), rel=0.02)


def hybrid(rank: int, flags: str) -> str:
    """`pretrain_gpt` with megatron-core's own layers in a hybrid model, whose published specs need Transformer Engine."""
    import tests.support.python_3_12.sitecustomize  # noqa: F401 -- its wheel runs on 3.11
    from megatron.zerobubble import gpt_script

    with mock.patch.object(gpt_script, "import_module", side_effect=lambda _: hybrid_stack(gpt_script.model_config())):
        return pretrain_gpt(rank, flags)


@pytest.mark.parametrize(
    ("run", "flag", "stages", "finer"),
    [
        (pretrain_gpt, "--pipeline-model-parallel-layout", "Ettt|tL", "Ett|t|t|L"),
        (hybrid, "--spec LOCAL LAYERS --hybrid-layer-pattern", "*-*-|*-*-", "*-|*-|*-|*-"),
    ],
)
@pytest.mark.sampled(0.3)
def test_stages_of_other_chunks_are_merged_and_cut(four_ranks: RankPool, run: Run, flag: str, stages: str, finer: str) -> None:
    line = f"{on_cpu(EVERYDAY['llama-3'])} {flag}"
    expected = losses(four_ranks, f"{line} {stages}", "stock", run)
    assert losses(four_ranks, f"{line} {finer} --enable-zero-bubble", "zb-h1", run) == expected
    in_v = losses(four_ranks, f"{line} {stages} --zero-bubble-v-schedule", "zbv", run)
    assert float(in_v[0][0]) == pytest.approx(float(expected[0][0]), rel=0.02)


PACKED = {
    "conversations": "--sft --no-create-attention-mask-in-dataloader --micro-batch-size 1",
    "documents": "--dataloader-inter-document-masking --micro-batch-size 1",
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    lengths = [3, 40, 9, 17, 5, 30, 12, 26, 2, 33, 8, 21, 64, 7, 15, 4] * 4
    return write_documents(tmp_path_factory.mktemp("documents") / "some", random_documents(lengths, vocabulary=90))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of one to three conversations, for Megatron-LM's SFT dataset."""
    path = tmp_path_factory.mktemp("conversations") / "some.jsonl"
    rows = []
    for row in range(64):
        said = [("system", "be brief"), ("user", "a" * (row % 5)), ("assistant", "bc" * (1 + row % 4))] * (1 + row % 3)
        rows.append({"messages": [{"role": role, "content": content} for role, content in said]})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.mark.claims(
    "Your own script",
    "rows of packed sequences by flags of `pretrain_gpt.py` in Megatron-LM's loop: `--sft` and "
    "`--dataloader-inter-document-masking`, under ZB-H1 and ZBV against megatron-core's 1F1B (`make test MCORE=0.19.2`)",
    "works, up to the order of sums; not run on a GPU",
)
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.sampled(0.5)
def test_packed_sequences_train_as_under_1f1b(four_ranks: RankPool, documents: str, conversations: str, name: str) -> None:
    """They run in another order, so gradients are summed in another one."""
    if "inter-document" in PACKED[name] and not hasattr(GPTDatasetConfig, "inter_document_masking"):
        pytest.skip("megatron-core has this from 0.19 on")
    if "--sft" in PACKED[name]:
        documents = conversations
    line = (
        f"{SMALL.replace('--mock-data', f'--data-path {documents} --split 90,10,0')} --pipeline-model-parallel-size 2 "
        f"--train-iters 10 --eval-interval 1000 --position-embedding-type rope --calculate-per-token-loss {PACKED[name]}"
    )
    expected = losses(four_ranks, line, "stock", SAME_WEIGHTS)
    for flag, schedule in (("--enable-zero-bubble", "zb-h1"), ("--zero-bubble-v-schedule", "zbv")):
        actual = losses(four_ranks, f"{line} {flag}", schedule, SAME_WEIGHTS)
        check(actual, expected)


def check(actual: list[tuple[str, ...]], expected: list[tuple[str, ...]]) -> None:
    """Losses and norms, of which the log has seven digits and three decimals, are those of gradients in another order."""
    for done, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        bound = max(after_steps(done, LR), 1e-6)
        assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=bound)
        assert list(map(float, ours[1:])) == pytest.approx(list(map(float, theirs[1:])), rel=bound, abs=1e-3)


ENGINE = (
    f"{SMALL} {WITHOUT_KERNELS.replace('local', 'transformer_engine')} --bf16 --swiglu --disable-bias-linear --train-iters 10 "
    "--eval-interval 100 --pipeline-model-parallel-size 2 --position-embedding-type rope --clip-grad 0 "
    "--untie-embeddings-and-output-weights"
)
FUSED = ENGINE.replace("--no-gradient-accumulation-fusion ", "")
GRAPHS = "--cuda-graph-impl transformer_engine"


@pytest.mark.claims(
    "Your own script",
    "CUDA graphs of layers in Megatron-LM's loop (`--cuda-graph-impl transformer_engine`; a double of `torch.cuda.CUDAGraph`), "
    "captured after the warm-up steps in the order that was re-planned in them; ZB-H1, and ZBV with whole layers, W included",
    "works, every printed digit of no graphs; **not run on a GPU**",
)
@pytest.mark.parametrize(
    ("schedule", "flags", "graphs"),
    [
        ("zb-h1", f"{ENGINE} --enable-zero-bubble", f"{GRAPHS} --cuda-graph-modules attn"),
        ("zbv", f"{FUSED} --zero-bubble-v-schedule", GRAPHS),
    ],
)
@pytest.mark.sampled(0.5)
def test_graphs_of_layers_are_captured_in_the_order_of_the_plan(
    engine_ranks: RankPool, schedule: str, flags: str, graphs: str
) -> None:
    assert losses(engine_ranks, f"{flags} {graphs}", schedule) == losses(engine_ranks, flags, schedule)


def rotary_embeddings(rank: int, flags: str) -> tuple[float, float]:
    """Of a rank's chunk: the factor by which positions are divided, and the lowest frequency."""
    import tests.support.python_3_12.sitecustomize  # noqa: F401 -- its wheel runs on 3.11
    from megatron.zerobubble import gpt_script

    made, model = [], gpt_script.model

    def noting(*args: Any, **named: Any) -> Any:
        made.append(model(*args, **named))
        return made[-1]

    with mock.patch.object(gpt_script, "model", noting):
        pretrain_gpt(rank, flags)
    (chunk,) = made
    return chunk.rotary_pos_emb.seq_len_interpolation_factor, float(chunk.rotary_pos_emb.inv_freq[-1])


@pytest.mark.sampled(0.3)
def test_flags_of_rotary_embeddings_reach_the_model(four_ranks: RankPool) -> None:
    line = f"{on_cpu(EVERYDAY['llama-3'])} --exit-interval 1"
    line += " --rotary-seq-len-interpolation-factor 4 --use-rope-scaling --rope-scaling-factor 2"
    for factor, lowest in four_ranks.run(rotary_embeddings, line):
        assert factor == 4
        assert lowest == pytest.approx(1e6 ** (-6 / 8) / 2)


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does, in an environment like that of Python 3.12."""
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "support" / "python_3_12"), variables["PYTHONPATH"]])
    return subprocess.run(words, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def torchrun(flags: str) -> subprocess.CompletedProcess[str]:
    return start(*command(flags.split(), num_ranks=2, script=ROOT / "pretrain_gpt.py"))


def test_it_is_started_by_torchrun_on_real_text(corpus: str) -> None:
    """Chunks for a V need no flag, and the flags of the fork are answered in one line."""
    line = on_cpu(FORK).replace("--mock-data", f"--data-path {corpus}").replace("--vocab-size 90", "--vocab-size 256")
    done = torchrun(f"{line} {FORK_ZBV} --train-samples 16 --lr-decay-samples 16 --lr-warmup-samples 0")
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert printed.count("flags of the authors' fork: ") == 1
    assert "zero bubble: zbv, p = 2, m = 8" in printed
    assert [line.split()[-1] for line in printed.splitlines() if "num_virtual_stages_per_pipeline_rank" in line] == ["2"]
    assert [line.split()[-1] for line in printed.splitlines() if " zero_bubble_v_schedule " in line] == ["True"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num-layers x", "error: argument --num-layers: invalid int value: 'x' (--help lists all flags)"),
        (
            "--inprocess-restart --fim-data",
            "error: --inprocess-restart, --fim-data: not in this script. Megatron-LM's own ",
        ),
        ("--allow-padding-num-layers", "error: --allow-padding-num-layers: not in this script. "),
        ("--sft --micro-batch-size 2", "error: --sft puts several sequences into one row: give --micro-batch-size 1, not 2"),
        ("--enable-zero-buble", "error: unrecognized arguments: --enable-zero-buble (--help lists all flags)"),
    ],
)
def test_a_wrong_flag_gets_one_line(flags: str, line: str) -> None:
    done = start(sys.executable, "pretrain_gpt.py", *f"{on_cpu(FORK)} {flags}".split())
    assert done.returncode != 0
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith(line), done.stderr
    assert not any(" error: " in each or each.startswith(("usage:", "Traceback")) for each in before), done.stderr


def test_every_flag_of_megatron_lm_is_accepted_but_those_that_are_named(four_ranks: RankPool) -> None:
    """Ours are added beside them, and none is taken for one of the authors' fork, or for one of ours."""
    theirs, both, changed, refused = four_ranks.run(flags_of_script)[0]
    assert len(theirs) > 800
    assert theirs <= both
    assert not changed
    assert (
        refused
        == {"--fim-data", "--hybrid-context-parallel", "--logits-load-dir", "--logits-save-dir", "--inprocess-restart"} & theirs
    )


def test_help_has_the_flags_of_both() -> None:
    done = start(sys.executable, "pretrain_gpt.py", "--help")
    assert done.returncode == 0, done.stderr
    assert {"--zero-bubble-v-schedule", "--tensorboard-dir", "--moe-router-topk"} <= set(done.stdout.split())
