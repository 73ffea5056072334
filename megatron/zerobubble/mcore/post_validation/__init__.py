"""Post-validation with megatron-core's optimizers: prepare, step, roll back, redo, and rerun forward passes."""
