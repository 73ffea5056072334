"""A training script as a user of Megatron-Bridge writes it: its recipe, a few overrides `name=value`, its `pretrain`.

With `schedule=NAME` the script itself installs one; started by `zerobubble run`, it knows nothing of schedules. Imports of Bridge
stand under `if`: saving a checkpoint starts a process that runs the file again.
"""

import json
import sys

if __name__ == "__main__":
    from megatron.bridge.recipes.gpt.h100.vanilla_gpt import vanilla_gpt_pretrain_1gpu_h100_bf16_config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from tests.frameworks.bridge import GPT, SMALL, WITHOUT_CUDA, set_fields

    words = dict(word.split("=", 1) for word in sys.argv[1:])
    schedule = words.pop("schedule", None)
    if schedule is not None:
        import megatron.zerobubble

        megatron.zerobubble.install(schedule=schedule)
    config = vanilla_gpt_pretrain_1gpu_h100_bf16_config()
    set_fields(config, {**SMALL, **WITHOUT_CUDA, **GPT, **{name: json.loads(value) for name, value in words.items()}})
    pretrain(config, forward_step)
