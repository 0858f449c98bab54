"""Asking the engines what a plan needs to know, and refusing what can't fit.

:func:`plan` tries a step of the model without numbers on rank 0, which takes no memory; then, where that leaves no
doubt that it fits, sends the model and has all ranks take some real steps of it, for the times. :func:`check_fits` is
what ``train`` asks before it starts: it counts only what is certain (what stays in memory from step to step), so that
nothing is refused that could have worked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.cluster import broadcast
from dtkit.cluster.broadcast import ModelHandle
from dtkit.dashboard.text.progress import show_progress
from dtkit.data import distribute
from dtkit.data.partition import Partition
from dtkit.errors import RunError
from dtkit.planning import cost_model as plans
from dtkit.planning.cost_model import Benchmark, LinearFit, MemoryBudget, ModelProfile, Plan, PlanRow, StepTimings
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster import Cluster
    from dtkit.engine.benchmark import ModelSizes
    from dtkit.engine.dry_run import ActivationPeak
    from dtkit.planning.layer_chain import LayerChain
    from dtkit.strategies.base import Strategy

_CERTAIN_FIT_FACTOR = 12  # times a model's parameters: gradients, and more state than any common optimiser has
_USABLE_FRACTION = 0.85  # of the free memory: a rehearsal is not worth the risk of running out of it
_MAX_CAUTIOUS_ROWS = 8  # of a rehearsal whose activations are not known

NOT_COUNTED_NOTE = "not counted: the data, and what torch loads at the first step"


# --- the benchmark ------------------------------------------------------------------------------------------


def run_benchmark(cluster: Cluster, dtype: str = "float32") -> Benchmark:
    """See :meth:`dtkit.Cluster.benchmark`."""
    cluster.check_open()
    check_idle(cluster)
    _check_dtype(dtype)
    begun = time.monotonic()
    with show_progress(f"measuring {formatting.format_count(cluster.world_size, 'engine')} and the links between them"):
        found = cluster.call_all("measure", what="links", dtype=dtype)
    ranks = range(cluster.world_size)
    pairs = {(low, high): value for low in ranks for high, value in found[low].pairs.items()}
    both = pairs | {(high, low): value for (low, high), value in pairs.items()}
    nothing = (float("nan"), float("nan"))
    return Benchmark(
        dtype=dtype,
        backend=cluster.backend,
        flops=tuple(links.flops for links in found),
        all_reduce_timings=tuple(found[0].all_reduce_times),
        latency_s=tuple(tuple(both.get((a, b), nothing)[0] for b in ranks) for a in ranks),
        bandwidth=tuple(tuple(both.get((a, b), nothing)[1] for b in ranks) for a in ranks),
        overlap=min(links.overlap for links in found),
        duration_s=time.monotonic() - begun,
    )


_MEASURED_WHILE_TRAINING = "so what is measured now would be wrong, and slow the run down"


def check_idle(cluster: Cluster, why: str = _MEASURED_WHILE_TRAINING, remedy: str = "pause it (run.pause())") -> None:
    """Raise RunError while a run is running, which says `why` nothing else may, and a `remedy` besides waiting."""
    run = cluster.current_run
    if run is not None and run.status.state in (State.PENDING, State.RUNNING):
        raise RunError(
            f"this cluster is training {run.spec.name} (step {run.status.step} of {run.spec.steps}), {why}. Wait for "
            f"it (run.wait()), or {remedy}"
        )


def _check_dtype(dtype: Any) -> None:
    known = ("float32", "float64", "bfloat16", "float16")
    if dtype not in known:
        raise ValueError(f"dtype={dtype!r}; it must be one of {', '.join(map(repr, known))}")


# --- a plan -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What ``cluster.plan`` was asked, besides the model: see there."""

    batch_size: int
    optimizer: Callable[..., Any]
    sample: Any
    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None
    strategies: Sequence[Strategy] | None = None


