"""Operations of fake engines, with made-up results.

Steps compute nothing. But models are stored, data is loaded, and functions are called. The classes subclass those of
:mod:`dtkit.rpc.protocol`, so mypy rejects a signature that differs from the engine's.
"""

# ruff: noqa: ARG002 - fake operations have no use for most arguments

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.engine.ops.admission import check_not_older
from dtkit.history import between_steps
from dtkit.history.history import ROW_DTYPE
from dtkit.history.profile import OperatorTime, RankProfile
from dtkit.history.workload import Workload
from dtkit.messages import DispatchResult, EngineInventory, JobPosition, NonFiniteReport
from dtkit.planning.cost_model import AvailableMemory, LinkSpeeds, StepTimings
from dtkit.planning.memory_report import MemoryUsage
from dtkit.rpc.clocks import ClockReading
from dtkit.rpc.handshake import get_handshake
from dtkit.rpc.measurements import BenchmarkOperations, ProfileOperations
from dtkit.rpc.protocol import (
    DataOperations,
    FunctionOperations,
    GroupOperations,
    JobOperations,
    ModelOperations,
    StateOperations,
    bind_operations,
)
from dtkit.rpc.reference import ReferenceReport
from dtkit.testing.fake_engine import FakeJob

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit._util.process import ProcessId
    from dtkit.history.engine_outbox import EvaluationSums
    from dtkit.messages import CheckpointReport, EngineDescription, GroupSpec, OutputItem, SnapshotReport
    from dtkit.planning.cost_model import ActivationPeak, ModelSizes
    from dtkit.planning.layer_chain import LayerChain
    from dtkit.rpc.job_plan import JobDefinition, LoadingOptions
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.reference import Reference
    from dtkit.rpc.script import Script
    from dtkit.testing.fake_engine import FakeEngine

_NO_STATE = "fake engines have no state to save"


def make_operations(engine: FakeEngine) -> dict[str, Callable[..., Any]]:
    """Return the methods that serve an engine's requests, by operation."""
    subjects = (_Group, _Functions, _Data, _Models, _Jobs, _State, _Benchmarks, _Profiles)
    return bind_operations(*(subject(engine) for subject in subjects))


