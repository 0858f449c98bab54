"""Calls to the ranks of one engine group, and what travels with them."""
