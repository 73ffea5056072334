"""Pipeline schedules side by side, real and emulated (`python -m tools.benchmarks.schedules`)."""
