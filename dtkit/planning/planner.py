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
from dtkit.cluster.broadcast import Replicas
from dtkit.dashboard.progress import waiting
from dtkit.data import distribute
from dtkit.data.partition import Partition
from dtkit.errors import RunError
from dtkit.planning import cost_model as plans
from dtkit.planning.cost_model import Benchmark, Facts, Line, Plan, PlanRow, Room, Times
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster import Cluster
    from dtkit.engine.benchmark import Sizes
    from dtkit.engine.dry_run import Peaks
    from dtkit.strategies.base import Strategy
    from dtkit.strategies.pipeline.cut import Layers

_SURELY = 12  # times a model's parameters: gradients, and more state than any common optimiser has
_MARGIN = 0.85  # of the free memory: a rehearsal is not worth the risk of running out of it
_CAUTIOUS_ROWS = 8  # of a rehearsal whose activations are not known

NOT_COUNTED = "not counted: the data, and what torch loads at the first step"


# --- the benchmark ------------------------------------------------------------------------------------------


def benchmark(cluster: Cluster, dtype: str = "float32") -> Benchmark:
    """See :meth:`dtkit.Cluster.benchmark`."""
    cluster.check_open()
    check_idle(cluster)
    _check_dtype(dtype)
    begun = time.monotonic()
    with waiting(f"measuring {formatting.plural(cluster.world_size, 'engine')} and the links between them"):
        found = cluster.ask("measure", what="links", dtype=dtype)
    ranks = range(cluster.world_size)
    pairs = {(low, high): value for low in ranks for high, value in found[low].pairs.items()}
    both = pairs | {(high, low): value for (low, high), value in pairs.items()}
    nothing = (float("nan"), float("nan"))
    return Benchmark(
        dtype=dtype,
        backend=cluster.backend,
        flops=tuple(links.flops for links in found),
        all_reduce=tuple(found[0].all_reduce),
        latency_s=tuple(tuple(both.get((a, b), nothing)[0] for b in ranks) for a in ranks),
        bandwidth=tuple(tuple(both.get((a, b), nothing)[1] for b in ranks) for a in ranks),
        overlap=min(links.overlap for links in found),
        took_s=time.monotonic() - begun,
    )


_MEASURED = "so what is measured now would be wrong, and slow the run down"


def check_idle(cluster: Cluster, why: str = _MEASURED, remedy: str = "pause it (run.pause())") -> None:
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
class Wish:
    """What ``cluster.plan`` was asked, besides the model: see there."""

    batch_size: int
    optimizer: Callable[..., Any]
    sample: Any
    loss: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    strategies: Sequence[Strategy] | None = None


def plan(cluster: Cluster, model: Any, wish: Wish) -> Plan:
    """See :meth:`dtkit.Cluster.plan`."""
    cluster.check_open()
    check_idle(cluster)
    _check(cluster, model, wish)
    strategies = _strategies(cluster, model, wish)
    network = cluster.benchmark()
    with waiting(f"planning for {_name(model)}") as progress:
        study = _Study(cluster, model, wish, progress.update)
        rows = []
        for strategy in strategies:
            facts = study.facts(getattr(strategy, "precision", None), network)
            if strategy.table is not None:
                layers = study.layers(strategy.parts)
                facts = [dataclasses.replace(fact, layers=layers) for fact in facts]
            if strategy.partial:  # the model is mapped, and taken apart
                facts = [dataclasses.replace(fact, sent=0) for fact in facts]
            costs = [strategy.cost(fact, network) for fact in facts]
            rows += plans.rows_of(repr(strategy), facts, costs, study.rooms)
    return Plan(
        model=_name(model),
        batch_size=int(wish.batch_size),
        world_size=cluster.world_size,
        rows=tuple(rows),
        benchmark=network,
        notes=tuple(dict.fromkeys([*study.notes, *_unsaid(rows), NOT_COUNTED])),
    )


def _unsaid(rows: Sequence[PlanRow]) -> list[str]:
    """What is not known of the strategies themselves."""
    names = dict.fromkeys(row.strategy for row in rows if math.isnan(row.sent_bytes))
    return [f"not counted: what {', '.join(names)} sends within layers, and the time that takes"] if names else []


