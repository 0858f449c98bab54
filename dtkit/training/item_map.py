"""``cluster.map``: a function is applied to each item, on single engines as they become free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from dtkit._util import formatting
from dtkit._util.formatting import name_type
from dtkit.dashboard import call_display
from dtkit.dashboard.text.progress import show_progress
from dtkit.errors import ItemError
from dtkit.training.item_scheduler import ItemScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dtkit.dashboard.text.progress import Progress
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.types import Failure

OnError = Literal["raise", "return"]


def map_items(
    engine_group: EngineGroup,
    function: Callable[..., Any],
    items: Iterable[Any],
    repair: Callable[[], object],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    timeout: float | None = None,
) -> list[Any]:
    """See :meth:`dtkit.Cluster.map`; `repair` replaces engines that are gone."""
    engine_group.check_open()
    check_function(function, on_error)
    check_arguments(args, kwargs, timeout)
    if not hasattr(items, "__iter__"):
        raise TypeError(f"items={items!r} is {name_type(items)}; give a list, as in cluster.map(function, [1, 2])")
    source = _Items(list(items), on_error)
    name = str(getattr(function, "__name__", type(function).__name__))
    scheduler = ItemScheduler(engine_group, name, (function, tuple(args), dict(kwargs or {})), source, repair)
    with call_display.display_until_done(scheduler), show_progress(f"map {name}") as progress:
        source.show = lambda: _show(progress, scheduler, len(source.items))
        scheduler.run(timeout)
    return source.results


def check_function(function: Any, on_error: str, example: str = "cluster.map(function, items)") -> None:
    """Raise TypeError or ValueError for invalid arguments."""
    if not callable(function):
        raise TypeError(
            f"the function is {name_type(function)}, which can't be called; give a function, as in {example}"
        )
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error={on_error!r}; it must be 'raise' or 'return'")


def check_arguments(args: Any, kwargs: Any, timeout: Any) -> None:
    """Raise TypeError or ValueError unless these are a sequence, names with values, and seconds."""
    if isinstance(args, (str, bytes)) or not hasattr(args, "__iter__"):
        raise TypeError(f"args={args!r}; give the further arguments as a list, as in args=[{args!r}]")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs={kwargs!r}; give further arguments by name, as in kwargs={{'width': 8}}")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise ValueError(f"timeout={timeout!r}; it must be a number of seconds above 0, or None for no limit")


def _show(progress: Progress, scheduler: ItemScheduler, num_items: int) -> None:
    """Show the number of items that each node has computed."""
    nodes = ", ".join(f"node {rank}: {count}" for rank, count in sorted(scheduler.num_done.items()))
    total = f"{scheduler.num_done.total():,} of {formatting.format_count(num_items, 'item')}"
    progress.update(f"map {scheduler.name}: {total}{f' ({nodes})' if nodes else ''}")


class _Items:
    """Items of a list, and their results in the same order."""

    def __init__(self, items: list[Any], on_error: OnError) -> None:
        self.items = items
        self.results: list[Any] = [None] * len(items)
        self.show: Callable[[], object] = bool
        self._on_error, self._next = on_error, 0

    @property
    def has_more(self) -> bool:
        return self._next < len(self.items)

    def take(self) -> tuple[int, Any]:
        index = self._next
        self._next += 1
        return index, self.items[index]

    def on_start(self, index: int, rank: int) -> None:
        pass

    def on_repeat(self, index: int, item: Any) -> Any:  # noqa: ARG002 - the item is as before
        return item

    def on_result(self, index: int, value: Any) -> None:
        self.results[index] = value
        self.show()

    def on_failure(self, index: int, failure: Failure) -> None:
        error = ItemError(index, self.items[index], failure)
        if self._on_error == "raise":
            raise error
        self.results[index] = error
        self.show()

    def on_poll(self) -> None:
        self.show()
