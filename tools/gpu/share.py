"""Run a program on ranks that share one GPU and talk over NCCL.

`torchrun --nproc-per-node 4 -m tools.gpu.share -m megatron.zerobubble.cli.train ITS FLAGS`

NCCL refuses two ranks of a host on one GPU, so each rank says that it is a host of its own (NCCL_HOSTID), and they talk through
sockets. Everything else is what a cluster runs: NCCL's kernels, streams, communicators and their order. The GPU takes turns, so
times mean nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def variables(rank: int) -> dict[str, str]:
    """The environment of a rank, by its number in the job, that shares GPU 0 with all others."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": "4",
    }


def main(argv: Sequence[str]) -> None:
    """Run ``-m MODULE`` or a script with its arguments, in this process."""
    if not argv or argv[:1] == ["-m"] == argv:
        raise SystemExit("tools.gpu.share: give a script, or -m and a module, and its arguments")
    os.environ.update(variables(int(os.environ.get("RANK", "0"))))
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
