"""One rank's record of one explained step of a pipeline: the tensors that its stages send and receive.

While a schedule runs, the probe wraps methods of torch's stages: those that return transfers, and those that use
received tensors. It records a tensor when it is sent, and when the receiver uses it. The notebook compares the digests
of both. Neighboring stages on the same rank pass tensors without messages, which the probe records too.

In backward, the probe takes each micro-batch's gradients separately, and then adds them as backward would. It also sums
them in float64, to compare the sum with the gradient that the update uses.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from dtkit.engine.observe.step_probe import StepProbe
from dtkit.engine.observe.tensor_values import compute_digest, compute_norm, flatten_to_float64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dtkit.explain.base import RankReport
    from dtkit.explain.pipeline import MicroBatchGradient, PipelineReport, StageReport, TransferRecord

_SEND_METHODS = {"get_fwd_send_ops": "activation", "get_bwd_send_ops": "gradient"}
_RECV_METHODS = {"get_fwd_recv_ops": "activation", "get_bwd_recv_ops": "gradient"}
_LOCAL_INPUT_METHODS = {"set_local_fwd_input": "activation", "set_local_bwd_input": "gradient"}
_CONSUMING_METHODS = {"forward_one_chunk": "activation", "backward_one_chunk": "gradient"}
_BACKWARD_METHODS = ("backward_one_chunk", "backward_weight_one_chunk")
_PRODUCER_OFFSET = {"activation": -1, "gradient": 1}  # from the stage that uses a tensor to the one that computes it
_NUM_SHOWN_VALUES = 3  # of each tensor


class PipelineProbe(StepProbe):
    """Recorder of one rank's values and transfers in one step of a pipeline."""

    def __init__(self, stage_modules: Mapping[int, torch.nn.Module], *, rank: int, step: int, epoch: int) -> None:
        """Record a step of this rank's modules by stage. Their parameters are named as in the whole model."""
        super().__init__(torch.nn.ModuleList(stage_modules.values()), rank=rank, step=step, epoch=epoch)
        self._named_parameters = [
            pair for part in stage_modules.values() for pair in part.named_parameters() if pair[1].requires_grad
        ]
        for entry, (name, _) in zip(self._report["tensors"], self._named_parameters, strict=True):
            entry["name"] = name
        self._rank = rank
        self._stage_parameters = {
            s: [p for p in part.parameters() if p.requires_grad] for s, part in stage_modules.items()
        }
        self._gradient_sums = {
            s: [torch.zeros_like(flatten_to_float64(p)) for p in held] for s, held in self._stage_parameters.items()
        }
        self._expected_tensors: dict[tuple[str, int, int], list[tuple[torch.Tensor, int]]] = {}
        self._transfers: list[TransferRecord] = []
        self._micro_batch_norms: list[MicroBatchGradient] = []
        self._stage_reports: dict[int, StageReport] = {
            s: {"tensors": len(held), "numbers": sum(p.numel() for p in held), "norm": 0.0, "gap": 0.0}
            for s, held in self._stage_parameters.items()
        }

    @contextlib.contextmanager
    def observe_stages(self, stages: Sequence[Any]) -> Iterator[None]:
        """Wrap the methods of torch's stages within the context."""
        wrappers = [
            (_SEND_METHODS, self._wrap_send),
            (_RECV_METHODS, self._wrap_recv),
            (_LOCAL_INPUT_METHODS, self._wrap_local_input),
            (_CONSUMING_METHODS, self._wrap_consumer),
        ]
        for stage in stages:
            for names, wrap in wrappers:
                for name, kind in names.items():
                    setattr(stage, name, wrap(getattr(stage, name), kind, stage.stage_index))
            for name in _BACKWARD_METHODS:
                setattr(stage, name, self._wrap_backward(getattr(stage, name), stage.stage_index))
        try:
            yield
        finally:
            for stage in stages:
                for name in (
                    *_SEND_METHODS,
                    *_RECV_METHODS,
                    *_LOCAL_INPUT_METHODS,
                    *_CONSUMING_METHODS,
                    "backward_weight_one_chunk",
                ):
                    delattr(stage, name)  # uncovers the method of the class

    # -- between stages ---------------------------------------------------------------------------------------

    def _wrap_send(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def record_sends(micro_batch: int) -> Any:
            ops = method(micro_batch)
            for k, op in enumerate(ops):
                self._record_transfer(
                    "sent", kind, (stage, stage - _PRODUCER_OFFSET[kind]), (micro_batch, k), op.tensor, op.peer
                )
            return ops

        return record_sends

    def _wrap_recv(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def record_expected(micro_batch: int) -> Any:
            ops = method(micro_batch)
            self._expected_tensors[kind, stage, micro_batch] = [(op.tensor, op.peer) for op in ops]
            return ops

        return record_expected

    def _wrap_local_input(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        """Wrap the method that passes tensors to a stage on the same rank."""

        def record_local_transfer(outputs: Any, micro_batch: int) -> None:
            method(outputs, micro_batch)
            tensors = [v for v in (outputs if isinstance(outputs, tuple) else (outputs,)) if v is not None]
            for k, tensor in enumerate(tensors):
                self._record_transfer(
                    "sent", kind, (stage + _PRODUCER_OFFSET[kind], stage), (micro_batch, k), tensor, self._rank
                )
            self._expected_tensors[kind, stage, micro_batch] = [(tensor, self._rank) for tensor in tensors]

        return record_local_transfer

    def _wrap_consumer(self, method: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        @functools.wraps(method)
        def record_arrivals(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            for k, (tensor, peer) in enumerate(self._expected_tensors.pop((kind, stage, micro_batch), [])):
                self._record_transfer(
                    "arrived", kind, (stage + _PRODUCER_OFFSET[kind], stage), (micro_batch, k), tensor, peer
                )
            return method(micro_batch, *args, **kwargs)

        return record_arrivals

    def _record_transfer(
        self,
        direction: str,
        kind: str,
        stage_pair: tuple[int, int],
        tensor_id: tuple[int, int],
        tensor: torch.Tensor,
        peer: int,
    ) -> None:
        values = flatten_to_float64(tensor)
        self._transfers.append(
            {
                "direction": direction,
                "kind": kind,
                "stage_pair": stage_pair,
                "tensor_id": tensor_id,
                "rank": self._rank,
                "peer": peer,
                "at": time.perf_counter(),
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nbytes": tensor.nbytes,
                "norm": compute_norm(values),
                "first": tuple(values[:_NUM_SHOWN_VALUES].tolist()),
                "digest": compute_digest([("", tensor)]),
            }
        )

    # -- within a stage ---------------------------------------------------------------------------------------

    def _wrap_backward(self, method: Callable[..., Any], stage: int) -> Callable[..., Any]:
        """Wrap a backward pass, to take its gradients separately and add them to the existing ones."""
        parameters, sums = self._stage_parameters[stage], self._gradient_sums[stage]

        @functools.wraps(method)
        def record_gradients(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            before = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            result = method(micro_batch, *args, **kwargs)
            norms = []
            for p, old, total in zip(parameters, before, sums, strict=True):
                if p.grad is not None:
                    gradient = flatten_to_float64(p.grad)
                    norms.append(compute_norm(gradient))
                    total.add_(gradient)
                    p.grad = p.grad if old is None else old.add_(p.grad)
                else:
                    p.grad = old
            if norms:
                self._micro_batch_norms.append({"stage": stage, "micro_batch": micro_batch, "norm": math.hypot(*norms)})
            return result

        return record_gradients

    def compare_gradient_sums(self) -> None:
        """Compare the sums over all micro-batches with the parameters' gradients."""
        for stage, parameters in self._stage_parameters.items():
            report = self._stage_reports[stage]
            for p, total in zip(parameters, self._gradient_sums[stage], strict=True):
                gradient = torch.zeros_like(total) if p.grad is None else flatten_to_float64(p.grad)
                report["norm"] = math.hypot(report["norm"], compute_norm(gradient))
                report["gap"] = math.hypot(report["gap"], compute_norm(total.sub_(gradient)))
        self._gradient_sums = {}

    def build_report(self) -> RankReport:
        """Return the record as plain data for ``PipelineExplanation.from_reports``."""
        report: PipelineReport = {
            **super().build_report(),
            "transfers": self._transfers,
            "parts": self._micro_batch_norms,
            "stages": self._stage_reports,
        }
        return report
