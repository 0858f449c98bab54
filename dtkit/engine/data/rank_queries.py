"""Detection of code that asks for its rank: a stream that does divides itself, even if its items are random."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})


@contextlib.contextmanager
def record_rank_queries() -> Iterator[list[str]]:
    """Yield a list that gets the names of the ways in which code within the context asks for its rank."""
    import torch.distributed as dist

    queries: list[str] = []
    environment: Any = type(os.environ)
    read_variable = environment.__getitem__

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            queries.append(name)
            return method(*args)

        return ask

    def read(variables: Any, name: Any) -> Any:
        if name in _VARIABLES:
            queries.append(f"os.environ[{name!r}]")
        return read_variable(variables, name)

    replacements: list[tuple[Any, str, Any]] = [
        (dist.ProcessGroup, "rank", wrap("torch.distributed.get_rank()", dist.ProcessGroup.rank)),
        (dist.ProcessGroup, "size", wrap("torch.distributed.get_world_size()", dist.ProcessGroup.size)),
        (environment, "__getitem__", read),
    ]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    try:
        for owner, name, replacement in replacements:
            setattr(owner, name, replacement)
        yield queries
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
