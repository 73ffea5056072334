"""Running a plan: point-to-point transfers, buffers and the walk over the ops. Knows no schedule by name."""
