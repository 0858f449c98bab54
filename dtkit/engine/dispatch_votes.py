"""When ranks vote on the end of a dispatch."""

from __future__ import annotations


def return_false() -> bool:
    """Return the answer of a vote that nobody has started."""
    return False


def choose_vote_steps(num_steps: int) -> set[int]:
    """Return the steps of a dispatch after which ranks vote on its end: after each eighth, and once early."""
    return {k for k in (num_steps // 64, *(eighth * num_steps // 8 for eighth in range(1, 8))) if k}
