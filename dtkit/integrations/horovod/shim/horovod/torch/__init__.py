"""Another name for dtkit's own modules. Importing this one puts dtkit's into `sys.modules` in its place."""

import sys

import dtkit.integrations.horovod.torch as implementation
from dtkit.integrations.horovod.torch import compression, elastic, functions, optimizer, sync_batch_norm

sys.modules.update(
    {
        __name__: implementation,
        f"{__name__}.mpi_ops": implementation,
        f"{__name__}.compression": compression,
        f"{__name__}.elastic": elastic,
        f"{__name__}.functions": functions,
        f"{__name__}.optimizer": optimizer,
        f"{__name__}.sync_batch_norm": sync_batch_norm,
    }
)
