"""Planning: which rank computes what, in which order. Standard library only, importable on a machine without torch."""
