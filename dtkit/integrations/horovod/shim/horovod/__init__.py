"""The package that ``import horovod`` finds under ``cluster.torchrun(script, horovod=True)``, and nowhere else."""

__version__ = "0.28.1+dtkit"
