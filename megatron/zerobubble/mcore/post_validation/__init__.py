"""Post-validation with megatron-core's optimizers: prepare, step, roll back, and run forward passes again."""
