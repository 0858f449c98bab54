"""Communication among engines: the process group, its TCP connections, and interrupts of blocked calls."""
