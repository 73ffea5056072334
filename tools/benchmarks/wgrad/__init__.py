"""What `tools.benchmarks.split` measures: shapes of layers, a stack of them, and the times of W and the other passes."""
