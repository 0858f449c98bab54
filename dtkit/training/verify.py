"""The check that distributed training is the same as training in one process: replay it both ways and compare.

Two jobs are built from the start of the training: one on all ranks, and one on rank 0 alone that takes the rows of
every shard, so that both see the same rows in the same steps. Their parameters are then compared. What differs by
nature (statistics over a rank's own part of the batch, random numbers) is named and not judged.

Numbers whose true gradient is zero (the key bias of attention, a bias before BatchNorm) move by nothing but rounding,
which Adam-like optimizers amplify; they are found number by number (the key bias is a third of one parameter), named
apart and held to a wider bound.
"""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING, Any

from dtkit.errors import EngineError
from dtkit.rpc.protocol import JobOperations, make_call
from dtkit.training.state_dict import fetch_state_dict, load_payloads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from dtkit._util.deadline import Deadline
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.training.config import JobSpec

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
ZERO_TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
_HALF_PRECISION_TOLERANCE = 1e-2
_ZERO_GRADIENT_FRACTION = {
    "float64": 1e-13,
    "float32": 1e-6,
}  # of the largest gradient: below it a gradient is rounding


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of a verification. ``differences`` has the largest difference in each parameter and buffer."""

    verdict: str
    """"PASS", "FAIL" or "NOT COMPARABLE"."""
    steps: int
    world_size: int
    dtype: str
    max_difference: float
    """The largest difference, without the numbers of zero gradient."""
    tolerance: float
    differences: Mapping[str, float]
    zero_gradient: Mapping[str, tuple[int, float]]
    """Parameters with numbers whose true gradient is zero: how many, and their largest difference."""
    incomparable_reasons: tuple[str, ...]
    """What makes the two not comparable: modules as "name (Type): why", and options of the strategy."""

    def __bool__(self) -> bool:
        return self.verdict == "PASS"

    def text(self) -> str:
        """Return the report, a few lines."""
        worst = max(self.differences, key=lambda name: self.differences[name], default="")
        lines = [
            f"{self.verdict}: {self.steps} steps on {self.world_size} ranks against one process, {self.dtype}",
            f"  largest difference of the parameters {self.max_difference:.3g}, tolerance {self.tolerance:g}",
        ]
        if self.verdict == "FAIL":
            lines.append(f"  worst: {worst}, {self.differences[worst]:.3g}")
        for name, (count, largest) in self.zero_gradient.items():
            bound = ZERO_TOLERANCE.get(self.dtype, _HALF_PRECISION_TOLERANCE)
            lines.append(
                f"  {name}: {count} numbers of zero gradient hold rounding alone: {largest:.3g}, bound {bound:g}"
            )
        lines += [f"  {module}" for module in self.incomparable_reasons]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Verification({self.verdict}, difference={self.max_difference:.3g}, tolerance={self.tolerance:g})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"


def verify(
    engine_group: EngineGroup, job_spec: JobSpec, steps: int, equivalence_notes: Sequence[str], deadline: Deadline
) -> Verification:
    """See :meth:`dtkit.Run.verify`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}; verify needs an integer from 1 up")
    distributed, single = engine_group.make_key("job"), engine_group.make_key("job")
    try:
        state = _train_job(engine_group, job_spec, distributed, steps, None, deadline)
        reference = _train_job(engine_group, job_spec, single, steps, [0], deadline)
        call = make_call(JobOperations.max_gradients, job=single)
        payloads = engine_group.call_all(call, ranks=[0], timeout=deadline.get_remaining_s())
        (gradients,) = load_payloads(payloads)
    except EngineError:
        deadline.get_remaining_s()  # raises TimeoutError if that is why the engines failed
        raise
    finally:
        engine_group.free_later(distributed)
        engine_group.free_later(single)
    modules = (
        tuple(find_incomparable_modules(job_spec.model_handle.build_with_state(reference)))
        if engine_group.world_size > 1
        else ()
    )
    modules += tuple(equivalence_notes)
    return compare_states(state, reference, gradients, modules, steps, engine_group.world_size)


