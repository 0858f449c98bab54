"""Data sets: partitioning into shards, and sending data and models to the engines."""
