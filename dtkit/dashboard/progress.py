"""Placeholder until the elapsed-time line is written here (see the helper's task)."""
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Nothing yet."""
    yield
