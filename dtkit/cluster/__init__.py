"""Processes of a cluster: start, find, take over and end them; and the facade `Cluster`."""
