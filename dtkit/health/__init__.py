"""Health of the ranks: the status of each engine, the diagnosis of a stall, and stacks. Never imports torch."""
