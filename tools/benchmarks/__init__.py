"""What the project measures itself with; run each as `python -m tools.benchmarks.NAME`."""
