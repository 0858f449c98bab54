"""The check that distributed training equals training in one process, by repeating it both ways.

Two jobs start the training again: one on all ranks, and a reference on rank 0 with every shard's rows. Both see the
same rows in the same steps. Their parameters are then compared.

Some trainings differ by nature. Each rank may draw its own random numbers. A loss or a normalization may depend on the
samples that share a batch. If parameters differ, further references show whether that is the reason (see
:func:`_find_reasons`). The result is then "NOT COMPARABLE" instead of "FAIL".

Numbers with a true gradient of zero change only by rounding, which Adam-like optimizers amplify. Examples are the key
bias of attention and a bias before BatchNorm. They are identified number by number, since the key bias is a third of
one parameter. They are listed separately, and have a wider bound.

Gradients that are small, but not zero, are amplified too: Adam divides by the root of their squares. Differences beyond
the tolerance then prove nothing. So both trainings are repeated in float64 (see :func:`_compare_in_float64`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dtkit.errors import CollectiveInStepError, EngineError
from dtkit.rpc.reference import DIGESTED_STEPS, Reference
from dtkit.rpc.verification import HALF_PRECISION_TOLERANCE, Verification
from dtkit.strategies.incomparable_modules import summarize_modules
from dtkit.training.replay import Replay
from dtkit.training.verify_reasons import (
    ERROR_IN_FLOAT64,
    GROWN_ROUNDING,
    NO_ERROR_IN_FLOAT64,
    NOT_A_MEAN,
    NOT_REPEATED,
    OWN_GENERATOR_IN_DATA,
    OWN_GENERATOR_IN_STEP,
    RANDOM_STEP,
    ROUNDING,
    SAME_PRECISION,
    STILL_DIFFERS_BY_PART,
    TOO_LARGE,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from dtkit._util.deadline import Deadline
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.reference import ReferenceReport
    from dtkit.strategies.base import Strategy
    from dtkit.training.config import JobSpec

    StateDict = Mapping[str, Any]

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
_ROUNDING_MARGIN = 5  # factor by which rounding is below the tolerance at first, and grows faster than the steps
_MAX_MOVE_RATIO = 10  # of the median difference, to how far float32 instead of float64 moves the reference
_MAX_FLOAT64_NUMBERS = 100_000_000  # parameters; a copy with gradients and Adam's averages takes 32 bytes for each
_PART_NUMBERS = 2**15  # numbers that are compared at once
_ZERO_GRADIENT_FRACTION = {
    "float64": 1e-13,
    "float32": 1e-6,
}  # share of the largest gradient below which a gradient is rounding


def check_steps(steps: Any) -> None:
    """Raise ValueError unless `steps` is a number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}; verify needs an integer from 1 up")


def verify(
    engine_group: EngineGroup,
    job_spec: JobSpec,
    steps: int,
    strategy: Strategy,
    equivalence_notes: Sequence[str],
    deadline: Deadline,
) -> Verification:
    """See :meth:`dtkit.Run.verify`."""
    replay = Replay(engine_group, job_spec, deadline)
    try:
        state = replay.train(steps)
        try:
            reference, report = replay.train_reference(Reference.WHOLE, steps)
        except EngineError as error:
            reason = _describe_collective(error)
            if reason is None:
                raise
            return _make_incomparable(state, reason, steps, engine_group.world_size)
        modules: tuple[str, ...] = ()
        num_replicas = strategy.build_mesh(engine_group.world_size).num_replicas
        if engine_group.world_size > 1:
            modules = summarize_modules(
                job_spec.model_handle.build_with_state(reference),
                num_replicas=num_replicas,
                is_pipeline=strategy.pipeline_schedule is not None,
            )
        verification = compare_states(
            state,
            reference,
            report.max_gradients,
            modules + tuple(equivalence_notes),
            steps,
            engine_group.world_size,
            report.update_dtype,
        )
        verification = dataclasses.replace(
            verification,
            step_times=replay.get_step_times(),
            num_micro_batches=strategy.num_micro_batches if job_spec.model_handle.batch_norm_names else 1,
        )
        if verification.is_within_tolerance:
            return verification
        if equivalence_notes:
            is_comparable = strategy.rounds_by_part and not modules
            return _compare_by_part(replay, verification, state, report) if is_comparable else verification
        if verification.verdict == "FAIL" and verification.dtype != "float64":
            verification = _compare_in_float64(replay.in_float64(), verification, state, reference)
            if verification.verdict == "PASS":
                return verification
        return _explain_difference(replay, verification, state, (reference, report))
    except EngineError:
        deadline.get_remaining_s()  # raises TimeoutError if that is why the engines failed
        raise


