"""Data sets: partitions into shards, and the way of data and models to the engines."""
