"""Zero-bubble schedules in a training loop written for stock megatron-core."""