class _Subject:
    """Operations of one subject, on one engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine, self._results = engine, engine.results


class _Group(_Subject, GroupOperations):
    def handshake(self) -> dict[str, object]:
        return {**get_handshake(), **self._results.handshake_overrides[self._engine.rank]}

    def acquire_ownership(self, *, owner: int) -> EngineInventory:
        engine = self._engine
        check_not_older(owner, engine.owner)
        engine.owner = owner
        return EngineInventory(engine.rank, engine.generation, {key: job.step for key, job in engine.jobs.items()})

    def return_ownership(self, *, owner: int) -> None:
        self._engine.owner = owner

    def join_group(
        self,
        *,
        spec: GroupSpec,
        owner: int,
        file_owner: ProcessId | None,
        step_timeout: float | None,
        ranks_changed: bool = False,
    ) -> EngineDescription:
        engine = self._engine
        check_not_older(owner, engine.owner)
        if owner != engine.owner:
            engine.release([*engine.jobs, *engine.models, *engine.num_rows])
        if ranks_changed:
            engine.jobs.clear()
        engine.owner, engine.file_owner, engine.generation, engine.is_broken = owner, file_owner, spec.generation, False
        return self.node_info()

    def leave_group(self) -> None:
        engine = self._engine
        engine.generation = -1
        engine.release([*engine.jobs, *engine.models, *engine.num_rows])

    def node_info(self) -> EngineDescription:
        return {
            "host": "fake",
            "pid": 4000 + self._engine.rank,
            "device": "cpu",
            "memory_total": 8_000_000_000,
            "memory_free": self._results.memory_free,
            "threads": 1,
            "cores": 8,
        }

    def read_clock(self, *, rounds: int = 9) -> list[ClockReading]:
        return [ClockReading(0.0, 0.0, 0.0)] * rounds

    def warm_up(self) -> None:
        """Do nothing: there is nothing to load."""


class _Functions(_Subject, FunctionOperations):
    def call_function(self, *, payload: Payload) -> tuple[Payload | None, list[OutputItem]]:
        engine = self._engine
        fn, args, kwargs = payload.load()
        items = engine.take_output()
        return engine.pack(fn(*args, **kwargs), name="the function's result"), items

    def open_torchrun_store(self) -> int:
        return 1

    def run_script(self, *, script: Script, port: int, restart_count: int) -> tuple[Payload | None, list[OutputItem]]:
        assert script.payload is not None, "the fake runs functions only"
        del port, restart_count
        return self.call_function(payload=script.payload)


class _Data(_Subject, DataOperations):
    def load_data(self, *, key: str, payload: Payload, sizes: Sequence[int] | None) -> int | None:
        loaded = self._engine.load(key, payload)
        data = loaded() if sizes is None else loaded[0]
        self._engine.num_rows[key] = len(data[0] if isinstance(data, (tuple, list)) else data)
        return self._engine.num_rows[key]

    def set_shards(self, *, key: str, indices: np.ndarray, sizes: Sequence[int]) -> None:
        self._engine.num_rows[key] = sum(sizes)

    def release(self, *, keys: Sequence[str]) -> None:
        self._engine.release(keys)

    def repartition(self) -> None:
        """Do nothing: there are no shards."""

    def export_data(self) -> Payload:
        return self._engine.pack((self._engine.models, self._engine.num_rows))

    def import_data(self, *, payload: Payload) -> None:
        self._engine.models, self._engine.num_rows = payload.load()


class _Models(_Subject, ModelOperations):
    def store_model(self, *, key: str, payload: Payload) -> None:
        self._engine.models[key] = payload.load()

    def receive_model(self, *, key: str, payload: Payload) -> str:
        from dtkit.engine.ops.data import compute_model_checksum

        self._engine.models[key] = self._engine.load(key, payload)
        return compute_model_checksum(self._engine.models[key])

    def export_model(self, *, key: str) -> Payload:
        return self._engine.pack(self._engine.models[key])


class _Jobs(_Subject, JobOperations):
    def build_job(
        self, *, job: str, definition: JobDefinition, reference: Reference | None = None, uninitialized: bool = False
    ) -> float:
        engine, batch_size = self._engine, definition.plan.batch_size
        share, rest = divmod(batch_size, self._results.world_size)
        steps_per_epoch = definition.plan.count_steps_per_epoch(engine.num_rows[definition.data])
        engine.jobs[job] = FakeJob(definition.model, share + (engine.rank < rest), steps_per_epoch)
        return engine.lr

    def rebuild_job(self, *, job: str, definition: JobDefinition, payloads: Sequence[Payload]) -> tuple[int, float]:
        engine = self._engine
        self.build_job(job=job, definition=definition)
        engine.jobs[job].step, engine.lr = payloads[0].load()
        return engine.jobs[job].step, engine.lr

    def job_status(self, *, job: str) -> JobPosition:
        return JobPosition(self._engine.get_job(job).step, is_intact=True, lr=self._engine.lr)

    def advance(
        self,
        *,
        job: str,
        step: int,
        steps: int,
        lr: float | None = None,
        shares: Sequence[float] | None = None,
        explain: bool = False,
        fingerprint: bool = False,
        read_until: int = 0,
    ) -> tuple[DispatchResult, list[OutputItem]]:
        engine, training = self._engine, self._engine.get_job(job, step)
        engine.lr = engine.lr if lr is None else lr
        end, end_reason, loss = step + steps, "done", None
        if (early := self._results.take_early_end(engine.rank, steps)) is not None:
            end, end_reason = step + early, "time"
        if (nonfinite := self._results.take_nonfinite(engine.rank, range(step, end))) is not None:
            (end, loss), end_reason = nonfinite, "nonfinite"
        training.step = end
        rows = self._build_rows(training, step, end)
        between, training.between = training.between if end > step else {}, {}
        result = DispatchResult(rows, end, engine.lr, end_reason, NonFiniteReport(loss), between=between)
        return result, engine.take_output()

    def _build_rows(self, job: FakeJob, start: int, stop: int) -> np.ndarray:
        rows = np.zeros(stop - start, ROW_DTYPE)
        rows["step"], rows["rank"], rows["lr"] = np.arange(start, stop), self._engine.rank, self._engine.lr
        rows["epoch"] = rows["step"] // job.steps_per_epoch
        rows["samples"] = rows["weight"] = job.samples
        rows["loss"] = 1 / (1 + rows["step"])
        rows["step_s"], rows["memory_bytes"] = self._results.step_s, 300_000_000
        return rows

    def evaluate(
        self,
        *,
        job: str,
        data: str,
        metrics: bytes,
        batch_size: int,
        loading: LoadingOptions | None = None,
        step: int | None = None,
    ) -> EvaluationSums:
        training, seconds = self._engine.get_job(job, step), self._results.step_s
        training.between = {between_steps.ALL: 2 * seconds, between_steps.VALIDATION: seconds}
        return 4, {"loss": (2.0, 4.0)}

    def inject_delay(self, *, job: str, factor: float) -> None:
        self._engine.get_job(job)

    def memory_usage(self, *, job: str) -> MemoryUsage:
        self._engine.get_job(job)
        return MemoryUsage(0, 0, 0, 0, process_growth=None, limit=None)

    def model_placement(self, *, job: str) -> Any:
        self._engine.get_job(job)

    def state_dict_parts(self, *, job: str, callback: int | None = None) -> Payload:
        del callback
        from dtkit.engine.state.shards import MODEL_PREFIX, ShardedState, TensorShard

        model = self._engine.models[self._engine.get_job(job).model]  # as it was sent: nothing was trained
        tensors = model.state_dict() if self._engine.rank == 0 else {}
        shards = {
            f"{MODEL_PREFIX}/{name}": TensorShard(tensor, tuple(tensor.shape), (0,) * tensor.dim())
            for name, tensor in tensors.items()
        }
        facts: dict[str, Any] = {
            key: {} for key in ("layout", "values", "optimizers", "aliases", "extra", "per_rank", "frozen")
        }
        return self._engine.pack(ShardedState(shards, facts))

    def reference_report(self, *, job: str) -> Payload:
        self._engine.get_job(job)
        return self._engine.pack(ReferenceReport({}, ()))


class _State(_Subject, StateOperations):
    def save_checkpoint(
        self, *, job: str, step: int, folder: str, token: str, from_snapshot: bool = False, may_stage: bool = False
    ) -> CheckpointReport:
        self._engine.get_job(job, step)
        return {"error": _NO_STATE, "seconds": 0.0, "torch": "none", "is_remote": False}

    def restore_checkpoint(
        self, *, job: str, folder: str, index: Mapping[str, Any], files: Sequence[str], facts: Mapping[str, Any]
    ) -> tuple[int, float, dict[str, tuple[Any, Any]]]:
        return self._engine.get_job(job).step, self._engine.lr, {}

    def restore_weights(
        self,
        *,
        job: str,
        step: int,
        folder: str,
        index: Mapping[str, Any],
        files: Sequence[str],
        facts: Mapping[str, Any],
    ) -> None:
        self._engine.get_job(job, step)

    def take_snapshot(self, *, job: str, step: int) -> SnapshotReport:
        self._engine.get_job(job, step)
        return {"error": None, "seconds": 0.0}

    def export_state(self, *, job: str, scope: str) -> Payload:
        return self._engine.pack((self._engine.get_job(job).step, self._engine.lr))

    def export_snapshot(self, *, job: str, step: int, ranks: Sequence[int]) -> Payload:
        raise LookupError(f"fake engines keep no snapshot of {job} at step {step} for ranks {ranks}")


class _Benchmarks(_Subject, BenchmarkOperations):
    def measure_links(self, *, dtype: str) -> LinkSpeeds:
        others = range(self._engine.rank + 1, self._results.world_size)
        return LinkSpeeds(50e9, [(8, 1e-4), (2**20, 1e-3)], dict.fromkeys(others, (5e-5, 1e9)), 0.5)

    def measure_available_memory(self, *, free_caches: bool) -> AvailableMemory:
        return AvailableMemory(self._results.memory_free, 0, 0, None)

    def measure_model_sizes(self, *, program: bytes, model: str | None) -> ModelSizes:
        import torch

        from dtkit.engine import benchmark

        group: Any = None  # no collective is needed
        context = benchmark.BenchmarkContext(group, torch.device("cpu"), self._engine.models, {})
        return benchmark.measure_model_sizes(context, program, model)

    def measure_activation_peaks(
        self, *, program: bytes, model: str | None, data: str, rows: tuple[int, ...], precision: str | None = None
    ) -> tuple[list[ActivationPeak], str]:
        return [], "a double has no data"

    def measure_layers(
        self, *, program: bytes, model: str | None, data: str, rows: int, timed: bool
    ) -> tuple[LayerChain | None, str]:
        return None, "a double has no data"

    def measure_step_times(
        self,
        *,
        program: bytes,
        model: str,
        data: str,
        rows: int,
        precision: str | None = None,
        track_allocations: bool = False,
    ) -> StepTimings:
        return StepTimings([(1, 0.001, 0.002), (rows, 0.001 * rows, 0.002 * rows)], 0.001)

    def measure_strategy_step(
        self, *, program: bytes, strategy: bytes, model: str, data: str, counts: tuple[int, ...], alone: bool = False
    ) -> float:
        return 0.01 * max(counts)


class _Profiles(_Subject, ProfileOperations):
    def start_profile(self, *, job: str) -> None:
        self._engine.get_job(job)

    def stop_profile(self, *, job: str) -> RankProfile | None:
        self._engine.get_job(job)
        operators = (OperatorTime("aten::mm", 3, 0.002 * (1 + self._engine.rank), 0.0),)
        events = [{"ph": "X", "pid": 1, "tid": 1, "name": "aten::mm", "ts": 0.0, "dur": 2000.0}]
        return RankProfile(operators, gzip.compress(json.dumps({"traceEvents": events}).encode()), 0.0)

    def measure_workload(self, *, job: str, model: str) -> Workload:
        self._engine.get_job(job)
        return Workload(48.0, 0, "this CPU")
