"""The cluster that a user holds: start or attach, train, run, show, close."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import html
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.cluster import cluster_file, reaper
from dtkit.cluster import transport as engines
from dtkit.cluster.devices import DevicePlan, choose_num_engines, plan_devices
from dtkit.cluster.transport import LaunchConfig, LaunchedTransport
from dtkit.dashboard.text.progress import show_progress
from dtkit.errors import ClusterError, DtkitError, SupersededError
from dtkit.health import status
from dtkit.rpc import shared_memory
from dtkit.rpc.engine_group import SNAPSHOTS_FOLDER, EngineGroup
from dtkit.types import END_EARLY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from dtkit.cluster.cluster_file import ClusterInfo
    from dtkit.data.broadcast import ModelHandle
    from dtkit.data.partition import Partition
    from dtkit.health.stacks import Stacks
    from dtkit.planning.cost_model import Benchmark
    from dtkit.planning.plan import Plan
    from dtkit.rpc.transport import Transport
    from dtkit.strategies.base import Strategy
    from dtkit.training.run import Run
    from dtkit.training.task import Task
    from dtkit.types import EngineInventory


class Cluster(EngineGroup):
    """Engines on this machine (or wherever `launcher` starts them), as ranks 0 to n - 1 of one process group.

    Parameters
    ----------
    n
        Engines. By default one per GPU, else what cores and memory carry, at most four.
    launcher
        "local", or the name of any ipyparallel launcher ("ssh", "slurm", "mpi", ...).
    device
        "auto" (a GPU where there is one), "cpu" or "cuda".
    threads
        Torch threads per engine; by default the cores divided among the engines.
    memory_limit
        Bytes (or text such as "600MB") that each engine's process may allocate for data; on a GPU, of its memory.
    timeout
        Seconds that starting may take, and forming the group.
    step_timeout
        Seconds that a collective may wait. By default 30 minutes for the first step of a job, then 60 seconds or 20
        median steps, whichever is longer.
    lease
        Seconds that engines live without a notebook, whose kernel may restart: by default 60, or 30 minutes with a job
        in memory.
    interface
        Network interface of the collectives. By default the loopback interface, which nobody outside this host
        can reach; name another one to use engines on several hosts. Tensor traffic is not encrypted.
    spares
        Engines that are started along and wait, so that one that is lost can be replaced at once.
    keep_alive
        Whether engines outlive the script that started them too, and wait for :func:`dtkit.attach` as long as `lease`
        says; without a `lease`, until somebody closes the cluster.

    """

    def __init__(
        self,
        n: int | None = None,
        *,
        launcher: str = "local",
        device: str = "auto",
        threads: int | None = None,
        memory_limit: int | str | None = None,
        timeout: float = 60,
        step_timeout: float | None = None,
        lease: float | None = None,
        interface: str | None = None,
        spares: int = 0,
        keep_alive: bool = False,
    ) -> None:
        engines.check_launcher(launcher)
        n = choose_num_engines(n, launcher)
        _check_spares(spares)
        limit = None if memory_limit is None else formatting.parse_bytes(memory_limit)
        plan = plan_devices(n, device, threads)
        shared_memory.remove_orphans()
        with show_progress(f"starting {formatting.format_count(n, 'engine')}") as progress:
            lease = math.inf if keep_alive and lease is None else lease
            transport = LaunchedTransport(n, LaunchConfig(launcher, plan, timeout, limit, lease, spares, keep_alive))
            progress.update(f"loading torch on {formatting.format_count(n, 'engine')}")
            self._connect(transport, transport.folder, transport.file_owner, plan, timeout, step_timeout, interface)

    @classmethod
    def from_transport(
        cls,
        transport: Transport,
        *,
        device: str = "auto",
        threads: int | None = None,
        timeout: float = 60,
        step_timeout: float | None = None,
        interface: str | None = None,
        folder: str | Path | None = None,
    ) -> Cluster:
        """A cluster over engines that somebody else started (see :func:`attach`), or over a test double."""
        self = cls.__new__(cls)
        folder = _make_cluster_folder(folder)
        plan = plan_devices(len(transport.engine_ids), device, threads)
        self._connect(transport, folder, shared_memory.ProcessId.from_pid(), plan, timeout, step_timeout, interface)
        return self

    @classmethod
    def from_client(cls, client: Any, **options: Any) -> Cluster:
        """Make a cluster of engines that somebody else started with ipyparallel, on one or several hosts.

        Parameters
        ----------
        client
            A connected ``ipyparallel.Client``. ``close()`` leaves its engines running.
        options
            Those of :class:`Cluster` that apply to running engines (device, threads, timeout, step_timeout,
            interface), and ``folder=``, where the engines meet: on several hosts, one that all of them see.

        """
        return cls.from_transport(engines.wrap_client(client), **options)

    @classmethod
    def reattach(cls, info: ClusterInfo) -> Cluster:
        """A cluster that another notebook had: see :func:`dtkit.attach`."""
        self = cls.__new__(cls)
        transport = LaunchedTransport.reattach(info)
        how = transport.config
        EngineGroup.__init__(
            self,
            transport,
            transport.folder,
            transport.file_owner,
            how.plan,
            how.timeout,
            info.step_timeout,
            info.interface,
        )
        # locks: while a file of some hundred bytes is written
        self.current_run, self._benchmarks, self._cluster_file_lock = None, {}, threading.Lock()
        try:
            self.engine_inventories = self.acquire_ownership()
            lost = self.find_lost_ranks()
            self.handshake([rank for rank in range(self.world_size) if rank not in lost])
            if not lost:
                self.form_process_group()
            self._started_at = info.begun
            self.write_cluster_file()
        except BaseException:
            self.undo_reattach(info)
            raise
        atexit.register(self._close_at_exit)
        return self

    @property
    def can_be_reattached(self) -> bool:
        """Whether its engines live on when this notebook ends, so that another one may take them over."""
        return isinstance(self._transport, LaunchedTransport)

    def write_cluster_file(self) -> None:
        """Say in the folder who has this cluster, and which engines it has now."""
        transport = self._transport
        if isinstance(transport, LaunchedTransport):
            with self._cluster_file_lock:
                self._make_cluster_info(transport).write()
            transport.on_refill = self._write_cluster_file_after_refill

    def _write_cluster_file_after_refill(self) -> None:
        """Else a notebook that takes over would not know them: they would wait for ever, and others be started."""
        if not self._is_closed and not self.is_superseded:
            with contextlib.suppress(OSError):  # closed meanwhile; or a full disk, and then nobody waits here for it
                self.write_cluster_file()

    def _make_cluster_info(self, transport: LaunchedTransport) -> ClusterInfo:
        return cluster_file.ClusterInfo(
            folder=self.folder,
            owner=self._owner_id,
            notebook=cluster_file.get_process_identity(os.getpid()),
            warden=transport.get_reaper_identity(),
            engine_ids=tuple(transport.engine_ids),
            spare_ids=tuple(transport.spare_ids),
            begun=self._started_at,
            launch_config=dataclasses.asdict(transport.config),
            step_timeout=self.step_timeout,
            interface=self._interface,
        )

    def _connect(
        self,
        transport: Transport,
        folder: Path,
        file_owner: shared_memory.ProcessId,
        device_plan: DevicePlan,
        timeout: float,
        step_timeout: float | None,
        interface: str | None,
    ) -> None:
        super().__init__(transport, folder, file_owner, device_plan, timeout, step_timeout, interface)
        self.current_run: Run | None = None
        self.engine_inventories: list[EngineInventory] = []
        self._benchmarks: dict[str, Benchmark] = {}
        # locks: while a file of some hundred bytes is written
        self._started_at, self._cluster_file_lock = time.time(), threading.Lock()
        try:
            self.handshake()
            self.form_process_group()
            self.write_cluster_file()
            self.fan_out("warm_up")  # nobody waits for it: the first step will find it done
        except BaseException:
            self.close()
            raise
        atexit.register(self._close_at_exit)

    # -- what a user calls ------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, inside the process group, and return the results by rank.

        The cell shows live what ranks print and pass to :func:`dtkit.log`. An interrupt reaches the engines.
        """
        return self._submit(fn, args, kwargs).display_and_wait()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Task:
        """Call a function as :meth:`run` does, without waiting. The returned task displays itself."""
        return self._submit(fn, args, kwargs)

    def torchrun(self, main: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``main(*args, **kwargs)`` on every rank in torchrun's environment, and return the results by rank.

        Use it for a script that makes its own process group. dtkit's group is formed again afterwards.
        """
        return self._submit(main, args, kwargs, own_group=True).display_and_wait()

    def _submit(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, own_group: bool = False
    ) -> Task:
        from dtkit.training import task

        self.ensure_group_formed()
        return task.submit(self, fn, args, kwargs, own_group=own_group)

    def partition(
        self,
        data: Any,
        *,
        by: str = "contiguous",
        weights: Sequence[float] | None = None,
        labels: Any = None,
        seed: int | None = None,
        target: Any = None,
        columns: Sequence[Any] | None = None,
        model: Any = None,
        loss: Callable[..., Any] | None = None,
        training_step: Callable[..., Any] | None = None,
    ) -> Partition:
        """One shard of `data` per rank. Shows who got what.

        Parameters
        ----------
        data
            A tuple of arrays (numpy or torch) of equal lengths, of which the last is the target and the others are the
            model's positional inputs; a pandas DataFrame; a map-style Dataset of torch or of Hugging Face's
            ``datasets``; or a function that returns one of these on the engine. What lies in files is read by the
            engines themselves: memory-mapped arrays, paths of ``.npy`` files (``("X.npy", "y.npy")``), and paths of
            parquet files or of a folder of them, read by row group.
        by
            "contiguous", "strided", "stratified" (every class spread evenly over the ranks), or "speed": every rank
            takes some steps of `model`, and gets rows, and so a part of each batch, in proportion to its speed.
        weights
            The share of each rank; by default equal shards, whose sizes differ by at most one.
        labels
            One per row, for "stratified" and for the picture; by default the target where it holds classes.
        seed
            Permutes the rows before they are cut; None keeps their order.
        target, columns
            Of a table (a DataFrame, parquet, a Dataset of ``datasets``): the column to predict, or a list of them; and
            the columns that the model gets, by default all others. Numbers keep their dtype where all features share
            one; mixed ones, booleans and float64 become torch's default dtype. A categorical target is numbered, other
            columns must hold numbers, none of them missing.
        model, loss, training_step
            For "speed": what will be trained, as for :meth:`train`.

        """
        from dtkit.data import distribute, speed
        from dtkit.planning import planner

        self.check_open()
        if by == "speed":
            planner.check_idle(self.current_run)
            speed.check_measurable(model, loss, training_step, weights)
        how: dict[str, Any] = {"labels": labels, "seed": seed, "target": target, "columns": columns}
        part = distribute.partition_data(self, data, by="contiguous" if by == "speed" else by, weights=weights, **how)
        return speed.repartition_by_speed(self, part, model, loss, training_step) if by == "speed" else part

    def broadcast(self, model: Any) -> ModelHandle:
        """The model on every rank with identical parameters and buffers. Shows a checksum per rank."""
        from dtkit.data import broadcast as replicas

        self.check_open()
        return replicas.broadcast(self, model)

    def train(
        self,
        model: Any,
        data: Any,
        *,
        optimizer: Callable[..., Any],
        batch_size: int,
        loss: Callable[..., Any] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        strategy: Strategy | None = None,
        shuffle: str | None = "shard",
        training_step: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        validation: Any = None,
        lr_scheduler: Callable[..., Any] | None = None,
        lr_scheduler_every: str = "step",
        callbacks: Sequence[Callable[[Run], Any]] = (),
        target: Any = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        prefetch: bool | None = None,
        seed: int = 0,
        start: bool = True,
        checkpoint_every: int | None = None,
        checkpoint_dir: str | Path | None = None,
        keep_last: int = 3,
        resume_from: str | Path | None = None,
        on_failure: str = "repair",
        snapshot_every: int | None = None,
    ) -> Run:
        """Train `model` on `data` and return at once: the run is a handle, a dashboard and something to await.

        Parameters
        ----------
        model
            An ``nn.Module`` (yours stays untouched), or what :meth:`broadcast` returned.
        data
            A :class:`Partition`, or raw data as for :meth:`partition` (permuted by `seed`, then cut; parquet is cut
            as it lies). Or a stream without length: an IterableDataset, or a function that returns an iterable of
            samples. A function of ``rank`` and ``world_size`` makes that rank's part; of any other stream rank r takes
            the items r, r + N, ... Give `steps`, which are then the most: the run ends with the stream.
        optimizer
            A function from parameters to an optimiser, as in ``lambda params: torch.optim.SGD(params, lr=0.1)``.
        batch_size
            Samples per update, over all ranks.
        loss
            ``loss(output, target)``: the mean over samples, or a pair (sum, weight).
        epochs, steps
            How long: one of them.
        strategy
            How to parallelise; :class:`DataParallel` by default.
        shuffle
            "shard": each rank its own rows, in an order of its own. "global": any number of ranks sees the same rows in
            each step, so that training is the same up to rounding. None: rows in order.
        training_step
            ``step(model, batch)`` instead of `loss`, for batches of any form; returns what `loss` may return.
        metrics
            Names and functions of (output, target) that return means over samples, for `validation` and `Run.evaluate`.
        validation
            Held-out data, evaluated after each epoch.
        lr_scheduler
            A function from the optimiser to any torch scheduler, as in
            ``lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)``. One that wants a
            loss (``ReduceLROnPlateau``) gets each epoch's: that of `validation`, or else of training.
        lr_scheduler_every
            When it is stepped: after every "step" (update) or every "epoch".
        callbacks
            Functions of the run, called in the notebook after every epoch and before the next one begins; what they
            raise pauses the run. :class:`EarlyStopping` is one.
        target
            Of a table: see :meth:`partition`. `validation` and `Run.evaluate` take the same columns.
        num_workers
            Processes per engine that load a Dataset's samples (torch's DataLoader); 0 loads in the engine.
        pin_memory
            Page-locked memory for batches on their way to a GPU; by default where there is one.
        prefetch
            Load the next batch in a thread while a step runs; by default where it pays: for data in files, and with a
            GPU for arrays too.
        seed
            Of the order of rows and of random numbers on the engines.
        start
            False leaves the run paused before its first step, for ``run.step()``.
        checkpoint_every, checkpoint_dir, keep_last
            Write a checkpoint into the folder `checkpoint_dir` after every so many steps, and after the last one; the
            newest `keep` stay. Notebook and engines must share the folder. Training goes on while ranks write; an error
            of the disk is shown, and training goes on too.
        resume_from
            A checkpoint's folder, or one that holds checkpoints, whose newest is taken. `steps` and `epochs` count from
            the very start. On the same layout training goes on as if it had never ended; on another number of engines
            or under another strategy with exactly the same state, and the run's log says what is different.
        on_failure
            What to do when an engine is lost. "repair": another one takes its place, with the state of a survivor; the
            fourth time in a row at one step the run fails. "shrink": the others take its shard, and go on (of the epoch
            that is under way, ``shuffle="shard"`` then sees some rows twice and some not). "pause": wait for
            ``run.resume()``, which repairs.
        snapshot_every
            Steps from one snapshot to the next, for strategies that keep the only copy of a part of the model on one
            rank: what the run goes back to when that is lost. Each rank keeps a copy of its own part and of another
            rank's in memory, where there is room; on disk they are written as often as it keeps up, for what is lost
            together with its copy. By default every 10 seconds in memory, and every 30 on disk.

        Raises
        ------
        ValueError, TypeError
            For what can't work, before anything starts.
        RunError
            While another run is running. One that is paused or has ended is released, its weights kept.
        EngineError
            Where the engines could not set the training up.

        """
        from dtkit.training import launch
        from dtkit.training.validation import TrainConfig

        options = TrainConfig(
            optimizer=optimizer,
            batch_size=batch_size,
            loss=loss,
            epochs=epochs,
            steps=steps,
            strategy=strategy,
            shuffle=shuffle,
            training_step=training_step,
            metrics=metrics,
            validation=validation,
            lr_scheduler=lr_scheduler,
            lr_scheduler_every=lr_scheduler_every,
            callbacks=callbacks,
            target=target,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch=prefetch,
            seed=seed,
            start=start,
            checkpoint_every=checkpoint_every,
            checkpoint_dir=checkpoint_dir,
            keep_last=keep_last,
            resume_from=resume_from,
            on_failure=on_failure,
            snapshot_every=snapshot_every,
        )
        return launch.train(self, self, model, data, options)

    def benchmark(self, dtype: str = "float32", *, remeasure: bool = False) -> Benchmark:
        """How fast the engines compute and what lies between them: measured once, in a few seconds, and kept.

        All ranks multiply matrices at once; all-reduces of growing size follow, then messages between each pair, one
        pair after the other. Shows itself as a table, and its ``figure()`` as heat maps from rank to rank.

        Parameters
        ----------
        dtype
            Of the matrices: "float32", "float64", "bfloat16" or "float16".
        remeasure
            Whether to measure again.

        Raises
        ------
        RunError
            While a run is running.

        """
        from dtkit.planning import planner

        if remeasure or dtype not in self._benchmarks:
            planner.check_idle(self.current_run)
            self._benchmarks[dtype] = planner.run_benchmark(self, dtype)
        return self._benchmarks[dtype]

    def plan(
        self,
        model: Any,
        *,
        batch_size: int,
        optimizer: Callable[..., Any],
        sample: Any = None,
        loss: Callable[..., Any] | None = None,
        training_step: Callable[..., Any] | None = None,
        strategies: Sequence[Strategy] | None = None,
    ) -> Plan:
        """Whether a training would fit, and what a step would cost, for each strategy and rank. Trains nothing.

        Activations and optimiser state come from a step on tensors without memory, which is no guess and takes none
        (where the model's code needs numbers: from real steps on a few rows). If there is little doubt that it fits,
        all ranks take some real steps of a copy, for the time and for the overhead.

        Counted are the model as it was sent (engines keep it), the copy that trains, gradients, optimiser state, the
        larger of what forward and backward or the update hold besides at their peak (batch included), and the overhead
        by which processes grow beyond that: freed memory that malloc keeps, workspace of convolutions. Not counted: the
        data, and what torch loads at the first step. ``compile=True`` and ``balance`` are planned for as if left out.

        Parameters
        ----------
        model, optimizer, loss, training_step, batch_size
            As for :meth:`train`.
        sample
            A batch or a few rows, as in ``(X[:8], y[:8])``, or a :class:`Partition`: what a row looks like.
        strategies
            Which to compare; one of each that exists by default.

        Raises
        ------
        ValueError, TypeError
            For what can't be planned.
        RunError
            While a run is running.
        EngineError
            Where model, loss or optimiser fail.

        """
        from dtkit.planning import planner, profiler

        planner.check_idle(self.current_run)
        request = profiler.PlanRequest(batch_size, optimizer, sample, loss, training_step, strategies)
        return planner.make_plan(self, model, request, self.benchmark)

    def stacks(self) -> Stacks:
        """Every rank's Python stack as of now, also while engines are busy, in a collective, or stuck.

        Shows each rank's process, phase, step and lines, the user's own highlighted. Takes half a second on average,
        waits for no engine's call and disturbs no training.
        """
        from dtkit.health import stacks

        self.check_open()
        return stacks.collect_stacks(self.folder, self.nodes)

    def activate(self) -> None:
        """Make ipyparallel's ``%px`` and ``%%px`` speak to these engines, between dispatches."""
        self.check_open()
        view = getattr(self._transport, "make_locked_view", None)
        if view is None:
            raise ClusterError("these engines are no ipyparallel engines, so %%px can't reach them")
        view(self._lock).activate()

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run, then everything that this cluster started. Idempotent.

        Where another notebook has taken it over, it stays.
        """
        if self.is_superseded:
            self.detach()
            return
        with self._lock:
            if self._is_closed:
                return
            run, self.current_run = self.current_run, None
        if run is not None:
            run.lifecycle.close()
        self._release_engines()
        with self._lock:
            self._is_closed = True
        for shipment in self._uploaded_payloads:
            shipment.discard()
        self._transport.close()
        with contextlib.suppress(OSError):
            for path in [*self._folder.glob("store-*"), *self._folder.glob(f"{END_EARLY_PREFIX}*")]:
                path.unlink()
            (self._folder / reaper.JOB_FLAG).unlink(missing_ok=True)
            status.remove_status_files(self._folder)
            shutil.rmtree(self._folder / SNAPSHOTS_FOLDER, ignore_errors=True)
            self._folder.rmdir()  # somebody else's engines: the folder is ours alone, and empty by now
        atexit.unregister(self._close_at_exit)

    @property
    def is_superseded(self) -> bool:
        """Whether another notebook has taken it over."""
        if not isinstance(self._transport, LaunchedTransport):
            return False
        with contextlib.suppress(FileNotFoundError, ValueError):
            return cluster_file.read_cluster_file(self.folder).owner > self._owner_id
        return False

    def check_owned(self) -> None:
        """See :class:`~dtkit.rpc.engine_group.Ranks`."""
        if self.is_superseded:
            raise SupersededError("another notebook has taken this cluster over; dtkit.attach() takes it back")

    def undo_reattach(self, info: ClusterInfo) -> None:
        """It could not be taken over after all: it is whose it was, say so to the engines and in the folder."""
        try:
            if info.is_owned:  # else nobody is there to call them
                with contextlib.suppress(DtkitError):  # the other one is told that it has them no more
                    self.return_ownership(info.owner)
        finally:
            self._restore_cluster_file(info)
            self.detach()

    def _restore_cluster_file(self, info: ClusterInfo) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            now = cluster_file.read_cluster_file(self.folder)
            if now.owner == self._owner_id:
                dataclasses.replace(now, owner=info.owner, notebook=info.notebook).write()

    def detach(self) -> None:
        """Speak to these engines no more, and leave them to whoever has them. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if isinstance(self._transport, LaunchedTransport):
            self._transport.detach()
        atexit.unregister(self._close_at_exit)

    def repair(self) -> list[int]:
        """Start engines in place of those that are gone. Returns their ranks.

        A run goes on where survivors, or its last snapshot, stand; one that is running sees to that by itself.
        """
        self.check_open()
        self.check_owned()
        lost, run = self.find_lost_ranks(), self.current_run
        if run is not None and not run.is_released:
            run.repair()
        elif lost:
            self.replace(lost)
            self.clear_if_all_new()
        return lost

    def _release_engines(self) -> None:
        """Engines that live on leave our process group and forget what they held for us."""
        if self._nodes and not isinstance(self._transport, LaunchedTransport):
            self.gather_replies(self.fan_out("leave_group"), 5.0)

    def _close_at_exit(self) -> None:
        """A script that ends takes its engines along, unless told to keep them; a kernel leaves them to the lease."""
        if isinstance(self._transport, LaunchedTransport) and self._transport.config.keep_alive:
            return
        if not _is_in_kernel():
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return "Cluster(closed)"
        head = f"Cluster of {formatting.format_count(self.world_size, 'engine')}, {self.backend}"
        return "\n".join([head, self._make_table().to_text(), *self._list_notes()])

    def _list_notes(self) -> list[str]:
        """What whoever looks at it should know."""
        from dtkit.engine.comm.process_group import find_loopback_interface

        found = [self._device_plan.note] if self._device_plan.note else []
        if self._interface not in (None, find_loopback_interface()):
            found.append(f"Tensors travel over {self._interface}, and that traffic is not encrypted.")
        return found

    def _make_table(self) -> Table:
        header = [
            "rank",
            "engine id",
            "host",
            "pid",
            "device",
            "memory used",
            "memory free",
            "threads",
            "backend",
        ]
        rows = [
            [
                str(n.rank),
                str(n.engine_id),
                n.host,
                str(n.pid),
                n.device,
                formatting.format_bytes(n.memory_total - n.memory_free),
                formatting.format_bytes(n.memory_free),
                str(n.threads),
                self.backend,
            ]
            for n in self._nodes
        ]
        return Table(header, rows, {"host", "device", "backend"})

    def _repr_html_(self) -> str:
        if self._is_closed:
            return "<p>Cluster(closed)</p>"
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._list_notes())
        return self._make_table().to_html() + notes


def _make_cluster_folder(location: str | Path | None) -> Path:
    """A new folder for a cluster, that only this user can enter: in `where`, or among this host's temporary ones."""
    parent = Path(tempfile.gettempdir() if location is None else location).expanduser().absolute()
    try:
        return Path(tempfile.mkdtemp(prefix="dtkit-", dir=parent))
    except OSError as error:
        raise ValueError(
            f"folder={str(parent)!r}: {error.strerror}. It must be one that the notebook and all engines can write to"
        ) from None


def _is_in_kernel() -> bool:
    """Whether this process is a Jupyter kernel."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return hasattr(shell, "kernel")


def _check_spares(spares: int) -> None:
    if isinstance(spares, bool) or not isinstance(spares, int) or spares < 0:
        raise ValueError(
            f"spares={spares!r}; it is how many engines wait to replace one that is lost. Use an integer from 0 up"
        )
