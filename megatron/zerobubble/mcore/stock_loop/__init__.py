"""A schedule of ours in a training loop that is written for megatron-core alone."""
