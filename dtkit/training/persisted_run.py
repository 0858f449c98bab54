"""A run's plan on disk, for another notebook that takes the cluster over.

It is written into the cluster's folder (see :mod:`dtkit.history.run_log`) when the job is built, and again when the run
is extended. It has the keys of model and data on the engines, not the objects. An engine returns the model, and the
cluster knows the number of ranks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded
from dtkit.data.broadcast import ModelHandle
from dtkit.data.distribute import DataHandle, StreamHandle
from dtkit.errors import SerializationError
from dtkit.history import run_log
from dtkit.rpc import pickling
from dtkit.rpc.protocol import ModelOperations, make_call
from dtkit.training.config import JobSpec, RunOptions, RunPlan

if TYPE_CHECKING:
    from dtkit.data.columns import ColumnSelection
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.job_plan import JobPlan, LoadingOptions
    from dtkit.types import RunSpec


@dataclasses.dataclass(frozen=True)
class _DataReference:
    """Data on the engines, without the notebook's handle."""

    key: str
    num_samples: int | None
    """None for a stream."""
    columns: ColumnSelection
    batch_size: int | None

    @classmethod
    def from_handle(cls, handle: DataHandle) -> _DataReference:
        return cls(handle.key, handle.num_samples, handle.columns, handle.batch_size)

    def to_handle(self, engine_group: EngineGroup) -> Any:
        """Return another notebook's handle to the same data."""
        if self.num_samples is None:
            return StreamHandle(engine_group, self.key, self.columns)
        handle = DataHandle(engine_group, self.key, self.num_samples, self.columns)
        handle.batch_size = self.batch_size
        return handle


@dataclasses.dataclass(frozen=True)
class _PersistedRun:
    """The pickled record."""

    spec: RunSpec
    model_key: str
    """Key of the model on the engines."""
    data: _DataReference
    validation: _DataReference | None
    plan: JobPlan
    program: bytes
    loading: LoadingOptions | None
    options: RunOptions
    """Options without the handles to data on the engines."""


def save(engine_group: EngineGroup, plan: RunPlan) -> tuple[run_log.RunLog, str]:
    """Write the plan. Returns the log for the run's history, and a warning about missing parts of the plan."""
    options, job_spec, warning = plan.options, plan.job_spec, ""
    validation = None if options.validation is None else _DataReference.from_handle(options.validation)
    picklable = dataclasses.replace(options, validation=None)
    record = _PersistedRun(
        plan.spec,
        job_spec.model_handle.key,
        _DataReference.from_handle(job_spec.data_handle),
        validation,
        job_spec.plan,
        job_spec.program,
        job_spec.loading,
        picklable,
    )
    log = run_log.RunLog(engine_group.folder / run_log.RUNS_FOLDER / plan.job)
    for missing in ("the callbacks", "this run"):
        try:
            pickled = engine_group.uploads.dumps(record, name="the run")
        except SerializationError as error:
            warning = f"a notebook that takes over will not have {missing}: {error}".partition("\n")[0]
            record = dataclasses.replace(record, options=dataclasses.replace(picklable, callbacks=()))
        else:
            log.write_run_pickle(pickled)
            log.write_label(_make_label(plan, pickled))
            break
    return log, warning


def _make_label(plan: RunPlan, pickled: bytes) -> run_log.RunLabel:
    def list_modules() -> set[str]:
        return pickling.list_modules(pickled) | plan.job_spec.model_handle.list_modules()

    # silent: an object that can't be unpickled here is reported by the notebook that attaches
    modules = run_guarded(list_modules, lambda _: set[str]())
    return run_log.RunLabel(plan.spec.name, plan.spec.steps, tuple(sorted(modules - {"__main__"})))


def load(engine_group: EngineGroup, job: str, model_rank: int) -> RunPlan | None:
    """Read the plan in another notebook, with the model from `model_rank`; None if the job has no stored plan."""
    data = run_log.read_run_pickle(engine_group.folder / run_log.RUNS_FOLDER / job)
    if data is None:
        return None
    # unpickles: written by this user's earlier notebook; only this user can write to its folder
    record: _PersistedRun = pickling.loads(data)
    model = _rebuild_model_handle(engine_group, record.model_key, model_rank)
    job_spec = JobSpec(model, record.data.to_handle(engine_group), record.plan, record.program, record.loading)
    validation = None if record.validation is None else record.validation.to_handle(engine_group)
    return RunPlan(job, record.spec, job_spec, dataclasses.replace(record.options, validation=validation))


def _rebuild_model_handle(engine_group: EngineGroup, key: str, rank: int) -> ModelHandle:
    """Fetch the model as it was broadcast from an engine that holds it."""
    (payload,) = engine_group.call_independently(make_call(ModelOperations.export_model, key=key), [rank]).values()
    model = payload.load()
    payload.discard()
    return ModelHandle(engine_group, key, engine_group.uploads.pack(model, name="model"), model, ())
