"""A run as one notebook puts it down for another: what the one writes, the other reads, and both are here.

It is written when the job is made, and again when the run is extended, into the cluster's folder (see
:mod:`dtkit.history.run_log`): the run's description, and the keys by which the engines know its model and data. The
model itself comes back from an engine, and how many ranks there are is the cluster's to say.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit.cluster.broadcast import ModelHandle
from dtkit.data.distribute import DataHandle, StreamHandle
from dtkit.errors import SerializationError
from dtkit.history import run_log
from dtkit.rpc import pickling
from dtkit.training.config import JobSpec, RunOptions

if TYPE_CHECKING:
    from dtkit.cluster.cluster import Cluster
    from dtkit.data.columns import ColumnSelection
    from dtkit.engine.data.loader import LoadingOptions
    from dtkit.types import JobPlan, RunSpec


@dataclasses.dataclass(frozen=True)
class _DataReference:
    """Data that lie on the engines: what it takes to speak of them."""

    key: str
    num_samples: int | None
    """None of a stream."""
    columns: ColumnSelection

    @classmethod
    def from_handle(cls, handle: DataHandle) -> _DataReference:
        return cls(handle.key, handle.num_samples, handle.columns)

    def to_handle(self, cluster: Cluster) -> Any:
        """The same data, as another notebook's."""
        if self.num_samples is None:
            return StreamHandle(cluster, self.key, self.columns)
        return DataHandle(cluster, self.key, self.num_samples, self.columns)


@dataclasses.dataclass(frozen=True)
class _PersistedRun:
    """What is written, pickled."""

    spec: RunSpec
    model_key: str
    """Its key on the engines."""
    data: _DataReference
    validation: _DataReference | None
    plan: JobPlan
    program: bytes
    loading: LoadingOptions | None
    options: RunOptions
    """Without what lies on the engines."""


def save(
    cluster: Cluster, job: str, spec: RunSpec, job_spec: JobSpec, options: RunOptions
) -> tuple[run_log.RunLog, str]:
    """Write it. Returns where the run's history is to follow, and a word on what the other notebook will lack."""
    valid = None if options.validation is None else _DataReference.from_handle(options.validation)
    there = dataclasses.replace(options, validation=None)
    data, lacks = _DataReference.from_handle(job_spec.data_handle), ""
    said = _PersistedRun(
        spec, job_spec.model_handle.key, data, valid, job_spec.plan, job_spec.program, job_spec.loading, there
    )
    written = run_log.RunLog(cluster.folder / run_log.RUNS_FOLDER / job)
    for lacking in ("the callbacks", "this run"):
        try:
            written.write_run_pickle(cluster.dumps(said, name="the run"))
        except SerializationError as error:
            lacks = f"a notebook that takes over will not have {lacking}: {error}".partition("\n")[0]
            said = dataclasses.replace(said, options=dataclasses.replace(there, callbacks=()))
        else:
            break
    return written, lacks


def load(cluster: Cluster, job: str) -> tuple[RunSpec, JobSpec, RunOptions] | None:
    """Read it, in another notebook; None where nothing was written of such a job."""
    data = run_log.read_run_pickle(cluster.folder / run_log.RUNS_FOLDER / job)
    if data is None:
        return None
    # unpickles: written by this user's earlier notebook; nobody else can write to its folder
    said: _PersistedRun = pickling.loads(data)
    copies = _rebuild_model_handle(cluster, said.model_key)
    order = JobSpec(copies, said.data.to_handle(cluster), said.plan, said.program, said.loading)
    valid = None if said.validation is None else said.validation.to_handle(cluster)
    return said.spec, order, dataclasses.replace(said.options, validation=valid)


def _rebuild_model_handle(cluster: Cluster, key: str) -> ModelHandle:
    """The model as it was broadcast, from an engine that holds it."""
    (rank, *_) = (heritage.rank for heritage in cluster.engine_inventories)
    (shipment,) = cluster.call_independently("export_model", [rank], key=key).values()
    model = shipment.load()
    shipment.discard()
    return ModelHandle(cluster, key, cluster.pack(model, name="model"), model, ())
