"""What can only be measured on the engines: their speed, the links between them, their memory, and a user's model.

A request names one of :data:`MEASURES`. "links" is a collective of all ranks, and short: a product of matrices,
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

from dtkit._util.guard import attempt
from dtkit.engine import dry_run, memory, node_info
from dtkit.engine.data.sources import to_device
from dtkit.planning.cost_model import StepTimings
from dtkit.rpc import pickling
from dtkit.strategies.base import make_optimizer
from dtkit.strategies.loss import split_batch
from dtkit.strategies.pipeline import layer_costs
from dtkit.strategies.pipeline.cut import LayerChain, find_layer_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import Source
    from dtkit.engine.dry_run import Peaks
    from dtkit.strategies.loss import Loss

SIZES = (8, 64 * 1024, 1024**2, 8 * 1024**2, 25 * 1024**2)  # bytes of all-reduces; DDP's buckets have 25 MiB
LONG_S = 0.25  # larger all-reduces than one that took so long are not tried
PAIR_BYTES, PAIR_TRIPS = 1024**2, 3
PINGS = 20
BUDGET_S, LONGEST_S = 1.0, 4.0  # for the steps of one size; for one step, at most
LEAST_ROWS = 2  # batch normalisation can't take one
_TRAINED = 4  # steps that a rehearsal begins with
_SAMPLE = 3  # rows of a batch that only serves for its shapes


@dataclasses.dataclass(frozen=True)
class Seat:
    """Where this engine works, and what it holds."""

    group: Group
    device: torch.device
    models: Mapping[str, torch.nn.Module]
    data: Mapping[str, tuple[Source, Shards]]


def serve(seat: Seat, what: str, **args: Any) -> Any:
    """Do one of :data:`MEASURES`."""
    return MEASURES[what](seat, **args)


# --- speed and links ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Links:
    """One rank's part of a benchmark: see :class:`dtkit.planning.cost_model.Benchmark`."""

    flops: float
    all_reduce: list[tuple[int, float]]
    pairs: dict[int, tuple[float, float]]
    """(latency in seconds, bytes per second) to each higher rank."""
    overlap: float


def links(seat: Seat, dtype: str) -> Links:
    """Measure speed and links. A collective."""
    kind = getattr(torch, dtype)
    # waits: a collective, limited by the process group's timeout
    seat.group.barrier()
    rate, product = _matrix_rate(seat, kind)
    if seat.group.world_size == 1:
        return Links(rate, [], {}, 1.0)
    reduced = _all_reduces(seat)
    return Links(rate, reduced, _pairs(seat), _overlap(seat, product, reduced[-1][0]))


