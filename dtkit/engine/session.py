"""The one session of an engine process: its process group, its data, its jobs.

It is reached through :mod:`dtkit.engine.server`. A request of another owner or another generation, or a dispatch for
another step than the job stands at, is refused before any collective.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit.engine import memory_limit, node_info, warmup
from dtkit.engine.comm.sigint import SigintHandler
from dtkit.engine.observe import error_report
from dtkit.engine.observe.call_output import CallOutput, activate_output
from dtkit.engine.observe.watchdog import Watchdog
from dtkit.errors import RefusedError, SupersededError
from dtkit.history.engine_outbox import ResultOutbox
from dtkit.rpc import pickling
from dtkit.rpc.payload import Payload, make_payload
from dtkit.types import END_EARLY_PREFIX, EngineInventory, Failure, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.iterable import StreamSource
    from dtkit.engine.data.loader import LoadingOptions
    from dtkit.engine.data.sources import RowSource
    from dtkit.engine.job import Job
    from dtkit.engine.memory import PeakMemoryTracker
    from dtkit.engine.state.peer_snapshots import PeerSnapshot
    from dtkit.engine.state.writer import CheckpointWriter
    from dtkit.history.engine_outbox import EvaluationSums
    from dtkit.planning.memory_report import MemoryUsage
    from dtkit.rpc.shared_memory import ProcessId
    from dtkit.types import DispatchResult, GroupSpec, JobPlan

_INDEPENDENT_OPS = ("job_status", "export_state", "export_snapshot", "export_model", "return_ownership")
"""What an engine does by itself, also when its group is broken, or could not be formed."""
_MEMORY_UNLIMITED_OPS = (
    "acquire_ownership",
    "return_ownership",
    "join_group",
    "leave_group",
    "node_info",
    "release",
    "job_status",
)
"""What gets an engine out of a failure: a limit on memory, which that may have used up, is none on this."""
FIRST_STEP_TIMEOUT_S, MIN_STEP_TIMEOUT_S, STEP_TIMEOUT_FACTOR = (
    1800.0,
    60.0,
    20.0,
)  # a collective's time limit: first step, then


class Session:
    """What this engine holds between two calls."""

    def __init__(self) -> None:
        self.owner = 0
        self.group: Group | None = None
        self.device: torch.device | None = None
        self._spec: GroupSpec | None = None
        self._file_owner: ProcessId | None = None
        self._step_timeout: float | None = None
        self._models: dict[str, torch.nn.Module | Payload] = {}
        self._data: dict[str, tuple[RowSource, Shards]] = {}
        self._streams: dict[str, StreamSource] = {}  # data that has no rows by number
        self._jobs: dict[str, Job] = {}
        self._outboxes: dict[str, ResultOutbox] = {}  # the last dispatches of each job
        self._memory_trackers: dict[str, PeakMemoryTracker] = {}  # of the memory that each job takes
        self._snapshots: dict[
            str, list[PeerSnapshot]
        ] = {}  # snapshots of each job: of this rank's part, and of a peer's
        self._checkpoint_writer: CheckpointWriter | None = None  # of checkpoints
        self._torchrun_store: Any = None
        self._call_output: CallOutput | None = None  # what is said in the call being served
        self.watchdog = Watchdog(self._jobs)
        self.sigint_handler = SigintHandler()
        self.memory_limit = memory_limit.MemoryLimit()

    # -- serving ----------------------------------------------------------------------------------------------

    def serve_request(self, request: Request, publish: Callable[[int, list[Any]], None] | None) -> Any:
        """Check who asks, then do it."""
        with self.memory_limit.suspend() if request.op in _MEMORY_UNLIMITED_OPS else self.memory_limit.enforce():
            return self._run_op(request, publish)

    def _run_op(self, request: Request, publish: Callable[[int, list[Any]], None] | None) -> Any:
        self._call_output = None
        if request.op == "handshake":  # asked before anybody joined, and of any version
            return node_info.get_handshake()
        if request.op == "acquire_ownership":
            return self._acquire_ownership(request.owner_id)
        if request.op != "join_group":
            self._check_admission(request)
        if request.op == "call_function":
            return self.op_call_function(publish=publish, **request.args)  # type: ignore[arg-type]
        return getattr(self, f"op_{request.op}")(**request.args)

    def _check_admission(self, request: Request) -> None:
        self._check_owner(request.owner_id)
        if request.op in _INDEPENDENT_OPS:
            return
        generation = -1 if self.group is None else self.group.generation
        if request.generation != generation:
            raise RefusedError(
                f"the process group is at generation {generation}, the call is for {request.generation}: it was sent "
                "before the group was formed anew"
            )
        if self.group is not None and self.group.is_broken:
            raise RefusedError(
                "the process group is not formed: an error broke it up, or cluster.torchrun took its place. "
                "Wait for that call's result, then call again"
            )

    def _check_owner(self, owner: int) -> None:
        if owner != self.owner:
            raise SupersededError(
                f"this engine belongs to owner {self.owner}, the call came from owner {owner}: another notebook "
                "attached meanwhile. Attach again to take it back"
            )

    def _acquire_ownership(self, owner: int) -> EngineInventory:
        """Belong to another notebook from here on. What this engine holds, stays."""
        if owner < self.owner:
            self._check_owner(owner)
        self.owner = owner
        rank, generation = (-1, -1) if self._spec is None else (self._spec.rank, self._spec.generation)
        return EngineInventory(rank, generation, {key: job.step for key, job in self._jobs.items()})

    def op_return_ownership(self, owner: int) -> None:
        """Belong to the former notebook again: whoever has this engine could not take the cluster over after all."""
        self.owner = owner

    # -- the group --------------------------------------------------------------------------------------------

    def op_join_group(
        self,
        spec: GroupSpec,
        owner: int,
        keeper: ProcessId | None,
        step_timeout: float | None,
        *,
        others: bool = False,
    ) -> dict[str, Any]:
        """Form the process group (anew) and say what this node is.

        `others`: ranks are not who they were. Jobs end then, which are to be made anew.
        """
        import torch

        from dtkit.engine import checks, memory
        from dtkit.engine.comm.process_group import Group

        if owner < self.owner:
            self._check_owner(owner)
        if owner != self.owner:
            self._release_all()
        self.owner, self._file_owner, self._step_timeout = owner, keeper, step_timeout
        again = self.group is not None
        if self.group is not None:
            self.group.close()
            self.group = None
        vars(sys).pop("ps1", None)  # IPython's mark of a prompt, by which Lightning refuses to start its DDP
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.device = torch.device(spec.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._spec = spec
        checks.check_folder_writable(Path(spec.store_path).parent)
        self.watchdog.start(spec)
        self.group = Group(spec)
        self._set_collective_timeout(step_timeout or FIRST_STEP_TIMEOUT_S)
        self._run_abortable(lambda: self._rebind_jobs(ranks_changed=others))
        if again:  # what held the old group, its threads and connections, lies in cycles
            memory.release_unused_memory()
        return self.op_node_info()

    def _rebind_jobs(self, *, ranks_changed: bool) -> None:
        """Have jobs go on in the group that there is now; or end them.

        A job that failed to be built on some rank is of no use on the others, which would wait for that rank.
        """
        assert self.group is not None
        shared = [name for name, job in self._jobs.items() if job.context.group is not None]
        ended = set(self._jobs) if ranks_changed else set(shared) - self.group.intersect_names(shared)
        for name in ended:
            self._close_job(name)
        for job in self._jobs.values():
            job.set_process_group(self.group)

    def op_leave_group(self) -> None:
        """The notebook goes and the engine stays: leave the group, and forget what it held."""
        self.watchdog.stop()
        if self.group is not None:
            self.group.close()
            self.group = None
        self._release_all()

    def _release_all(self) -> None:
        self.op_release([*self._models, *self._data, *self._streams, *self._jobs])

    def op_node_info(self) -> dict[str, Any]:
        """This node's row of the cluster's table, less the engine id."""
        import torch

        assert self.device is not None
        total, free = node_info.read_device_memory(self.device)
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(self.device),
            "memory_total": total,
            "memory_free": free,
            "threads": torch.get_num_threads(),
        }

    def op_read_clock(self, rounds: int = 9) -> list[float]:
        """What this rank's clock says as several barriers end: at about the same moments on all ranks."""
        assert self.group is not None
        times = []
        for _ in range(rounds):
            # waits: a collective, limited by the process group's timeout
            self.group.barrier()
            times.append(time.perf_counter())
        return times

    def op_warm_up(self) -> None:
        """Load what the first step would load, and set the limit of memory from there."""
        warmup.preload()
        assert self.device is not None
        self.memory_limit.activate(self.device)

    def _set_collective_timeout(self, seconds: float) -> None:
        assert self.group is not None
        self.group.set_timeout(seconds)
        self._collective_timeout_s = seconds

    # -- calls of the user's functions ------------------------------------------------------------------------

    def op_call_function(
        self,
        publish: Callable[[int, list[Any]], None] | None,
        shipment: Payload,
        port: int | None = None,
        attempt: int = 0,
    ) -> tuple[Payload, list[Any]]:
        """Call ``fn(*args, **kwargs)``; with a `port`, under torchrun's environment and without our group."""
        channel = self._call_output = CallOutput(publish)

        def work() -> Any:
            fn, args, kwargs = shipment.load()
            return fn(*args, **kwargs)

        with activate_output(channel):
            value = self._run_abortable(work) if port is None else self._run_as_torchrun(work, port, attempt)
        return make_payload(pickling.pack_object(value, name="the function's result"), self._file_owner), channel.items

    def _run_abortable(self, work: Callable[[], Any]) -> Any:
        """Work that may wait in a collective of our group: an interrupt gets through to it."""
        from dtkit.engine.comm.process_group import abort_on_sigint

        assert self.group is not None
        with abort_on_sigint(self.group.abort):
            return work()

    def op_open_torchrun_store(self) -> int:
        """Rank 0: a store for a script's own group. Its port."""
        from dtkit.engine.comm import torchrun

        assert self.group is not None
        self._torchrun_store, port = torchrun.open_store(self.group.world_size)
        return port

    def _run_as_torchrun(self, work: Callable[[], Any], port: int, restart_count: int) -> Any:
        """Our group steps aside; the script makes its own from torchrun's environment variables."""
        from dtkit.engine.comm import torchrun

        assert self.group is not None
        assert self._spec is not None
        self.group.close()
        self.group.is_broken = True  # what queued behind this call is refused until the group is formed anew
        return torchrun.call_with_environment(work, torchrun.make_torchrun_environment(self._spec, port, restart_count))

    # -- data and models --------------------------------------------------------------------------------------

    def op_load_data(
        self, key: str, shipment: Payload, sizes: Sequence[int] | None, *, broadcast: bool = False
    ) -> int | None:
        """Keep data under `key`. With `sizes` it comes as (data, all shards' rows); else as a function that loads it.

        Returns the number of rows; None for a stream, which nobody knows the length of.
        """
        from dtkit.engine.data.batches import Shards
        from dtkit.engine.data.iterable import StreamSource
        from dtkit.engine.data.sources import as_source

        loaded = self._load_payload(shipment, by_broadcast=broadcast)
        data, indices = (loaded(), None) if sizes is None else loaded
        source = as_source(data)
        if isinstance(source, StreamSource):
            self._streams[key] = source
            return None
        rows = range(len(source)) if indices is None else indices
        self._data[key] = source, Shards(rows, sizes or [len(source)])
        return len(source)

    def op_set_shards(self, key: str, indices: np.ndarray, sizes: Sequence[int]) -> None:
        """Say which rows of data that is here already belong to which shard."""
        from dtkit.engine.data.batches import Shards

        self._data[key] = self._data[key][0], Shards(indices, sizes)

    def op_release(self, keys: Sequence[str]) -> None:
        """Let go of data, models and jobs; unknown keys are no error."""
        for key in keys:
            self._data.pop(key, None)
            self._streams.pop(key, None)
            self._models.pop(key, None)
            self._close_job(key)

    def _close_job(self, job: str) -> None:
        """Let go of a job, and give the system its memory back: what comes next may need it in one piece."""
        if job in self._jobs:
            from dtkit.engine import memory

            self._jobs.pop(job).close()
            self._memory_trackers.pop(job, None)
            self._snapshots.pop(job, None)
            if job in self._outboxes:
                self._outboxes.pop(job).discard_read()
            memory.release_unused_memory()

    def op_store_model(self, key: str, shipment: Payload) -> None:
        """Keep under `key` where a model lies, to be mapped when it is needed."""
        self._models[key] = shipment

    def op_receive_model(self, key: str, shipment: Payload, *, broadcast: bool = False) -> str:
        """Keep a model under `key`, its numbers received from rank 0. Returns the checksum of its state."""
        import torch

        model = self._load_payload(shipment, by_broadcast=broadcast)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"expected an nn.Module, got {type(model).__name__}")
        self._models[key] = model
        return compute_model_checksum(model)

    def _get_model(self, key: str) -> torch.nn.Module:
        found = self._models[key]
        return found.load() if isinstance(found, Payload) else found

    def _load_payload(self, payload: Payload, *, by_broadcast: bool = False) -> Any:
        """Unpack a shipment; buffers that only rank 0 holds come by broadcast over the data plane."""
        if not by_broadcast:
            return payload.load()
        assert self.group is not None
        buffers = payload.open_buffers() if self.group.rank == 0 else None
        return payload.load(self.group.broadcast_buffers(buffers, payload.sizes))

    def op_measure(self, what: str, **args: Any) -> Any:
        """Speed, links, memory, or what a model takes: see :mod:`dtkit.engine.benchmark`."""
        from dtkit.engine import benchmark

        assert self.group is not None
        assert self.device is not None
        models = {key: m for key, m in self._models.items() if not isinstance(m, Payload)}
        seat = benchmark.BenchmarkContext(self.group, self.device, models, self._data)
        return self._run_abortable(lambda: benchmark.run_benchmark(seat, what, **args))

    # -- jobs -------------------------------------------------------------------------------------------------

    def op_build_job(self, job: str, *, hollow: bool = False, **order: Any) -> float:
        """Make a job. Returns the learning rate. `copy_to_meta`: until its state is restored it is at no step."""
        made = self._build_job(job, **order)
        made.partially_updated = hollow
        self._jobs[job] = made
        return made.lr

    def op_rebuild_job(self, job: str, shipments: Sequence[Payload], **order: Any) -> tuple[int, float]:
        """Make a job anew with what survivors gave, or had kept: (step, learning rate).

        The old one stands until then: a notebook that dies here leaves either, and none before its first step.
        """
        from dtkit.engine.state.survivors import restore_from_survivors

        made = self._build_job(job, **order)
        parts = [part for shipment in shipments for part in shipment.load()]
        self._run_abortable(lambda: restore_from_survivors(made, parts))
        self._jobs[job] = made
        return made.step, made.lr

    def _build_job(
        self,
        job: str,
        model: str,
        data: str,
        program: bytes,
        plan: JobPlan,
        loading: LoadingOptions | None = None,
        *,
        alone: bool = False,
    ) -> Job:
        """`alone`: this engine plays all shards by itself, without the group."""
        from dtkit.engine.build import build_job
        from dtkit.engine.data.loader import LoadingOptions
        from dtkit.engine.memory import PeakMemoryTracker

        assert self.group is not None
        assert self.device is not None
        # unpickles: sent by the notebook in a call
        what, kept = pickling.loads(program), self._models[model]
        what.strategy.preload()
        self._memory_trackers[job] = PeakMemoryTracker(self.device, None if isinstance(kept, Payload) else kept)
        held = self._streams[data] if data in self._streams else self._data[data]
        place, network, loads = (self.group, self.device), self._get_model(model), loading or LoadingOptions()
        made: Job = self._run_abortable(
            lambda: build_job(what, network, held, plan, loads, place, single_process=alone)
        )
        return made

    def op_advance(
        self,
        job: str,
        step: int,
        steps: int,
        lr: float | None = None,
        shares: Sequence[float] | None = None,
        *,
        explain: bool = False,
        fingerprint: bool = False,
        seen: int = 0,
    ) -> tuple[DispatchResult, list[Any]]:
        """Take steps of a job that must stand at `step`. Returns rows, and what was printed.

        The notebook has read all rows before step `seen`; later ones stay on disk, for one that may take its place.
        `lr` and `shares` of the batch by rank hold from this dispatch on.
        """
        from dtkit.engine import memory

        found = self._get_job(job, step)
        if lr is not None:
            found.set_lr(lr)
        if shares is not None:
            found.set_shares(shares)
        channel = self._call_output = CallOutput()
        if (complaint := self.watchdog.take_warning()) is not None:
            channel.add_line(complaint)
        with activate_output(channel), contextlib.nullcontext() if explain else self._track_memory(job):
            self._run_abortable(
                lambda: found.advance(steps, explain=explain, should_end_early=self._make_end_early_check(job))
            )
        self.sigint_handler.work_done = True
        if explain:
            memory.release_unused_memory()  # a microscope keeps copies, and leaves malloc with holes of their sizes
        self._shorten_collective_timeout(found)
        advance = found.collect_results(fingerprint=fingerprint)
        unread = self._get_outbox(job)
        unread.discard_read(seen)
        unread.store_dispatch(advance, channel.items)
        return advance, channel.items

    def _get_outbox(self, job: str) -> ResultOutbox:
        """Where a job's dispatches are kept until the notebook has read them."""
        if job not in self._outboxes:
            assert self._spec is not None
            self._outboxes[job] = ResultOutbox(Path(self._spec.store_path).parent, job, self._spec.rank)
        return self._outboxes[job]

    def op_export_model(self, key: str) -> Payload:
        """A model as it was sent."""
        return make_payload(pickling.pack_object(self._get_model(key)), self._file_owner)

    def op_save_checkpoint(
        self, job: str, step: int, folder: str, token: str, *, copied: bool = False
    ) -> dict[str, Any]:
        """Copy the state of a job that stands at `step`, and write it beside the training. See engine.writing.

        `copy_to_device`: the last call was for a snapshot, whose copy is written, if there is one.
        """
        from dtkit.engine.state import peer_snapshots
        from dtkit.engine.state.writer import CheckpointWriter

        found, group = self._get_job(job, step), self.group
        assert group is not None
        copy = peer_snapshots.find_own_part(self._snapshots.get(job, ()), step, group.rank) if copied else None
        writer = self._checkpoint_writer = self._checkpoint_writer or CheckpointWriter()
        return self._run_abortable(lambda: writer.start_save(found, folder, token, copy))  # type: ignore[no-any-return]

    def op_take_snapshot(self, job: str, step: int) -> dict[str, Any]:
        """Keep copies of the state of a job that stands at `step`: of this rank's part and of a peer's. See peers."""
        from dtkit.engine.state import peer_snapshots

        found, kept = self._get_job(job, step), self._snapshots.setdefault(job, [])
        spare_bytes = self._memory_trackers[job].compute_spare_bytes()
        return self._run_abortable(lambda: peer_snapshots.take_snapshot(found, kept, spare_bytes))  # type: ignore[no-any-return]

    def _count_snapshot_bytes(self, job: str) -> int:
        return sum(copies.nbytes for copies in self._snapshots.get(job, ()))

    def _track_memory(self, job: str) -> contextlib.AbstractContextManager[None]:
        return self._memory_trackers[job].track_steps(self._count_snapshot_bytes(job))

    def op_restore_checkpoint(self, job: str, **checkpoint: Any) -> tuple[int, float, dict[str, tuple[Any, Any]]]:
        """Put a checkpoint's state into a job that stands before its first step. What came of it: see writing.read."""
        from dtkit.engine.state import writer as writing

        found = self._get_job(job)
        read = self._run_abortable(lambda: writing.restore_checkpoint(found, **checkpoint))
        found.partially_updated = False
        return read  # type: ignore[no-any-return]

    def op_memory_usage(self, job: str) -> MemoryUsage:
        """What this rank's part of a job takes: tensors as they are now, growth as it was at most."""
        return self._get_job(job).measure_memory(self._memory_trackers[job], self._count_snapshot_bytes(job))

    def op_model_placement(self, job: str) -> Any:
        """Which part of a job's model lies where: a table, or None."""
        return self._get_job(job).placement

    # -- what is left after a failure -------------------------------------------------------------------------

    def op_job_status(self, job: str) -> tuple[int, bool, float, dict[int, tuple[int, ...]]]:
        """(step, whether this rank's parameters are of that step, learning rate, {step: ranks of whose parts, as of
        then, there are copies here}).
        """
        found = self._get_job(job)
        copies = {one.step: tuple(one.parts_by_rank) for one in self._snapshots.get(job, ())}
        return found.step, not found.partially_updated, found.lr, copies

    def op_export_state(self, job: str, what: str) -> Payload:
        """What this rank holds of a job's state: see :func:`dtkit.engine.state.survivors.export_state`."""
        from dtkit.engine.state.survivors import export_state

        return make_payload(pickling.pack_object([export_state(self._get_job(job), what)]), self._file_owner)

    def op_export_snapshot(self, job: str, step: int, parts: Sequence[int]) -> Payload:
        """Copies that are kept here of these ranks' parts of a job, as of `step`."""
        from dtkit.engine.state import peer_snapshots

        return make_payload(
            pickling.pack_object(peer_snapshots.export_parts(self._snapshots[job], step, parts)), self._file_owner
        )

    def op_export_data(self) -> Payload:
        """Data and models that this engine holds, for one that takes another's place."""
        return make_payload(pickling.pack_object((self._models, self._data, self._streams)), self._file_owner)

    def op_import_data(self, shipment: Payload) -> None:
        """What another engine handed over."""
        self._models, self._data, self._streams = shipment.load()

    def op_repartition(self) -> None:
        """Cut all data into as many shards as there are ranks now."""
        import numpy as np

        from dtkit.engine.data.batches import Shards

        assert self.group is not None
        n = self.group.world_size
        for key, (source, shards) in self._data.items():
            rows = np.concatenate([shards.get_rows(k) for k in range(len(shards.sizes))])
            self._data[key] = source, Shards(rows, [len(part) for part in np.array_split(rows, n)])

    def _make_end_early_check(self, job: str) -> Callable[[], bool]:
        """Whether the notebook has left word, in the folder that both see, that it waits for this dispatch to end."""
        assert self._spec is not None
        return (Path(self._spec.store_path).parent / f"{END_EARLY_PREFIX}{job}").exists

    def op_inject_delay(self, job: str, factor: float) -> None:
        """Have this rank's computing take so many times as long."""
        self._get_job(job).inject_delay(factor)

    def _shorten_collective_timeout(self, job: Job) -> None:
        """After the first step a collective need not wait for compilation."""
        if self._step_timeout is None and self.group is not None and job.context.group is not None:
            limit = max(MIN_STEP_TIMEOUT_S, STEP_TIMEOUT_FACTOR * job.median_step_s())
            if not 0.8 < limit / self._collective_timeout_s < 1.25:
                self._set_collective_timeout(limit)

    def op_state_dict_parts(self, job: str) -> Payload | None:
        """What this rank gives to the model's state dict; nothing from a rank whose copy is another's too."""
        found = self._get_job(job).state_dict_parts()
        return make_payload(pickling.pack_object(found), self._file_owner) if found else None

    def op_max_gradients(self, job: str) -> Payload:
        """The largest gradient of every number so far, of a job that works alone: {parameter: tensor}."""
        return make_payload(pickling.pack_object(dict(self._get_job(job).max_gradients or {})), self._file_owner)

    def op_evaluate(
        self,
        job: str,
        data: str,
        program: bytes,
        batch_size: int,
        step: int | None = None,
        loading: LoadingOptions | None = None,
    ) -> EvaluationSums:
        """(samples, {name: (sum, weight)}) of this rank's shard. With `step`: between two steps of a run, which must
        stand there, and which a notebook that takes it over is to know of.
        """
        from dtkit.engine.data.loader import LoadingOptions, load_evaluation_batches

        assert self.group is not None
        found = self._get_job(job, step)
        # unpickles: sent by the notebook in a call
        metrics = pickling.loads(program)
        source, shards = self._data[data]
        parts = shards.split_for_replicas(found.context.mesh.num_replicas)
        batches = load_evaluation_batches(
            source, parts[found.context.shards[0]], batch_size, loading or LoadingOptions(), self.group.rank
        )
        rounds = -(-max(map(len, parts)) // batch_size)
        value: EvaluationSums = self._run_abortable(
            lambda: found.evaluate(batches, metrics, rounds, after_epoch=step is not None)
        )
        if step is not None:
            self.sigint_handler.work_done = True
            self._get_outbox(job).store_evaluation(step, value)
        return value

    def _get_job(self, job: str, step: int | None = None) -> Job:
        """The job, which must stand at `step` if that is given."""
        if job not in self._jobs:
            raise RefusedError(f"no job {job} on this engine; it was released")
        found = self._jobs[job]
        if step is not None and found.step != step:
            raise RefusedError(f"the job stands at step {found.step}, the call is for step {step}")
        return found

    def collect_partial_result(self, request: Request) -> Any:
        """What a failed dispatch had completed, or a failed call had said: its last words tell most."""
        said = [] if self._call_output is None else self._call_output.items
        name = str(request.args.get("job"))
        job = self._jobs.get(name) if request.op == "advance" else None
        if job is not None:
            advance = job.collect_results()
            self._get_outbox(name).store_dispatch(
                advance, said
            )  # a notebook that is gone by now reads no failure either
            return advance, said
        return (None, said) if request.op == "call_function" else None

    def build_failure(self, error: BaseException, request: Request) -> Failure:
        """What to tell of an error that ended a request."""
        from dtkit.engine.comm.process_group import is_lost_peer_error

        job = self._jobs.get(str(request.args.get("job")))
        kind = "refused" if isinstance(error, RefusedError) else "error"
        if (
            kind == "error" and self.sigint_handler.was_interrupted
        ):  # a KeyboardInterrupt of the user's own code is an error
            kind = "interrupted"
        return Failure(
            rank=-1 if self._spec is None else self._spec.rank,
            host=socket.gethostname(),
            type=type(error).__name__,
            message=error_report.format_message(error),
            traceback=error_report.format_traceback(error),
            step=None if job is None else job.step,
            victim=is_lost_peer_error(error),
            kind=kind,
        )


_session = Session()


def get_session() -> Session:
    """The one that there is."""
    return _session


def compute_model_checksum(model: torch.nn.Module) -> str:
    """A digest of all parameters and buffers: equal bits, equal digest. Twelve hexadecimal digits."""
    from dtkit.engine.observe.step_probe import compute_digest

    return compute_digest(model.state_dict().items())
