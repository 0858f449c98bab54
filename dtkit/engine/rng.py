"""A job's random state: torch's as the job keeps it, and those of numpy and Python, which it shares with cells.

With another layout a rank continues with the state of the rank that had the same replica index. A new replica starts
with a state that follows from the seed, the step and its index.
"""

from __future__ import annotations

import base64
import contextlib
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.engine.state.visitor import StateVisitor

_PYTHON_STATE_FORMAT = "625I"  # words of the Mersenne Twister's state, and the position in it


class JobRng:
    """Context in which torch draws a job's own random numbers, so that jobs and cells don't disturb each other."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda_device = device if device.type == "cuda" else None
        self._seed = seed
        self._cpu_state: torch.Tensor
        self._cuda_state: torch.Tensor | None
        self._reseed(seed)

    def _reseed(self, seed: int) -> None:
        with self._fork_rng():
            torch.manual_seed(seed)
            self._save_states()

    def visit_state(self, visitor: StateVisitor, step: int) -> None:
        """Visit the states of this job, and those of numpy and Python in this process."""
        replica = visitor.replica
        cuda = None if self._cuda_state is None else encode_state(self._cuda_state)
        current = {"replica": replica, "cpu": encode_state(self._cpu_state), "cuda": cuda, **get_global_states()}
        state = visitor.per_rank(
            "random", current, lambda states: next((s for s in states if s["replica"] == replica), None)
        )
        if state is None:
            self._reseed(derive_seed(self._seed, step, replica))
            return
        self._cpu_state = decode_state(state["cpu"])
        if self._cuda_device is not None and state["cuda"] is not None:
            self._cuda_state = decode_state(state["cuda"])
        set_global_states(state)

    def _fork_rng(self) -> contextlib.AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[self._cuda_device] if self._cuda_device else [])

    def _save_states(self) -> None:
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(self._cuda_device) if self._cuda_device else None

    @contextlib.contextmanager
    def preserve_states(self) -> Iterator[None]:
        """Enter the context, and restore the state afterwards: training draws the same numbers with and without it."""
        saved = self._cpu_state, self._cuda_state
        try:
            with self:
                yield
        finally:
            self._cpu_state, self._cuda_state = saved

    def __enter__(self) -> None:
        self._fork_context = self._fork_rng()
        self._fork_context.__enter__()
        torch.set_rng_state(self._cpu_state)
        if self._cuda_device and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda_device)

    def __exit__(self, *exception: object) -> None:
        self._save_states()
        self._fork_context.__exit__(None, None, None)


def encode_state(state: torch.Tensor) -> str:
    """Return a torch random state as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def decode_state(text: str) -> torch.Tensor:
    """Return the state that :func:`encode_state` was given."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def get_global_states() -> dict[str, Any]:
    """Return the states of numpy's and Python's global generators."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - users' code draws from the global generator
    version, words, gauss = random.getstate()
    return {
        "numpy": [kind, base64.b64encode(np.asarray(keys).tobytes()).decode(), *rest],
        "python": [version, base64.b64encode(struct.pack(_PYTHON_STATE_FORMAT, *words)).decode(), gauss],
    }


def set_global_states(state: dict[str, Any]) -> None:
    """Restore what :func:`get_global_states` returned."""
    kind, keys, *rest = state["numpy"]
    words = np.frombuffer(base64.b64decode(keys), np.uint32)
    np.random.set_state((kind, words, *rest))  # noqa: NPY002 - as above
    version, packed, gauss = state["python"]
    random.setstate((version, struct.unpack(_PYTHON_STATE_FORMAT, base64.b64decode(packed)), gauss))


def derive_seed(seed: int, step: int, replica: int) -> int:
    """Return a seed that no other step and replica have."""
    return int(np.random.SeedSequence([seed, step, replica]).generate_state(1, np.uint64)[0] >> 1)
