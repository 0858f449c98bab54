"""Check of a model's layers in the notebook: what several ranks can't do as one worker does is refused at once."""

from __future__ import annotations

import keras

from dtkit.integrations.keras.saved_model import iterate_layers

_LOOKUPS = (keras.layers.IntegerLookup, keras.layers.StringLookup, keras.layers.TextVectorization)


def check_layers(model: keras.Model) -> None:
    """Raise ValueError for a layer whose training on several ranks would differ from `fit`."""
    for layer in iterate_layers(model):
        if layer.dtype_policy.name == "mixed_float16":
            raise ValueError(
                f"{layer.name} has the policy 'mixed_float16', for which fit scales the loss, and dtkit doesn't: small "
                "gradients would be 0. Use 'mixed_bfloat16' or 'float32'"
            )
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"{layer.name} is stateful: it keeps the state of each row for the next batch. Each rank has other "
                "rows, and batches of other sizes, so the states would be mixed. Leave stateful out, and give longer "
                "sequences"
            )
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise ValueError(  # noqa: TRY004 - this layer's behavior is the problem
                f"{layer.name} rewrites its kernel in the forward pass, which a rank without rows in a step leaves "
                "out, so ranks would differ. Leave it out, or give its layer a kernel_constraint"
            )
        if isinstance(layer, _LOOKUPS) and layer.get_config().get("vocabulary") is None:
            raise ValueError(
                f"{layer.name} has a vocabulary from adapt(), which its configuration leaves out. Give it "
                "vocabulary=layer.get_vocabulary(include_special_tokens=False), or apply it to the data before"
            )
