"""The live view in a notebook: widgets, their messages, and the page's half in ``static/``."""
