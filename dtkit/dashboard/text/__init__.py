"""Runs, calls and results as text and as HTML, without matplotlib."""
