"""The training stack behind pretrain_gpt.py: flags, start-up, data, loop, checkpoints."""
