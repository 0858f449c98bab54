"""What can only be measured on the engines: their speed, the links between them, their memory, and a user's model.

A request names one of :data:`BENCHMARKS`. "links" is a collective of all ranks, and short: a product of matrices,
all-reduces of growing size (until one takes long), messages back and forth between each pair, and both at once.
"times" has all ranks take the same steps at the same time, without synchronising them, since processes that share
cores and memory slow each other down in training as well.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from dtkit._util.guard import run_guarded
from dtkit.engine import dry_run, memory, node_info
from dtkit.engine.data.sources import to_device
from dtkit.planning.cost_model import StepTimings
from dtkit.planning.layer_chain import LayerChain
from dtkit.rpc import pickling
from dtkit.strategies.base import make_optimizer
from dtkit.strategies.loss import split_batch
from dtkit.strategies.meta_copy import count_bytes
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.cut import find_layer_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import RowSource
    from dtkit.engine.dry_run import ActivationPeak
    from dtkit.strategies.loss import Loss

ALL_REDUCE_BYTES = (8, 64 * 1024, 1024**2, 8 * 1024**2, 25 * 1024**2)  # bytes of all-reduces; DDP's buckets have 25 MiB
MAX_ALL_REDUCE_S = 0.25  # larger all-reduces than one that took so long are not tried
PAIR_BYTES, NUM_PAIR_TRIPS = 1024**2, 3
NUM_PINGS = 20
STEPS_BUDGET_S, MAX_STEP_S = 1.0, 4.0  # for the steps of one size; for one step, at most
MIN_ROWS = 2  # batch normalisation can't take one
_NUM_WARMUP_STEPS = 4  # steps that a rehearsal begins with
_SAMPLE_ROWS = 3  # rows of a batch that only serves for its shapes


@dataclasses.dataclass(frozen=True)
class BenchmarkContext:
    """Where this engine works, and what it holds."""

    group: Group
    device: torch.device
    models: Mapping[str, torch.nn.Module]
    data: Mapping[str, tuple[RowSource, Shards]]


def run_benchmark(context: BenchmarkContext, what: str, **args: Any) -> Any:
    """Do one of :data:`BENCHMARKS`."""
    return BENCHMARKS[what](context, **args)


# --- speed and links ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LinkSpeeds:
    """One rank's part of a benchmark: see :class:`dtkit.planning.cost_model.Benchmark`."""

    flops: float
    all_reduce_times: list[tuple[int, float]]
    pairs: dict[int, tuple[float, float]]
    """(latency in seconds, bytes per second) to each higher rank."""
    overlap: float


def measure_links(context: BenchmarkContext, dtype: str) -> LinkSpeeds:
    """Measure speed and links. A collective."""
    kind = getattr(torch, dtype)
    # waits: a collective, limited by the process group's timeout
    context.group.barrier()
    rate, product = _measure_matmul_flops(context, kind)
    if context.group.world_size == 1:
        return LinkSpeeds(rate, [], {}, 1.0)
    reduced = _time_all_reduces(context)
    return LinkSpeeds(rate, reduced, _measure_pairs(context), _measure_overlap(context, product, reduced[-1][0]))


