"""One run, on the notebook's side: its handle, the thread that drives it, recovery, and a user's own function."""
