"""Profiles of a model: its memory and times, measured on the engines.

Rank 0 first tries a step on tensors without memory. If the model fits without doubt, it is then sent, and all ranks
take some real steps for the times.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from dtkit._util import timeouts
from dtkit.data import broadcast, distribute
from dtkit.data.broadcast import ModelHandle
from dtkit.data.partition import Partition
from dtkit.data.program import pickle_program
from dtkit.errors import EngineError
from dtkit.planning.cost_model import Benchmark, LinearFit, MemoryBudget, ModelProfile, StepTimings
from dtkit.planning.plan import find_shortage
from dtkit.rpc.measurements import BenchmarkOperations
from dtkit.rpc.protocol import Call, make_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.planning.cost_model import ActivationPeak
    from dtkit.planning.layer_chain import LayerChain
    from dtkit.planning.plan import PlanRow
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import Strategy

R = TypeVar("R")

_USABLE_FRACTION = 0.85  # of the free memory, for real steps
_MAX_CAUTIOUS_ROWS = 8  # in real steps of a model with unknown activations


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Arguments of :meth:`dtkit.Cluster.plan`, besides the model."""

    batch_size: int
    optimizer: Callable[..., Any]
    data: Any
    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None
    strategies: Sequence[Strategy] | None = None
    activation_checkpointing: bool | Sequence[str] = False


