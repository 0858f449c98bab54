"""JupyterLab, driven in a real browser."""
