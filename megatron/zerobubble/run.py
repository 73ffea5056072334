"""`python -m megatron.zerobubble.run`: the command `zerobubble run`, by a name that torchrun can start.

::

    torchrun --nproc-per-node 4 -m megatron.zerobubble.run --enable-zero-bubble /path/to/Megatron-LM/pretrain_gpt.py ITS FLAGS
"""

import sys

from megatron.zerobubble.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
