"""Every flag: one frozen dataclass per group, and `Settings`, which holds them all."""
