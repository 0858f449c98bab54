"""Planning: memory and time that each strategy would need, and whether a model fits."""
