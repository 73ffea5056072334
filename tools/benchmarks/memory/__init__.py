"""Memory of every rank over many iterations, measured vs. planned (`python -m tools.benchmarks.memory`)."""
