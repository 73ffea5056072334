"""Variants of wgrad (W), side by side (`python -m tools.benchmarks.wgrad`); also used by `tools.benchmarks.split`."""
