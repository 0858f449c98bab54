"""Benchmarks of a cluster, and plans that compare strategies on it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from dtkit._util import formatting
from dtkit._util.formatting import name_type
from dtkit._util.function_checks import check_loss_functions
from dtkit._util.meant_names import find_optimizer, find_strategy
from dtkit.dashboard.text.progress import show_progress
from dtkit.data import broadcast
from dtkit.data.broadcast import ModelHandle
from dtkit.data.partition import Partition
from dtkit.data.sharding import divide_proportionally
from dtkit.errors import RunError
from dtkit.planning.batch_search import find_largest_batch
from dtkit.planning.cost_model import Benchmark, Cost, ModelProfile
from dtkit.planning.host_traffic import describe_host_traffic
from dtkit.planning.plan import Plan, PlanRow, build_rows
from dtkit.planning.profiler import ModelProfiler, PlanRequest, get_model_name
from dtkit.rpc.measurements import BenchmarkOperations
from dtkit.rpc.protocol import make_call
from dtkit.types import RunSpec, State, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import Strategy

ONE_PROCESS = "one process"
NOT_COUNTED_NOTE = "not counted: the data, and what torch loads at the first step"


# --- benchmark ----------------------------------------------------------------------------------------------


def run_benchmark(engine_group: EngineGroup, dtype: str = "float32") -> Benchmark:
    """Measure the engines and their links: see :meth:`dtkit.Cluster.benchmark`."""
    engine_group.check_open()
    _check_dtype(dtype)
    started_at = time.monotonic()
    with show_progress(f"measuring {formatting.format_count(engine_group.world_size, 'engine')} and their links"):
        speeds = engine_group.call_all(make_call(BenchmarkOperations.measure_links, dtype=dtype))
    ranks = range(engine_group.world_size)
    pairs = {(low, high): value for low in ranks for high, value in speeds[low].pairs.items()}
    pairs |= {(high, low): value for (low, high), value in pairs.items()}
    unknown = (math.nan, math.nan)
    return Benchmark(
        dtype=dtype,
        backend=engine_group.membership.backend,
        flops=tuple(links.flops for links in speeds),
        all_reduce_timings=tuple(speeds[0].all_reduce_times),
        latency_s=tuple(tuple(pairs.get((a, b), unknown)[0] for b in ranks) for a in ranks),
        bandwidth=tuple(tuple(pairs.get((a, b), unknown)[1] for b in ranks) for a in ranks),
        overlap=min(links.overlap for links in speeds),
        duration_s=time.monotonic() - started_at,
        direct_sum_timings=tuple(speeds[0].direct_sum_times),
    )


_MEASURED_WHILE_TRAINING = "so a measurement would be wrong, and would slow the run down"


class ActiveRun(Protocol):
    """Part of a run that :func:`check_idle` reads."""

    @property
    def status(self) -> Status:
        """State and step."""

    @property
    def spec(self) -> RunSpec:
        """Name and number of steps."""


def check_idle(
    run: ActiveRun | None, why: str = _MEASURED_WHILE_TRAINING, remedy: str = "pause it (run.pause())"
) -> None:
    """Raise RunError if `run` is running. The message gives the reason `why`, and a `remedy` besides waiting."""
    if run is not None and run.status.state in (State.PENDING, State.RUNNING):
        raise RunError(
            f"this cluster is training {run.spec.name} (step {run.status.step} of {run.spec.steps}), {why}. Wait for "
            f"it (run.wait()), or {remedy}"
        )


def _check_dtype(dtype: Any) -> None:
    known = ("float32", "float64", "bfloat16", "float16")
    if dtype not in known:
        raise ValueError(f"dtype={dtype!r}; it must be one of {', '.join(map(repr, known))}")


# --- plan ---------------------------------------------------------------------------------------------------


def make_plan(
    engine_group: EngineGroup, model: Any, request: PlanRequest, run_benchmark: Callable[[], Benchmark]
) -> Plan:
    """Compare strategies: see :meth:`dtkit.Cluster.plan`. `run_benchmark` is called after the request is checked."""
    engine_group.check_open()
    _validate_request(engine_group, model, request)
    strategies = _resolve_strategies(engine_group, model, request)
    benchmark = run_benchmark()
    with show_progress(f"planning for {get_model_name(model)}") as progress:
        profiler = ModelProfiler(engine_group, model, request, progress.update)
        rows: list[PlanRow] = []
        searches: dict[str, Callable[[], int]] = {}
        ring_bytes: dict[str, list[float]] = {}
        for place, strategy in enumerate(strategies, 1):
            profiles = profiler.profile_ranks(getattr(strategy, "precision", None), benchmark)
            if strategy.pipeline_schedule is not None:
                layers = profiler.profile_layers(strategy.num_micro_batches)
                profiles = [dataclasses.replace(profile, layer_chain=layers) for profile in profiles]
            if strategy.shards_model:  # engines map the model as sent, and keep only their shards
                profiles = [dataclasses.replace(profile, sent_model=0) for profile in profiles]
            costs = [strategy.estimate_cost(profile, benchmark) for profile in profiles]
            if _is_one_ring(strategy, engine_group.world_size):
                ring_bytes[repr(strategy)] = [cost.sent_bytes for cost in costs]
            position = f"{place} of {len(strategies)}"
            rows += _build_measured_rows(profiler, strategy, profiles, costs, request, position)
            searches[repr(strategy)] = functools.partial(
                find_largest_batch, strategy, profiles, request.batch_size, benchmark, profiler.memory_budgets
            )
        one_process = _plan_one_process(profiler, request, benchmark)
    traffic = describe_host_traffic(ring_bytes, [node.host for node in engine_group.nodes])
    return Plan(
        model=get_model_name(model),
        batch_size=int(request.batch_size),
        world_size=engine_group.world_size,
        rows=tuple(rows),
        benchmark=benchmark,
        notes=tuple(dict.fromkeys([*profiler.notes, *traffic, *_list_unknowns(rows), NOT_COUNTED_NOTE])),
        one_process=one_process,
        find_largest_batch=lambda name: searches[name](),
    )


def _build_measured_rows(
    profiler: ModelProfiler,
    strategy: Strategy,
    profiles: Sequence[ModelProfile],
    costs: Sequence[Cost],
    request: PlanRequest,
    position: str,
) -> list[PlanRow]:
    """Return one strategy's rows, with the time of real steps if they are short and surely fit."""
    rows = build_rows(repr(strategy), profiles, costs, profiler.memory_budgets)
    if not profiler.can_time_steps(rows):
        return rows
    replicas = strategy.build_mesh(len(rows)).num_replicas
    shards = tuple(request.data.sizes) if isinstance(request.data, Partition) else ()
    weights = shards if len(shards) == replicas else (1,) * replicas
    counts = divide_proportionally(int(request.batch_size), weights)
    measured_s = profiler.time_strategy(strategy, counts, position)
    return build_rows(repr(strategy), profiles, costs, profiler.memory_budgets, measured_s)


