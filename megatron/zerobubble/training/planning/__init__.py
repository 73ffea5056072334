"""Plans from what the run measures: `auto`, re-planning, balanced stages."""
