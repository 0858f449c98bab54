"""Calls to the ranks of one engine group, and the objects that are sent with them."""
