"""Your own TensorFlow loop on dtkit's engines, for functions under ``cluster.run`` and ``cluster.torchrun``.

Gradients, variables and metrics travel over the process group of torch.distributed. `collectives` and `merged_metrics`
have these functions; `callbacks` has a Keras callback that feeds `dtkit.log`, and `datasets` divides a
`tf.data.Dataset` among the ranks.
"""

from dtkit.integrations.tensorflow.callbacks import LogCallback
from dtkit.integrations.tensorflow.collectives import (
    DistributedGradientTape,
    DistributedOptimizer,
    average_gradients,
    broadcast_variables,
)
from dtkit.integrations.tensorflow.datasets import shard_dataset
from dtkit.integrations.tensorflow.merged_metrics import merge_metrics

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LogCallback",
    "average_gradients",
    "broadcast_variables",
    "merge_metrics",
    "shard_dataset",
]
