"""The scripts that start a job on GPUs and on a Slurm cluster, and the Dockerfile.

`scontrol` and `srun` here are small scripts that stand for Slurm's: they record how they were called. They cannot show that a
cluster accepts the job, or delivers its signals in time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "pretrain_zero_bubble.slurm"
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$RECORD"
[[ "$1 $2" == "show hostnames" ]] && printf '%s\\n' ${NODES:-node7 node8}
exit 0
"""
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$RECORD"
echo "MASTER_ADDR=$MASTER_ADDR LAUNCHER=$LAUNCHER" >> "$RECORD"
mkdir -p "$RUN_DIR/checkpoints"
case "$FAKE" in
fail) exit 3 ;;
finish) echo 200 > "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" ;;
stop)
    trap '' TERM
    touch "$RECORD.started"
    while [[ ! -f "$RECORD.signal" ]]; do sleep 0.05; done
    echo 40 > "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" ;;
esac
"""
TASKS = """#!/usr/bin/env bash
# As srun starts tasks on one machine: each knows its number, and the signal of the job reaches each.
shift
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' USR1
echo $$ > "$RECORD.srun"
worst=0
for pid in "${pids[@]}"; do
    while true; do
        code=0; wait "$pid" || code=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    ((code > worst)) && worst=$code
done
exit $worst
"""


class Cluster:
    """A folder of commands that stand for Slurm's, and what they recorded."""

    def __init__(self, folder: Path, srun: str) -> None:
        self.folder, self.record = folder, folder / "record"
        for name, text in (("scontrol", SCONTROL), ("srun", srun)):
            path = folder / name
            path.write_text(text)
            path.chmod(path.stat().st_mode | stat.S_IEXEC)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))},
            "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RECORD": str(self.record),
            "RUN_DIR": str(folder / "run"),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "123",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_NNODES": "1",
            "SLURM_NTASKS": "2",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SLURM), *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def calls(self) -> list[str]:
        return self.record.read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, SRUN)


