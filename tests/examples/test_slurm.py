"""The Slurm script: addresses, ranks and their environment; what it does after a signal, a failure, and the end of the training.

Slurm's commands are doubles (`tests.support.cluster`); the last test has real ranks.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, Cluster
from tests.training.launch import environment as rank_environment

pytestmark = pytest.mark.claims(
    "Long runs",
    "the Slurm script: addresses and ranks; after a signal a checkpoint and a requeue; a failure keeps its exit code; a "
    "finished run is not requeued",
    "works on doubles of Slurm's commands, with real ranks in `make test-slow`; by hand under Slurm 22.05 on one machine "
    "without GPUs: time limit, requeue twice, failure, killed rank, `scancel`, end",
)

SCRIPT = "pretrain_zero_bubble.slurm"
HEAD = re.findall(r"^#SBATCH (.*)$", (ROOT / "examples" / SCRIPT).read_text(), re.MULTILINE)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_the_directives_come_before_the_first_command() -> None:
    """sbatch stops reading them there. They ask for a signal that the script traps, and allow a requeue."""
    text = (ROOT / "examples" / SCRIPT).read_text()
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert text.rindex("#SBATCH") < text.index(commands[0])
    assert "--requeue" in HEAD
    assert "--open-mode=append" in HEAD, "else the log of the run so far is lost"
    (signal,) = re.findall(r"^--signal=B:(\w+)@(\d+)$", "\n".join(HEAD), re.MULTILINE)
    assert f"trap stop {signal[0]}" in text
    assert int(signal[1]) >= 120


def test_one_task_per_gpu_with_addresses_and_ranks(cluster: Cluster) -> None:
    done = cluster.run(SCRIPT, "--lr", "1e-4", environment=cluster.batch_environment(SRUN_ARGS="--label --mpi=none"))
    assert done.returncode == 0, done.stderr
    (srun,) = cluster.calls("srun")
    for option in ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block", "--cpus-per-task=8"):
        assert option in srun
    assert {"--label", "--mpi=none"} <= set(srun)
    for rank in range(4):
        own = cluster.rank_environment(rank)
        assert (own["RANK"], own["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        assert (own["WORLD_SIZE"], own["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("node0", str(10000 + 4242))
        assert own["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
        assert own["CUDA_MODULE_LOADING"] == "EAGER"
    assert not cluster.calls("torchrun")


def test_the_ranks_save_where_they_load(cluster: Cluster) -> None:
    cluster.run(SCRIPT, "--lr", "1e-4", environment=cluster.batch_environment(SAVE_INTERVAL="50"))
    arguments = cluster.rank_arguments()

    def value(flag: str) -> str:
        return arguments[arguments.index(flag) + 1]

    assert value("--load") == value("--save") == str(cluster.folder / "run" / "checkpoints")
    assert value("--save-interval") == "50"
    assert "--exit-signal-handler" in arguments
    assert value("--pipeline-model-parallel-size") == "4"
    assert arguments[-2:] == ["--lr", "1e-4"], "the user's own flags come last, where they win"


def test_without_a_signal_a_finished_run_is_not_requeued(cluster: Cluster) -> None:
    done = cluster.run(SCRIPT, environment=cluster.batch_environment())
    assert done.returncode == 0
    assert [call[0] for call in cluster.calls("scontrol")] == ["show"]
    assert not cluster.calls("scancel")


@pytest.mark.parametrize("num_signals", [1, 3, 40])
def test_a_signal_stops_the_ranks_and_requeues_the_job(cluster: Cluster, num_signals: int) -> None:
    code, output = cluster.run_until_signaled(
        SCRIPT, environment=cluster.batch_environment(TRAINER="stop"), num_signals=num_signals
    )
    assert code == 0, output
    assert cluster.calls("scancel") == [["--signal=TERM", "4242"]], "once: later, ranks no longer handle it"
    assert cluster.calls("scontrol")[1:] == [["requeue", "4242"]]
    assert "exiting at iteration 5 (on SIGTERM)" in output


def test_a_signal_after_the_last_iteration_does_not_requeue(cluster: Cluster) -> None:
    code, output = cluster.run_until_signaled(SCRIPT, environment=cluster.batch_environment(TRAINER="last-iteration"))
    assert code == 0, output
    assert cluster.calls("scancel")
    assert [call[0] for call in cluster.calls("scontrol")] == ["show"]


def test_the_log_of_an_earlier_start_does_not_count(cluster: Cluster) -> None:
    cluster.run_until_signaled(SCRIPT, environment=cluster.batch_environment(TRAINER="stop"))
    again = cluster.batch_environment(TRAINER="last-iteration", SLURM_RESTART_COUNT="1")
    for file in cluster.folder.glob("ready-*"):
        file.unlink()
    code, _ = cluster.run_until_signaled(SCRIPT, environment=again)
    assert code == 0
    assert [call[0] for call in cluster.calls("scontrol")] == ["show", "requeue", "show"]


@pytest.mark.parametrize("srun_code", ["7", "143"])
def test_a_failure_keeps_its_exit_code_and_is_not_requeued(cluster: Cluster, srun_code: str) -> None:
    """Also where srun returns 143, for the ranks that it terminated after the first had failed."""
    done = cluster.run(SCRIPT, environment=cluster.batch_environment(TRAINER="fail", SRUN_CODE=srun_code))
    assert done.returncode == 7
    assert "failed with exit code 7; not requeued" in done.stderr
    assert [call[0] for call in cluster.calls("scontrol")] == ["show"]


def test_a_failure_after_the_signal_is_not_requeued(cluster: Cluster) -> None:
    code, output = cluster.run_until_signaled(SCRIPT, environment=cluster.batch_environment(TRAINER="fail-on-signal"))
    assert code == 9, output
    assert [call[0] for call in cluster.calls("scontrol")] == ["show"]


def test_a_cluster_that_refuses_to_requeue_is_an_error_with_the_remedy(cluster: Cluster) -> None:
    own = cluster.batch_environment(TRAINER="stop", REQUEUE_CODE="1")
    code, output = cluster.run_until_signaled(SCRIPT, environment=own)
    assert code == 2
    assert f"submit it again with RUN_DIR={cluster.folder / 'run'}" in output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "start it with sbatch"),
        ({"ZERO_BUBBLE_HOME": "/"}, "/examples/pretrain_zero_bubble.sh does not exist"),
        ({"SLURM_SUBMIT_DIR": "/"}, "call sbatch from the root of the repository"),
        ({"SLURM_GPUS_ON_NODE": ""}, "ask for them with sbatch --gpus-per-node"),
        ({"HOSTS": "node0"}, "named 1 of 2 machines"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(cluster: Cluster, variables: dict[str, str], message: str) -> None:
    done = cluster.run(SCRIPT, environment=cluster.batch_environment() | variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_real_ranks_stop_on_the_signal_and_continue(corpus: str, tmp_path: Path) -> None:
    """Two CPU ranks without torchrun: stopped by the signal with a checkpoint, and continued from it to the end."""
    cluster = Cluster(tmp_path, has_real_python=True)
    tiny = {"HIDDEN_SIZE": "32", "SEQ_LENGTH": "32", "DATA_PATH": corpus, "GPUS_PER_NODE": "2", "GPUS": "0"}
    own = cluster.batch_environment(num_nodes=1) | tiny | {"PYTHONPATH": rank_environment()["PYTHONPATH"]}
    flags = ["--eval-iters", "0", "--train-iters", "100000", "--lr-decay-iters", "100", "--save-interval", "3"]
    saved = "run/checkpoints/latest_checkpointed_iteration.txt"
    with socket.create_server(("127.0.0.1", 0)) as server:  # a free port
        own |= {"HOSTS": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    code, output = cluster.run_until_signaled(SCRIPT, *flags, environment=own, ready=saved, num_ready=1)
    assert code == 0, output
    (left,) = re.findall(r"exiting at iteration (\d+) \(on SIGTERM\)", output)
    assert (tmp_path / saved).read_text().strip() == left
    assert cluster.calls("scontrol")[1:] == [["requeue", "4242"]]
    flags += ["--train-iters", str(int(left) + 4), "--override-opt_param-scheduler"]
    done = cluster.run(SCRIPT, *flags, environment=own | {"SLURM_RESTART_COUNT": "1"})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / saved).read_text().strip() == str(int(left) + 4)
    assert [call[0] for call in cluster.calls("scontrol")] == ["show", "requeue", "show"]
