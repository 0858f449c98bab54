"""Every strategy trains as one process does: one test, and a table of what it is run with.

20 steps in float64 from the same rows as a plain loop in one process: the parameters, each step's loss, and what the
history says of batches, micro-batches and norms. A new strategy, schedule or option is a line of TABLE.

Every strategy takes all kinds of nets and both optimisers, with batches of 24 of 121 samples: the last batch of an
epoch then has one sample, fewer than ranks or micro-batches. What is left out takes the same path as something that
stands here:

- Options (micro-batches, clipping, a loss that is a pair) meet one net, since they act on gradients, whatever they are
  of; and one optimiser, which comes after them. They are run with batches of 25, which divide by nothing.
- Replicas around stages or slices stand on four engines (2 x 2), for the groups that they form differ from all others
  only in being both. On two engines each replica is a whole model: a net of one kind is enough for that.
- One engine, and three, that divide nothing, belong to data parallelism: other strategies want their degrees to
  multiply to the number of engines. It alone takes 50 steps too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtkit import DataParallel, NaiveDataParallel, Pipeline, Sharded, TensorParallel
from tests.support.nets import IN_PROJECTIONS, KINDS, OPTIMIZERS, WIDTH, Clipped, bound, forwards, net, slices
from tests.support.oracle import LOSSES, SAMPLES, Trained, difference, global_rows, reference, train
from tests.support.pairwise import Pair, choose_covering, pairs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import dtkit
    from dtkit.strategies.base import Strategy

pytestmark = pytest.mark.cluster


@dataclasses.dataclass(frozen=True)
class Row:
    """A strategy, on how many engines, and what it is run with: all combinations of `nets` and `optimizers`."""

    worlds: Sequence[int]
    strategy: Strategy
    nets: Sequence[str] = KINDS
    optimizers: Sequence[str] = ("momentum", "adamw")
    batch: int = 24
    loss: str = "mean"
    steps: int = 20
    name: str = ""
    """By default what the strategy says of itself."""


def option(worlds: Sequence[int], strategy: Strategy, net_name: str = "mlp", **other: Any) -> Row:
    """A row for what acts on gradients, whatever they are of: one net and optimiser, batches that divide by nothing."""
    return Row(worlds, strategy, **{"nets": (net_name,), "optimizers": ("momentum",), "batch": 25, **other})


ATTENTION = ("decoder by hand", "decoder with a mask", "decoder fused", "gpt by hand", "translator")
CONVOLUTION = {"out": "scattered"}  # `auto` finds nothing in it
WITH_AUTO = tuple(name for name in KINDS if name != "convolution")
PLANS: dict[str, dict[str, Any]] = {
    "by name": {"h.0.mlp.0": "colwise", "h.0.mlp.2": "rowwise"},
    "features of the embedding": {"wte": "gathered", "h.*.q": "gathered"},
    "rows of the embedding": {"wte": "rowwise"},
    "sequence": {"h.*.first": "sequence", "h.*.mlp.0": "colwise", "h.*.mlp.2": "rowwise", "norm": "sequence"},
    "torch's own": {
        "h.*.mlp.0": ColwiseParallel(),
        "h.*.mlp.2": RowwiseParallel(),
        "h.0.proj": RowwiseParallel(input_layouts=Replicate()),
    },
}
# Micro-batches for two and for four ranks. Some schedules want rounds of as many as there are ranks.
SCHEDULES = {
    "GPipe": (5, 5),
    "1F1B": (5, 5),
    "Interleaved1F1B": (6, 8),
    "InterleavedZeroBubble": (6, 8),
    "LoopedBFS": (6, 8),
    "ZBVZeroBubble": (5, 5),
}


TABLE = [
    # -- data parallelism: any number of engines -------------------------------------------------------------------
    Row([1, 2, 3, 4], DataParallel(), ["mlp"], steps=50),
    Row([1, 2, 3, 4], DataParallel(accumulate=3, clip_grad_norm=0.2), ["mlp"], steps=50),
    Row([2, 4], DataParallel(), KINDS[1:]),
    option([2, 4], DataParallel(accumulate=3)),
    option([2, 4], DataParallel(clip_grad_norm=0.2)),
    option([2, 4], DataParallel(), loss="pair"),
    option([3], DataParallel(accumulate=3, clip_grad_norm=0.2), loss="pair"),
    option([3], DataParallel(bucket_cap_mb=0.0005)),
    option([3], DataParallel(balance="auto")),
    Row([1, 3], NaiveDataParallel(), ["mlp"]),
    # -- sharded ---------------------------------------------------------------------------------------------------
    Row([2, 4], Sharded()),
    Row([4], Sharded(replicas=2)),
    option([2], Sharded(replicas=2)),
    option([2], Sharded(), "scaled"),
    option([4], Sharded(), "scaled"),
    option([4], Sharded(replicas=2), "decoder tied"),
    option([2], Sharded(clip_grad_norm=0.2)),
    option([4], Sharded(accumulate=3)),
    option([4], Sharded(replicas=2, accumulate=3, clip_grad_norm=0.2)),
    option([2], Sharded(accumulate=2), loss="pair"),
    option([4], Sharded(replicas=2), loss="pair"),
    # -- tensor parallelism: batches are cut among replicas only ---------------------------------------------------
    Row([2], TensorParallel(2), WITH_AUTO),
    Row([4], TensorParallel(4), WITH_AUTO),
    Row([4], TensorParallel(2, replicas=2), WITH_AUTO),
    Row([2], TensorParallel(2), ["gpt"]),
    Row([4], TensorParallel(4), ["gpt"]),
    Row([4], TensorParallel(2, replicas=2), ["gpt"]),
    Row([2], TensorParallel(2, CONVOLUTION), ["convolution"]),
    Row([4], TensorParallel(4, CONVOLUTION), ["convolution"]),
    Row([4], TensorParallel(2, CONVOLUTION, 2), ["convolution"]),
    Row([2], TensorParallel(2), ATTENTION, ["momentum"]),
    Row([4], TensorParallel(2, replicas=2), ATTENTION, ["adamw"]),
    option([2], TensorParallel(1, replicas=2)),
    option([2], TensorParallel(2, clip_grad_norm=0.2)),
    option([4], TensorParallel(4, accumulate=3)),
    option([4], TensorParallel(4), "translator"),
    option([4], TensorParallel(2, replicas=2, accumulate=3, clip_grad_norm=0.2)),
    option([2], TensorParallel(2), loss="pair"),
    option([4], TensorParallel(2, replicas=2), loss="pair"),
    *(option([2], TensorParallel(2, plan), "decoder", name=f"plan {of}") for of, plan in PLANS.items()),
    option([4], TensorParallel(4, PLANS["sequence"]), "decoder", name="plan sequence"),  # of 6, in parts of 2 and 1
    option([4], TensorParallel(2, PLANS["torch's own"], 2), "decoder", name="plan torch's own, replicas"),
    option([2], TensorParallel(2, {"2": "loss"}), "wide"),
    option([4], TensorParallel(2, {"2": "loss"}, 2), "wide"),
    # -- pipelines: micro-batches are filled up to one size --------------------------------------------------------
    Row([2], Pipeline(2, 4)),
    Row([4], Pipeline(4, 4), ["decoder of four blocks"]),
    Row([4], Pipeline(2, 4, replicas=2)),
    *(Row([2], Pipeline(2, m, kind), ["deep"], ["momentum"]) for kind, (m, _) in SCHEDULES.items()),
    *(
        Row([4], Pipeline(4, m, kind, balance_by="parameters"), ["deep"], ["momentum"])
        for kind, (_, m) in SCHEDULES.items()
    ),
    option([2], Pipeline(2, 4, clip_grad_norm=0.1), "deep"),
    option([4], Pipeline(2, 4, replicas=2, clip_grad_norm=0.1), "deep"),
    option([2], Pipeline(2, 4), "deep", loss="pair"),
    option([4], Pipeline(2, 4, replicas=2), "deep", loss="pair"),
]


Case = tuple[int, Row, str, str]


def list_cases() -> list[Case]:
    """Return the full product of the table: world size, row, net, optimizer."""
    return [
        (world, row, net_name, optimizer)
        for row in TABLE
        for world, net_name, optimizer in itertools.product(row.worlds, row.nets, row.optimizers)
    ]


def is_daily(case: Case) -> bool:
    """Return whether `make test` may run a case: four engines only where the mesh is 2 x 2.

    One kind of attention is enough there: each replica cuts it as two engines do.
    """
    world, row, net_name, _ = case
    is_two_by_two = tuple(row.strategy.build_mesh(world).axes.values()) == (2, 2)
    return world < 4 or (is_two_by_two and net_name not in ATTENTION[1:])


def get_pairs(case: Case) -> set[Pair]:
    """Return what the daily cases cover: pairs of strategy, mesh, net, optimizer and options.

    The mesh isn't paired with nets and optimizers: it decides only which ranks form a group.
    """
    world, row, net_name, optimizer = case
    strategy = type(row.strategy).__name__
    mesh = " x ".join(map(str, row.strategy.build_mesh(world).axes.values()))
    fields = {field.name: getattr(row.strategy, field.name) for field in dataclasses.fields(row.strategy)}
    options = f"{row.name.removesuffix(', replicas') or _describe_options(fields)}, {row.loss}"
    return pairs_of((strategy, net_name, optimizer, options)) | pairs_of((strategy, mesh, options))


_MESH_OPTIONS = ("replicas", "tp_size", "stages", "balance_by")


def _describe_options(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items() if name not in _MESH_OPTIONS)


def get_parameters() -> list[Any]:
    """Return all cases. Those that the pairwise choice leaves out are slow."""
    cases = list_cases()
    daily = [case for case in cases if is_daily(case)]
    chosen = [daily[index] for index in choose_covering([get_pairs(case) for case in daily])]
    return [
        pytest.param(*case, id=describe(case), marks=[] if case in chosen else [pytest.mark.slow]) for case in cases
    ]


def describe(case: Case) -> str:
    world, row, net_name, optimizer = case
    return f"world{world}, {row.name or row.strategy}, {net_name}, {optimizer}, {row.batch}, {row.loss}"


@functools.cache
def expected(net_name: str, optimizer: str, clip: float | None, loss: str, batch: int, steps: int) -> Trained:
    """What one process makes of it, whatever the strategy."""
    make = OPTIMIZERS[optimizer] if clip is None else Clipped(OPTIMIZERS[optimizer], clip)
    return reference(net(net_name), functools.partial(global_rows, batch=batch), LOSSES[loss][1], make, steps)


@pytest.mark.parametrize(("cluster", "row", "net_name", "optimizer"), get_parameters(), indirect=["cluster"])
def test_training_is_that_of_one_process(cluster: dtkit.Cluster, row: Row, net_name: str, optimizer: str):
    run = train(
        cluster,
        net(net_name),
        strategy=row.strategy,
        optimizer=OPTIMIZERS[optimizer],
        loss=LOSSES[row.loss][0],
        batch_size=row.batch,
        steps=row.steps,
        shuffle="global",
    )
    clip = getattr(row.strategy, "clip_grad_norm", None)
    truth, limit = expected(net_name, optimizer, clip, row.loss, row.batch, row.steps), bound(net_name, optimizer)
    assert difference(run.model.state_dict(), truth.state) <= limit
    assert np.abs(run.history.loss()[1] - truth.losses).max() <= limit
    check_that_what_is_awkward_took_place(run, row)
    if isinstance(row.strategy, TensorParallel) and net_name in IN_PROJECTIONS:
        rows = {len(here) for here in cluster.run(slices, IN_PROJECTIONS[net_name])}
        assert rows == {3 * WIDTH // row.strategy.tp_size}  # attention was cut, and not only right


def check_that_what_is_awkward_took_place(run: dtkit.Run, row: Row) -> None:
    """A smaller last batch, ranks without a sample in it, as many micro-batches as asked for, clipping."""
    world, rest = len(run.timeline.ranks), SAMPLES % row.batch
    assert set(run.history.totals()["samples"]) == {row.batch, rest}
    assert (run.history.column("samples") == 0).any() == (row.strategy.build_mesh(world).num_replicas > rest)
    taken = [run.timeline.num_micro_batches] * world if run.timeline.is_pipelined else forwards(run)
    assert taken == [row.strategy.num_micro_batches] * world
    clip = getattr(row.strategy, "clip_grad_norm", None)
    if clip is not None:
        norms = run.history.column("grad_norm").reshape(-1, world)
        assert (norms > clip).any()
        assert (norms == norms[:, :1]).all()  # every rank knows the norm of the whole gradient
