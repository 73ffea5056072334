"""Scheduler playground: the planner (`megatron.zerobubble.plan`) on a page in the browser (`zerobubble playground`)."""
