"""What one rank sees of one step whose layers or parameters are cut: every collective, with its bytes.

Where each rank has slices only, no rank has gradients of its own to be shown before and after a sum: collectives are
within forward and backward. So these are noted, in order, as torch dispatches them. Each is waited for where it is
noted (so that nothing overlaps in such a step), and a result that should be the same on all of its ranks gets a digest.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtkit.engine.memory import count_storage_bytes
from dtkit.engine.observe.step_probe import StepProbe, compute_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.explain.base import RankReport
    from dtkit.explain.sharded import CollectiveReport, ShardedReport

_OP_NAMESPACES = ("c10d", "_c10d_functional")
_COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_REPLICATED_RESULT_KINDS = ("all_reduce", "all_gather", "broadcast")
"""Those whose result is the same on all ranks."""


class CollectiveProbe(StepProbe):
    """Collects one rank's numbers of one step."""

    def __init__(
        self,
        model: torch.nn.Module,
        get_phase: Callable[[], str],
        count_sent_bytes: Callable[[], int],
        *,
        reports_samples: bool,
        **position: int,
    ) -> None:
        """`phase` tells what the step is doing; `sent` how many bytes this rank has sent so far.

        `speaks`: of the ranks that take the same samples, this is the one that counts them.
        """
        super().__init__(model, **position)
        self._get_phase, self._count_sent_bytes, self._reports_samples = get_phase, count_sent_bytes, reports_samples
        self._collectives: list[CollectiveReport] = []
        self._sent_before = self._sent_after = count_sent_bytes()

    @contextlib.contextmanager
    def record_collectives(self) -> Iterator[None]:
        """Note the collectives of a step."""
        self._sent_before = self._count_sent_bytes()
        with _CollectiveRecorder(self._record):
            yield
        self._sent_after = self._count_sent_bytes()

    def _record(self, kind: str, nbytes: int, results: Sequence[torch.Tensor], ranks: tuple[int, ...]) -> None:
        first = results[0]
        self._collectives.append(
            {
                "what": kind,
                "phase": self._get_phase(),
                "shape": tuple(first.shape),
                "dtype": str(first.dtype).removeprefix("torch."),
                "nbytes": nbytes,
                "ranks": ranks,
                "digest": compute_digest([("", tensor) for tensor in results])
                if kind in _REPLICATED_RESULT_KINDS
                else None,
            }
        )

    def build_report(self) -> RankReport:
        """All of it as plain numbers: what ``ShardedExplanation.from_reports`` takes, one of each rank."""
        parameters = list(self._model.parameters())
        found: ShardedReport = {
            **super().build_report(),
            "collectives": self._collectives,
            "speaks": self._reports_samples,
            "sent_bytes": self._sent_after - self._sent_before,
            "held_bytes": count_storage_bytes(parameters),
            "whole_bytes": sum(p.numel() * p.element_size() for p in parameters),
        }
        return found


class _CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """Tells of each collective that is dispatched while it is active, once that has ended."""

    def __init__(self, on_collective: Callable[[str, int, Sequence[torch.Tensor], tuple[int, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_collective = on_collective

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; a DTensor's is first made into those on its parts."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        kind = _classify_op(func)
        if kind is not None:
            groups = [tree_leaves(value) for value in (*args, made)]
            tensors = [[t for t in group if isinstance(t, torch.Tensor)] for group in groups]
            results = _wait_for_results(made) or tensors[0]
            self._on_collective(
                kind, max(sum(t.nbytes for t in group) for group in tensors), results, _find_ranks(args)
            )
        return made


def _classify_op(func: Any) -> str | None:
    """One of `_TYPE_CHECKS`, as torch's many names for them begin; None for what is no collective."""
    space, _, name = getattr(getattr(func, "_schema", None), "name", "").partition("::")
    if space not in _OP_NAMESPACES:
        return None
    plain = name.replace("_", "")
    return next((kind for kind in _COLLECTIVE_KINDS if plain.startswith(kind.replace("_", ""))), None)


def _wait_for_results(output: Any) -> list[torch.Tensor]:
    """The tensors that a collective has made, when they are there."""
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.ScriptObject):
            # waits: a collective, limited by the process group's timeout
            leaf.wait()  # type: ignore[attr-defined]  # a c10d Work
            return results
    wait: Callable[[Any], torch.Tensor] = vars(_functional_collectives)["wait_tensor"]  # which may be marked just now
    return [wait(tensor) for tensor in results]


def _find_ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    """The ranks that a collective is among: by its process group, or that group's name."""
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(AttributeError, RuntimeError, TypeError, KeyError):
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
        if isinstance(arg, str):
            with contextlib.suppress(AttributeError, RuntimeError, KeyError):
                return tuple(dist.get_process_group_ranks(vars(dist.distributed_c10d)["_resolve_process_group"](arg)))
    return tuple(range(dist.get_world_size()))