class _Study:
    """What is found out of one model, step by step."""

    def __init__(self, cluster: Cluster, model: Any, wish: Wish, say: Callable[[str], None]) -> None:
        self._cluster, self._model, self._say = cluster, model, say
        self.notes: list[str] = []
        self._data = distribute.place(cluster, wish.sample)
        self._program = program(cluster, model, wish.loss, wish.step, wish.optimizer)
        self._key = model.key if isinstance(model, Replicas) else None
        self._shares = _shares(cluster, wish)
        self.rooms = _rooms(cluster, tidy=True)
        say(f"trying {_name(model)} without numbers")
        self._sizes: Sizes = self._ask_first("sizes")
        self._copies: Replicas | None = None
        self._known: dict[str | None, list[Facts]] = {}
        self._chains: dict[int, Layers | None] = {}
        self._stepped = False  # whether real steps were taken: it fits, then

    def _ask_first(self, what: str, **args: Any) -> Any:
        return self._cluster.ask("measure", ranks=[0], what=what, program=self._program, model=self._key, **args)[0]

    def facts(self, precision: str | None, network: Benchmark) -> list[Facts]:
        """One rank's facts after the other; what was found for a precision once serves all strategies with it."""
        if precision not in self._known:
            self._known[precision] = self._find(precision, network)
        return self._known[precision]

    def layers(self, micro_batches: int) -> Layers | None:
        """What there is to cut, timed where real steps were taken, on a micro-batch of a pipeline over all ranks."""
        rows = max(1, sum(self._shares) // micro_batches)
        if rows not in self._chains:
            self._say(f"looking for where to cut {_name(self._model)}")
            key = self._placed() if self._stepped else self._key
            found, why = self._cluster.ask(
                "measure",
                ranks=[0],
                what="layers",
                program=self._program,
                model=key,
                data=self._data.key,
                rows=rows,
                timed=self._stepped,
            )[0]
            self._note(f"stages of a pipeline are taken as equal: its layers can't be measured ({why})", unless=not why)
            self._chains[rows] = found
        return self._chains[rows]

    def _find(self, precision: str | None, network: Benchmark) -> list[Facts]:
        big = max(*self._shares, 4)
        found, why = self._ask_first("peaks", data=self._data.key, rows=(max(2, big // 2), big), precision=precision)
        times = self._times(precision, _held(found), ledger=not found)
        self._stepped = self._stepped or bool(times)
        if not found:
            self._note(f"the model was tried with numbers, on a few rows: {why}", unless=not times)
            self._note(f"activations are not counted: the model can't be tried without numbers ({why})", unless=times)
        held = _held(found or (times[0].peaks if times else []))
        if times:
            overhead = self._overhead(times, held)
            return [self._fact(rank, held, overhead, one) for rank, one in enumerate(times)]
        row_flops = found[-1].flops / found[-1].rows if found else 0.0
        untimed = [Times.estimated(row_flops / flops) for flops in network.flops]
        return [self._fact(rank, held, Line(), one) for rank, one in enumerate(untimed)]

    def _note(self, text: str, *, unless: object = None) -> None:
        if not unless:
            self.notes.append(text)

    def _overhead(self, times: Sequence[Times], held: Line) -> Line:
        """What processes grew by beyond the tensors they held: a part of what comes and goes, averaged over ranks."""
        sizes, parts = self._sizes, []
        for one in times:
            working = held.at(one.rows)
            expected = sizes.parameters + sizes.gradients + one.state + max(working, sizes.update)
            if one.grown is not None and working:
                parts.append((one.grown - expected) / working)
        if not parts:
            self._note("not counted: freed memory that malloc keeps, workspace inside of operations")
            return Line()
        part = max(0.0, sum(parts) / len(parts))
        return Line(part * held.fixed, part * held.per_row)

    def _fact(self, rank: int, held: Line, overhead: Line, times: Times) -> Facts:
        """One rank's facts."""
        sizes = self._sizes
        return Facts(
            rows=self._shares[rank],
            sent=sizes.parameters if self._key is None and _on_host(self._cluster) else 0,
            parameters=sizes.parameters,
            gradients=sizes.gradients,
            state=times.state or sizes.state or 0,
            update=sizes.update,
            activations=held,
            overhead=overhead,
            forward_s=Line.through([(rows, seconds) for rows, seconds, _ in times.points]),
            backward_s=Line.through([(rows, seconds) for rows, _, seconds in times.points]),
            update_s=times.update_s,
            shapes=sizes.shapes,
            rank=rank,
            model=None if isinstance(self._model, Replicas) else self._model,
        )

    def _times(self, precision: str | None, held: Line, *, ledger: bool) -> list[Times] | None:
        """Real steps on all ranks, unless memory may not suffice for them."""
        sizes = self._sizes
        whole = sizes.parameters * (1 if self._key else 2) + sizes.gradients + (sizes.state or 0) + sizes.update
        needs = [round((whole + held.at(share)) / _MARGIN) for share in self._shares]
        if plans.shortage(needs, [dataclasses.replace(room, held=0) for room in self.rooms]):
            self._note(
                "no step was taken, since it may not fit: times are those of matrix products at the benchmark's rate"
            )
            self._note(
                f"optimiser state is not counted: it can't be told without numbers ({sizes.why})", unless=not sizes.why
            )
            return None
        self._say(f"taking some steps of {_name(self._model)}")
        rows = [min(share, _CAUTIOUS_ROWS) if ledger else share for share in self._shares]
        return self._cluster.ask(
            "measure",
            each=[{"rows": count} for count in rows],
            what="times",
            program=self._program,
            model=self._placed(),
            data=self._data.key,
            precision=precision,
            ledger=ledger,
        )

    def _placed(self) -> str:
        """The key of the model on the engines, sent if need be."""
        if isinstance(self._model, Replicas):
            return self._model.key
        if self._copies is None:
            self._copies = broadcast.broadcast(self._cluster, self._model)
        return self._copies.key


def _held(peaks: Sequence[Peaks]) -> Line:
    """Bytes by rows."""
    return Line.through([(peak.rows, peak.nbytes) for peak in peaks]) if peaks else Line()


def program(
    cluster: Cluster,
    model: Any,
    loss: Callable[..., Any] | None,
    step: Callable[..., Any] | None,
    optimizer: Callable[..., Any],
) -> bytes:
    """What the engines are to measure, pickled: shapes of the model where it is not there yet."""
    from dtkit.engine.dry_run import hollow
    from dtkit.strategies.loss import Objective

    shapes = None if isinstance(model, Replicas) else hollow(model)
    return cluster.dumps((shapes, Objective(loss, step), optimizer), name="plan")


def _rooms(cluster: Cluster, *, tidy: bool) -> list[Room]:
    """The memory that each rank can get, by host and device."""
    found = cluster.ask("measure", what="room", tidy_up=tidy)
    return [
        Room(f"{node.host} {node.device}", free.free, free.held, free.swap, free.limit)
        for node, free in zip(cluster.nodes, found, strict=True)
    ]


def _on_host(cluster: Cluster) -> bool:
    """Whether copies that train lie in the same memory as the model as it was sent."""
    return all(node.device == "cpu" for node in cluster.nodes)


def _shares(cluster: Cluster, wish: Wish) -> list[int]:
    """The most samples that each rank takes in a step."""
    if isinstance(wish.sample, Partition):
        return [-(-wish.batch_size * size // wish.sample.n) for size in wish.sample.sizes]
    return [-(-wish.batch_size // cluster.world_size)] * cluster.world_size


def candidates(cluster: Cluster, model: Any) -> list[Strategy]:
    """One of each strategy that exists, as a plan compares them; stages and slices where the model can be cut so."""
    from dtkit.strategies.averaging import OuterSGD, ParameterAveraging
    from dtkit.strategies.data_parallel import DataParallel
    from dtkit.strategies.pipeline.cut import chain
    from dtkit.strategies.pipeline.pipeline import Pipeline
    from dtkit.strategies.sharded import Sharded
    from dtkit.strategies.tensor.tensor_parallel import TensorParallel

    found: list[Strategy] = [DataParallel(), ParameterAveraging(every=8), ParameterAveraging(8, OuterSGD())]
    ranks = cluster.world_size
    if ranks > 1:
        found.append(Sharded())
    if ranks > 1 and not isinstance(model, Replicas) and len(chain(model)) >= ranks:
        found.append(Pipeline(ranks, 2 * ranks))
    if ranks > 1 and not isinstance(model, Replicas):
        with contextlib.suppress(ValueError):
            slices = TensorParallel(ranks)
            slices.check_model(model)
            found.append(slices)
    return found


def _strategies(cluster: Cluster, model: Any, wish: Wish) -> Sequence[Strategy]:
    from dtkit.strategies.base import Strategy

    for strategy in wish.strategies or ():
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategies holds {strategy!r}; each must be a dtkit strategy such as dtkit.DataParallel()"
            )
        strategy.check(cluster.world_size, wish.batch_size)
        if not isinstance(model, Replicas):
            strategy.check_model(model)
    if wish.strategies is not None and not wish.strategies:
        raise ValueError("strategies is empty; leave it out to compare all that exist")
    return wish.strategies or candidates(cluster, model)


# --- what was asked -----------------------------------------------------------------------------------------


def _check(cluster: Cluster, model: Any, wish: Wish) -> None:
    if isinstance(model, Replicas):
        if model.cluster is not cluster:
            raise ValueError(
                f"{model.name} was broadcast on another cluster; give the model, or cluster.broadcast(model)"
            )
    else:
        broadcast.check(model)
    if wish.sample is None:
        raise ValueError(
            "a plan needs sample=, a batch or a few rows as in sample=(X[:8], y[:8]), or a Partition: activations are "
            "measured and not guessed"
        )
    if (wish.loss is None) == (wish.step is None):
        raise ValueError(
            "give either loss, a function of (output, target), or step, a function of (model, batch) that returns the "
            f"loss; you gave {'both' if wish.loss is not None else 'neither'}"
        )
    if not callable(wish.optimizer):
        raise TypeError(
            f"optimizer is a {type(wish.optimizer).__name__}; it must be a function from parameters to an optimiser: "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    _check_batch_size(cluster, wish)


def _check_batch_size(cluster: Cluster, wish: Wish) -> None:
    size = wish.batch_size
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"batch_size={size!r}; it must be an integer")
    if size < cluster.world_size:
        raise ValueError(
            f"batch_size={size} is less than the {cluster.world_size} ranks; it is the number of samples per update "
            f"over all ranks, and each needs one. Use at least {cluster.world_size}"
        )
    if isinstance(wish.sample, Partition) and size > wish.sample.n:
        raise ValueError(
            f"batch_size={size} is more than the {wish.sample.n} samples of the partition; it is the number of samples "
            f"per update over all ranks. Use at most {wish.sample.n}"
        )


def _name(model: Any) -> str:
    return model.name if isinstance(model, Replicas) else type(model).__name__


# --- before a training starts -------------------------------------------------------------------------------


def check_fits(cluster: Cluster, model: Any, optimizer: Callable[..., Any], strategy: Strategy) -> None:
    """Raise ValueError where a model and its optimiser can't fit some rank's memory, whatever the batch.

    Counted is what is certain: the model as sent, the copy that trains, gradients, and the optimiser's state. Free is
    what is free, with swap space and what an earlier run gives back. One short question to the engines where the model
    is small beside their memory; where it is not, the optimiser is tried on the meta device.
    """
    sent = 0 if isinstance(model, Replicas) else _nbytes(model)
    certainly = _SURELY * (sent or model.nbytes)
    if plans.shortage([certainly] * cluster.world_size, _rooms(cluster, tidy=False)) is None:
        return
    key = model.key if isinstance(model, Replicas) else None
    asked = program(cluster, model, None, None, optimizer)
    sizes = cluster.ask("measure", ranks=[0], what="sizes", program=asked, model=key)[0]
    rooms = _rooms(cluster, tidy=True)
    fact = Facts(
        0, sent if _on_host(cluster) else 0, sizes.parameters, sizes.gradients, sizes.state or 0, 0, shapes=sizes.shapes
    )
    lack = _lack(strategy, fact, rooms)
    if lack is not None:
        others = [s for s in candidates(cluster, model) if repr(s) != repr(strategy) and _lack(s, fact, rooms) is None]
        raise ValueError(_refusal(_name(model), strategy, fact, lack, others))


def _lack(strategy: Strategy, fact: Facts, rooms: Sequence[Room]) -> tuple[int, int, int] | None:
    fact = _as_certain(strategy, fact)
    cost = strategy.cost(fact, Benchmark.unmeasured(len(rooms)))
    return plans.shortage([fact.sent + cost.certain] * len(rooms), rooms)


def _as_certain(strategy: Strategy, fact: Facts) -> Facts:
    """What of these facts is certain of a strategy."""
    if strategy.partial:  # it is mapped, and taken apart
        fact = dataclasses.replace(fact, sent=0)
    if getattr(strategy, "find_unused_parameters", False):  # what is never used has no gradient and no state
        fact = dataclasses.replace(fact, gradients=0, state=0, shapes=())
    return fact


def _refusal(name: str, strategy: Strategy, fact: Facts, lack: tuple[int, int, int], others: Sequence[Strategy]) -> str:
    rank, needed, free = lack
    fact = _as_certain(strategy, fact)
    parts = plans.parts_text(strategy.cost(fact, Benchmark.unmeasured(1)), fact.sent)
    if others:
        remedy = f"These would fit: {', '.join(map(repr, others))}"
    else:
        remedy = (
            "No other strategy fits either: use a smaller model, an optimiser that keeps less (SGD without momentum "
            "keeps nothing), or engines with more memory"
        )
    return (
        f"{name} does not fit rank {rank} with {strategy!r}: it needs {formatting.size(needed)} there before the first "
        f"activation ({parts}), and {formatting.size(free)} are free for it. {remedy}"
    )


def _nbytes(model: Any) -> int:
    from dtkit.engine.dry_run import nbytes

    return nbytes([*model.parameters(), *model.buffers()])
