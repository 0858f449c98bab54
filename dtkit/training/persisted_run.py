"""A run as one notebook puts it down for another: what the one writes, the other reads, and both are here.

It is written when the job is made, and again when the run is extended, into the cluster's folder (see
:mod:`dtkit.history.run_log`): the run's description, and the keys by which the engines know its model and data. The
model itself comes back from an engine, and how many ranks there are is the cluster's to say.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit.cluster.broadcast import Replicas
from dtkit.data.distribute import DataHandle, StreamHandle
from dtkit.errors import CannotSend
from dtkit.history import run_log
from dtkit.rpc import pickling
from dtkit.training.config import Extras, Order

if TYPE_CHECKING:
    from dtkit.cluster.cluster import Cluster
    from dtkit.data.columns import ColumnSelection
    from dtkit.engine.data.loader import Loading
    from dtkit.types import JobPlan, RunSpec


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Data that lie on the engines: what it takes to speak of them."""

    key: str
    samples: int | None
    """None of a stream."""
    columns: ColumnSelection

    @classmethod
    def of(cls, placed: DataHandle) -> _Keys:
        return cls(placed.key, placed.num_samples, placed.columns)

    def placed(self, cluster: Cluster) -> Any:
        """The same data, as another notebook's."""
        if self.samples is None:
            return StreamHandle(cluster, self.key, self.columns)
        return DataHandle(cluster, self.key, self.samples, self.columns)


@dataclasses.dataclass(frozen=True)
class _Testament:
    """What is written, pickled."""

    spec: RunSpec
    model: str
    """Its key on the engines."""
    data: _Keys
    valid: _Keys | None
    plan: JobPlan
    program: bytes
    loading: Loading | None
    extras: Extras
    """Without what lies on the engines."""


def put_down(cluster: Cluster, job: str, spec: RunSpec, order: Order, extras: Extras) -> tuple[run_log.Spool, str]:
    """Write it. Returns where the run's history is to follow, and a word on what the other notebook will lack."""
    valid = None if extras.valid is None else _Keys.of(extras.valid)
    there = dataclasses.replace(extras, valid=None)
    data, lacks = _Keys.of(order.data), ""
    said = _Testament(spec, order.copies.key, data, valid, order.plan, order.program, order.loading, there)
    written = run_log.Spool(cluster.folder / run_log.RUNS / job)
    for lacking in ("the callbacks", "this run"):
        try:
            written.order(cluster.dumps(said, name="the run"))
        except CannotSend as error:
            lacks = f"a notebook that takes over will not have {lacking}: {error}".partition("\n")[0]
            said = dataclasses.replace(said, extras=dataclasses.replace(there, callbacks=()))
        else:
            break
    return written, lacks


def take_up(cluster: Cluster, job: str) -> tuple[RunSpec, Order, Extras] | None:
    """Read it, in another notebook; None where nothing was written of such a job."""
    data = run_log.order(cluster.folder / run_log.RUNS / job)
    if data is None:
        return None
    # unpickles: written by this user's earlier notebook; nobody else can write to its folder
    said: _Testament = pickling.loads(data)
    copies = _copies(cluster, said.model)
    order = Order(copies, said.data.placed(cluster), said.plan, said.program, said.loading)
    valid = None if said.valid is None else said.valid.placed(cluster)
    return said.spec, order, dataclasses.replace(said.extras, valid=valid)


def _copies(cluster: Cluster, key: str) -> Replicas:
    """The model as it was broadcast, from an engine that holds it."""
    (rank, *_) = (heritage.rank for heritage in cluster.heritage)
    (shipment,) = cluster.alone("model", [rank], key=key).values()
    model = shipment.unload()
    shipment.discard()
    return Replicas(cluster, key, cluster.pack(model, name="model"), model, ())
