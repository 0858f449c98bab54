"""Explanations of one step: what each rank computed and sent, and how it became one update."""
