"""Parallelisms, one per module; the user passes one of them to `train`."""
