"""Planning: what each strategy would need and cost, and whether a model fits the memory."""
