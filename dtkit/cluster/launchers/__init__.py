"""Launchers: how the processes of a cluster are started. A new launcher is one file here."""
