"""Doubles of the commands that the example scripts call: Slurm's, nvidia-smi, torchrun and python.

They are bash scripts in one folder that is put in front of PATH. `srun` starts its tasks on this machine, as many as it is asked
for, with the variables that Slurm gives to each; `scancel --signal` signals those tasks; everything that was called is recorded.
The double of python stands for the trainer as `training.loop` ends it: on SIGTERM it logs a line and exits with 0.

What they cannot show: Slurm's clock, that requeueing works, options that a real srun refuses, and anything about GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["ROOT", "Cluster"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200.0
_RECORD = 'printf "%s\\n" "${0##*/} $*" >>"$DOUBLES/calls"\n'

_SCONTROL = """
if [[ $1 == show ]]; then for host in $HOSTS; do echo "$host"; done; fi
if [[ $1 == requeue ]]; then exit "${REQUEUE_CODE:-0}"; fi
"""

_SCANCEL = """
kill -s "${1#--signal=}" $(cat "$DOUBLES"/task-*)
"""

_SRUN = """
while [[ $1 == -* ]]; do
    case $1 in
        --ntasks=*) ntasks=${1#*=} ;;
        --ntasks-per-node=*) per_node=${1#*=} ;;
    esac
    shift
done
for ((task = 0; task < ntasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) SLURM_NTASKS=$ntasks "$@" &
    tasks+=("$!")
    echo "$!" >"$DOUBLES/task-$task"
done
code=0
for task in "${!tasks[@]}"; do
    wait "${tasks[task]}" && continue
    one=$?
    echo "srun: error: node: task $task: Exited with exit code $one" >&2
    ((one > code)) && code=$one
done
exit "${SRUN_CODE:-$code}"
"""

_NVIDIA_SMI = """
[[ $1 == -L ]] && for ((gpu = 0; gpu < ${GPUS:-0}; gpu++)); do echo "GPU $gpu: a double"; done
[[ $1 == --query-gpu=compute_cap ]] && for ((gpu = 0; gpu < ${GPUS:-0}; gpu++)); do echo "${COMPUTE_CAP:-9.0}"; done
exit 0
"""

_ASKED = """
if [[ ${0##*/} == python && ${1:-} == -c ]]; then  # whether megatron-core has Megatron-LM's loop
    echo "${HAS_MEGATRON:-False}"
    exit
fi
"""
_RANK = """
env -0 >"$DOUBLES/environment-${RANK:-none}"
printf "%s\\n" "$@" >"$DOUBLES/arguments-${RANK:-none}"
case ${TRAINER:-finish} in
    finish) exit 0 ;;
    fail) exit "$((RANK == 1 ? 7 : 0))" ;;
esac
ending() {
    if [[ $TRAINER == fail-on-signal ]]; then exit 9; fi
    if [[ $TRAINER == stop && $RANK == 0 ]]; then echo "exiting at iteration 5 (on SIGTERM)"; fi
    exit 0
}
trap ending TERM
touch "$DOUBLES/ready-$RANK"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
exit 99
"""


class Cluster:
    """The doubles, and how scripts are started among them.

    Args:
        folder: an empty one, for the doubles and for what they record.
        has_real_python: start the real trainer instead of a double.
    """

    def __init__(self, folder: Path, *, has_real_python: bool = False) -> None:
        self.folder = folder
        rank = f'exec "{sys.executable}" "$@"\n' if has_real_python else _RANK
        doubles = {"scontrol": _SCONTROL, "scancel": _SCANCEL, "srun": _SRUN, "nvidia-smi": _NVIDIA_SMI}
        for name, body in (doubles | {"python": rank, "torchrun": _RANK}).items():
            path = folder / name
            path.write_text(f"#!/usr/bin/env bash\n{_ASKED}{_RECORD}{body}")
            path.chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        """A small environment with the doubles in front; nothing of an outer job."""
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.folder), "DOUBLES": str(self.folder)} | variables

    def batch_environment(self, *, num_nodes: int = 2, gpus: int = 2, **variables: str) -> dict[str, str]:
        """What sbatch gives to a script on `num_nodes` machines with `gpus` GPUs each, besides `variables`."""
        hosts = [f"node{number}" for number in range(num_nodes)]
        slurm = {
            "SLURM_JOB_ID": "4242",
            "SLURM_JOB_NAME": "zb",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NUM_NODES": str(num_nodes),
            "SLURM_JOB_NODELIST": f"node[0-{num_nodes - 1}]",
            "SLURM_GPUS_ON_NODE": str(gpus),
            "SLURM_CPUS_PER_TASK": "8",
            "RUN_DIR": str(self.folder / "run"),
        }
        return self.environment(**slurm, HOSTS=" ".join(hosts), GPUS=str(gpus)) | variables

    def run(self, script: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "examples" / script), *arguments]
        return subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def run_until_signaled(
        self,
        script: str,
        *arguments: str,
        environment: dict[str, str],
        ready: str = "ready-*",
        num_ready: int = 4,
        num_signals: int = 1,
    ) -> tuple[int, str]:
        """Run an example, send it USR2 once `num_ready` files `ready` are there, and return exit code and output."""
        command = ["bash", str(ROOT / "examples" / script), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, env=environment, cwd=self.folder, text=True, start_new_session=True, **pipes) as job:  # type: ignore[call-overload]
            try:
                deadline = time.monotonic() + TIMEOUT_S
                while len(list(self.folder.glob(ready))) < num_ready:
                    assert job.poll() is None, job.stdout.read()
                    assert time.monotonic() < deadline, f"no {ready} in time"
                    time.sleep(0.02)
                for _ in range(num_signals):
                    job.send_signal(signal.SIGUSR2)
                    time.sleep(0.01)  # signals that wait are one; each of these is handled by itself
                output, _ = job.communicate(timeout=TIMEOUT_S)
            except BaseException:
                os.killpg(job.pid, signal.SIGKILL)
                raise
        return job.returncode, output

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command, in order."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.split()[1:] for line in lines if line.split()[0] == name]

    def rank_environment(self, rank: int | None = 0) -> dict[str, str]:
        """The environment that a rank, or torchrun (None), was started with."""
        text = (self.folder / f"environment-{'none' if rank is None else rank}").read_text()
        return dict(entry.split("=", 1) for entry in text.split("\0") if entry)

    def rank_arguments(self, rank: int | None = 0) -> list[str]:
        """The arguments that a rank, or torchrun (None), was started with."""
        return (self.folder / f"arguments-{'none' if rank is None else rank}").read_text().splitlines()
