"""A launched process and its job: start, exit in one line, failure, heartbeats, watchdog. Imports no megatron.core."""
