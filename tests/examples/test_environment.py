"""The torchrun script: what it starts, and the environment of a run on GPUs. torchrun and nvidia-smi are doubles."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron.zerobubble.bench.bench_options import parse_options
from megatron.zerobubble.training.arguments import parse_arguments
from tests.support.cluster import ROOT, Cluster

pytestmark = pytest.mark.claims(
    "Long runs",
    "the torchrun script: what it starts, and the environment on GPUs; every shell script passes shellcheck",
    "works, nvidia-smi and torchrun are doubles; **not run on a GPU**",
    also=("examples/test_lint.py",),
)

SCRIPT = "pretrain_zero_bubble.sh"
RANKS_ON_CPU = "4" if (os.cpu_count() or 1) >= 4 else "2"
VARIABLES = (
    *("CUDA_MODULE_LOADING", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN", "NVTE_EXT_MARGIN_SM"),
)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def started(cluster: Cluster, **variables: str) -> dict[str, str]:
    """The environment that torchrun gets."""
    done = cluster.run(SCRIPT, environment=cluster.environment(**variables))
    assert done.returncode == 0, done.stderr
    return cluster.rank_environment(None)


def test_on_gpus_the_environment_is_set(cluster: Cluster) -> None:
    environment = started(cluster, GPUS="4")
    assert [environment.get(name) for name in VARIABLES] == ["EAGER", "expandable_segments:True", "32", "16", "16", "4"]
    arguments = " ".join(cluster.rank_arguments(None))
    assert "--distributed-backend nccl --bf16" in arguments


def test_what_the_user_has_set_stays(cluster: Cluster) -> None:
    own = dict(zip(VARIABLES, ("LAZY", "", "8", "0", "8", "0"), strict=True))
    environment = started(cluster, GPUS="4", TP_SIZE="2", **own)
    assert {name: environment.get(name) for name in VARIABLES} == own


def test_the_newer_name_of_the_allocator_counts_as_set(cluster: Cluster) -> None:
    environment = started(cluster, GPUS="4", PYTORCH_ALLOC_CONF="max_split_size_mb:512")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment, "torch reads the older name first"


@pytest.mark.parametrize(
    ("tensor", "capability", "queues"),
    [("1", "9.0", "32"), ("2", "8.0", "1"), ("2", "9.0", "1"), ("2", "10.0", "32"), ("2", "12.1", "32"), ("2", "[N/A]", "1")],
)
def test_tensor_parallelism_takes_one_hardware_queue_before_blackwell(
    cluster: Cluster, tensor: str, capability: str, queues: str
) -> None:
    environment = started(cluster, GPUS="4", TP_SIZE=tensor, COMPUTE_CAP=capability)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == queues
    assert "TP_SIZE" not in environment or environment["TP_SIZE"] == tensor


@pytest.mark.parametrize("gpus", ["0", "1"])
def test_without_two_gpus_ranks_run_on_the_cpu_and_nothing_is_set(cluster: Cluster, gpus: str) -> None:
    environment = started(cluster, GPUS=gpus)
    assert not set(VARIABLES) & set(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    arguments = cluster.rank_arguments(None)
    assert arguments[:3] == ["--nproc-per-node", RANKS_ON_CPU, "--standalone"]
    report = Path(arguments[arguments.index("--zero-bubble-trace") + 1]) / "report.json"
    printed = subprocess.run(
        ["make", "-n", "--no-print-directory", "train"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    *_, last = printed.splitlines()
    assert f"drop {report.relative_to(ROOT)} on the page" in last


RENDEZVOUS = "--nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-id 4f1c --rdzv-endpoint node0:29500 "


@pytest.mark.parametrize(("rank", "is_host"), [("0", "1"), ("1", "0"), ("", None)])
def test_several_machines_under_torchrun(cluster: Cluster, rank: str, is_host: str | None) -> None:
    """A scheduler's RANK and WORLD_SIZE, which count processes, change nothing. Without NODE_RANK torchrun compares names."""
    processes = {"WORLD_SIZE": "16", "RANK": "9"}
    sizes = {"PIPELINE_SIZE": "8", "TP_SIZE": "2"}
    given = cluster.environment(GPUS="8", NNODES="2", NODE_RANK=rank, MASTER_ADDR="node0", RDZV_ID="4f1c", **sizes)
    given |= processes
    done = cluster.run(SCRIPT, environment=given)
    assert (done.returncode, done.stderr) == (0, "")
    arguments, environment = cluster.rank_arguments(None), cluster.rank_environment(None)
    expected = RENDEZVOUS + ("" if is_host is None else f"--rdzv-conf is_host={is_host} ")
    assert " ".join(arguments).startswith(expected + str(ROOT))
    assert not {"WORLD_SIZE", "RANK"} & set(environment), "torchrun sets them"
    assert arguments[arguments.index("--pipeline-model-parallel-size") + 1] == "8"


def test_the_variables_of_the_papers_scripts_count_machines_with_a_warning(cluster: Cluster) -> None:
    environment = cluster.environment(GPUS="8", WORLD_SIZE="2", RANK="1", MASTER_ADDR="node0")
    done = cluster.run(SCRIPT, environment=environment)
    assert "RDZV_ID: set RDZV_ID to the same random letters on each machine, from: openssl rand -hex 16" in done.stderr
    done = cluster.run(SCRIPT, environment=environment | {"RDZV_ID": "4f1c"})
    assert done.returncode == 0
    assert done.stderr == (
        "warning: numbers of machines are taken from WORLD_SIZE=2 (give NNODES) RANK=1 (give NODE_RANK); schedulers set these "
        "to processes\n"
    )
    assert " ".join(cluster.rank_arguments(None)).startswith(RENDEZVOUS + "--rdzv-conf is_host=0 ")


