"""Train a GPT: `torchrun --nproc-per-node 4 pretrain_gpt.py --pipeline-model-parallel-size 4 --zero-bubble-v-schedule ...`.

Model provider, forward step and loss are in `megatron/zerobubble/training/models/gpt.py`; to train another model, pass providers
of your own to `run`. `training/loop.py` is the training loop, `mcore/zb_schedules.py` makes the schedule, `runtime/executor.py`
runs it.
`--help` lists the flags. Without a checkout: `zerobubble train`.
"""

from megatron.zerobubble.training.entry import run
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

if __name__ == "__main__":
    run(model_provider, forward_step_provider)