def _plan_one_process(profiler: ModelProfiler, request: PlanRequest, benchmark: Benchmark) -> PlanRow:
    """Return the row of rank 0 alone with whole batches."""
    from dtkit.strategies.data_parallel import DataParallel

    profile = dataclasses.replace(profiler.profile_ranks(None, benchmark)[0], rows=int(request.batch_size))
    cost = Cost.for_replica(profile, sent_bytes=0.0, exposed_s=0.0)
    arguments = ONE_PROCESS, [profile], [cost], profiler.memory_budgets[:1]
    rows = build_rows(*arguments)
    if profiler.can_time_steps(rows):
        rows = build_rows(*arguments, profiler.time_one_process(DataParallel(), int(request.batch_size)))
    return rows[0]


def _is_one_ring(strategy: Strategy, world_size: int) -> bool:
    """Return whether all ranks take part in each collective."""
    is_divided = getattr(strategy, "replicas", 1) > 1  # shards of a model that has several copies
    return strategy.build_mesh(world_size).num_replicas == world_size and not is_divided


def _list_unknowns(rows: Sequence[PlanRow]) -> list[str]:
    """Return notes on strategies whose traffic is unknown: where its time is contained, or that it isn't."""
    unknown = [row for row in rows if not row.is_traffic_counted]
    measured = dict.fromkeys(row.strategy for row in unknown if row.is_measured)
    estimated = dict.fromkeys(row.strategy for row in unknown if not row.is_measured)
    notes = []
    if measured:
        notes.append(f"not counted: what {', '.join(measured)} sends within layers; 'other' contains the time it takes")
    if estimated:
        notes.append(
            f"not counted: what {', '.join(estimated)} sends within layers, and the time it takes: 'in all' is a lower "
            "bound (>)"
        )
    return notes