def test_the_benchmark_runs_the_same_job_under_other_schedules(cluster: Cluster) -> None:
    """Its flags are those of a training run, and the comparison takes them."""
    done = cluster.run("benchmark.sh", "--contenders", "stock-1f1b,zbv", environment=cluster.environment(GPUS="4"))
    assert done.returncode == 0, done.stderr
    arguments = cluster.rank_arguments(None)
    place = arguments.index("-m")
    assert arguments[place + 1 : place + 3] == ["megatron.zerobubble.cli.bench", "--bench-dir"]
    flags = arguments[place + 2 :]
    flags[flags.index("--data-path") + 1 : flags.index("--data-path") + 2] = ["--mock-data"]
    flags.remove("--data-path")
    for flag in ("--split",):
        del flags[flags.index(flag) : flags.index(flag) + 2]
    assert list(parse_options(flags, world_size=4, prog="bench").programs) == ["stock-1f1b", "zbv"]


def test_the_benchmark_gives_each_cpu_rank_a_core(cluster: Cluster) -> None:
    done = cluster.run("benchmark.sh", environment=cluster.environment(GPUS="0"))
    assert done.returncode == 0, done.stderr
    assert cluster.rank_arguments(None)[:2] == ["--nproc-per-node", RANKS_ON_CPU]


def test_megatron_lms_loop_gets_flags_of_its_own(cluster: Cluster) -> None:
    """A V's chunks are added by pretrain_gpt.py; the rest of the flags both loops have."""
    started(cluster, GPUS="4", HAS_MEGATRON="True", TOKENIZER_MODEL="gpt2")
    flags = cluster.rank_arguments(None)
    assert flags[flags.index("--tokenizer-type") : flags.index("--tokenizer-type") + 4] == [
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "gpt2")
    ]
    assert "--metrics-jsonl" not in flags
    done = cluster.run("benchmark.sh", "--quick", environment=cluster.environment(GPUS="0", HAS_MEGATRON="True"))
    assert done.returncode == 0, done.stderr
    flags = cluster.rank_arguments(None)
    assert flags[flags.index("--cpu") : flags.index("--") + 2] == ["--cpu", "--quick", "--", str(ROOT / "pretrain_gpt.py")]
    assert not {"--zero-bubble-v-schedule", "--zero-bubble-pipeline-timers-start-iter"} & set(flags)


def test_restarts_continue_from_the_latest_checkpoint(cluster: Cluster) -> None:
    started(cluster, GPUS="0", MAX_RESTARTS="3", RUN_DIR="/run/1")
    arguments = cluster.rank_arguments(None)
    assert arguments[:5] == ["--nproc-per-node", RANKS_ON_CPU, "--standalone", "--max-restarts", "3"]
    assert arguments[arguments.index("--load") + 1] == "/run/1/checkpoints" == arguments[arguments.index("--save") + 1]


def test_the_pipeline_has_the_ranks_that_the_other_sizes_leave(cluster: Cluster) -> None:
    started(cluster, GPUS="0", GPUS_PER_NODE="8", TP_SIZE="2", CP_SIZE="2")
    arguments = cluster.rank_arguments(None)
    given = {flag: arguments[arguments.index(flag) + 1] for flag in ("--context-parallel-size", "--pipeline-model-parallel-size")}
    assert given == {"--context-parallel-size": "2", "--pipeline-model-parallel-size": "2"}
    assert arguments[arguments.index("--global-batch-size") + 1] == "16", "one replica, eight microbatches of two"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LAUNCHER", "slurm", "LAUNCHER=slurm is for the tasks of a Slurm step"),
        ("LAUNCHER", "mpi", "LAUNCHER is mpi; it must be torchrun or slurm\n"),
        ("MODEL", "bert", "MODEL is bert; it must be deepseek-like or unset\n"),
    ],
)
def test_a_wrong_choice_is_an_error(cluster: Cluster, name: str, value: str, message: str) -> None:
    done = cluster.run(SCRIPT, environment=cluster.environment(**{name: value}))
    assert done.returncode != 0
    assert done.stderr == message or (value == "slurm" and message in done.stderr)


@pytest.mark.parametrize("tensor", ["1", "2"])
def test_the_deepseek_like_model_has_flags_that_go_together(cluster: Cluster, tensor: str) -> None:
    started(cluster, GPUS="0", MODEL="deepseek-like", TP_SIZE=tensor)
    arguments = cluster.rank_arguments(None)
    flags = arguments[arguments.index("--distributed-backend") :]
    place = flags.index("--data-path")
    made = parse_arguments([*flags[:place], *flags[place + 2 :], "--mock-data"], world_size=4, on_cpu=True)
    assert made.model.multi_latent_attention
    assert made.model.moe_layer_freq == [0, *[1] * (made.model.num_layers - 1)]


def test_kinds_of_layers_have_switches(cluster: Cluster) -> None:
    started(cluster, GPUS="0", TRANSFORMER_IMPL="transformer_engine", FP8_FORMAT="hybrid", ATTENTION_BACKEND="unfused")
    arguments = cluster.rank_arguments(None)
    switches = {"--transformer-impl": "transformer_engine", "--fp8-format": "hybrid", "--attention-backend": "unfused"}
    assert {flag: arguments[arguments.index(flag) + 1] for flag in switches} == switches


def test_without_switches_the_trainer_chooses_the_layers(cluster: Cluster) -> None:
    started(cluster, GPUS="0")
    assert not {"--transformer-impl", "--fp8-format", "--attention-backend"} & set(cluster.rank_arguments(None))
