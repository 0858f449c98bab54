"""Launchers, which start a cluster's processes. A new launcher is one file here."""
