"""Folder on the path of scripts' processes, with the module that Python imports at their start."""
