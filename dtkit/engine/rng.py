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

_PYTHON = "625I"  # words of the Mersenne Twister's state, and the place in it


def text_of(state: torch.Tensor) -> str:
    """A state of torch's, as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def state_of(text: str) -> torch.Tensor:
    """What :func:`text_of` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def shared() -> dict[str, Any]:
    """The states of numpy's and of Python's own generators."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global one is what users' code draws from
    version, words, gauss = random.getstate()
    return {
        "numpy": [kind, base64.b64encode(np.asarray(keys).tobytes()).decode(), *rest],
        "python": [version, base64.b64encode(struct.pack(_PYTHON, *words)).decode(), gauss],
    }


def set_shared(state: dict[str, Any]) -> None:
    """Put back what :func:`shared` returned."""
    kind, keys, *rest = state["numpy"]
    words = np.frombuffer(base64.b64decode(keys), np.uint32)
    np.random.set_state((kind, words, *rest))  # noqa: NPY002 - as above
    version, packed, gauss = state["python"]
    random.setstate((version, struct.unpack(_PYTHON, base64.b64decode(packed)), gauss))


def at_place(states: Sequence[dict[str, Any]], place: int) -> dict[str, Any] | None:
    """The first of these states that belongs to a place among the replicas."""
    return next((state for state in states if state["place"] == place), None)


def fresh_seed(seed: int, step: int, place: int) -> int:
    """A seed that no other step and place have."""
    return int(np.random.SeedSequence([seed, step, place]).generate_state(1, np.uint64)[0] >> 1)
