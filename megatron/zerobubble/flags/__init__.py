"""The zero-bubble flags: one frozen dataclass, its parser and its checks. Imports no torch."""
