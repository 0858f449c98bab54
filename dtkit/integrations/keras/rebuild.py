"""Rebuilding of a pickled Keras model. Keras is imported only once its backend is chosen."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any


def rebuild(backend: str, definition: bytes, state: dict[str, Any], training: bool) -> Any:  # noqa: FBT001 - pickle calls it by position
    """Return the module that `KerasModule.__reduce__` has pickled."""
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = backend  # the notebook's, whatever this process has inherited
    # unpickles: part of a pickle that is being loaded
    kind, saved, options = pickle.loads(definition)
    module = kind(saved, options)
    module.load_state_dict(state)
    return module.train(training)