def _matrix_rate(seat: Seat, dtype: torch.dtype) -> tuple[float, Callable[[], Any]]:
    """(operations per second, a product of matrices to compute with)."""
    n = 8192 if seat.device.type == "cuda" else 768
    a, b = (torch.ones(n, n, device=seat.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    seconds = _repeat(seat, product, 0.4)
    return 2 * n**3 / _fast(seconds), product


def _repeat(seat: Seat, work: Callable[[], Any], budget: float, least: int = 3) -> list[float]:
    """Seconds of each of as many calls as fit into `budget`, after one that is not counted."""
    _timed(seat, work)
    seconds: list[float] = []
    while len(seconds) < least or sum(seconds) < budget:
        seconds.append(_timed(seat, work))
    return seconds


def _fast(seconds: Sequence[float]) -> float:
    """The fast quartile: what disturbs makes slower, never faster."""
    return sorted(seconds)[len(seconds) // 4]


def _timed(seat: Seat, work: Callable[[], Any]) -> float:
    clock = node_info.clock(seat.device)
    start = clock.mark()
    work()
    end = clock.mark()
    clock.settle()
    return clock.seconds(start, end)


def _all_reduces(seat: Seat) -> list[tuple[int, float]]:
    """(bytes, seconds) of growing all-reduces; all ranks stop at the same one."""
    found: list[tuple[int, float]] = []
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=seat.device)
        seconds = [_all_reduce_s(seat, tensor) for _ in range(PINGS if size < 1024**2 else 6)]
        found.append((size, statistics.median(seconds[1:])))
        if seat.group.any(found[-1][1] > LONG_S):
            break
    return found


def _all_reduce_s(seat: Seat, tensor: torch.Tensor) -> float:
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    _settle(seat)
    return time.perf_counter() - begun


def _settle(seat: Seat) -> None:
    if seat.device.type == "cuda":
        torch.cuda.synchronize(seat.device)


def _pairs(seat: Seat) -> dict[int, tuple[float, float]]:
    """Latency and bandwidth to each higher rank: one pair after the other, the others wait for their turn."""
    # gloo sends and receives on the CPU only.
    device = seat.device if "nccl" in seat.group.backend else torch.device("cpu")
    found = {}
    for low in range(seat.group.world_size):
        for high in range(low + 1, seat.group.world_size):
            if seat.group.rank in (low, high):
                measured = _pair(seat, high if seat.group.rank == low else low, device)
                if seat.group.rank == low:
                    found[high] = measured
    return found


def _pair(seat: Seat, peer: int, device: torch.device) -> tuple[float, float]:
    """(seconds one way for 8 bytes, bytes per second), as the lower rank sees them."""
    small, large = torch.zeros(2, device=device), torch.zeros(PAIR_BYTES // 4, device=device)
    _trip(seat, peer, small)
    _trip(seat, peer, large)
    ping = statistics.median(_trip(seat, peer, small) for _ in range(PINGS)) / 2
    bulk = statistics.median(_trip(seat, peer, large) for _ in range(PAIR_TRIPS)) / 2
    return ping, PAIR_BYTES / bulk


def _trip(seat: Seat, peer: int, tensor: torch.Tensor) -> float:
    """There and back: the lower rank begins."""
    begun = time.perf_counter()
    moves = (dist.send, dist.recv) if seat.group.rank < peer else (dist.recv, dist.send)
    for move in moves:
        move(tensor, peer)
    _settle(seat)
    return time.perf_counter() - begun


def _overlap(seat: Seat, product: Callable[[], Any], nbytes: int) -> float:
    """How much of an all-reduce of so many bytes hides behind computing that takes about as long."""
    tensor = torch.zeros(nbytes // 4, device=seat.device)
    found = []
    for _ in range(5):
        # waits: a collective, limited by the process group's timeout
        seat.group.barrier()
        alone = _all_reduce_s(seat, tensor)
        times = max(1, round(alone / _timed(seat, product)))
        # waits: a collective, limited by the process group's timeout
        seat.group.barrier()
        computing = _timed(seat, functools.partial(_repeated, product, times))
        # waits: a collective, limited by the process group's timeout
        seat.group.barrier()
        begun = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        _repeated(product, times)
        # waits: a collective, limited by the process group's timeout
        work.wait()
        _settle(seat)
        both = time.perf_counter() - begun
        found.append((alone + computing - both) / min(alone, computing))
    return min(1.0, max(0.0, statistics.median(found)))


def _repeated(work: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        work()


# --- a model ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a model takes whatever the batch: see :class:`dtkit.planning.cost_model.ModelProfile`."""

    parameters: int
    gradients: int
    shapes: tuple[tuple[int, ...], ...]
    state: int | None
    """None where the optimiser could not be tried without numbers; `why` says why."""
    update: int
    why: str


def sizes(seat: Seat, program: bytes, model: str | None) -> Sizes:
    """What a model takes whatever the batch. `program` has (hollow model or None, objective, optimiser's factory)."""
    # unpickles: sent by the notebook in a call
    hollow, _, factory = pickling.loads(program)
    network = hollow if model is None else seat.models[model]
    (state, update), why = _tried(lambda: dry_run.update_bytes(network, factory, seat.device), (None, 0))
    dense = dry_run.with_dense_gradients(network)
    return Sizes(
        parameters=dry_run.nbytes([*network.parameters(), *network.buffers()]),
        gradients=dry_run.nbytes(dense),
        shapes=tuple(tuple(p.shape) for p in dense),
        state=state,
        update=update,
        why=why,
    )


def peaks(
    seat: Seat, program: bytes, model: str | None, data: str, rows: tuple[int, ...], precision: str | None = None
) -> tuple[list[Peaks], str]:
    """What forward and backward hold on so many rows, without numbers; none and the reason where that fails."""
    # unpickles: sent by the notebook in a call
    hollow, objective, _ = pickling.loads(program)
    network = hollow if model is None else seat.models[model]
    source = seat.data[data][0]
    batch = source.take(_rows(source, _SAMPLE))
    autocast = functools.partial(_autocast, seat.device, precision)
    found, why = _tried(lambda: dry_run.peaks(network, objective, batch, rows, seat.device, autocast), [])
    if any(peak.opaque for peak in found):
        return [], "it has recurrent layers, whose workspace does not show"
    return found, why


def layers(
    seat: Seat, program: bytes, model: str | None, data: str, rows: int, *, timed: bool
) -> tuple[LayerChain | None, str]:
    """What the layers of a model's chain are and cost; `timed` in steps on `rows`, of a model that is placed here.

    None, and the reason, where that can't be told. By this rank alone.
    """
    # unpickles: sent by the notebook in a call
    hollow, objective, _ = pickling.loads(program)
    network = hollow if model is None else seat.models[model]
    source = seat.data[data][0]
    batch = to_device(source.take(_rows(source, rows)), seat.device)
    return _tried(lambda: _layers(network, objective, batch, seat.device if timed else None), None)


def _layers(network: torch.nn.Module, objective: Loss, batch: Any, device: torch.device | None) -> LayerChain | None:
    names = tuple(name for name, _ in find_layer_chain(network))
    if not names:
        return None
    inputs, target = split_batch(batch)
    numbers, outputs = layer_costs.measure_sizes(network, inputs)
    seconds = None
    if device is not None:
        seconds = layer_costs.measure_seconds(
            network, inputs, device, lambda output: objective.evaluate_output(output, target).loss
        )
    return LayerChain(names, numbers, seconds, tuple(nbytes / len(inputs[0]) for nbytes in outputs))


def _tried(work: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """(the work's result, "") or (otherwise, why not)."""

    def note(error: Exception) -> tuple[Any, str]:
        first = str(error).strip().splitlines()[:1] or [""]
        return otherwise, f"{type(error).__name__}: {first[0]}"[:200]

    return attempt(lambda: (work(), ""), note)


def _rows(source: Source, count: int) -> np.ndarray:
    """So many rows of a sample that may have fewer."""
    return np.arange(count) % len(source)


def _autocast(device: torch.device, precision: str | None = None) -> contextlib.AbstractContextManager[Any]:
    from dtkit.strategies.replicated import AUTOCAST_DTYPES

    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[precision])


def times(
    seat: Seat,
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
    start = functools.partial(Rehearsal, seat, seat.models[model], objective, factory, seat.data[data][0], precision)
    # waits: a collective, limited by the process group's timeout
    seat.group.barrier()
    try:
        with torch.random.fork_rng(devices=[] if seat.device.type == "cpu" else [seat.device]):
            return _rehearsed(seat, start, rows, ledger=ledger)
    finally:
        memory.tidy()


def _rehearsed(seat: Seat, start: Callable[[], Rehearsal], rows: int, *, ledger: bool) -> StepTimings:
    large = _affordable(start, rows)
    memory.tidy()  # steps of several sizes leave a heap in pieces that training's would not
    before = memory.reset_peak(seat.device)
    with contextlib.closing(start()) as rehearsal:
        rehearsal.train(large)
        grown = None if before is None else memory.peak(seat.device) - before
        pair = (large, 2 * large) if large < 2 * LEAST_ROWS else (large // 2, large)
        points = [(count, *rehearsal.seconds(count)) for count in pair]
        held = [rehearsal.peak(count) for count in pair] if ledger else []
        return StepTimings(points, rehearsal.update_seconds(), rehearsal.state_bytes(), large, grown, held)


def _affordable(start: Callable[[], Rehearsal], rows: int) -> int:
    """In a function of its own, after which nothing of that rehearsal is left."""
    with contextlib.closing(start()) as rehearsal:
        return rehearsal.affordable(rows)


class Rehearsal:
    """A copy of the model that is trained a little and thrown away.

    Gradients go where DDP has them go, since that shapes the heap: into flat buckets, each as soon as it is there. DDP
    makes its buckets anew after the first step, in the order in which gradients came, and so does this.
    """

    def __init__(
        self,
        seat: Seat,
        model: torch.nn.Module,
        objective: Loss,
        factory: Callable[..., Any],
        source: Source,
        precision: str | None,
    ) -> None:
        self._seat, self._objective, self._source = seat, objective, source
        self._model = copy.deepcopy(model).to(seat.device).train()
        self._optimizer = make_optimizer(factory, self._model)
        self._autocast = functools.partial(_autocast, seat.device, precision)
        self._dense = dry_run.with_dense_gradients(self._model)
        self._places = _buckets(self._dense)
        self._hooks = [dry_run.on_gradient(p, self._to_bucket) for p in self._dense]

    def _to_bucket(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = self._places[parameter].copy_(parameter.grad)

    def close(self) -> None:
        """Let go of the model: torch holds hooks where Python's collector of cycles does not look."""
        for hook in self._hooks:
            hook.remove()

    def affordable(self, rows: int) -> int:
        """`rows`, or as many as a step can take within the longest time: by steps of growing size."""
        count, seconds = LEAST_ROWS, sum(self._step(LEAST_ROWS))
        while count < rows:
            more = min(rows, 4 * count)
            if seconds * more / count > LONGEST_S:  # at most so long: part of a step does not grow with its rows
                return count
            count, seconds = more, sum(self._step(more))
        return count

    def seconds(self, rows: int) -> tuple[float, float]:
        """(forward, backward) of as many steps as the time allows, the first not counted: their fast quartiles."""
        self._step(rows)
        steps: list[tuple[float, float]] = []
        while len(steps) < 2 or sum(map(sum, steps)) < BUDGET_S:
            steps.append(self._step(rows))
        forward, backward = zip(*steps, strict=True)
        return _fast(forward), _fast(backward)

    def train(self, rows: int) -> None:
        """A few whole steps: after them a process is as large as it gets."""
        for k in range(_TRAINED):
            if k == 1:
                self._optimizer.zero_grad()
                self._places = _buckets(self._dense)
            self._step(rows)
            self._optimizer.step()

    def _step(self, rows: int) -> tuple[float, float]:
        batch = self._batch(rows)
        self._optimizer.zero_grad()
        clock = node_info.clock(self._seat.device)
        marks = [clock.mark()]
        with self._autocast():
            loss, _ = self._objective(self._model, batch)
        marks.append(clock.mark())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(clock.mark())
        clock.settle()
        return clock.seconds(marks[0], marks[1]), clock.seconds(marks[1], marks[2])

    def _batch(self, rows: int) -> Any:
        return to_device(self._source.take(_rows(self._source, rows)), self._seat.device)

    def update_seconds(self) -> float:
        """Of some updates, with the gradients of the last step."""
        return _fast(_repeat(self._seat, self._optimizer.step, 0.2))

    def state_bytes(self) -> int:
        """After an update."""
        return dry_run.state_bytes(self._optimizer)

    def peak(self, rows: int) -> Peaks:
        """What a step on so many rows holds besides, by the ledger."""
        self._optimizer.zero_grad()
        self.close()
        return dry_run.peak_of(self._model, self._objective, self._batch(rows), rows, self._autocast)


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> dict[torch.Tensor, torch.Tensor]:
    """A place for each gradient in flat buckets of DDP's sizes, from the last parameter to the first."""
    groups: list[list[torch.nn.Parameter]] = [[]]
    for p in reversed(parameters):
        cap = SIZES[2] if len(groups) == 1 else SIZES[-1]
        if groups[-1] and (dry_run.nbytes(groups[-1]) >= cap or groups[-1][0].dtype != p.dtype):
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


MEASURES: dict[str, Callable[..., Any]] = {
    "links": links,
    "sizes": sizes,
    "peaks": peaks,
    "layers": layers,
    "times": times,
    "room": lambda seat, **args: memory.room(seat.device, seat.models.values(), **args),
}
