"""Command-line flags: one frozen dataclass per group, and `Settings`, which contains all groups."""
