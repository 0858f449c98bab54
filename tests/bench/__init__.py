"""What `make bench` measures: each figure next to its reference, in alternating pairs, with median and spread."""