def _describe_collective(error: EngineError) -> str | None:
    """Return the reason why there is no reference, if its step called a collective."""
    failure = next((f for f in error.failures if f.type == CollectiveInStepError.__name__), None)
    if failure is None:
        return None
    return f"{failure.message.splitlines()[0]}. Compare with a training without it, or on one engine"


def _make_incomparable(state: StateDict, reason: str, steps: int, world_size: int) -> Verification:
    dtype = _get_least_precise_dtype(value for value in state.values() if hasattr(value, "is_floating_point"))
    tolerance = TOLERANCE.get(dtype, HALF_PRECISION_TOLERANCE)
    return Verification("NOT COMPARABLE", steps, world_size, dtype, math.nan, tolerance, {}, {}, (reason,))


def _explain_difference(
    replay: Replay,
    verification: Verification,
    state: StateDict,
    reference: tuple[StateDict, ReferenceReport],
) -> Verification:
    """Return the verification with the reasons for its difference, as far as further references show them."""
    steps, gradients = verification.steps, reference[1].max_gradients
    by_part, _ = replay.train_reference(Reference.BY_PART, steps)
    parameters = {name: by_part[name] for name in gradients}
    part_comparison = compare_states(state, parameters, gradients, (), steps, verification.world_size)
    reasons = verification.incomparable_reasons or _find_reasons(replay, part_comparison, verification.max_difference)
    return dataclasses.replace(
        verification,
        verdict="NOT COMPARABLE" if reasons else "FAIL",
        incomparable_reasons=reasons,
        part_difference=part_comparison.max_difference if part_comparison.is_within_tolerance else None,
    )


def _compare_by_part(
    replay: Replay, verification: Verification, state: StateDict, report: ReferenceReport
) -> Verification:
    """Return the comparison with one process that takes each rank's part of a batch by itself, if the two agree.

    Lower precision rounds sums over the samples of a part, the same on a rank as in that process.
    """
    by_part, _ = replay.train_reference(Reference.BY_PART, verification.steps)
    gradients = report.max_gradients
    comparison = compare_states(
        state,
        {name: by_part[name] for name in gradients},
        gradients,
        (),
        verification.steps,
        verification.world_size,
        report.update_dtype,
    )
    if comparison.verdict == "PASS":
        whole_difference, step_times = verification.max_difference, verification.step_times
        return dataclasses.replace(comparison, whole_difference=whole_difference, step_times=step_times)
    difference, note = comparison.max_difference, "; ".join(verification.incomparable_reasons)
    reason = STILL_DIFFERS_BY_PART.format(note=note, difference=difference, tolerance=comparison.tolerance)
    return dataclasses.replace(verification, incomparable_reasons=(reason,))


def _compare_in_float64(
    replay: Replay, verification: Verification, state: StateDict, reference: StateDict
) -> Verification:
    """Repeat both trainings in float64. Return the verification with what this shows about its difference.

    Rounding shrinks with the precision, and other errors stay. So the verdict is "PASS" if the two agree in float64,
    and if the lower precision alone moves the `reference` about as far (see :func:`find_unexplained`).
    """
    numbers = sum(value.numel() for value in reference.values() if hasattr(value, "is_floating_point"))
    if numbers > _MAX_FLOAT64_NUMBERS:
        return dataclasses.replace(verification, rounding_note=TOO_LARGE.format(numbers=numbers))
    try:
        double_state = replay.train(verification.steps)
        expected, report = replay.train_reference(Reference.WHOLE, verification.steps)
    except EngineError as error:
        if error.cause.kind not in ("error", "nonfinite"):
            raise  # an engine has ended, or doesn't answer
        cause = f"{error.cause.type}: {(error.cause.message.splitlines() or [''])[0]}"
        return dataclasses.replace(verification, rounding_note=NOT_REPEATED.format(cause=cause))
    except ValueError as error:
        return dataclasses.replace(verification, rounding_note=NOT_REPEATED.format(cause=error))
    comparison = compare_states(
        double_state,
        expected,
        report.max_gradients,
        (),
        verification.steps,
        verification.world_size,
        report.update_dtype,
    )
    return judge_rounding(
        verification, comparison, find_unexplained(state, reference, expected, verification.tolerance)
    )


