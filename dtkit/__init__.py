"""Distributed training of PyTorch models, driven and watched from a notebook."""

__version__ = "0.1.0"
