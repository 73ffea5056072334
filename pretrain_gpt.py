"""Megatron-LM's training loop with zero-bubble flags: `torchrun --nproc-per-node 8 pretrain_gpt.py --zero-bubble-v-schedule ...`.

Megatron-LM has another script of this name, which runs unedited: `zerobubble run /path/to/Megatron-LM/pretrain_gpt.py ...`.

Flags, data, tokenizers, checkpoints and logs are Megatron-LM's: its loop, `megatron.training`, comes with megatron-core from 0.17
on, for Python 3.12. Model, data and loss are in `megatron/zerobubble/gpt_script.py`, which a script for another model may begin
from; one that exists runs unchanged by `zerobubble run`. `--help` lists all flags.

On megatron-core 0.16 this project's small reference trainer stands in, as `zerobubble train` always: `training/trainer.py`.
"""

import importlib.util

from megatron.zerobubble.cli.run import run_itself

if __name__ == "__main__":
    zero_bubble = globals().get("__zero_bubble__")  # if zerobubble run, or bench, or the line below has started this
    if zero_bubble is None:
        run_itself(__file__)
    elif importlib.util.find_spec("megatron.training") is None:
        from megatron.zerobubble.training import trainer

        trainer.main(zero_bubble, stands_in=True)
    else:
        from megatron.zerobubble import gpt_script

        gpt_script.main(zero_bubble)
