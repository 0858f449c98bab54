"""Helpers of all packages: files, processes, formatting, time constants, and private names of torch."""
