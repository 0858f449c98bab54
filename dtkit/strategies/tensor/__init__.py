"""Tensor parallelism: plans, their styles, and attention sharded by heads."""
