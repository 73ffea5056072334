"""The reference trainer behind pretrain_gpt.py: flags, start-up, data, loop, checkpoints."""