def ends(process: subprocess.Popen[str], timeout_s: float = 60.0) -> str:
    """Everything that the job printed. One that does not end in time is killed."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the job did not end in {timeout_s} s: {process.communicate()[0]}")


def wait_for(path: Path, process: subprocess.Popen[str], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            pytest.fail(f"{path} does not appear: {ends(process, 1.0)}")
        time.sleep(0.05)


def test_a_finished_job_is_not_put_into_the_queue_again(cluster: Cluster) -> None:
    process = cluster.start("--hidden-size", "64", FAKE="finish")
    assert ends(process).endswith("done: iteration 200 of 200\n")
    assert process.returncode == 0
    assert cluster.calls == [
        "scontrol show hostnames node[7-8]",
        f"srun --kill-on-bad-exit=1 bash {ROOT}/examples/pretrain_zero_bubble.sh --exit-signal-handler --hidden-size 64",
        "MASTER_ADDR=node7 LAUNCHER=slurm",
    ]


def test_a_failed_job_keeps_its_exit_code_and_is_not_put_into_the_queue_again(cluster: Cluster) -> None:
    process = cluster.start(FAKE="fail")
    assert "failed with exit code 3 and is not put into the queue again" in ends(process)
    assert process.returncode == 3
    assert not [call for call in cluster.calls if "requeue" in call]


def test_a_stopped_job_is_put_into_the_queue_again_and_continues(cluster: Cluster) -> None:
    """The shell of the job gets the signal, too: it goes on waiting for the ranks."""
    process = cluster.start("--train-iters=300", FAKE="stop")
    wait_for(Path(f"{cluster.record}.started"), process)
    process.send_signal(signal.SIGTERM)
    Path(f"{cluster.record}.signal").touch()
    output = ends(process)
    assert process.returncode == 0, output
    assert "asked to stop; waiting for the ranks to save" in output
    assert output.endswith("stopped at iteration 40 of 300: back into the queue\n")
    assert cluster.calls[-1] == "scontrol requeue 123"
    ends(cluster.start("--train-iters=300", FAKE="finish"))
    assert f"--exit-signal-handler --load {cluster.folder}/run/checkpoints --train-iters=300" in cluster.calls[-3]


def test_outside_of_slurm_one_line_says_what_to_do(cluster: Cluster) -> None:
    del cluster.environment["SLURM_SUBMIT_DIR"]
    process = cluster.start()
    assert "start this script with sbatch" in ends(process)
    assert process.returncode != 0


@pytest.mark.slow
def test_real_ranks_stop_at_the_signal_and_continue(tmp_path: Path) -> None:
    """Two ranks on the CPU: SIGTERM, a checkpoint, the queue, and the rest of the run from the checkpoint."""
    cluster = Cluster(tmp_path, TASKS)
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"document {number}: " + "words " * 20}) for number in range(200)))
    preprocess = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--tokenizer-type", "ByteLevelTokenizer"]
    subprocess.run(
        [*preprocess, "--input", str(text), "--output-prefix", str(tmp_path / "text")], check=True, capture_output=True
    )
    cluster.environment |= {"DATA_PATH": str(tmp_path / "text"), "NODES": "localhost"}
    sizes = ["--hidden-size", "32", "--seq-length", "32", "--global-batch-size", "4", "--micro-batch-size", "1"]
    sizes += ["--eval-iters", "0", "--exit-duration-in-mins", "30"]
    process = cluster.start(*sizes, TRAIN_ITERS="1000000")
    wait_for(tmp_path / "run" / "metrics.jsonl", process, 120)
    os.kill(int(Path(f"{cluster.record}.srun").read_text()), signal.SIGUSR1)
    output = ends(process, 120)
    assert process.returncode == 0, output
    assert "on SIGTERM" in output
    saved = int((tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved > 0
    assert cluster.calls[-1] == "scontrol requeue 123"
    output = ends(cluster.start(*sizes, "--override-opt_param-scheduler", TRAIN_ITERS=str(saved + 2)), 120)
    assert output.endswith(f"done: iteration {saved + 2} of {saved + 2}\n"), output


# -- the environment of GPUs ------------------------------------------------------------------------------------------------

GPU_ENVIRONMENT = {
    "CUDA_MODULE_LOADING": "EAGER",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


def environment_of(*sizes: int, **given: str) -> dict[str, str]:
    done = subprocess.run(
        ["bash", "-c", f"source {ROOT}/examples/gpu_environment.sh; gpu_environment {' '.join(map(str, sizes))}; env"],
        env={"PATH": os.environ["PATH"], **given},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs if name.startswith(("CUDA_", "PYTORCH_", "TORCH_"))}


def test_the_environment_of_gpus() -> None:
    assert environment_of() == GPU_ENVIRONMENT
    assert environment_of(2) == environment_of(1, 2) == GPU_ENVIRONMENT | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_what_is_set_stays_as_it_is() -> None:
    given = dict.fromkeys(GPU_ENVIRONMENT, "mine")
    assert environment_of(2, **given) == given
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment_of(PYTORCH_ALLOC_CONF="mine")


def test_on_gpus_the_launcher_sets_it(tmp_path: Path) -> None:
    """With an `nvidia-smi` that stands for two GPUs and a `torchrun` that records its environment."""
    for name, text in (("nvidia-smi", "printf 'GPU 0: X\\nGPU 1: X\\n'"), ("torchrun", 'env; echo "arguments $*"')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "PYTORCH_", "TORCH_"))}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "pretrain_zero_bubble.sh")],
        env={**given, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    for name, value in GPU_ENVIRONMENT.items():
        assert f"\n{name}={value}\n" in done.stdout, name
    assert "--distributed-backend nccl --bf16 --manual-gc --manual-gc-interval 100" in done.stdout


def test_an_unknown_launcher_is_an_error() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "pretrain_zero_bubble.sh")],
        env={**os.environ, "LAUNCHER": "mpi"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "LAUNCHER is mpi; it must be torchrun or slurm\n")


# -- linters ----------------------------------------------------------------------------------------------------------------


def linter(name: str) -> str:
    """The path of a linter that requirements/dev.txt installs where it exists."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed; requirements/dev.txt has it for Linux on x86_64")
    return found


def test_shell_scripts_are_clean() -> None:
    scripts = [*(ROOT / "examples").glob("*.sh"), *(ROOT / "examples").glob("*.slurm"), ROOT / ".ci" / "run"]
    done = subprocess.run([linter("shellcheck"), "-x", *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run(
        [linter("hadolint"), ROOT / "docker" / "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def pinned(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", path.read_text(), re.MULTILINE))


def copied() -> Iterator[str]:
    for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            yield from line.split()[1:-1]


def test_the_image_gets_what_was_tested_and_keeps_its_own_torch() -> None:
    image = pinned(ROOT / "docker" / "requirements.txt")
    assert "torch" not in image
    tested = pinned(ROOT / "requirements" / "base.txt") | pinned(ROOT / "requirements" / "dev.txt")
    for name, version in image.items():
        assert version == tested[name], name
    assert all((ROOT / source).exists() for source in copied())
