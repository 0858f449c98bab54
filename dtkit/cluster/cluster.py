"""The cluster that a user holds: run functions, distribute data and models, train, plan."""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import hide_from_completion
from dtkit.cluster.engines import Engines
from dtkit.data import broadcast, distribute, speed
from dtkit.planning import planner, profiler
from dtkit.training import item_map, launch, script_task, task
from dtkit.training.config import TrainConfig
from dtkit.training.elastic_script import make_policy

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from pathlib import Path

    import keras
    import torch
    from numpy.typing import ArrayLike

    from dtkit.data.broadcast import ModelHandle
    from dtkit.data.partition import Partition
    from dtkit.engine.callbacks import EngineCallback
    from dtkit.planning.plan import Plan
    from dtkit.strategies.base import Strategy
    from dtkit.training.run import Run

_NEEDS_ENGINES = "which needs all engines"


@suggest_attributes("cluster")
@hide_from_completion("from_transport", "refresh_nodes")
@explain_arguments
class Cluster(Engines):
    """Engines on this machine (or wherever `launcher` starts them), as ranks 0 to n - 1 of one process group::

        with dtkit.Cluster(2) as cluster:  # closed at the end of the block, else by cluster.close()
            print(cluster.run(os.getpid))
            run = cluster.train(model, (X, y), loss=nn.CrossEntropyLoss(), optimizer=sgd, batch_size=64, epochs=3)
            run.wait()

    In a notebook, ``cluster`` in the last line of a cell shows a table of the engines. Raises ValueError for an option
    that can't be met, and ClusterError if engines don't start within `timeout`.

    n : number of engines; by default one per GPU, else what cores and memory allow, at most four.
    launcher : "local"; several hosts, such as ``dtkit.SSH(["gpu1:4", "gpu2:4"])``; or the name of any ipyparallel
        launcher ("slurm", "mpi", ...), whose engines must share the notebook's folder.
    device : "auto" (a GPU if there is one), "cpu" or "cuda".
    threads : torch threads per engine; by default the cores divided among the engines.
    memory_limit : bytes, or text such as "600MB", that each engine may allocate; with a GPU, of the GPU's memory.
    timeout : seconds that starting the engines and forming the group may take.
    step_timeout : seconds that a collective may wait. By default 30 minutes for the first step of a job, then the
        longer of 60 seconds and 20 median steps.
    lease : seconds that engines live without a notebook, such as during a kernel restart. By default 60, or 30 minutes
        with a job in memory; none after a shutdown of the kernel, unless a run is running, or paused with parameters
        that are of use. After a script that was killed, 60.
    interface : network interface of the collectives; by default loopback, which other hosts can't reach. Engines on
        several hosts need another one. Tensor traffic is not encrypted.
    spares : engines that are started too and wait, so that a lost one can be replaced at once.
    keep_alive : whether engines also outlive a script, and wait for :func:`dtkit.attach` until `lease` is over.
        Without a `lease`, they wait until somebody closes the cluster.
    """

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank, inside the process group, and return the results by rank.

        The cell shows live what ranks print, and charts of what they pass to :func:`dtkit.log`. ``cluster.last_task``
        keeps these numbers: ``rows``, ``to_pandas()`` and ``figure()``. An interrupt reaches the engines.
        """
        return self.submit(function, *args, **kwargs).display_and_wait()

    def submit(self, function: Callable[..., Any] | str | Path, /, *args: Any, **kwargs: Any) -> task.Task:
        """Call a function as :meth:`run` does, without waiting. The returned task displays itself.

        The path of a script, or "-m" and a module's name, runs as by :meth:`torchrun`: ``cluster.submit("train.py")``.
        """
        if isinstance(function, (str, os.PathLike)):
            self.last_task = script_task.submit_script(self._engine_group, function, args, kwargs, self.repair)
        else:
            self.last_task = task.submit(self._engine_group, function, args, kwargs, self.repair)
        return self.last_task

    def map(
        self,
        function: Callable[..., Any],
        items: Iterable[Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
    ) -> list[Any]:
        """Call ``function(item, *args, **kwargs)`` for each item, on single engines as they become free.

        Returns the results in the order of the items. The function and `args` travel once, and may be large. The item
        of an engine that is lost is computed again, at most three times. An interrupt reaches the engines.

        on_error : "raise" ends the other items, and raises :class:`~dtkit.errors.ItemError`, which names the item.
            "return" puts that error into the item's place.
        timeout : seconds for all items; then the engines are interrupted, and TimeoutError is raised.

        Raises RunError while a run is running.
        """
        planner.check_idle(self.current_run, _NEEDS_ENGINES)
        options: dict[str, Any] = {"args": args, "kwargs": kwargs, "on_error": on_error, "timeout": timeout}
        return item_map.map_items(self._engine_group, function, items, self.repair, **options)

    def search(
        self, objective: Callable[..., Any], space: Mapping[str, Sequence[Any]] | None = None, **options: Any
    ) -> Any:
        """Look for the parameters with the best value: each trial on one engine. See :mod:`dtkit.integrations.search`.

        objective : function of a trial, which returns a number. As with Optuna, ``trial.suggest_float("lr", 1e-4, 1e-1,
            log=True)`` chooses a parameter. ``trial.report(value, step)`` reports an intermediate value, and
            ``trial.should_prune()`` returns whether to end a bad trial early.
        space : choices by name, as in ``{"lr": [0.1, 0.01]}``; ``trial.params`` has the chosen ones. All combinations
            are tried, or `n_trials` of them. Without a space, Optuna chooses.
        options : `n_trials`, `study` (Optuna's), `direction`, `seed`, `args`, `kwargs`, `on_error` and `timeout`.

        Returns a :class:`~dtkit.integrations.search.SearchResult`. Raises RunError while a run is running.
        """
        planner.check_idle(self.current_run, _NEEDS_ENGINES)
        search = importlib.import_module("dtkit.integrations.search.driver")  # integrations import the cluster
        return search.search(self._engine_group, objective, space, self.repair, **options)

    def joblib(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that runs joblib's tasks on the engines, such as all of scikit-learn's with `n_jobs`.

        ``with cluster.joblib(): GridSearchCV(...).fit(X, y)``. Shared memory holds large arrays once. Results equal
        those of a single process. Raises RunError while a run is running.
        """
        planner.check_idle(self.current_run, _NEEDS_ENGINES)
        backend = importlib.import_module("dtkit.integrations.joblib.backend")  # integrations import the cluster
        context: contextlib.AbstractContextManager[None] = backend.use_engines(self._engine_group, self.repair)
        return context

    def torchrun(
        self,
        main: str | Path | Callable[..., Any],
        *args: Any,
        horovod: bool = False,
        min_np: int | None = None,
        max_np: int | None = None,
        on_failure: Literal["repair", "shrink"] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a script in a fresh process for each rank, as torchrun would, and return the results by rank.

        main : the path of a script (``cluster.torchrun("train.py", "--epochs", 3)``), "-m" and a module's name, or a
            function, which is called with the other arguments. It makes its own process group.
        horovod : whether ``import horovod.torch as hvd`` finds :mod:`dtkit.integrations.horovod.torch` in the script.
        on_failure : what to do when an engine is lost, for scripts with ``hvd.elastic.run``. "repair" starts another
            one from the others' last commit, or goes on without it if none can be started. "shrink" goes on at once
            with fewer ranks. By default "shrink" with `min_np`, else "repair".
        min_np, max_np : as for horovodrun, the fewest ranks to go on with (1), and the most to start with. Engines
            beyond `max_np` wait to replace a lost one.

        The cell shows what ranks print and pass to :func:`dtkit.log`, as for :meth:`run`. The results are a function's
        return values, or a script's exit codes, all 0. Any other code raises EngineError and ends the other ranks. An
        interrupt ends the processes within seconds. Engines keep their state.
        """
        asked: dict[str, Any] = {"min_np": min_np, "max_np": max_np, "on_failure": on_failure}
        policy = make_policy(self._engine_group.world_size, horovod=horovod, **asked)
        self.last_task = script_task.submit_script(self._engine_group, main, args, kwargs, self.repair, policy)
        return self.last_task.display_and_wait()

    def partition(
        self,
        data: Any,
        *,
        by: str = "contiguous",
        weights: Sequence[float] | None = None,
        labels: ArrayLike | None = None,
        seed: int | None = None,
        target: Hashable | Sequence[Hashable] = None,
        columns: Sequence[Hashable] | None = None,
        model: torch.nn.Module | ModelHandle | None = None,
        loss: Callable[..., torch.Tensor | tuple[Any, ...]] | None = None,
        training_step: Callable[..., torch.Tensor | tuple[Any, ...]] | None = None,
    ) -> Partition:
        """Partition data into one shard per rank. The result shows which rank got what::

            partition = cluster.partition((X, y), by="stratified", seed=0)
            partition.sizes  # rows by rank
            partition.indices(1)  # the rows of rank 1

        data : a tuple of equally long arrays (numpy or torch), the model's inputs and last the target. Or a dict of
            arrays, a pandas DataFrame, a list of samples, or a map-style Dataset of torch or Hugging Face. Or a
            function that returns one of these on the engine. Engines read files themselves: memory-mapped arrays,
            ``.npy`` paths (``("X.npy", "y.npy")``), and parquet files or a folder of them, by row group.
        by : "contiguous", "strided", "stratified" (each class spread evenly over the ranks), or "speed". With "speed",
            every rank takes some steps of `model`. It gets rows, and so a part of each batch, in proportion to its
            speed.
        weights : share of each rank; by default equal shards, whose sizes differ by at most one.
        labels : one per row, for "stratified" and the picture; by default the target, if its values are classes.
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

    def broadcast(self, model: torch.nn.Module) -> ModelHandle:
        """Copy a model to every rank, with identical parameters and buffers.

        The result shows a checksum per rank, and is what a training takes::

            replicas = cluster.broadcast(model)
            run = cluster.train(replicas, (X, y), loss=nn.CrossEntropyLoss(), optimizer=sgd, batch_size=64, steps=20)
        """
        self._engine_group.check_open()
        return broadcast.broadcast(self._engine_group, model)

    def train(
        self,
        model: torch.nn.Module | ModelHandle | keras.Model,
        data: Any,
        *,
        optimizer: Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]] | None = None,
        batch_size: int | None = None,
        loss: Callable[..., torch.Tensor | tuple[Any, ...]] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        strategy: Strategy | None = None,
        shuffle: str | bool | None = "shard",
        training_step: Callable[..., torch.Tensor | tuple[Any, ...]] | None = None,
        metrics: Mapping[str, Callable[..., SupportsFloat]] | None = None,
        validation: Any = None,
        validation_every: int = 1,
        lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        lr_scheduler_every: str = "step",
        callbacks: Sequence[Any] = (),
        on_engine: Sequence[EngineCallback] = (),
        target: Hashable | Sequence[Hashable] = None,
        columns: Sequence[Hashable] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        activation_checkpointing: bool | Sequence[str] = False,
        sampler: Iterable[int] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        prefetch: bool | None = None,
        seed: int = 0,
        start: bool = True,
        checkpoint_every: int | None = None,
        checkpoint_dir: str | Path | None = None,
        keep_last: int = 3,
        checkpoint_trainable_only: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
        on_failure: str = "repair",
        snapshot_every: int | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
    ) -> Run:
        """Train `model` on `data`. Returns at once: the run is a handle, a dashboard and something to await::

            run = cluster.train(
                model, (X, y), loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                batch_size=64, epochs=10,
            )
            await run  # in a script, run.wait(); then run.model is the trained model

        model : an ``nn.Module`` (which stays as it is), or what :meth:`broadcast` returned. A Lightning module brings
            its step, optimizer and schedule; a datamodule as `data` also brings validation data.
        data : a :class:`Partition`, or data as for :meth:`partition`, permuted by `seed`. Or a stream: an
            IterableDataset, or a function that returns an iterable of samples. A function of ``rank`` and
            ``world_size`` makes that rank's part; of other streams rank r takes the items r, r + N, ... Or a torch
            DataLoader: its Dataset, collate_fn, order, workers and batch size are used.
        optimizer : a function of the parameters, as in ``lambda params: torch.optim.SGD(params, lr=0.1)``. If it is a
            function of ``model`` it gets the model, and of ``named_parameters`` pairs (name, parameter). It may return
            a list of optimizers, each for parameters of its own.
        batch_size : samples per update, over all ranks; by default that of a DataLoader.
        loss : ``loss(output, target)``, the mean over samples, or a pair (sum, weight). Leave it out for a model that
            returns its own loss, as Hugging Face's do. Its batches are dicts of forward's arguments.
        epochs, steps : length of the training; give one. A stream needs `steps`, and may end earlier.
        strategy : how to parallelize; :class:`DataParallel` by default.
        shuffle : "shard": each rank its own rows, in its own order. "global": the rows of a step don't depend on the
            number of ranks. So training is the same up to rounding. None or False: rows in their order.
        training_step : ``step(model, batch)`` instead of `loss`, for batches of any form; it returns what `loss` may.
            With several optimizers, ``step(model, batch, optimizers)`` calls ``backward`` and ``step`` itself.
        metrics : names and functions of (output, target) that return means, or objects of torchmetrics, for
            `validation` and `Run.evaluate`. With the model's own loss they get its logits and the labels. The attribute
            ``higher_is_better`` of a function says which value is the best.
        validation, validation_every : held-out data, evaluated after so many epochs each time, and at the end.
        lr_scheduler : a function from the optimizer to a torch scheduler, as in ``lambda optimizer: StepLR(optimizer,
            30)``. One that needs a loss (``ReduceLROnPlateau``) gets that of each evaluation, else of each epoch.
        lr_scheduler_every : "step" (after each update) or "epoch".
        callbacks : functions of the run, called in the notebook between epochs; objects with ``on_step(run, step)``,
            called for each step as its records arrive. An error in one pauses the run.
        on_engine : callbacks that run on every rank after each step, such as ``dtkit.ExponentialMovingAverage(0.999)``.
        target, columns : for tables, see :meth:`partition`. `validation` and `Run.evaluate` take the same columns.
        collate_fn : function from a list of a Dataset's samples to a batch.
        activation_checkpointing : compute blocks again in backward, for less memory: True for the model's chain of
            blocks, or names of modules. A Pipeline does so with its stages.
        sampler : iterable of an epoch's row numbers, with a length, such as torch's ``WeightedRandomSampler``.
        drop_last : leave out the rows that don't fill the last batch of an epoch or of a stream, as a DataLoader does.
        num_workers : processes per engine that load a Dataset's samples (torch's DataLoader); 0 loads in the engine.
        pin_memory : whether batches for a GPU are in page-locked memory; by default if there is a GPU.
        prefetch : load the next batch during a step; by default for data in files, and with a GPU for arrays.
        seed : seeds the order of rows, and random numbers on the engines.
        start : False leaves the run paused before its first step, for ``run.step()``.
        checkpoint_every, checkpoint_dir, keep_last : write a checkpoint every so many steps and after the last one, and
            keep the newest few. Files of hosts that lack this folder are fetched. A folder without an interval gets
            only the last checkpoint. Disk errors don't end training.
        checkpoint_trainable_only : leave frozen parameters out of checkpoints. A resumed run takes your model's.
        resume_from : a checkpoint, as ``run.save()`` returns it, or a folder of which the newest is taken. `steps` and
            `epochs` count from the very start. Training continues from exactly that state, even with other engines or
            another strategy. From a model that ``run.save(format=...)`` or ``save_pretrained`` wrote, training takes
            the weights, and begins at step 0 with a new optimizer.
        on_failure : when an engine is lost, "repair" replaces it with the state of a survivor. The fourth loss in a row
            at one step fails the run. "shrink": the others take over its shard (in this epoch, ``shuffle="shard"`` then
            repeats some rows and skips others). "pause": wait for ``run.resume()``, which repairs.
        snapshot_every : steps between snapshots, to continue from if all copies of some part of the model are lost.
            They are on disk, by default every 10 seconds, or less often if writing takes over a hundredth of the time.
            If only one rank holds a part, two ranks keep it in memory every 10 seconds, and the disk every 30.
        name, tags : for views, reports, comparisons and checkpoints; by default the model's class, and no tags.

        Raises ValueError or TypeError for bad arguments, RunError during another run, and EngineError if the engines
        can't build the job. A run that is paused or has ended is released, and keeps its weights.
        """
        arguments = locals()
        config = TrainConfig(**{field.name: arguments[field.name] for field in dataclasses.fields(TrainConfig)})
        self._job_ends.check_can_follow(on_failure)
        return launch.train(self._engine_group, self, model, data, config)

    def train_xgboost(
        self,
        params: Mapping[str, Any],
        data: Any,
        num_boost_round: int = 10,
        *,
        evals: Mapping[str, Any] | None = None,
        early_stopping_rounds: int | None = None,
        on_failure: Literal["repair", "shrink"] = "repair",
        **options: Any,
    ) -> Any:
        """Train boosted trees with XGBoost's own collectives, each engine on its shard, and wait for the model.

        params : XGBoost's parameters. Histograms are summed over ranks, so `tree_method` must be "hist" or "approx".
        data : ``(X, y)`` or ``(X, y, weights)``, or a partition of them.
        evals : validation data by name.
        early_stopping_rounds : rounds without improvement of the last metric of the last of `evals`.
        on_failure : when an engine is lost, training continues from the last stored round, three times at most.
            "repair" replaces the engine. "shrink" divides its rows among the others. While these hold a paused or
            finished run, "shrink" replaces the engine, too.
        options : further arguments of ``xgboost.train``, such as `xgb_model`, a model to continue.

        Returns a :class:`~dtkit.integrations.xgboost.BoostingResult`. The cell shows each round by node. Raises
        EngineError for errors on the engines, and RunError during a run.
        """
        planner.check_idle(self.current_run, _NEEDS_ENGINES)
        boosting = importlib.import_module("dtkit.integrations.xgboost.training")  # integrations import the cluster
        recovery = boosting.Recovery(self._engine_group, self, on_failure)
        return boosting.train(recovery, params, data, num_boost_round, evals, early_stopping_rounds, options)

    def plan(
        self,
        model: torch.nn.Module | ModelHandle,
        data: Any,
        *,
        batch_size: int,
        optimizer: Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]],
        loss: Callable[..., torch.Tensor | tuple[Any, ...]] | None = None,
        training_step: Callable[..., torch.Tensor | tuple[Any, ...]] | None = None,
        strategies: Sequence[Strategy] | None = None,
        activation_checkpointing: bool | Sequence[str] = False,
    ) -> Plan:
        """Predict for each strategy and rank whether a training would fit, and what a step would cost. Trains nothing.

        A step on tensors without memory gives the sizes of activations and optimizer state. If the model's code needs
        numbers, the engines take real steps on a few rows instead. If the training surely fits, all ranks take some
        real steps of a copy. They give the time and the memory overhead. Short steps are then taken under each
        strategy, and by one process for comparison (``plan.one_process``). Memory excludes the data, and what torch
        loads at the first step.

        `data` are those of :meth:`train`, or a few rows of them. `strategies` are by default one of each kind. The
        other arguments, and the errors, are those of :meth:`train`. ``plan.largest_batch()`` returns a `batch_size`.
        """
        planner.check_idle(self.current_run)
        request = profiler.PlanRequest(
            batch_size, optimizer, data, loss, training_step, strategies, activation_checkpointing
        )
        return planner.make_plan(self._engine_group, model, request, self.benchmark)
