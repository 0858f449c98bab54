"""What one rank of a pipeline sees of one step: what it sends over the borders of its stages, and what arrives.

While a schedule runs, the methods of torch's stages are looked in on: those that say what is to be sent or received,
and those that use what has arrived. A tensor that is sent is noted when it is handed over, one that arrives when it is
used; both by a digest of its bits, so that the notebook can tell whether what arrived is what was sent. A stage next
to another one on the same rank hands over without sending, and that is noted alike.

Of the backward passes, each micro-batch's part of a stage's gradient is taken by itself and then added, as backward
would have done. So the parts can be added up again, in float64, and held against the gradient that the update uses.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from dtkit.engine.observe.step_probe import Microscope, digest, flat, norm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dtkit.explain.data_parallel import RankReport
    from dtkit.explain.pipeline import MicroBatchGradient, PipelineReport, StageReport, TransferRecord

_SENDS = {"get_fwd_send_ops": "activation", "get_bwd_send_ops": "gradient"}
_RECEIVES = {"get_fwd_recv_ops": "activation", "get_bwd_recv_ops": "gradient"}
_HANDS = {"set_local_fwd_input": "activation", "set_local_bwd_input": "gradient"}
_USES = {"forward_one_chunk": "activation", "backward_one_chunk": "gradient"}
_BACKWARD = ("backward_one_chunk", "backward_weight_one_chunk")
_BACK = {"activation": -1, "gradient": 1}  # from the stage that uses a tensor to the one that it is from
_FIRST = 3  # numbers of a tensor that are shown


class StageScope(Microscope):
    """Collects one rank's numbers of one step of a pipeline."""

    def __init__(self, parts: Mapping[int, torch.nn.Module], *, rank: int, step: int, epoch: int) -> None:
        """`parts` are this rank's modules by stage, with the parameters' names as they are in the model."""
        super().__init__(torch.nn.ModuleList(parts.values()), rank=rank, step=step, epoch=epoch)
        self._named = [pair for part in parts.values() for pair in part.named_parameters() if pair[1].requires_grad]
        for entry, (name, _) in zip(self._report["tensors"], self._named, strict=True):
            entry["name"] = name
        self._rank = rank
        self._held = {s: [p for p in part.parameters() if p.requires_grad] for s, part in parts.items()}
        self._sums = {s: [torch.zeros_like(flat(p)) for p in held] for s, held in self._held.items()}
        self._expected: dict[tuple[str, int, int], list[tuple[torch.Tensor, int]]] = {}
        self._sightings: list[TransferRecord] = []
        self._parts: list[MicroBatchGradient] = []
        self._stages: dict[int, StageReport] = {
            s: {"tensors": len(held), "numbers": sum(p.numel() for p in held), "norm": 0.0, "gap": 0.0}
            for s, held in self._held.items()
        }

    @contextlib.contextmanager
    def over(self, stages: Sequence[Any]) -> Iterator[None]:
        """Look in on torch's stages while it lasts."""
        watches = [(_SENDS, self._sending), (_RECEIVES, self._receiving), (_HANDS, self._handing), (_USES, self._using)]
        for stage in stages:
            for names, watch in watches:
                for name, kind in names.items():
                    setattr(stage, name, watch(getattr(stage, name), kind, stage.stage_index))
            for name in _BACKWARD:
                setattr(stage, name, self._adding(getattr(stage, name), stage.stage_index))
        try:
            yield
        finally:
            for stage in stages:
                for name in (*_SENDS, *_RECEIVES, *_HANDS, *_USES, "backward_weight_one_chunk"):
                    delattr(stage, name)  # of this stage: its class has its own

    # -- at the borders ---------------------------------------------------------------------------------------

    def _sending(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def watched(micro_batch: int) -> Any:
            ops = method(micro_batch)
            for k, op in enumerate(ops):
                self._see("sent", kind, (stage, stage - _BACK[kind]), (micro_batch, k), op.tensor, op.peer)
            return ops

        return watched

    def _receiving(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def watched(micro_batch: int) -> Any:
            ops = method(micro_batch)
            self._expected[kind, stage, micro_batch] = [(op.tensor, op.peer) for op in ops]
            return ops

        return watched

    def _handing(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        """From one stage to the next on the same rank: nothing is sent."""

        def watched(values: Any, micro_batch: int) -> None:
            method(values, micro_batch)
            given = [v for v in (values if isinstance(values, tuple) else (values,)) if v is not None]
            for k, tensor in enumerate(given):
                self._see("sent", kind, (stage + _BACK[kind], stage), (micro_batch, k), tensor, self._rank)
            self._expected[kind, stage, micro_batch] = [(tensor, self._rank) for tensor in given]

        return watched

    def _using(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            for k, (tensor, peer) in enumerate(self._expected.pop((kind, stage, micro_batch), [])):
                self._see("arrived", kind, (stage + _BACK[kind], stage), (micro_batch, k), tensor, peer)
            return method(micro_batch, *args, **kwargs)

        return watched

    def _see(
        self, way: str, kind: str, border: tuple[int, int], which: tuple[int, int], tensor: torch.Tensor, peer: int
    ) -> None:
        numbers = flat(tensor)
        self._sightings.append(
            {
                "way": way,
                "kind": kind,
                "border": border,
                "which": which,
                "rank": self._rank,
                "peer": peer,
                "at": time.perf_counter(),
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nbytes": tensor.nbytes,
                "norm": norm_of(numbers),
                "first": tuple(numbers[:_FIRST].tolist()),
                "digest": digest([("", tensor)]),
            }
        )

    # -- within a stage ---------------------------------------------------------------------------------------

    def _adding(self, method: Callable[..., Any], stage: int) -> Callable[..., Any]:
        """A backward pass whose gradients are taken by themselves, and then added to what there was."""
        parameters, sums = self._held[stage], self._sums[stage]

        @functools.wraps(method)
        def watched(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            before = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            found = method(micro_batch, *args, **kwargs)
            norms = []
            for p, old, total in zip(parameters, before, sums, strict=True):
                if p.grad is not None:
                    own = flat(p.grad)
                    norms.append(norm_of(own))
                    total.add_(own)
                    p.grad = p.grad if old is None else old.add_(p.grad)
                else:
                    p.grad = old
            if norms:
                self._parts.append({"stage": stage, "micro_batch": micro_batch, "norm": math.hypot(*norms)})
            return found

        return watched

    def summed(self) -> None:
        """All micro-batches are through: hold the sum of their parts against the gradients that there are."""
        for stage, parameters in self._held.items():
            found = self._stages[stage]
            for p, total in zip(parameters, self._sums[stage], strict=True):
                gradient = torch.zeros_like(total) if p.grad is None else flat(p.grad)
                found["norm"] = math.hypot(found["norm"], norm_of(gradient))
                found["gap"] = math.hypot(found["gap"], norm_of(total.sub_(gradient)))
        self._sums = {}

    def report(self) -> RankReport:
        """All of it as plain numbers: what ``PipelineExplanation.from_reports`` takes, one of each rank."""
        found: PipelineReport = {
            **super().report(),
            "sightings": self._sightings,
            "parts": self._parts,
            "stages": self._stages,
        }
        return found
