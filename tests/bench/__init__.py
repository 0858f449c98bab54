"""Measurements of `make bench`: each figure next to its reference, in alternating pairs, with median and spread."""
