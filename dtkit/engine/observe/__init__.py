"""Observation of an engine: phases of a step, the watchdog's status, output of calls, and probes of one step."""
