"""State of a job on an engine: capture, restore, checkpoints, and snapshots in memory."""