def find_unexplained(state: StateDict, reference: StateDict, in_float64: StateDict, tolerance: float) -> str:
    """Return the name of a tensor whose difference to the `reference` is no rounding; "" without one.

    Rounding has moved the `reference` itself away from the one that was trained `in_float64`. A few numbers with small
    gradients may go anywhere, so medians are compared. Integers aren't rounded.
    """
    for name, expected in reference.items():
        if not hasattr(expected, "is_floating_point") or not expected.numel():
            continue
        difference = _compute_difference(state[name], expected)
        if not expected.is_floating_point() and not expected.is_complex():
            is_explained = not bool(difference.any())
        else:
            moved = float(_compute_difference(expected, in_float64[name]).median())
            is_finite = math.isfinite(float(difference.max()))
            is_explained = is_finite and float(difference.median()) <= max(tolerance, _MAX_MOVE_RATIO * moved)
        if not is_explained:
            return name
    return ""


def judge_rounding(verification: Verification, in_float64: Verification, unexplained: str) -> Verification:
    """Return the verification with the verdict that follows from the comparison of the same trainings in float64.

    `unexplained` is a tensor whose difference is too large for rounding, if there is one.
    """
    dtype, difference = verification.dtype, in_float64.largest_difference
    verdict, reason = "FAIL", ERROR_IN_FLOAT64
    if in_float64.is_within_tolerance and in_float64.tolerance >= verification.tolerance:
        reason = SAME_PRECISION
    elif in_float64.is_within_tolerance:
        verdict, reason = ("FAIL", NO_ERROR_IN_FLOAT64) if unexplained else ("PASS", ROUNDING)
    note = reason.format(
        dtype=dtype, difference=difference, tolerance=in_float64.tolerance, computed=in_float64.dtype, name=unexplained
    )
    return dataclasses.replace(verification, verdict=verdict, float64_difference=difference, rounding_note=note)


def _find_reasons(replay: Replay, part_comparison: Verification, difference: float) -> tuple[str, ...]:
    """Return reasons why the training can't be compared with one process, from which it differs by `difference`.

    Return none if it should be equal.
    For a few steps, the reference is trained twice, and then with other random numbers.
    """
    steps = min(part_comparison.steps, DIGESTED_STEPS)
    first, first_report = replay.train_reference(Reference.WHOLE, steps)
    second, second_report = replay.train_reference(Reference.WHOLE, steps)
    if first_report.batch_digests != second_report.batch_digests:
        return (OWN_GENERATOR_IN_DATA,)
    if _is_different(first, second, part_comparison.tolerance):
        return (OWN_GENERATOR_IN_STEP,)
    reseeded, _ = replay.train_reference(Reference.RESEEDED, steps)
    if _is_different(first, reseeded, part_comparison.tolerance):
        return (RANDOM_STEP,)
    if not part_comparison.is_within_tolerance:
        return ()
    by_part, _ = replay.train_reference(Reference.BY_PART, steps)
    early_difference = _find_largest_difference(first, by_part)
    if _has_grown_from_rounding(early_difference, steps, difference, part_comparison):
        return (GROWN_ROUNDING.format(steps=steps, difference=early_difference, dtype=part_comparison.dtype),)
    return (NOT_A_MEAN,)


