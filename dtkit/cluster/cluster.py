"""The cluster that a user holds: start or attach, train, run, show, close."""

from __future__ import annotations

import atexit
import dataclasses
import math
from typing import TYPE_CHECKING, Any, Self

from dtkit._util import formatting, timeouts
from dtkit._util.notebook import in_notebook
from dtkit.cluster import start as starting
from dtkit.cluster import transport as transports
from dtkit.cluster.config import LaunchConfig
from dtkit.cluster.devices import choose_num_engines, plan_devices
from dtkit.cluster.launchers.launcher import check_launcher
from dtkit.dashboard.text import cluster_text
from dtkit.data import broadcast, distribute, speed
from dtkit.errors import ClusterError
from dtkit.health import stacks
from dtkit.planning import planner, profiler
from dtkit.rpc.protocol import GroupOperations, make_call
from dtkit.rpc.replacement import replace_lost_ranks
from dtkit.training import launch, task
from dtkit.training.config import TrainConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.cluster.devices import DevicePlan
    from dtkit.data.partition import Partition
    from dtkit.planning.cost_model import Benchmark
    from dtkit.planning.plan import Plan
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.transport import Transport
    from dtkit.strategies.base import Strategy
    from dtkit.training.run import Run
    from dtkit.types import NodeInfo