def list_candidates(engine_group: EngineGroup, model: Any) -> list[Strategy]:
    """Return one of each strategy that can train the model, for a plan to compare."""
    from dtkit.strategies.averaging import OuterSGD, ParameterAveraging
    from dtkit.strategies.data_parallel import DataParallel
    from dtkit.strategies.pipeline.cut import find_layer_chain
    from dtkit.strategies.pipeline.pipeline import Pipeline
    from dtkit.strategies.sharded import Sharded
    from dtkit.strategies.tensor.tensor_parallel import TensorParallel

    candidates: list[Strategy] = [DataParallel(), ParameterAveraging(every=8), ParameterAveraging(8, OuterSGD())]
    ranks = engine_group.world_size
    if ranks > 1:
        candidates.append(Sharded())
    if ranks > 1 and not isinstance(model, ModelHandle) and len(find_layer_chain(model)) >= ranks:
        candidates.append(Pipeline(ranks, 2 * ranks))
    if ranks > 1 and not isinstance(model, ModelHandle):
        with contextlib.suppress(ValueError):
            tensor_parallel = TensorParallel(ranks)
            tensor_parallel.check_model(model)
            candidates.append(tensor_parallel)
    return candidates


def _resolve_strategies(engine_group: EngineGroup, model: Any, request: PlanRequest) -> Sequence[Strategy]:
    from dtkit.strategies.base import Strategy

    if request.strategies is not None and not isinstance(request.strategies, Iterable):
        raise TypeError(f"strategies={request.strategies!r}; it must be a list, as in strategies=[dtkit.Sharded()]")
    for strategy in request.strategies or ():
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategies holds {strategy!r}; each must be a dtkit strategy such as "
                f"{find_strategy(strategy) or 'dtkit.DataParallel()'}"
            )
        strategy.check(engine_group.world_size, request.batch_size)
        if not isinstance(model, ModelHandle):
            strategy.check_model(model)
    if request.strategies is not None and not request.strategies:
        raise ValueError("strategies is empty; leave it out to compare all strategies")
    return request.strategies or list_candidates(engine_group, model)


# --- validation ---------------------------------------------------------------------------------------------


def _validate_request(engine_group: EngineGroup, model: Any, request: PlanRequest) -> None:
    if isinstance(model, ModelHandle):
        if model.engine_group is not engine_group:
            raise ValueError(
                f"{model.name} was broadcast on another cluster; give the model, or cluster.broadcast(model)"
            )
    else:
        broadcast.check_model(model)
    if request.data is None:
        raise ValueError(
            "data is None, and a plan measures activations; give what you train on, or a few rows of it, as in "
            "cluster.plan(model, (X[:8], y[:8]), ...)"
        )
    broadcast.check_has_loss(model, request.loss_fn, request.training_step)
    broadcast.check_is_not_manual(request.training_step)
    check_loss_functions(request.loss_fn, request.training_step)
    if not callable(request.optimizer):
        raise TypeError(
            f"optimizer is {name_type(request.optimizer)}; it must be a function from parameters to an optimizer: "
            f"optimizer=lambda params: {find_optimizer(request.optimizer) or 'torch.optim.SGD(params, lr=0.1)'}"
        )
    _check_batch_size(engine_group, request)


def _check_batch_size(engine_group: EngineGroup, request: PlanRequest) -> None:
    size = request.batch_size
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"batch_size={size!r}; it must be an integer")
    if size < engine_group.world_size:
        raise ValueError(
            f"batch_size={size} is less than the {engine_group.world_size} ranks; it is the number of samples per "
            f"update over all ranks, and each needs one. Use at least {engine_group.world_size}"
        )
    if isinstance(request.data, Partition) and size > request.data.n:
        raise ValueError(
            f"batch_size={size} is more than the {request.data.n} samples of the partition; it is the number of "
            f"samples per update over all ranks. Use at most {request.data.n}"
        )
