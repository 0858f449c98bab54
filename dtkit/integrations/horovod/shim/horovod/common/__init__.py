"""Other names for dtkit's own modules."""

import sys

from dtkit.integrations.horovod import exceptions, process_sets
from dtkit.integrations.horovod.torch import elastic

sys.modules.update(
    {
        f"{__name__}.elastic": elastic,
        f"{__name__}.exceptions": exceptions,
        f"{__name__}.process_sets": process_sets,
    }
)
