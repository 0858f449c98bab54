"""Every strategy trains as one process does: one test, with a table of its cases.

A case trains 20 steps in float64 on the same rows as a plain loop in one process. It compares the parameters and each
step's loss, and checks batches, micro-batches and norms in the history. A new strategy, schedule or option is a row of
TABLE.

Each strategy trains all kinds of nets with both optimizers, in batches of 24 of 121 samples. The last batch of an epoch
then has one sample, fewer than ranks or micro-batches. Other combinations share their code with these cases:

- Options (micro-batches, clipping, a loss pair) act on gradients of any model, and before the optimizer. They are
  tested with one net and one optimizer, in batches of 25, which neither 2 nor 3 divides.
- Replicas of stages or slices need four engines (2 x 2). On two engines each replica is a whole model, for which one
  net is enough.
- One engine and three engines are for data parallelism only, since the degrees of other strategies must multiply to the
  number of engines. It alone also takes 50 steps.
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
from tests.support.nets import (
    IN_PROJECTIONS,
    KINDS,
    OPTIMIZERS,
    WIDTH,
    Clipped,
    count_forward_passes,
    get_bound,
    get_slice,
    make_net,
)
from tests.support.oracle import LOSSES, SAMPLES, Trained, get_global_rows, max_difference, train, train_reference
from tests.support.pairwise import Pair, choose_covering, pairs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import dtkit
    from dtkit.strategies.base import Strategy

pytestmark = pytest.mark.cluster


@dataclasses.dataclass(frozen=True)
class Row:
    """A strategy on several numbers of engines, with all combinations of `nets` and `optimizers`."""

    worlds: Sequence[int]
    strategy: Strategy
    nets: Sequence[str] = KINDS
    optimizers: Sequence[str] = ("momentum", "adamw")
    batch: int = 24
    loss: str = "mean"
    steps: int = 20
    name: str = ""
    """Name of the case; by default the strategy's repr."""


def make_option_row(worlds: Sequence[int], strategy: Strategy, net_name: str = "mlp", **changes: Any) -> Row:
    """Return a row for an option that acts on gradients: one net, one optimizer, and batches of 25."""
    return Row(worlds, strategy, **{"nets": (net_name,), "optimizers": ("momentum",), "batch": 25, **changes})


