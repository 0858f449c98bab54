"""The seam between the notebook and the engine processes.

Everything above it (cluster, runs, views) speaks to engines through these few methods. Two things stand below:
ipyparallel (:mod:`dtkit.cluster.transport`), and the double for tests (:mod:`dtkit.testing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from dtkit.types import Reply


class Transport(Protocol):
    """Engines, in order of rank."""

    @property
    def engine_ids(self) -> Sequence[int]:
        """Ipyparallel's id of each rank."""

    def send(
        self, rank: int, message: bytes, listen: Callable[[int, list[object]], None] | None = None
    ) -> Future[Reply]:
        """Send one pickled Request. The future never raises: a lost engine is a Reply with a Failure.

        `listen(first, items)` is called with what the engine publishes meanwhile, from any thread.
        """

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:
        """Send SIGINT to these engines, without waiting; with `wake`, SIGCONT first: a stopped one hears nothing."""

    def check_reachable(self) -> None:
        """Raise ClusterError where no message can reach the engines any more. Without waiting."""

    def find_lost_ranks(self) -> list[int]:
        """The ranks whose engines have ended."""

    def kill(self, ranks: Sequence[int]) -> None:
        """End these engines at once, and return when they are gone."""

    def replace(self, ranks: Sequence[int]) -> None:
        """Have a new engine at each of these ranks; what still runs there is ended. Else ClusterError."""

    def drop(self, ranks: Sequence[int]) -> None:
        """Go on without these ranks: those above move down."""

    def close(self) -> None:
        """End what this transport started, and nothing else. Idempotent."""
