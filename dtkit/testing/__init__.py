"""Public doubles of engine processes: the real session in this process, and fake engines of any number."""
