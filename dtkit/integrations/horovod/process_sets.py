"""Process sets: groups of ranks that communicate among themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.integrations.horovod.context import get_context, has_context

if TYPE_CHECKING:
    from collections.abc import Sequence


class ProcessSet:
    """Some of the ranks. Pass it to `init` or to `add_process_set` before you use it.

    ranks : numbers of the ranks in the whole group, in any order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if not all(isinstance(rank, int) for rank in ranks):
            raise NotImplementedError("a process set is a list of ranks; MPI communicators are not supported")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks {list(ranks)} contain a rank twice; name each rank once")
        self.process_set_id: int | None = None
        """Number of the set; None before its registration and after its removal."""
        self._ranks = sorted(ranks)

    @property
    def ranks(self) -> list[int] | None:
        """The ranks in ascending order."""
        return self._ranks

    def size(self) -> int | None:
        """Return the number of ranks; None unless the set is registered."""
        return None if self.ranks is None or self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's place in the set; None unless the set is registered and contains this rank.

        Operations such as `broadcast` take ranks of the whole group instead.
        """
        rank, ranks = get_context().rank, self.ranks
        return None if self.size() is None or ranks is None or rank not in ranks else ranks.index(rank)

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None before `init`."""
        return None if self.ranks is None else get_context().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current group."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        """All ranks; None before `init`."""
        return get_context().set_ranks[0] if has_context() else None


global_process_set = _GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, and return it. All ranks call this function, with the same sets in the same order.

    Raises ValueError if a set of these ranks is registered already, or if a rank doesn't exist.
    """
    context = get_context()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or not set(ranks) <= set(context.set_ranks[0]):
        raise ValueError(f"ranks {ranks} are not ranks of this group; use some of 0 to {context.size - 1}")
    if ranks in context.set_ranks.values():
        raise ValueError(f"a process set of the ranks {ranks} exists; use that one, or remove it first")
    added.process_set_id = context.add_set(ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return whether it was registered. All ranks call this function."""
    number = process_set.process_set_id
    if number is None or number == 0 or number not in get_context().set_ranks:
        return False
    process_set.process_set_id = None
    get_context().remove_set(number)
    return True
