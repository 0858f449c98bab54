"""Folder on the module path of scripts that import `horovod`. Nothing else imports from it."""
