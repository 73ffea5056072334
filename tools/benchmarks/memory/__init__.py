"""What every rank holds over many iterations, against its plan (`python -m tools.benchmarks.memory`)."""
