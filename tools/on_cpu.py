"""Run a script that is written for CUDA and megatron.core on the CPU, with gloo: `torchrun ... tools/on_cpu.py SCRIPT ARGUMENTS`.

For trying a training loop on a laptop. The whole script runs inside the host-device layer
(`megatron.zerobubble.mcore.cpu.device`), passes included, which adds a Python call per torch op: suitable to test whether
something works, not to measure its speed.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path


def main() -> None:
    """Install the stand-in for CUDA, then run the script as __main__."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("give a script and its arguments: torchrun --nproc-per-node 2 tools/on_cpu.py SCRIPT [ARGUMENTS]")
    from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties

    script = sys.argv[1]
    del sys.argv[0]
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")  # of missing and deprecated modules, on every rank
    with quiet_third_parties(), HostDevice() as host, host.on_host():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
