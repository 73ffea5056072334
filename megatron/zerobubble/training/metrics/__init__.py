"""What an iteration reports: progress lines, JSON lines, curves, auxiliary losses, recorded timelines."""