def make_plan(cluster: Cluster, model: Any, request: PlanRequest) -> Plan:
    """See :meth:`dtkit.Cluster.plan`."""
    cluster.check_open()
    check_idle(cluster)
    _validate_request(cluster, model, request)
    strategies = _resolve_strategies(cluster, model, request)
    network = cluster.benchmark()
    with show_progress(f"planning for {_get_model_name(model)}") as progress:
        study = ModelProfiler(cluster, model, request, progress.update)
        rows = []
        for strategy in strategies:
            facts = study.profile_ranks(getattr(strategy, "precision", None), network)
            if strategy.pipeline_schedule is not None:
                layers = study.profile_layers(strategy.num_micro_batches)
                facts = [dataclasses.replace(fact, layer_chain=layers) for fact in facts]
            if strategy.shards_model:  # the model is mapped, and taken apart
                facts = [dataclasses.replace(fact, sent_model=0) for fact in facts]
            costs = [strategy.estimate_cost(fact, network) for fact in facts]
            rows += plans.build_rows(repr(strategy), facts, costs, study.memory_budgets)
    return Plan(
        model=_get_model_name(model),
        batch_size=int(request.batch_size),
        world_size=cluster.world_size,
        rows=tuple(rows),
        benchmark=network,
        notes=tuple(dict.fromkeys([*study.notes, *_list_unknowns(rows), NOT_COUNTED_NOTE])),
    )


def _list_unknowns(rows: Sequence[PlanRow]) -> list[str]:
    """What is not known of the strategies themselves."""
    names = dict.fromkeys(row.strategy for row in rows if math.isnan(row.sent_bytes))
    return [f"not counted: what {', '.join(names)} sends within layers, and the time that takes"] if names else []


