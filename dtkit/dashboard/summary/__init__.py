"""Numbers and sentences that all views show: curves, metrics, timing, notices, and the strip of the last step."""
