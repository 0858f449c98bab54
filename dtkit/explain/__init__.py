"""Explanations of one step: what each rank computed and sent, and the resulting update."""
