"""Benchmarks of this project; run each as `python -m tools.benchmarks.NAME`."""
