"""Planning with profiled timings: schedule `auto`, re-planning, balanced stages."""
