"""Tests on real clusters: engines, process groups, everything as a user has it."""
