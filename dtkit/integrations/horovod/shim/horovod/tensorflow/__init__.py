"""Another name for dtkit's own modules. Importing this one puts dtkit's into `sys.modules` in its place."""

import sys

import dtkit.integrations.horovod.tensorflow as implementation
from dtkit.integrations.horovod.tensorflow import compression, elastic, functions, operations

implementation.__path__.append(__path__[0])  # so that `horovod.tensorflow.keras` is found here
sys.modules.update(
    {
        __name__: implementation,
        f"{__name__}.compression": compression,
        f"{__name__}.elastic": elastic,
        f"{__name__}.functions": functions,
        f"{__name__}.mpi_ops": operations,
    }
)
