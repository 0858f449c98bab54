"""The notebook's side of a run: its handle, the thread that drives it, and recovery. Also users' own functions on
engines.
"""
