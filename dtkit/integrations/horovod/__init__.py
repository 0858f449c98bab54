"""Horovod's interface over torch.distributed: ``import dtkit.integrations.horovod.torch as hvd``.

Modules at this level don't depend on a framework's optimizers; `torch` has PyTorch's.
"""
