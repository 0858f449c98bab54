"""The agent of a host: an idle ipyparallel engine that starts, watches and ends the engines of its host."""