ATTENTION = ("decoder by hand", "decoder with a mask", "decoder fused", "gpt by hand", "translator")
CONVOLUTION = {"out": "scattered"}  # `auto` finds no layer in it
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
# Micro-batches for two and for four ranks. Some schedules need a multiple of the number of ranks.
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
    make_option_row([2, 4], DataParallel(accumulate=3)),
    make_option_row([2, 4], DataParallel(clip_grad_norm=0.2)),
    make_option_row([2, 4], DataParallel(), loss="pair"),
    make_option_row([2], DataParallel(), loss="weighted module", name="DataParallel, torch's class weights"),
    make_option_row([3], DataParallel(accumulate=3, clip_grad_norm=0.2), loss="pair"),
    make_option_row([3], DataParallel(bucket_cap_mb=0.0005)),
    make_option_row(
        [2], DataParallel(accumulate=3, clip_grad_norm=0.2, bucket_cap_mb=0.0005), loss="pair"
    ),  # under DDP
    make_option_row([3], DataParallel(balance="auto")),
    Row([1, 3], NaiveDataParallel(), ["mlp"]),
    # -- sharded ---------------------------------------------------------------------------------------------------
    Row([2, 4], Sharded()),
    Row([4], Sharded(replicas=2)),
    make_option_row([2], Sharded(replicas=2)),
    make_option_row([2], Sharded(), "scaled"),
    make_option_row([4], Sharded(), "scaled"),
    make_option_row([4], Sharded(replicas=2), "decoder tied"),
    make_option_row([2], Sharded(clip_grad_norm=0.2)),
    make_option_row([4], Sharded(accumulate=3)),
    make_option_row([4], Sharded(replicas=2, accumulate=3, clip_grad_norm=0.2)),
    make_option_row([2], Sharded(accumulate=2), loss="pair"),
    make_option_row([4], Sharded(replicas=2), loss="pair"),
    # -- tensor parallelism: only replicas divide batches ---------------------------------------------------
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
    make_option_row([2], TensorParallel(1, replicas=2)),
    make_option_row([2], TensorParallel(2, clip_grad_norm=0.2)),
    make_option_row([4], TensorParallel(4, accumulate=3)),
    make_option_row([4], TensorParallel(4), "translator"),
    make_option_row([4], TensorParallel(2, replicas=2, accumulate=3, clip_grad_norm=0.2)),
    make_option_row([2], TensorParallel(2), loss="pair"),
    make_option_row([4], TensorParallel(2, replicas=2), loss="pair"),
    make_option_row([2], Pipeline(2, 4), "deep", loss="weighted module", name="Pipeline, torch's class weights"),
    *(make_option_row([2], TensorParallel(2, plan), "decoder", name=f"plan {of}") for of, plan in PLANS.items()),
    make_option_row(
        [4], TensorParallel(4, PLANS["sequence"]), "decoder", name="plan sequence"
    ),  # 6 positions in parts of 2 and 1
    make_option_row([4], TensorParallel(2, PLANS["torch's own"], 2), "decoder", name="plan torch's own, replicas"),
    make_option_row([2], TensorParallel(2, {"2": "loss"}), "wide"),
    make_option_row([4], TensorParallel(2, {"2": "loss"}, 2), "wide"),
    # -- pipelines: micro-batches are padded to one size --------------------------------------------------------
    Row([2], Pipeline(2, 4)),
    Row([4], Pipeline(4, 4), ["decoder of four blocks"]),
    Row([4], Pipeline(2, 4, replicas=2)),
    *(Row([2], Pipeline(2, m, kind), ["deep"], ["momentum"]) for kind, (m, _) in SCHEDULES.items()),
    *(
        Row([4], Pipeline(4, m, kind, balance_by="parameters"), ["deep"], ["momentum"])
        for kind, (_, m) in SCHEDULES.items()
    ),
    make_option_row([2], Pipeline(2, 4, clip_grad_norm=0.1), "deep"),
    make_option_row([4], Pipeline(2, 4, replicas=2, clip_grad_norm=0.1), "deep"),
    make_option_row([2], Pipeline(2, 4), "deep", loss="pair"),
    make_option_row([4], Pipeline(2, 4, replicas=2), "deep", loss="pair"),
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
    """Return what the daily cases cover: each strategy with each net and optimizer, and its options on each mesh.

    Nets, optimizers and options aren't paired with each other: options and optimizers act on gradients of any net. The
    mesh decides only which ranks form a group.
    """
    world, row, net_name, optimizer = case
    strategy = type(row.strategy).__name__
    mesh = " x ".join(map(str, row.strategy.build_mesh(world).axes.values()))
    fields = {field.name: getattr(row.strategy, field.name) for field in dataclasses.fields(row.strategy)}
    options = f"{row.name.removesuffix(', replicas') or _describe_options(fields)}, {row.loss}"
    return {(strategy, net_name), (strategy, optimizer)} | pairs_of((strategy, mesh, options))


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
def get_expected(net_name: str, optimizer: str, clip: float | None, loss: str, batch: int, steps: int) -> Trained:
    """Train in one process, which is the same for all strategies."""
    make = OPTIMIZERS[optimizer] if clip is None else Clipped(OPTIMIZERS[optimizer], clip)
    return train_reference(
        make_net(net_name), functools.partial(get_global_rows, batch=batch), LOSSES[loss][1], make, steps
    )


@pytest.mark.parametrize(("cluster", "row", "net_name", "optimizer"), get_parameters(), indirect=["cluster"])
def test_training_equals_training_in_one_process(cluster: dtkit.Cluster, row: Row, net_name: str, optimizer: str):
    run = train(
        cluster,
        make_net(net_name),
        strategy=row.strategy,
        optimizer=OPTIMIZERS[optimizer],
        loss=LOSSES[row.loss][0],
        batch_size=row.batch,
        steps=row.steps,
        shuffle="global",
    )
    clip = getattr(row.strategy, "clip_grad_norm", None)
    reference, tolerance = (
        get_expected(net_name, optimizer, clip, row.loss, row.batch, row.steps),
        get_bound(net_name, optimizer),
    )
    assert max_difference(run.model.state_dict(), reference.state) <= tolerance
    assert np.abs(run.history.loss()[1] - reference.losses).max() <= tolerance
    check_edge_cases_occurred(run, row)
    if isinstance(row.strategy, TensorParallel) and net_name in IN_PROJECTIONS:
        rows = {len(part) for part in cluster.run(get_slice, IN_PROJECTIONS[net_name])}
        assert rows == {3 * WIDTH // row.strategy.tp_size}  # attention was really divided


def check_edge_cases_occurred(run: dtkit.Run, row: Row) -> None:
    """Check that there were a smaller last batch, ranks without a sample, all micro-batches, and clipping."""
    world, rest = len(run.timeline.ranks), SAMPLES % row.batch
    assert set(run.history.totals()["samples"]) == {row.batch, rest}
    assert (run.history.column("samples") == 0).any() == (row.strategy.build_mesh(world).num_replicas > rest)
    counts = [run.timeline.num_micro_batches] * world if run.timeline.is_pipelined else count_forward_passes(run)
    assert counts == [row.strategy.num_micro_batches] * world
    clip = getattr(row.strategy, "clip_grad_norm", None)
    if clip is not None:
        norms = run.history.column("grad_norm").reshape(-1, world)
        assert (norms > clip).any()
        assert (norms == norms[:, :1]).all()  # all ranks have the norm of the whole gradient
