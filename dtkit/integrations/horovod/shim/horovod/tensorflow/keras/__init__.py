"""Another name for dtkit's own modules. Importing this one puts dtkit's into `sys.modules` in its place."""

import sys

import dtkit.integrations.horovod.keras as implementation
from dtkit.integrations.horovod import keras_2
from dtkit.integrations.horovod.keras import callbacks, elastic

keras_2.accept_dropped_arguments()
sys.modules.update(
    {
        __name__: implementation,
        f"{__name__}.callbacks": callbacks,
        f"{__name__}.elastic": elastic,
    }
)
