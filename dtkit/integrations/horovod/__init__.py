"""Horovod's interface over torch.distributed: ``import dtkit.integrations.horovod.torch as hvd``.

Modules of this package know nothing of a framework's optimizers; `torch` has those of PyTorch.
"""