class ModelProfiler:
    """What is found out of one model, step by step."""

    def __init__(
        self, cluster: Cluster, model: Any, request: PlanRequest, report_progress: Callable[[str], None]
    ) -> None:
        self._cluster, self._model, self._report_progress = cluster, model, report_progress
        self.notes: list[str] = []
        self._data = distribute.distribute_validation_data(cluster, request.sample)
        self._program = pickle_program(cluster, model, request.loss_fn, request.training_step, request.optimizer)
        self._model_key = model.key if isinstance(model, ModelHandle) else None
        self._max_local_samples = _compute_max_local_samples(cluster, request)
        self.memory_budgets = _measure_memory_budgets(cluster, free_caches=True)
        report_progress(f"trying {_get_model_name(model)} without numbers")
        self._sizes: ModelSizes = self._measure_on_rank_0("sizes")
        self._model_handle: ModelHandle | None = None
        self._profiles: dict[str | None, list[ModelProfile]] = {}
        self._layer_chains: dict[int, LayerChain | None] = {}
        self._has_run_steps = False  # whether real steps were taken: it fits, then

    def _measure_on_rank_0(self, measurement: str, **args: Any) -> Any:
        return self._cluster.call_all(
            "measure", ranks=[0], what=measurement, program=self._program, model=self._model_key, **args
        )[0]

    def profile_ranks(self, precision: str | None, network: Benchmark) -> list[ModelProfile]:
        """One rank's facts after the other; what was found for a precision once serves all strategies with it."""
        if precision not in self._profiles:
            self._profiles[precision] = self._measure_profiles(precision, network)
        return self._profiles[precision]

    def profile_layers(self, micro_batches: int) -> LayerChain | None:
        """What there is to cut, timed where real steps were taken, on a micro-batch of a pipeline over all ranks."""
        rows = max(1, sum(self._max_local_samples) // micro_batches)
        if rows not in self._layer_chains:
            self._report_progress(f"looking for where to cut {_get_model_name(self._model)}")
            key = self._get_model_key() if self._has_run_steps else self._model_key
            found, why = self._cluster.call_all(
                "measure",
                ranks=[0],
                what="layers",
                program=self._program,
                model=key,
                data=self._data.key,
                rows=rows,
                timed=self._has_run_steps,
            )[0]
            self._add_note(
                f"stages of a pipeline are taken as equal: its layers can't be measured ({why})", unless=not why
            )
            self._layer_chains[rows] = found
        return self._layer_chains[rows]

    def _measure_profiles(self, precision: str | None, network: Benchmark) -> list[ModelProfile]:
        big = max(*self._max_local_samples, 4)
        found, why = self._measure_on_rank_0(
            "peaks", data=self._data.key, rows=(max(2, big // 2), big), precision=precision
        )
        times = self._measure_step_timings(precision, _fit_activations(found), ledger=not found)
        self._has_run_steps = self._has_run_steps or bool(times)
        if not found:
            self._add_note(f"the model was tried with numbers, on a few rows: {why}", unless=not times)
            self._add_note(
                f"activations are not counted: the model can't be tried without numbers ({why})", unless=times
            )
        held = _fit_activations(found or (times[0].activation_peaks if times else []))
        if times:
            overhead = self._estimate_overhead(times, held)
            return [self._build_profile(rank, held, overhead, one) for rank, one in enumerate(times)]
        row_flops = found[-1].flops / found[-1].rows if found else 0.0
        untimed = [StepTimings.from_estimate(row_flops / flops) for flops in network.flops]
        return [self._build_profile(rank, held, LinearFit(), one) for rank, one in enumerate(untimed)]

    def _add_note(self, text: str, *, unless: object = None) -> None:
        if not unless:
            self.notes.append(text)

    def _estimate_overhead(self, times: Sequence[StepTimings], held: LinearFit) -> LinearFit:
        """What processes grew by beyond the tensors they held: a part of what comes and goes, averaged over ranks."""
        sizes, parts = self._sizes, []
        for one in times:
            working = held.predict(one.rows)
            expected = sizes.parameters + sizes.gradients + one.optimizer_bytes + max(working, sizes.update_peak)
            if one.process_growth is not None and working:
                parts.append((one.process_growth - expected) / working)
        if not parts:
            self._add_note("not counted: freed memory that malloc keeps, workspace inside of operations")
            return LinearFit()
        part = max(0.0, sum(parts) / len(parts))
        return LinearFit(part * held.intercept, part * held.slope)

    def _build_profile(self, rank: int, held: LinearFit, overhead: LinearFit, times: StepTimings) -> ModelProfile:
        """One rank's facts."""
        sizes = self._sizes
        return ModelProfile(
            rows=self._max_local_samples[rank],
            sent_model=sizes.parameters if self._model_key is None and _trains_on_host(self._cluster) else 0,
            parameters=sizes.parameters,
            gradients=sizes.gradients,
            optimizer_state=times.optimizer_bytes or sizes.optimizer_state or 0,
            update_temporaries=sizes.update_peak,
            activations=held,
            overhead=overhead,
            forward_s=LinearFit.from_points([(rows, seconds) for rows, seconds, _ in times.points]),
            backward_s=LinearFit.from_points([(rows, seconds) for rows, _, seconds in times.points]),
            update_s=times.update_s,
            gradient_shapes=sizes.shapes,
            rank=rank,
            model=None if isinstance(self._model, ModelHandle) else self._model,
        )

    def _measure_step_timings(
        self, precision: str | None, held: LinearFit, *, ledger: bool
    ) -> list[StepTimings] | None:
        """Real steps on all ranks, unless memory may not suffice for them."""
        sizes = self._sizes
        whole = (
            sizes.parameters * (1 if self._model_key else 2)
            + sizes.gradients
            + (sizes.optimizer_state or 0)
            + sizes.update_peak
        )
        needs = [round((whole + held.predict(share)) / _USABLE_FRACTION) for share in self._max_local_samples]
        if plans.find_shortage(needs, [dataclasses.replace(room, reusable=0) for room in self.memory_budgets]):
            self._add_note(
                "no step was taken, since it may not fit: times are those of matrix products at the benchmark's rate"
            )
            self._add_note(
                f"optimiser state is not counted: it can't be told without numbers ({sizes.reason})",
                unless=not sizes.reason,
            )
            return None
        self._report_progress(f"taking some steps of {_get_model_name(self._model)}")
        rows = [min(share, _MAX_CAUTIOUS_ROWS) if ledger else share for share in self._max_local_samples]
        return self._cluster.call_all(
            "measure",
            each=[{"rows": count} for count in rows],
            what="times",
            program=self._program,
            model=self._get_model_key(),
            data=self._data.key,
            precision=precision,
            ledger=ledger,
        )

    def _get_model_key(self) -> str:
        """The key of the model on the engines, sent if need be."""
        if isinstance(self._model, ModelHandle):
            return self._model.key
        if self._model_handle is None:
            self._model_handle = broadcast.broadcast(self._cluster, self._model)
        return self._model_handle.key


def _fit_activations(peaks: Sequence[ActivationPeak]) -> LinearFit:
    """Bytes by rows."""
    return LinearFit.from_points([(peak.rows, peak.nbytes) for peak in peaks]) if peaks else LinearFit()


def pickle_program(
    cluster: Cluster,
    model: Any,
    loss_fn: Callable[..., Any] | None,
    training_step: Callable[..., Any] | None,
    optimizer: Callable[..., Any],
) -> bytes:
    """What the engines are to measure, pickled: shapes of the model where it is not there yet."""
    from dtkit.strategies.meta_copy import copy_to_meta
    from dtkit.strategies.loss import Loss

    shapes = None if isinstance(model, ModelHandle) else copy_to_meta(model)
    return cluster.dumps((shapes, Loss(loss_fn, training_step), optimizer), name="plan")


def _measure_memory_budgets(cluster: Cluster, *, free_caches: bool) -> list[MemoryBudget]:
    """The memory that each rank can get, by host and device."""
    found = cluster.call_all("measure", what="room", tidy_up=free_caches)
    return [
        MemoryBudget(f"{node.host} {node.device}", free.free_bytes, free.job_bytes, free.swap_bytes, free.limit_bytes)
        for node, free in zip(cluster.nodes, found, strict=True)
    ]


def _trains_on_host(cluster: Cluster) -> bool:
    """Whether copies that train lie in the same memory as the model as it was sent."""
    return all(node.device == "cpu" for node in cluster.nodes)


def _compute_max_local_samples(cluster: Cluster, request: PlanRequest) -> list[int]:
    """The most samples that each rank takes in a step."""
    if isinstance(request.sample, Partition):
        return [-(-request.batch_size * size // request.sample.n) for size in request.sample.sizes]
    return [-(-request.batch_size // cluster.world_size)] * cluster.world_size


def list_candidates(cluster: Cluster, model: Any) -> list[Strategy]:
    """One of each strategy that exists, as a plan compares them; stages and slices where the model can be cut so."""
    from dtkit.strategies.averaging import OuterSGD, ParameterAveraging
    from dtkit.strategies.data_parallel import DataParallel
    from dtkit.strategies.pipeline.cut import find_layer_chain
    from dtkit.strategies.pipeline.pipeline import Pipeline
    from dtkit.strategies.sharded import Sharded
    from dtkit.strategies.tensor.tensor_parallel import TensorParallel

    found: list[Strategy] = [DataParallel(), ParameterAveraging(every=8), ParameterAveraging(8, OuterSGD())]
    ranks = cluster.world_size
    if ranks > 1:
        found.append(Sharded())
    if ranks > 1 and not isinstance(model, ModelHandle) and len(find_layer_chain(model)) >= ranks:
        found.append(Pipeline(ranks, 2 * ranks))
    if ranks > 1 and not isinstance(model, ModelHandle):
        with contextlib.suppress(ValueError):
            slices = TensorParallel(ranks)
            slices.check_model(model)
            found.append(slices)
    return found


def _resolve_strategies(cluster: Cluster, model: Any, request: PlanRequest) -> Sequence[Strategy]:
    from dtkit.strategies.base import Strategy

    for strategy in request.strategies or ():
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategies holds {strategy!r}; each must be a dtkit strategy such as dtkit.DataParallel()"
            )
        strategy.check(cluster.world_size, request.batch_size)
        if not isinstance(model, ModelHandle):
            strategy.check_model(model)
    if request.strategies is not None and not request.strategies:
        raise ValueError("strategies is empty; leave it out to compare all that exist")
    return request.strategies or list_candidates(cluster, model)


# --- what was asked -----------------------------------------------------------------------------------------


def _validate_request(cluster: Cluster, model: Any, request: PlanRequest) -> None:
    if isinstance(model, ModelHandle):
        if model.cluster is not cluster:
            raise ValueError(
                f"{model.name} was broadcast on another cluster; give the model, or cluster.broadcast(model)"
            )
    else:
        broadcast.check_model(model)
    if request.sample is None:
        raise ValueError(
            "a plan needs sample=, a batch or a few rows as in sample=(X[:8], y[:8]), or a Partition: activations are "
            "measured and not guessed"
        )
    if (request.loss_fn is None) == (request.training_step is None):
        raise ValueError(
            "give either loss, a function of (output, target), or step, a function of (model, batch) that returns the "
            f"loss; you gave {'both' if request.loss_fn is not None else 'neither'}"
        )
    if not callable(request.optimizer):
        raise TypeError(
            f"optimizer is a {type(request.optimizer).__name__}; it must be a function from parameters to an optimiser: "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    _check_batch_size(cluster, request)


def _check_batch_size(cluster: Cluster, request: PlanRequest) -> None:
    size = request.batch_size
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"batch_size={size!r}; it must be an integer")
    if size < cluster.world_size:
        raise ValueError(
            f"batch_size={size} is less than the {cluster.world_size} ranks; it is the number of samples per update "
            f"over all ranks, and each needs one. Use at least {cluster.world_size}"
        )
    if isinstance(request.sample, Partition) and size > request.sample.n:
        raise ValueError(
            f"batch_size={size} is more than the {request.sample.n} samples of the partition; it is the number of samples "
            f"per update over all ranks. Use at most {request.sample.n}"
        )


def _get_model_name(model: Any) -> str:
    return model.name if isinstance(model, ModelHandle) else type(model).__name__


# --- before a training starts -------------------------------------------------------------------------------


def check_fits(cluster: Cluster, model: Any, optimizer: Callable[..., Any], strategy: Strategy) -> None:
    """Raise ValueError where a model and its optimiser can't fit some rank's memory, whatever the batch.

    Counted is what is certain: the model as sent, the copy that trains, gradients, and the optimiser's state. Free is
    what is free, with swap space and what an earlier run gives back. One short question to the engines where the model
    is small beside their memory; where it is not, the optimiser is tried on the meta device.
    """
    sent = 0 if isinstance(model, ModelHandle) else _count_model_bytes(model)
    certainly = _CERTAIN_FIT_FACTOR * (sent or model.nbytes)
    if (
        plans.find_shortage([certainly] * cluster.world_size, _measure_memory_budgets(cluster, free_caches=False))
        is None
    ):
        return
    key = model.key if isinstance(model, ModelHandle) else None
    asked = pickle_program(cluster, model, None, None, optimizer)
    sizes = cluster.call_all("measure", ranks=[0], what="sizes", program=asked, model=key)[0]
    rooms = _measure_memory_budgets(cluster, free_caches=True)
    fact = ModelProfile(
        0,
        sent if _trains_on_host(cluster) else 0,
        sizes.parameters,
        sizes.gradients,
        sizes.optimizer_state or 0,
        0,
        gradient_shapes=sizes.shapes,
    )
    lack = _find_strategy_shortage(strategy, fact, rooms)
    if lack is not None:
        others = [
            s
            for s in list_candidates(cluster, model)
            if repr(s) != repr(strategy) and _find_strategy_shortage(s, fact, rooms) is None
        ]
        raise ValueError(_format_refusal(_get_model_name(model), strategy, fact, lack, others))


def _find_strategy_shortage(
    strategy: Strategy, profile: ModelProfile, memory_budgets: Sequence[MemoryBudget]
) -> tuple[int, int, int] | None:
    profile = _keep_certain(strategy, profile)
    cost = strategy.estimate_cost(profile, Benchmark.memory_only(len(memory_budgets)))
    return plans.find_shortage([profile.sent_model + cost.persistent_bytes] * len(memory_budgets), memory_budgets)


def _keep_certain(strategy: Strategy, profile: ModelProfile) -> ModelProfile:
    """What of these facts is certain of a strategy."""
    if strategy.shards_model:  # it is mapped, and taken apart
        profile = dataclasses.replace(profile, sent_model=0)
    if getattr(strategy, "find_unused_parameters", False):  # what is never used has no gradient and no state
        profile = dataclasses.replace(profile, gradients=0, optimizer_state=0, gradient_shapes=())
    return profile


def _format_refusal(
    name: str, strategy: Strategy, profile: ModelProfile, shortage: tuple[int, int, int], others: Sequence[Strategy]
) -> str:
    rank, needed, free = shortage
    profile = _keep_certain(strategy, profile)
    parts = plans.describe_persistent(strategy.estimate_cost(profile, Benchmark.memory_only(1)), profile.sent_model)
    if others:
        remedy = f"These would fit: {', '.join(map(repr, others))}"
    else:
        remedy = (
            "No other strategy fits either: use a smaller model, an optimiser that keeps less (SGD without momentum "
            "keeps nothing), or engines with more memory"
        )
    return (
        f"{name} does not fit rank {rank} with {strategy!r}: it needs {formatting.format_bytes(needed)} there before the first "
        f"activation ({parts}), and {formatting.format_bytes(free)} are free for it. {remedy}"
    )


def _count_model_bytes(model: Any) -> int:
    from dtkit.strategies.meta_copy import count_bytes

    return count_bytes([*model.parameters(), *model.buffers()])
