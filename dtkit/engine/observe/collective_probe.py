"""One rank's record of one explained step with sharded layers or parameters: every collective, with its bytes.

With sharded parameters, no rank has whole gradients before and after an all-reduce, since collectives run within
forward and backward. The probe records these in the order in which torch dispatches them. It waits for each at once, so
that nothing overlaps in an explained step. A result that should be equal on all ranks gets a digest.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit._util.dispatch_mode import DispatchMode
from dtkit._util.dtensor import is_dtensor_type
from dtkit._util.torch_private import functional_collectives, resolve_group, tree_leaves
from dtkit.engine.observe.step_probe import StepProbe
from dtkit.engine.observe.tensor_values import compute_digest, count_storage_bytes
from dtkit.planning.cost_model import MAX_WHOLE_SUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.explain.base import RankReport
    from dtkit.explain.sharded import CollectiveReport, ShardedReport

_OP_NAMESPACES = ("c10d", "_c10d_functional")
_COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_REPLICATED_RESULT_KINDS = ("all_reduce", "all_gather", "broadcast")
"""Collectives with the same result on all ranks."""


class CollectiveProbe(StepProbe):
    """Recorder of one rank's values and collectives in one step."""

    def __init__(
        self,
        model: torch.nn.Module,
        get_phase: Callable[[], str],
        group: Group,
        *,
        reports_samples: bool,
        **position: int,
    ) -> None:
        """Record a step in `group`. `get_phase` returns the step's current phase.

        `reports_samples` is True on one of the ranks with the same samples.
        """
        super().__init__(model, **position)
        self._get_phase, self._group, self._reports_samples = get_phase, group, reports_samples
        self._collectives: list[CollectiveReport] = []
        self._sent_before = self._sent_after = group.count_sent_bytes()

    @contextlib.contextmanager
    def record_collectives(self) -> Iterator[None]:
        """Record the collectives of a step within the context."""
        self._sent_before = self._group.count_sent_bytes()
        self._group.on_direct_collective = self._record_direct
        try:
            with _CollectiveRecorder(self._record):
                yield
        finally:
            self._group.on_direct_collective = None
        self._sent_after = self._group.count_sent_bytes()

    def _record_direct(self, kind: str, nbytes: int, result: torch.Tensor) -> None:
        ranks = tuple(range(self._group.world_size))
        is_direct = kind == "all_reduce" and nbytes <= MAX_WHOLE_SUM_BYTES
        self._record(kind, nbytes, [result], ranks, is_direct=is_direct)

    def _record(
        self,
        kind: str,
        nbytes: int,
        results: Sequence[torch.Tensor],
        ranks: tuple[int, ...],
        *,
        is_direct: bool = False,
    ) -> None:
        first = results[0]
        self._collectives.append(
            {
                "operation": kind,
                "phase": self._get_phase(),
                "shape": tuple(first.shape),
                "dtype": str(first.dtype).removeprefix("torch."),
                "nbytes": nbytes,
                "ranks": ranks,
                "is_direct": is_direct,
                "digest": compute_digest([("", tensor) for tensor in results])
                if kind in _REPLICATED_RESULT_KINDS
                else None,
            }
        )

    def build_report(self) -> RankReport:
        """Return the record as plain data for ``ShardedExplanation.from_reports``."""
        parameters = list(self._model.parameters())
        report: ShardedReport = {
            **super().build_report(),
            "collectives": self._collectives,
            "reports_samples": self._reports_samples,
            "sent_bytes": self._sent_after - self._sent_before,
            "held_bytes": count_storage_bytes(parameters),
            "whole_bytes": sum(p.numel() * p.element_size() for p in parameters),
        }
        return report


class _CollectiveRecorder(DispatchMode):
    """Mode that reports each dispatched collective after its end."""

    def __init__(self, on_collective: Callable[[str, int, Sequence[torch.Tensor], tuple[int, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_collective = on_collective

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation. For DTensors, torch first dispatches the operations on their parts."""
        if any(map(is_dtensor_type, types)):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        kind = _classify_op(func)
        if kind is not None:
            groups = [tree_leaves(value) for value in (*args, output)]
            tensors = [[t for t in group if isinstance(t, torch.Tensor)] for group in groups]
            results = _wait_for_results(output) or tensors[0]
            self._on_collective(
                kind, max(sum(t.nbytes for t in group) for group in tensors), results, _find_ranks(args)
            )
        return output


def _classify_op(func: Any) -> str | None:
    """Return one of `_COLLECTIVE_KINDS` by the beginning of an operation's name; None for other operations."""
    space, _, name = func.name().partition("::")
    if space not in _OP_NAMESPACES:
        return None
    plain = name.replace("_", "")
    return next((kind for kind in _COLLECTIVE_KINDS if plain.startswith(kind.replace("_", ""))), None)


def _wait_for_results(output: Any) -> list[torch.Tensor]:
    """Return the tensors that a collective creates, after it has ended."""
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.ScriptObject):
            # waits: a collective, limited by the process group's timeout
            leaf.wait()  # type: ignore[attr-defined]  # a c10d Work
            return results
    wait: Callable[[Any], torch.Tensor] = vars(functional_collectives)["wait_tensor"]  # strategies may replace it
    return [wait(tensor) for tensor in results]


def _find_ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of a collective by its process group, or by the name of the group."""
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(AttributeError, RuntimeError, TypeError, KeyError):
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
        if isinstance(arg, str):
            with contextlib.suppress(AttributeError, RuntimeError, KeyError):
                return tuple(dist.get_process_group_ranks(resolve_group(arg)))
    return tuple(range(dist.get_world_size()))