def _has_grown_from_rounding(early: float, steps: int, late: float, comparison: Verification) -> bool:
    """Return whether a difference after a few steps was rounding, and grew much faster than the steps.

    Other losses differ by about as much in each step.
    """
    return (
        early < comparison.tolerance / _ROUNDING_MARGIN and late > _ROUNDING_MARGIN * early * comparison.steps / steps
    )


def _is_different(state: StateDict, other: StateDict, tolerance: float) -> bool:
    return _find_largest_difference(state, other) > tolerance


def _find_largest_difference(state: StateDict, other: StateDict) -> float:
    pairs = [(state[name], value) for name, value in other.items() if hasattr(value, "is_floating_point")]
    return max((float(_compute_difference(a, b).max()) for a, b in pairs if a.numel()), default=0.0)


def compare_states(
    state: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    incomparable_reasons: tuple[str, ...],
    steps: int,
    world_size: int,
    update_dtype: str | None = None,
) -> Verification:
    """Compare two state dicts. `gradients`: the largest absolute gradient of every number over the steps.

    The optimizer computes in `update_dtype`, or in that of the parameters.
    """
    compared = [state[name] for name in gradients if name in state]  # none of a simulation with a model for each rank
    compared = compared or [value for value in state.values() if hasattr(value, "is_floating_point")]
    dtype = update_dtype or _get_least_precise_dtype(compared)
    floor = _ZERO_GRADIENT_FRACTION.get(dtype, _ZERO_GRADIENT_FRACTION["float32"]) * max(
        (float(g.max()) for g in gradients.values() if g.numel()), default=0.0
    )
    differences, zero = {}, {}
    for name, expected in reference.items():
        if not hasattr(expected, "is_floating_point"):  # a module's extra state may have any type
            continue
        differences[name], num_zero, zero_difference = _find_extremes(state[name], expected, gradients.get(name), floor)
        if num_zero:
            zero[name] = num_zero, zero_difference
    largest_difference, tolerance = (
        max(differences.values(), default=0.0),
        TOLERANCE.get(dtype, HALF_PRECISION_TOLERANCE),
    )
    verification = Verification(
        "FAIL", steps, world_size, dtype, largest_difference, tolerance, differences, zero, incomparable_reasons
    )
    if verification.is_within_tolerance:  # the reasons have made no difference
        return dataclasses.replace(verification, verdict="PASS", incomparable_reasons=())
    return dataclasses.replace(verification, verdict="NOT COMPARABLE") if incomparable_reasons else verification


def _get_least_precise_dtype(tensors: Iterable[torch.Tensor]) -> str:
    """Return the dtype with the fewest digits, whose rounding determines the tolerance."""
    import torch

    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()] or [torch.get_default_dtype()]
    return str(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")


def _find_extremes(
    a: torch.Tensor, b: torch.Tensor, gradient: torch.Tensor | None, floor: float
) -> tuple[float, int, float]:
    """Return the largest difference, and the count and largest difference of differing numbers of zero gradient.

    The former leaves out the latter. Small parts stay in the processor's cache; new memory for large ones takes longer
    than comparing them.
    """
    largest, num_zero, largest_zero = 0.0, 0, 0.0
    a, b, sizes = a.reshape(-1), b.reshape(-1), None if gradient is None else gradient.reshape(-1)
    for begin in range(0, a.numel(), _PART_NUMBERS):
        part = slice(begin, begin + _PART_NUMBERS)
        difference = _compute_difference(a[part], b[part])
        if sizes is not None and bool((has_zero_gradient := sizes[part] <= floor).any()):
            changed = difference[has_zero_gradient & (difference > 0)]
            num_zero += changed.numel()
            largest_zero = max(largest_zero, float(changed.max()) if changed.numel() else 0.0)
            difference.masked_fill_(has_zero_gradient, 0.0)
        largest = max(largest, float(difference.max()))
    return largest, num_zero, largest_zero


def _compute_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of every number. It is 0 between equal infinities (of a mask), and infinite for
    NaN.
    """
    is_complex = a.is_complex() or b.is_complex()
    difference = (a - b).abs() if is_complex else (a.double() - b.double()).abs_()
    if difference.numel() and not math.isfinite(float(difference.max())):
        difference.masked_fill_(a == b, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    return difference