def _measure_matmul_flops(context: BenchmarkContext, dtype: torch.dtype) -> tuple[float, Callable[[], Any]]:
    """(operations per second, a product of matrices to compute with)."""
    n = 8192 if context.device.type == "cuda" else 768
    a, b = (torch.ones(n, n, device=context.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    seconds = _time_repeatedly(context, multiply, 0.4)
    return 2 * n**3 / _take_fast_quartile(seconds), multiply


def _time_repeatedly(
    context: BenchmarkContext, work: Callable[[], Any], budget_s: float, min_calls: int = 3
) -> list[float]:
    """Seconds of each of as many calls as fit into `budget`, after one that is not counted."""
    _time_call(context, work)
    seconds: list[float] = []
    while len(seconds) < min_calls or sum(seconds) < budget_s:
        seconds.append(_time_call(context, work))
    return seconds


def _take_fast_quartile(seconds: Sequence[float]) -> float:
    """The fast quartile: what disturbs makes slower, never faster."""
    return sorted(seconds)[len(seconds) // 4]


def _time_call(context: BenchmarkContext, work: Callable[[], Any]) -> float:
    clock = node_info.make_clock(context.device)
    start = clock.record_mark()
    work()
    end = clock.record_mark()
    clock.synchronize()
    return clock.compute_elapsed(start, end)


def _time_all_reduces(context: BenchmarkContext) -> list[tuple[int, float]]:
    """(bytes, seconds) of growing all-reduces; all ranks stop at the same one."""
    found: list[tuple[int, float]] = []
    for size in ALL_REDUCE_BYTES:
        tensor = torch.zeros(size // 4, device=context.device)
        seconds = [_time_all_reduce(context, tensor) for _ in range(NUM_PINGS if size < 1024**2 else 6)]
        found.append((size, statistics.median(seconds[1:])))
        if context.group.all_reduce_any(found[-1][1] > MAX_ALL_REDUCE_S):
            break
    return found


def _time_all_reduce(context: BenchmarkContext, tensor: torch.Tensor) -> float:
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    _synchronize(context)
    return time.perf_counter() - begun


def _synchronize(context: BenchmarkContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def _measure_pairs(context: BenchmarkContext) -> dict[int, tuple[float, float]]:
    """Latency and bandwidth to each higher rank: one pair after the other, the others wait for their turn."""
    # gloo sends and receives on the CPU only.
    device = context.device if "nccl" in context.group.backend else torch.device("cpu")
    found = {}
    for low in range(context.group.world_size):
        for high in range(low + 1, context.group.world_size):
            if context.group.rank in (low, high):
                measured = _measure_pair(context, high if context.group.rank == low else low, device)
                if context.group.rank == low:
                    found[high] = measured
    return found


def _measure_pair(context: BenchmarkContext, peer: int, device: torch.device) -> tuple[float, float]:
    """(seconds one way for 8 bytes, bytes per second), as the lower rank sees them."""
    small, large = torch.zeros(2, device=device), torch.zeros(PAIR_BYTES // 4, device=device)
    _time_round_trip(context, peer, small)
    _time_round_trip(context, peer, large)
    ping = statistics.median(_time_round_trip(context, peer, small) for _ in range(NUM_PINGS)) / 2
    bulk = statistics.median(_time_round_trip(context, peer, large) for _ in range(NUM_PAIR_TRIPS)) / 2
    return ping, PAIR_BYTES / bulk


def _time_round_trip(context: BenchmarkContext, peer: int, tensor: torch.Tensor) -> float:
    """There and back: the lower rank begins."""
    begun = time.perf_counter()
    moves = (dist.send, dist.recv) if context.group.rank < peer else (dist.recv, dist.send)
    for move in moves:
        move(tensor, peer)
    _synchronize(context)
    return time.perf_counter() - begun


def _measure_overlap(context: BenchmarkContext, multiply: Callable[[], Any], nbytes: int) -> float:
    """How much of an all-reduce of so many bytes hides behind computing that takes about as long."""
    tensor = torch.zeros(nbytes // 4, device=context.device)
    found = []
    for _ in range(5):
        # waits: a collective, limited by the process group's timeout
        context.group.barrier()
        alone = _time_all_reduce(context, tensor)
        times = max(1, round(alone / _time_call(context, multiply)))
        # waits: a collective, limited by the process group's timeout
        context.group.barrier()
        computing = _time_call(context, functools.partial(_call_repeatedly, multiply, times))
        # waits: a collective, limited by the process group's timeout
        context.group.barrier()
        begun = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        _call_repeatedly(multiply, times)
        # waits: a collective, limited by the process group's timeout
        work.wait()
        _synchronize(context)
        both = time.perf_counter() - begun
        found.append((alone + computing - both) / min(alone, computing))
    return min(1.0, max(0.0, statistics.median(found)))


def _call_repeatedly(work: Callable[[], Any], num_calls: int) -> None:
    for _ in range(num_calls):
        work()


# --- a model ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """What a model takes whatever the batch: see :class:`dtkit.planning.cost_model.ModelProfile`."""

    parameters: int
    gradients: int
    shapes: tuple[tuple[int, ...], ...]
    optimizer_state: int | None
    """None where the optimiser could not be tried without numbers; `why` says why."""
    update_peak: int
    reason: str


def measure_model_sizes(context: BenchmarkContext, program: bytes, model: str | None) -> ModelSizes:
    """What a model takes whatever the batch. `program` has (hollow model or None, objective, optimiser's factory)."""
    # unpickles: sent by the notebook in a call
    hollow, _, factory = pickling.loads(program)
    network = hollow if model is None else context.models[model]
    (state, update), why = _try_or_explain(
        lambda: dry_run.estimate_optimizer_bytes(network, factory, context.device), (None, 0)
    )
    dense = dry_run.find_dense_gradient_parameters(network)
    return ModelSizes(
        parameters=count_bytes([*network.parameters(), *network.buffers()]),
        gradients=count_bytes(dense),
        shapes=tuple(tuple(p.shape) for p in dense),
        optimizer_state=state,
        update_peak=update,
        reason=why,
    )


def measure_activation_peaks(
    context: BenchmarkContext,
    program: bytes,
    model: str | None,
    data: str,
    rows: tuple[int, ...],
    precision: str | None = None,
) -> tuple[list[ActivationPeak], str]:
    """What forward and backward hold on so many rows, without numbers; none and the reason where that fails."""
    # unpickles: sent by the notebook in a call
    hollow, objective, _ = pickling.loads(program)
    network = hollow if model is None else context.models[model]
    source = context.data[data][0]
    batch = source.take(_cycle_rows(source, _SAMPLE_ROWS))
    autocast = functools.partial(_make_autocast, context.device, precision)
    found, why = _try_or_explain(
        lambda: dry_run.estimate_peaks(network, objective, batch, rows, context.device, autocast), []
    )
    if any(peak.has_hidden_workspace for peak in found):
        return [], "it has recurrent layers, whose workspace does not show"
    return found, why


def measure_layers(
    context: BenchmarkContext, program: bytes, model: str | None, data: str, rows: int, *, timed: bool
) -> tuple[LayerChain | None, str]:
    """What the layers of a model's chain are and cost; `timed` in steps on `rows`, of a model that is placed here.

    None, and the reason, where that can't be told. By this rank alone.
    """
    # unpickles: sent by the notebook in a call
    hollow, objective, _ = pickling.loads(program)
    network = hollow if model is None else context.models[model]
    source = context.data[data][0]
    batch = to_device(source.take(_cycle_rows(source, rows)), context.device)
    return _try_or_explain(lambda: _measure_chain(network, objective, batch, context.device if timed else None), None)


def _measure_chain(
    network: torch.nn.Module, loss_fn: Loss, batch: Any, device: torch.device | None
) -> LayerChain | None:
    names = tuple(name for name, _ in find_layer_chain(network))
    if not names:
        return None
    inputs, target = split_batch(batch)
    numbers, outputs = layer_costs.measure_sizes(network, inputs)
    seconds = None
    if device is not None:
        seconds = layer_costs.measure_seconds(
            network, inputs, device, lambda output: loss_fn.evaluate_output(output, target).loss
        )
    return LayerChain(names, numbers, seconds, tuple(nbytes / len(inputs[0]) for nbytes in outputs))


def _try_or_explain(work: Callable[[], Any], fallback: Any) -> tuple[Any, str]:
    """(the work's result, "") or (otherwise, why not)."""

    def explain_error(error: Exception) -> tuple[Any, str]:
        first = str(error).strip().splitlines()[:1] or [""]
        return fallback, f"{type(error).__name__}: {first[0]}"[:200]

    return run_guarded(lambda: (work(), ""), explain_error)


def _cycle_rows(source: RowSource, count: int) -> np.ndarray:
    """So many rows of a sample that may have fewer."""
    return np.arange(count) % len(source)


def _make_autocast(device: torch.device, precision: str | None = None) -> contextlib.AbstractContextManager[Any]:
    from dtkit.strategies.replicated import AUTOCAST_DTYPES

    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[precision])


def measure_step_times(
    context: BenchmarkContext,
    program: bytes,
    model: str,
    data: str,
    rows: int,
    precision: str | None = None,
    *,
    ledger: bool = False,
) -> StepTimings:
    """Take real steps of a placed model on `rows`, or fewer where they take long, on all ranks at once. A collective.

    `ledger` says whether to count what they allocate.
    """
    # unpickles: sent by the notebook in a call
    _, objective, factory = pickling.loads(program)
    start = functools.partial(
        TrialTraining, context, context.models[model], objective, factory, context.data[data][0], precision
    )
    # waits: a collective, limited by the process group's timeout
    context.group.barrier()
    try:
        with torch.random.fork_rng(devices=[] if context.device.type == "cpu" else [context.device]):
            return _run_trial(context, start, rows, track_allocations=ledger)
    finally:
        memory.release_unused_memory()


def _run_trial(
    context: BenchmarkContext, start_trial: Callable[[], TrialTraining], rows: int, *, track_allocations: bool
) -> StepTimings:
    large = _find_affordable_rows(start_trial, rows)
    memory.release_unused_memory()  # steps of several sizes leave a heap in pieces that training's would not
    before = memory.reset_peak(context.device)
    with contextlib.closing(start_trial()) as rehearsal:
        rehearsal.run_warmup_steps(large)
        grown = None if before is None else memory.read_peak(context.device) - before
        pair = (large, 2 * large) if large < 2 * MIN_ROWS else (large // 2, large)
        points = [(count, *rehearsal.measure_step_seconds(count)) for count in pair]
        held = [rehearsal.measure_activation_peak(count) for count in pair] if track_allocations else []
        return StepTimings(
            points, rehearsal.measure_update_seconds(), rehearsal.count_optimizer_bytes(), large, grown, held
        )


def _find_affordable_rows(start_trial: Callable[[], TrialTraining], rows: int) -> int:
    """In a function of its own, after which nothing of that rehearsal is left."""
    with contextlib.closing(start_trial()) as rehearsal:
        return rehearsal.find_affordable_rows(rows)


class TrialTraining:
    """A copy of the model that is trained a little and thrown away.

    Gradients go where DDP has them go, since that shapes the heap: into flat buckets, each as soon as it is there. DDP
    makes its buckets anew after the first step, in the order in which gradients came, and so does this.
    """

    def __init__(
        self,
        context: BenchmarkContext,
        model: torch.nn.Module,
        loss_fn: Loss,
        factory: Callable[..., Any],
        source: RowSource,
        precision: str | None,
    ) -> None:
        self._context, self._loss_fn, self._source = context, loss_fn, source
        self._model = copy.deepcopy(model).to(context.device).train()
        self._optimizer = make_optimizer(factory, self._model)
        self._make_autocast = functools.partial(_make_autocast, context.device, precision)
        self._dense_parameters = dry_run.find_dense_gradient_parameters(self._model)
        self._bucket_views = _make_bucket_views(self._dense_parameters)
        self._hooks = [dry_run.add_gradient_hook(p, self._move_to_bucket) for p in self._dense_parameters]

    def _move_to_bucket(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = self._bucket_views[parameter].copy_(parameter.grad)

    def close(self) -> None:
        """Let go of the model: torch holds hooks where Python's collector of cycles does not look."""
        for hook in self._hooks:
            hook.remove()

    def find_affordable_rows(self, rows: int) -> int:
        """`rows`, or as many as a step can take within the longest time: by steps of growing size."""
        count, seconds = MIN_ROWS, sum(self._time_step(MIN_ROWS))
        while count < rows:
            more = min(rows, 4 * count)
            if seconds * more / count > MAX_STEP_S:  # at most so long: part of a step does not grow with its rows
                return count
            count, seconds = more, sum(self._time_step(more))
        return count

    def measure_step_seconds(self, rows: int) -> tuple[float, float]:
        """(forward, backward) of as many steps as the time allows, the first not counted: their fast quartiles."""
        self._time_step(rows)
        steps: list[tuple[float, float]] = []
        while len(steps) < 2 or sum(map(sum, steps)) < STEPS_BUDGET_S:
            steps.append(self._time_step(rows))
        forward, backward = zip(*steps, strict=True)
        return _take_fast_quartile(forward), _take_fast_quartile(backward)

    def run_warmup_steps(self, rows: int) -> None:
        """A few whole steps: after them a process is as large as it gets."""
        for k in range(_NUM_WARMUP_STEPS):
            if k == 1:
                self._optimizer.zero_grad()
                self._bucket_views = _make_bucket_views(self._dense_parameters)
            self._time_step(rows)
            self._optimizer.step()

    def _time_step(self, rows: int) -> tuple[float, float]:
        batch = self._make_batch(rows)
        self._optimizer.zero_grad()
        clock = node_info.make_clock(self._context.device)
        marks = [clock.record_mark()]
        with self._make_autocast():
            loss, _ = self._loss_fn(self._model, batch)
        marks.append(clock.record_mark())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(clock.record_mark())
        clock.synchronize()
        return clock.compute_elapsed(marks[0], marks[1]), clock.compute_elapsed(marks[1], marks[2])

    def _make_batch(self, rows: int) -> Any:
        return to_device(self._source.take(_cycle_rows(self._source, rows)), self._context.device)

    def measure_update_seconds(self) -> float:
        """Of some updates, with the gradients of the last step."""
        return _take_fast_quartile(_time_repeatedly(self._context, self._optimizer.step, 0.2))

    def count_optimizer_bytes(self) -> int:
        """After an update."""
        return dry_run.count_optimizer_bytes(self._optimizer)

    def measure_activation_peak(self, rows: int) -> ActivationPeak:
        """What a step on so many rows holds besides, by the ledger."""
        self._optimizer.zero_grad()
        self.close()
        return dry_run.measure_peak(self._model, self._loss_fn, self._make_batch(rows), rows, self._make_autocast)


def _make_bucket_views(parameters: Sequence[torch.nn.Parameter]) -> dict[torch.Tensor, torch.Tensor]:
    """A place for each gradient in flat buckets of DDP's sizes, from the last parameter to the first."""
    groups: list[list[torch.nn.Parameter]] = [[]]
    for p in reversed(parameters):
        cap = ALL_REDUCE_BYTES[2] if len(groups) == 1 else ALL_REDUCE_BYTES[-1]
        if groups[-1] and (count_bytes(groups[-1]) >= cap or groups[-1][0].dtype != p.dtype):
            groups.append([])
        groups[-1].append(p)
    places: dict[torch.Tensor, torch.Tensor] = {}
    for group in groups:
        flat = (
            torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device) if group else None
        )
        start = 0
        for p in group:
            assert flat is not None
            places[p] = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
    return places


BENCHMARKS: dict[str, Callable[..., Any]] = {
    "links": measure_links,
    "sizes": measure_model_sizes,
    "peaks": measure_activation_peaks,
    "layers": measure_layers,
    "times": measure_step_times,
    "room": lambda seat, **args: memory.measure_available_memory(seat.device, seat.models.values(), **args),
}
