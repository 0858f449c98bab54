"""Code that runs on an engine. It imports torch, never IPython, ipyparallel, ipywidgets or matplotlib."""
