"""Random states as plain values: torch's as a job keeps them, and those of numpy and of Python, which it shares.

On another layout a rank goes on with the state of the rank that had the same place among the replicas. A replica that
there was not begins with a state of its own that follows from the seed, the step and its place.
"""

from __future__ import annotations

import base64
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_PYTHON_STATE_FORMAT = "625I"  # words of the Mersenne Twister's state, and the place in it


def encode_state(state: torch.Tensor) -> str:
    """A state of torch's, as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def decode_state(text: str) -> torch.Tensor:
    """What :func:`encode_state` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def get_global_states() -> dict[str, Any]:
    """The states of numpy's and of Python's own generators."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global one is what users' code draws from
    version, words, gauss = random.getstate()
    return {
        "numpy": [kind, base64.b64encode(np.asarray(keys).tobytes()).decode(), *rest],
        "python": [version, base64.b64encode(struct.pack(_PYTHON_STATE_FORMAT, *words)).decode(), gauss],
    }


def set_global_states(state: dict[str, Any]) -> None:
    """Put back what :func:`shared` returned."""
    kind, keys, *rest = state["numpy"]
    words = np.frombuffer(base64.b64decode(keys), np.uint32)
    np.random.set_state((kind, words, *rest))  # noqa: NPY002 - as above
    version, packed, gauss = state["python"]
    random.setstate((version, struct.unpack(_PYTHON_STATE_FORMAT, base64.b64decode(packed)), gauss))


def find_replica_state(states: Sequence[dict[str, Any]], replica: int) -> dict[str, Any] | None:
    """The first of these states that belongs to a place among the replicas."""
    return next((state for state in states if state["place"] == replica), None)


def derive_seed(seed: int, step: int, replica: int) -> int:
    """A seed that no other step and place have."""
    return int(np.random.SeedSequence([seed, step, replica]).generate_state(1, np.uint64)[0] >> 1)
