"""Ways to run W, side by side (`python -m tools.benchmarks.wgrad`), and what `tools.benchmarks.split` measures with."""