class ModelProfiler:
    """Profiler of one model. Each method measures only values that were not measured before."""

    def __init__(
        self, engine_group: EngineGroup, model: Any, request: PlanRequest, report_progress: Callable[[str], None]
    ) -> None:
        self._engine_group, self._model, self._report_progress = engine_group, model, report_progress
        self.notes: list[str] = []
        self._data = distribute.distribute_validation_data(engine_group, request.data, name="data")
        self._program = pickle_program(
            engine_group,
            model,
            request.loss_fn,
            request.training_step,
            request.optimizer,
            activation_checkpointing=request.activation_checkpointing,
        )
        self._model_key = model.key if isinstance(model, ModelHandle) else None
        self._max_local_samples = _compute_max_local_samples(engine_group, request)
        self.memory_budgets = measure_memory_budgets(engine_group, free_caches=True)
        report_progress(f"trying {get_model_name(model)} without numbers")
        self._sizes = self._measure_on_rank_0(
            make_call(BenchmarkOperations.measure_model_sizes, program=self._program, model=self._model_key)
        )
        self._model_handle: ModelHandle | None = None
        self._profiles: dict[str | None, list[ModelProfile]] = {}
        self._layer_chains: dict[int, LayerChain | None] = {}
        self._has_run_steps = False  # whether the model fits, and times were measured

    def can_time_steps(self, rows: Sequence[PlanRow]) -> bool:
        """Return whether steps of these ranks are short and surely fit, next to all that is in memory now."""
        needs = [round(row.needed / _USABLE_FRACTION) for row in rows]
        budgets = [dataclasses.replace(budget, reusable=0) for budget in self.memory_budgets[: len(rows)]]
        is_short = rows[0].step_s <= timeouts.MAX_TRIED_STEP_S
        return self._has_run_steps and is_short and find_shortage(needs, budgets) is None

    def time_strategy(self, strategy: Strategy, counts: Sequence[int], position: str) -> float | None:
        """Return the seconds of a real step under a strategy, or None if it fails.

        `counts` has the samples of each replica, and `position` is for the progress, such as "3 of 7".
        """
        name = f"{type(strategy).__name__} ({position})"
        self._report_progress(f"taking some steps of {get_model_name(self._model)} with {name}")
        try:
            return max(self._engine_group.call_all(self._make_strategy_call(strategy, counts)))
        except EngineError as error:
            self._add_note(f"{strategy} failed in its first steps: {error.cause.message}")
            return None

    def time_one_process(self, strategy: Strategy, batch_size: int) -> float:
        """Return the seconds of a real step of one rank with all samples, while the others wait."""
        self._report_progress(f"taking some steps of {get_model_name(self._model)} in one process")
        return self._measure_on_rank_0(self._make_strategy_call(strategy, [batch_size], alone=True))

    def _make_strategy_call(self, strategy: Strategy, counts: Sequence[int], *, alone: bool = False) -> Call[float]:
        return make_call(
            BenchmarkOperations.measure_strategy_step,
            program=self._program,
            strategy=self._engine_group.uploads.dumps(strategy, name="plan"),
            model=self._get_model_key(),
            data=self._data.key,
            counts=tuple(counts),
            alone=alone,
        )

    def _measure_on_rank_0(self, call: Call[R]) -> R:
        return self._engine_group.call_all(call, ranks=[0])[0]

    def profile_ranks(self, precision: str | None, benchmark: Benchmark) -> list[ModelProfile]:
        """Return the profile of each rank. Strategies with the same precision share it."""
        if precision not in self._profiles:
            self._profiles[precision] = self._measure_profiles(precision, benchmark)
        return self._profiles[precision]

    def profile_layers(self, micro_batches: int) -> LayerChain | None:
        """Return the chain of layers for a micro-batch of a pipeline over all ranks, with times if steps were taken."""
        rows = max(1, sum(self._max_local_samples) // micro_batches)
        if rows not in self._layer_chains:
            self._report_progress(f"looking for where to cut {get_model_name(self._model)}")
            key = self._get_model_key() if self._has_run_steps else self._model_key
            chain, reason = self._measure_on_rank_0(
                make_call(
                    BenchmarkOperations.measure_layers,
                    program=self._program,
                    model=key,
                    data=self._data.key,
                    rows=rows,
                    timed=self._has_run_steps,
                )
            )
            self._add_note(
                f"stages of a pipeline are taken as equal: its layers can't be measured ({reason})", unless=not reason
            )
            self._layer_chains[rows] = chain
        return self._layer_chains[rows]

    def _measure_profiles(self, precision: str | None, benchmark: Benchmark) -> list[ModelProfile]:
        rows = max(*self._max_local_samples, 4)
        peaks, reason = self._measure_on_rank_0(
            make_call(
                BenchmarkOperations.measure_activation_peaks,
                program=self._program,
                model=self._model_key,
                data=self._data.key,
                rows=(max(2, rows // 2), rows),
                precision=precision,
            )
        )
        timings = self._measure_step_timings(precision, _fit_activations(peaks), track_allocations=not peaks)
        self._has_run_steps = self._has_run_steps or bool(timings)
        if not peaks:
            self._add_note(f"the model was tried with numbers, on a few rows: {reason}", unless=not timings)
            self._add_note(
                f"activations are not counted: the model can't be tried without numbers ({reason})", unless=timings
            )
        activations = _fit_activations(peaks or (timings[0].activation_peaks if timings else []))
        if timings:
            overhead = self._estimate_overhead(timings, activations)
        else:
            overhead, row_flops = LinearFit(), peaks[-1].flops / peaks[-1].rows if peaks else 0.0
            timings = [StepTimings.from_estimate(row_flops / flops) for flops in benchmark.flops]
        return [
            self._build_profile(rank, activations, overhead, rank_timings) for rank, rank_timings in enumerate(timings)
        ]

    def _add_note(self, text: str, *, unless: object = None) -> None:
        if not unless:
            self.notes.append(text)

    def _estimate_overhead(self, timings: Sequence[StepTimings], activations: LinearFit) -> LinearFit:
        """Return the growth of processes beyond their tensors: a share of activations, averaged over ranks."""
        sizes, shares = self._sizes, []
        for each in timings:
            peak = activations.predict(each.rows)
            expected = sizes.parameters + sizes.gradients + each.optimizer_bytes + max(peak, sizes.update_peak)
            if each.process_growth is not None and peak:
                shares.append((each.process_growth - expected) / peak)
        if not shares:
            self._add_note("not counted: freed memory that malloc keeps, workspace inside of operations")
            return LinearFit()
        share = max(0.0, sum(shares) / len(shares))
        return LinearFit(share * activations.intercept, share * activations.slope)

    def _build_profile(
        self, rank: int, activations: LinearFit, overhead: LinearFit, timings: StepTimings
    ) -> ModelProfile:
        sizes = self._sizes
        return ModelProfile(
            rows=self._max_local_samples[rank],
            sent_model=sizes.parameters if self._model_key is None and trains_on_host(self._engine_group) else 0,
            parameters=sizes.parameters,
            gradients=sizes.gradients,
            optimizer_state=timings.optimizer_bytes or sizes.optimizer_state or 0,
            update_temporaries=sizes.update_peak,
            activations=activations,
            overhead=overhead,
            forward_s=LinearFit.from_points([(rows, seconds) for rows, seconds, _ in timings.points]),
            backward_s=LinearFit.from_points([(rows, seconds) for rows, _, seconds in timings.points]),
            update_s=timings.update_s,
            gradient_shapes=sizes.shapes,
            rank=rank,
            model=None if isinstance(self._model, ModelHandle) else self._model,
        )

    def _measure_step_timings(
        self, precision: str | None, activations: LinearFit, *, track_allocations: bool
    ) -> list[StepTimings] | None:
        """Take real steps on all ranks; None if the memory may not suffice."""
        sizes = self._sizes
        persistent = (
            sizes.parameters * (1 if self._model_key else 2)
            + sizes.gradients
            + (sizes.optimizer_state or 0)
            + sizes.update_peak
        )
        needs = [
            round((persistent + activations.predict(share)) / _USABLE_FRACTION) for share in self._max_local_samples
        ]
        if find_shortage(needs, [dataclasses.replace(budget, reusable=0) for budget in self.memory_budgets]):
            self._add_note(
                "no step was taken, because it may not fit: times are those of matrix products at the benchmark's rate"
            )
            self._add_note(
                f"optimizer state is not counted: it can't be measured without numbers ({sizes.reason})",
                unless=not sizes.reason,
            )
            return None
        self._report_progress(f"taking some steps of {get_model_name(self._model)}")
        rows = [min(share, _MAX_CAUTIOUS_ROWS) if track_allocations else share for share in self._max_local_samples]
        model_key = self._get_model_key()
        return self._engine_group.call_all(
            [
                make_call(
                    BenchmarkOperations.measure_step_times,
                    program=self._program,
                    model=model_key,
                    data=self._data.key,
                    rows=count,
                    precision=precision,
                    track_allocations=track_allocations,
                )
                for count in rows
            ]
        )

    def _get_model_key(self) -> str:
        """Return the key of the model on the engines, and send it first if necessary."""
        if isinstance(self._model, ModelHandle):
            return self._model.key
        if self._model_handle is None:
            self._model_handle = broadcast.broadcast(self._engine_group, self._model)
        return self._model_handle.key


def _fit_activations(peaks: Sequence[ActivationPeak]) -> LinearFit:
    """Return the bytes of activations by rows."""
    return LinearFit.from_points([(peak.rows, peak.nbytes) for peak in peaks]) if peaks else LinearFit()


def measure_memory_budgets(engine_group: EngineGroup, *, free_caches: bool) -> list[MemoryBudget]:
    """Return the memory that each rank can get, in pools by host and device."""
    rooms = engine_group.call_all(make_call(BenchmarkOperations.measure_available_memory, free_caches=free_caches))
    return [
        MemoryBudget(f"{node.host} {node.device}", free.free_bytes, free.job_bytes, free.swap_bytes, free.limit_bytes)
        for node, free in zip(engine_group.nodes, rooms, strict=True)
    ]


def trains_on_host(engine_group: EngineGroup) -> bool:
    """Return whether the copy that trains is in the same memory as the model as sent."""
    return all(node.device == "cpu" for node in engine_group.nodes)


def _compute_max_local_samples(engine_group: EngineGroup, request: PlanRequest) -> list[int]:
    """Return the most samples that each rank takes in a step."""
    if isinstance(request.data, Partition):
        return [-(-request.batch_size * size // request.data.n) for size in request.data.sizes]
    return [-(-request.batch_size // engine_group.world_size)] * engine_group.world_size


def get_model_name(model: Any) -> str:
    """Return the name of a model or of its handle."""
    return model.name if isinstance(model, ModelHandle) else type(model).__name__