class Cluster:
    """Engines on this machine (or wherever `launcher` starts them), as ranks 0 to n - 1 of one process group.

    n : number of engines; by default one per GPU, else what cores and memory allow, at most four.
    launcher : "local", or the name of any ipyparallel launcher ("ssh", "slurm", "mpi", ...).
    device : "auto" (a GPU if there is one), "cpu" or "cuda".
    threads : torch threads per engine; by default the cores divided among the engines.
    memory_limit : bytes, or text such as "600MB", that each engine may allocate; with a GPU, of its memory.
    timeout : seconds that starting may take, and forming the group.
    step_timeout : seconds that a collective may wait. By default 30 minutes for the first step of a job, then the
        longer of 60 seconds and 20 median steps.
    lease : seconds that engines live without a notebook, whose kernel may restart; by default 60, or 30 minutes with a
        job in memory.
    interface : network interface of the collectives; by default loopback, which other hosts can't reach. Engines on
        several hosts need another one. Tensor traffic is not encrypted.
    spares : engines that are started too and wait, so that a lost one can be replaced at once.
    keep_alive : whether engines also outlive a script, and wait for :func:`dtkit.attach` as long as `lease` says;
        without a `lease`, until somebody closes the cluster.

    """

    def __init__(
        self,
        n: int | None = None,
        *,
        launcher: str = "local",
        device: str = "auto",
        threads: int | None = None,
        memory_limit: int | str | None = None,
        timeout: float = timeouts.CLUSTER_TIMEOUT_S,
        step_timeout: float | None = None,
        lease: float | None = None,
        interface: str | None = None,
        spares: int = 0,
        keep_alive: bool = False,
    ) -> None:
        check_launcher(launcher)
        n = choose_num_engines(n, launcher)
        plan = plan_devices(n, device, threads)
        limit = None if memory_limit is None else formatting.parse_bytes(memory_limit)
        lease = math.inf if keep_alive and lease is None else lease
        config = LaunchConfig(launcher, plan, timeout, limit, lease, spares, keep_alive)
        group = starting.start_engines(n, config, step_timeout=step_timeout, interface=interface)
        self._set_up(group, plan, keep_alive=keep_alive)

    def _set_up(self, group: EngineGroup, plan: DevicePlan, *, keep_alive: bool = False) -> None:
        self._engine_group, self._device_note, self._keep_alive = group, plan.note, keep_alive
        self.current_run: Run | None = None
        """The last run that was started, unless it was released."""
        self._benchmarks: dict[str, Benchmark] = {}
        atexit.register(self._close_at_exit)

    @classmethod
    def from_client(cls, client: Any, **options: Any) -> Cluster:
        """Make a cluster of engines that somebody else started with ipyparallel, on one or several hosts.

        Options: `device`, `threads`, `timeout`, `step_timeout` and `interface`, as for :class:`Cluster`; and `folder`,
        where the engines meet: on several hosts, one that all of them see. :meth:`close` leaves the engines running.
        """
        return cls.from_transport(transports.wrap_client(client), **options)

    @classmethod
    def from_transport(
        cls, transport: Transport, *, device: str = "auto", threads: int | None = None, **options: Any
    ) -> Cluster:
        """Make a cluster of a test double's engines (:mod:`dtkit.testing`). Options as for :meth:`from_client`."""
        plan = plan_devices(len(transport.engine_ids), device, threads)
        self = cls.__new__(cls)
        self._set_up(starting.use_engines(transport, plan, **options), plan)
        return self

    @classmethod
    def _from_group(cls, group: EngineGroup, config: LaunchConfig, run: Run | None) -> Cluster:
        """Make a cluster of engines that were taken over: see :func:`dtkit.attach`."""
        self = cls.__new__(cls)
        self._set_up(group, config.plan, keep_alive=config.keep_alive)
        self.current_run = run
        return self

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeInfo]:
        """One row per rank, with the memory of the last formation or :meth:`refresh_nodes`."""
        return self._engine_group.nodes

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._engine_group.world_size

    @property
    def backend(self) -> str:
        """Library of the collectives: "gloo" or "nccl"."""
        return self._engine_group.membership.backend

    @property
    def folder(self) -> Path:
        """The cluster's private folder."""
        return self._engine_group.folder

    def refresh_nodes(self) -> list[NodeInfo]:
        """Ask every engine for its memory again."""
        self._engine_group.membership.set_nodes(self._engine_group.call_all(make_call(GroupOperations.node_info)))
        return self.nodes

    def stacks(self) -> stacks.Stacks:
        """Return every rank's Python stack as of now, also while engines are busy, in a collective, or stuck.

        Takes half a second on average, waits for no call, and disturbs no training.
        """
        self._engine_group.check_open()
        return stacks.collect_stacks(self.folder, self.nodes)

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Interrupt what engines are doing, as the notebook's interrupt button does. Does not wait."""
        self._engine_group.interrupt(ranks)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, inside the process group, and return the results by rank.

        The cell shows live what ranks print and pass to :func:`dtkit.log`. An interrupt reaches the engines.
        """
        return task.submit(self._engine_group, fn, args, kwargs).display_and_wait()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> task.Task:
        """Call a function as :meth:`run` does, without waiting. The returned task displays itself."""
        return task.submit(self._engine_group, fn, args, kwargs)

    def torchrun(self, main: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``main(*args, **kwargs)`` on every rank in torchrun's environment, and return the results by rank.

        Use it for a script that makes its own process group. dtkit's group is formed again afterwards.
        """
        return task.submit(self._engine_group, main, args, kwargs, own_group=True).display_and_wait()

    def activate(self) -> None:
        """Let ipyparallel's ``%px`` and ``%%px`` use these engines, between dispatches."""
        self._engine_group.check_open()
        make_view = getattr(self._engine_group.transport, "make_locked_view", None)
        if make_view is None:
            raise ClusterError("%%px needs ipyparallel engines; these are of another kind")
        make_view(self._engine_group.lock).activate()

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
        """Partition data into one shard per rank. The result shows which rank got what.

        data : a tuple of equally long arrays (numpy or torch), the model's inputs and last the target; a pandas
            DataFrame; a map-style Dataset of torch or Hugging Face; or a function that returns one of these on the
            engine. Engines read files themselves: memory-mapped arrays, ``.npy`` paths (``("X.npy", "y.npy")``), and
            parquet files or a folder of them, by row group.
        by : "contiguous", "strided", "stratified" (each class spread evenly over the ranks), or "speed": every rank
            takes some steps of `model`, and gets rows, and so a part of each batch, in proportion to its speed.
        weights : share of each rank; by default equal shards, whose sizes differ by at most one.
        labels : one per row, for "stratified" and the picture; by default the target, if it holds classes.
        seed : permutes the rows before they are partitioned; None keeps their order.
        target, columns : for tables, the column to predict, or several; and the input columns, by default all others.
            Features that share one dtype keep it; mixed ones, booleans and float64 become torch's default dtype. A
            categorical target is numbered. Other columns must hold numbers, none of them missing.
        model, loss, training_step : for "speed", what will be trained, as for :meth:`train`.

        """
        group = self._engine_group
        group.check_open()
        options: dict[str, Any] = {"labels": labels, "seed": seed, "target": target, "columns": columns}
        if by != "speed":
            return distribute.partition_data(group, data, by=by, weights=weights, **options)
        planner.check_idle(self.current_run)
        speed.check_measurable(model, loss, training_step, weights)
        equal_shards = distribute.partition_data(group, data, **options)
        return speed.repartition_by_speed(group, equal_shards, model, loss, training_step)

    def broadcast(self, model: Any) -> broadcast.ModelHandle:
        """Copy a model to every rank, with identical parameters and buffers. Shows a checksum per rank."""
        self._engine_group.check_open()
        return broadcast.broadcast(self._engine_group, model)

    # -- training ---------------------------------------------------------------------------------------------

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
        columns: Sequence[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
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
        """Train `model` on `data`. Returns at once: the run is a handle, a dashboard and something to await.

        model : an ``nn.Module`` (which stays as it is), or what :meth:`broadcast` returned.
        data : a :class:`Partition`, or data as for :meth:`partition`, permuted by `seed`. Or a stream: an
            IterableDataset, or a function that returns an iterable of samples. A function of ``rank`` and
            ``world_size`` makes that rank's part; of other streams rank r takes the items r, r + N, ...
        optimizer : a function of the parameters, as in ``lambda params: torch.optim.SGD(params, lr=0.1)``. If it is a
            function of ``model`` it gets the model, and of ``named_parameters`` pairs (name, parameter).
        batch_size : samples per update, over all ranks.
        loss : ``loss(output, target)``, the mean over samples, or a pair (sum, weight).
        epochs, steps : length of the training; give one. A stream needs `steps`, and may end before.
        strategy : how to parallelize; :class:`DataParallel` by default.
        shuffle : "shard": each rank its own rows, in its own order. "global": the rows of a step don't depend on the
            number of ranks, so that training is the same up to rounding. None: rows (of a partition) in their order.
        training_step : ``step(model, batch)`` instead of `loss`, for batches of any form; returns what `loss` may.
        metrics : names and functions of (output, target) that return means, for `validation` and `Run.evaluate`.
        validation : held-out data, evaluated after each epoch.
        lr_scheduler : a function from the optimizer to a torch scheduler, as in ``lambda optimizer: StepLR(optimizer,
            30)``. One that needs a loss (``ReduceLROnPlateau``) gets each epoch's, of `validation` if there is any.
        lr_scheduler_every : "step" (after each update) or "epoch".
        callbacks : functions of the run, called in the notebook between epochs. An error in one pauses the run.
        target, columns : for tables, see :meth:`partition`. `validation` and `Run.evaluate` take the same columns.
        collate_fn : function from a list of a Dataset's samples to a batch.
        num_workers : processes per engine that load a Dataset's samples (torch's DataLoader); 0 loads in the engine.
        pin_memory : page-locked memory for batches on their way to a GPU; by default if there is one.
        prefetch : load the next batch during a step; by default for data in files, and with a GPU for arrays.
        seed : of the order of rows, and of random numbers on the engines.
        start : False leaves the run paused before its first step, for ``run.step()``.
        checkpoint_every, checkpoint_dir, keep_last : write a checkpoint into this folder, which notebook and engines
            share, after so many steps and after the last one; the newest ones stay. Disk errors don't end training.
        resume_from : a checkpoint, or a folder of which the newest is taken. `steps` and `epochs` count from the very
            start. Training continues from exactly that state, also with other engines or another strategy.
        on_failure : when an engine is lost, "repair" replaces it, with the state of a survivor; the fourth time in a
            row at one step the run fails. "shrink": the others take over its shard (in this epoch, ``shuffle="shard"``
            then repeats some rows and skips others). "pause": wait for ``run.resume()``, which repairs.
        snapshot_every : steps between snapshots, for strategies of which a rank holds the only copy of a part of the
            model. Two ranks keep each part in memory; disk serves if both are lost. By default every 10 seconds in
            memory, every 30 on disk.

        Raises ValueError or TypeError for what can't work, before anything starts; RunError while another run is
        running (one that is paused or has ended is released, and keeps its weights); EngineError if the job can't be
        built on the engines.
        """
        arguments = locals()
        config = TrainConfig(**{field.name: arguments[field.name] for field in dataclasses.fields(TrainConfig)})
        return launch.train(self._engine_group, self, model, data, config)

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
        """Predict for each strategy and rank whether a training would fit, and what a step would cost. Trains nothing.

        Activations and optimizer state come from a step on tensors without memory; if the model's code needs numbers,
        from real steps on a few rows. If it surely fits, all ranks take some real steps of a copy, for the time and the
        memory overhead. Memory excludes the data, and what torch loads at the first step.

        `sample` is a batch or a few rows, as in ``(X[:8], y[:8])``, or a :class:`Partition`; `strategies` are those to
        compare, by default one of each that exists; the rest is as for :meth:`train`. Raises as `train` does.
        """
        planner.check_idle(self.current_run)
        request = profiler.PlanRequest(batch_size, optimizer, sample, loss, training_step, strategies)
        return planner.make_plan(self._engine_group, model, request, self.benchmark)

    def benchmark(self, dtype: str = "float32", *, remeasure: bool = False) -> Benchmark:
        """Measure how fast the engines compute and communicate, in a few seconds. Later calls return the same result.

        All ranks multiply matrices of `dtype` ("float32", "float64", "bfloat16" or "float16") at once. Then come
        all-reduces of growing size, and messages between each pair of ranks. The result shows itself as a table, and
        its ``figure()`` as heat maps. `remeasure` measures again. Raises RunError while a run is running.
        """
        if remeasure or dtype not in self._benchmarks:
            planner.check_idle(self.current_run)
            self._benchmarks[dtype] = planner.run_benchmark(self._engine_group, dtype)
        return self._benchmarks[dtype]

    # -- lost engines, and the end ----------------------------------------------------------------------------

    def repair(self) -> list[int]:
        """Start new engines in place of those that have ended, and return their ranks.

        A running run does this by itself. A paused one continues from the step of the survivors or of a snapshot.
        """
        group = self._engine_group
        group.check_open()
        group.check_owned()
        lost_ranks, run = group.membership.find_lost_ranks(), self.current_run
        if run is not None and not run.is_released:
            run.repair()
        elif lost_ranks:
            replace_lost_ranks(group, lost_ranks)
        return lost_ranks

    def close(self) -> None:
        """End the run, then everything that this cluster started. Idempotent.

        Nothing ends if another notebook has taken the cluster over.
        """
        group = self._engine_group
        atexit.unregister(self._close_at_exit)
        if group.is_superseded:
            group.detach()
            return
        with group.lock:
            if group.is_closed:
                return
            run, self.current_run = self.current_run, None
        if run is not None:
            run.lifecycle.close()
        group.close()

    def _close_at_exit(self) -> None:
        """Close the cluster as a script ends. A kernel may restart, so its cluster lives as long as the lease."""
        if not self._keep_alive and not in_notebook():
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return cluster_text.make_page(self._engine_group, self._device_note).to_text()

    def _repr_html_(self) -> str:
        return cluster_text.make_page(self._engine_group, self._device_note).to_html()
