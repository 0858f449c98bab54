"""Records of a run: rows of every rank and step, the run log on disk, outboxes of engines, and timelines."""
