"""Batches on an engine: sources of rows and samples, streams, loaders, and seeds."""
