"""Runs, calls and results as matplotlib figures."""
