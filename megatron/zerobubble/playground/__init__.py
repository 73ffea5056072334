"""Scheduler playground: the planner of `megatron.zerobubble.plan` on a page in the browser (`zerobubble playground`)."""
