"""Random numbers for one part of a process, by its own states of torch's, numpy's and Python's global generators.

User code draws from the global generators. While it runs, an :class:`OwnRng` sets them to states of its own.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import random
import struct
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_PYTHON_STATE_FORMAT = "625I"  # words of the Mersenne Twister's state, and the position in it
_MAX_NUMPY_SEED = 2**32 - 1
_MASK = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class GeneratorStates:
    """States of the global generators, which all threads of a process share."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def capture(cls, cuda_device: torch.device | None = None) -> GeneratorStates:
        """Return the current states, with that of one CUDA device if given."""
        cuda = None if cuda_device is None else torch.cuda.get_rng_state(cuda_device)
        numpy_state: Any = np.random.get_state()  # noqa: NPY002 - users' code draws from the global generator
        return cls(torch.get_rng_state(), cuda, numpy_state, random.getstate())

    def restore(self, cuda_device: torch.device | None = None) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if cuda_device is not None and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, cuda_device)
        np.random.set_state(self.numpy)  # noqa: NPY002 - as above
        random.setstate(self.python)

    def encode(self) -> dict[str, Any]:
        """Return the states as JSON values."""
        kind, keys, *rest = self.numpy
        version, words, gauss = self.python
        return {
            "cpu": _encode_bytes(self.cpu.numpy().tobytes()),
            "cuda": None if self.cuda is None else _encode_bytes(self.cuda.numpy().tobytes()),
            "numpy": [kind, _encode_bytes(np.asarray(keys).tobytes()), *rest],
            "python": [version, _encode_bytes(struct.pack(_PYTHON_STATE_FORMAT, *words)), gauss],
        }

    @classmethod
    def decode(cls, encoded: dict[str, Any]) -> GeneratorStates:
        """Return the states that :meth:`encode` was called on."""
        kind, keys, *rest = encoded["numpy"]
        version, words, gauss = encoded["python"]
        return cls(
            _decode_tensor(encoded["cpu"]),
            None if encoded["cuda"] is None else _decode_tensor(encoded["cuda"]),
            (kind, np.frombuffer(base64.b64decode(keys), np.uint32), *rest),
            (version, struct.unpack(_PYTHON_STATE_FORMAT, base64.b64decode(words)), gauss),
        )


class OwnRng:
    """Context whose code draws from its own states, so that it and the code outside don't affect each other.

    All threads of a process share the generators, so another thread waits until the context ends.
    """

    # locks: while the owner's code runs; only tests have several threads that draw
    _lock = threading.RLock()

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._cuda_device = device if device is not None and device.type == "cuda" else None
        self.states: GeneratorStates
        """States at the end of the last context."""
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Let the next context start with this seed."""
        with self._lock:
            outside = GeneratorStates.capture(self._cuda_device)
            seed_generators(seed, self._cuda_device)
            self.states = GeneratorStates.capture(self._cuda_device)
            outside.restore(self._cuda_device)

    def __enter__(self) -> None:
        # waits: for another thread's context, which only tests have
        self._lock.acquire()
        self._outside = GeneratorStates.capture(self._cuda_device)
        self.states.restore(self._cuda_device)

    def __exit__(self, *exception: object) -> None:
        self.states = GeneratorStates.capture(self._cuda_device)
        self._outside.restore(self._cuda_device)
        self._lock.release()


def seed_generators(seed: int, cuda_device: torch.device | None = None) -> None:
    """Seed torch's, numpy's and Python's global generators."""
    seed_torch(seed, cuda_device)
    np.random.seed(seed & _MAX_NUMPY_SEED)  # noqa: NPY002 - users' code draws from the global generator
    random.seed(seed)


def seed_torch(seed: int, cuda_device: torch.device | None = None) -> None:
    """Seed torch's global generators."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes 100 times as long
    if cuda_device is not None:
        with torch.cuda.device(cuda_device):
            torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the generators on the host after the context."""
    states = GeneratorStates.capture()
    try:
        yield
    finally:
        states.restore()


def derive_seed(*key: int) -> int:
    """Return a seed derived from numbers from 0 up. Other numbers are unlikely to give the same seed."""
    return int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0] >> 1)


def mix_seed(seed: int, step: int) -> int:
    """Return a seed of 63 bits derived from two numbers from 0 up, in a microsecond.

    It is one number of the generator SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    z = ((seed + 1) * 0xBF58476D1CE4E5B9 + (step + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def _encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
