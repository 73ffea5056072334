"""The scripts under `examples/`, and what is beside them for clusters."""