def _train_job(
    engine_group: EngineGroup, job_spec: JobSpec, job: str, steps: int, ranks: list[int] | None, deadline: Deadline
) -> Mapping[str, Any]:
    """Build the job, take the steps, return its state dict."""
    is_single = ranks is not None
    job_spec.build(engine_group, job, ranks=ranks, single_process=is_single, timeout=deadline.get_remaining_s())
    done = 0
    while done < steps:
        call = make_call(JobOperations.advance, job=job, step=done, steps=steps - done)
        advance, _ = engine_group.call_all(call, ranks=ranks, timeout=deadline.get_remaining_s())[0]
        if advance.end_reason == "nonfinite":
            raise ValueError(
                f"the gradients are not finite at step {advance.step}, so there is nothing to compare after it. "
                f"Verify fewer steps: run.verify(steps={max(1, advance.step)})"
            )
        if advance.end_reason == "exhausted":
            break
        done = advance.step
    return fetch_state_dict(engine_group, job, ranks, deadline.get_remaining_s())


def compare_states(
    state: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    incomparable_reasons: tuple[str, ...],
    steps: int,
    world_size: int,
) -> Verification:
    """Compare two state dicts. `gradients`: the largest absolute gradient of every number over the steps."""
    dtype = _get_least_precise_dtype(state[name] for name in gradients if name in state)
    floor = _ZERO_GRADIENT_FRACTION.get(dtype, _ZERO_GRADIENT_FRACTION["float32"]) * max(
        (float(g.max()) for g in gradients.values() if g.numel()), default=0.0
    )
    differences, zero = {}, {}
    for name, expected in reference.items():
        if not hasattr(expected, "is_floating_point"):  # a module's extra state may be anything
            continue
        difference = _compute_difference(state[name], expected)
        if name in gradients and bool((is_zero := gradients[name] <= floor).any()):
            zero[name] = int(is_zero.sum()), float(difference[is_zero].max())
            difference = difference[~is_zero]
        differences[name] = float(difference.max()) if difference.numel() else 0.0
    largest_difference, tolerance = (
        max(differences.values(), default=0.0),
        TOLERANCE.get(dtype, _HALF_PRECISION_TOLERANCE),
    )
    bound = ZERO_TOLERANCE.get(dtype, _HALF_PRECISION_TOLERANCE)
    is_within = largest_difference <= tolerance and all(largest <= bound for _, largest in zero.values())
    verdict = "NOT COMPARABLE" if incomparable_reasons else "PASS" if is_within else "FAIL"
    return Verification(
        verdict, steps, world_size, dtype, largest_difference, tolerance, differences, zero, incomparable_reasons
    )


def _get_least_precise_dtype(tensors: Iterator[torch.Tensor]) -> str:
    """Return the dtype with the fewest digits: its rounding decides the tolerance."""
    import torch

    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()] or [torch.get_default_dtype()]
    return str(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")


def _compute_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of every number: 0 between equal infinities (of a mask), infinite for NaN."""
    is_complex = a.is_complex() or b.is_complex()
    difference = (a - b).abs() if is_complex else (a.double() - b.double()).abs()
    return difference.masked_fill(a == b, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))


def find_incomparable_modules(model: torch.nn.Module) -> Iterator[str]:
    """Yield the modules of `model` whose training differs between one process and several by nature."""
    import torch
    from torch import nn

    from dtkit._util.torch_private import BatchNormBase, DropoutBase

    for name, module in model.named_modules():
        title = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, BatchNormBase) and not isinstance(module, nn.SyncBatchNorm):
            yield f"{title}: each rank normalizes with the statistics of its own part of the batch"
        elif isinstance(module, DropoutBase) and module.p > 0:
            yield f"{title}: each rank draws random numbers of its own"
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0:
            yield f"{title}: dropout={module.dropout} draws random numbers of each rank's own"
        elif isinstance(module, torch.nn.RReLU):
            yield f"{title}: each rank draws random slopes of its own"
