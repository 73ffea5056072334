"""Run a script written for CUDA and megatron.core on the CPU, with gloo: `torchrun ... tools/on_cpu.py SCRIPT ARGUMENTS`.

For trying a training loop on a laptop. The whole script, passes included, runs inside the host-device layer
(`megatron.zerobubble.mcore.cpu.device`), which costs a Python call for every torch op: use it to test whether something works,
not how fast it is.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path


def main() -> None:
    """Replace CUDA by the CPU, then run the script."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("give a script and its arguments: torchrun --nproc-per-node 2 tools/on_cpu.py SCRIPT [ARGUMENTS]")
    from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties

    script = sys.argv[1]
    del sys.argv[0]
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")  # about missing or deprecated features, on every rank
    with quiet_third_parties(), HostDevice() as host, host.on_host():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
