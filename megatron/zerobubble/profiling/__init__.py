"""Record what ran and when, measure pass times and memory, and compare a recorded iteration with its plan."""
