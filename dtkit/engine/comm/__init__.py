"""Communication among engines: the process group, its TCP connections, and interrupts of what blocks."""
