"""Checkpoints on disk: folders, metadata, tensors, and the manager that writes them during a run."""
