"""The reference trainer, `zerobubble train`: flags, start-up, data, loop, checkpoints."""
