"""Run a plan: point-to-point transfers, their buffers, and the executor that walks over the ops. Independent of the schedule."""
