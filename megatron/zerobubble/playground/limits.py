"""What the playground accepts. Whoever needs more uses `zerobubble plan`, which has no limits."""

from __future__ import annotations

MAX_RANKS = 64
MAX_MICROBATCHES = 512
MAX_STAGES_A_RANK = 8
MAX_OPS = 64 * 512 * 6
"""Of one timeline: two stages a rank, each with F, B and W."""
MAX_TIME_MS = 1e6
MAX_MEMORY = 64.0
"""In units of 1F1B's rank 0; nothing that fits the other limits holds more."""
MAX_POINTS = 12
"""Of a Pareto curve."""
MAX_BODY_BYTES = 32 * 2**20
BODY_SECONDS = 20.0
"""In which a request must have arrived."""
TASK_SECONDS = 60.0
"""For what is not a search: reading a file, drawing, exporting."""
WORKER_BYTES = 6 * 2**30
"""Address space of a worker process."""
