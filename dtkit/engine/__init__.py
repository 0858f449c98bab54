"""Code that runs on an engine. It imports torch, but never IPython, ipyparallel, ipywidgets or matplotlib."""
