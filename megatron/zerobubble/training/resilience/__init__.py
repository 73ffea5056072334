"""Failed ranks, stuck ranks, and early exit on preemption and time limits."""
