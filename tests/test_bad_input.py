"""Invalid arguments of the user: refused with the value, the rule and the remedy. The engines are doubles."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit._util import resources
from dtkit.strategies.sharded import check_shardable
from tests.support.small import check_usable, data, net, sgd, train

if TYPE_CHECKING:
    from collections.abc import Iterator


GATE = threading.Lock()


class Gated(dtkit.EngineCallback):
    """A callback on the engines that holds a lock."""

    def __init__(self) -> None:
        self.gate = threading.Lock()


class HoldsALock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)
        self.gate = threading.Lock()

    def gated(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self.gate:
            return F.cross_entropy(output, target)


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def cut(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = data()
    return inputs[:rows], targets[:rows]


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # name -> (arguments of train, the error, a pattern of its message)
    "fewer samples than ranks": ({"rows": cut(1), "batch_size": 1}, ValueError, "1 samples don't suffice for 2 ranks"),
    "unequal lengths": ({"rows": (data()[0], data()[1][:60])}, ValueError, "64, 60 rows .* same length"),
    "text instead of numbers": ({"rows": (data()[0], np.array(["a"] * 64))}, TypeError, "numbers only. Encode it"),
    "a dict of numbers as data": ({"rows": {"x": 1}}, TypeError, r"data\['x'\] is an int; each part must be a numpy"),
    "a number as validation": ({"validation": 3}, TypeError, "^validation is an int; it must be a tuple of arrays"),
    "a text as validation": ({"validation": "x"}, ValueError, "^validation='x' is not supported: give a .npy file"),
    "unequal lengths of validation": (
        {"validation": (cut(9)[0], cut(5)[1])},
        ValueError,
        "^validation has arrays of 9",
    ),
    "a function of a number as validation": (
        {"validation": lambda: 3},
        dtkit.errors.EngineError,
        "TypeError: what the function validation returned is an int; it must be a tuple of arrays",
    ),
    "a function of an argument as validation": (
        {"validation": lambda n: n},
        TypeError,
        r"^validation is a function of \(n\)",
    ),
    "a generator as validation": ({"validation": (k for k in [1])}, TypeError, "^validation is a generator that iter"),
    "text instead of numbers in validation": (
        {"validation": (data()[0], np.array(["a"] * 64))},
        TypeError,
        r"^validation\[1\] has dtype <U1",
    ),
    "a model wrapped for several GPUs": (
        {"model": nn.DataParallel(net())},
        TypeError,
        r"wrapped in DataParallel, and dtkit distributes it by itself. Give what is inside \(model.module\)",
    ),
    "no samples": ({"rows": cut(0)}, ValueError, "^the data has no samples. Give at least one for each of the 2 ranks"),
    "a number as tags": ({"tags": 3}, TypeError, "^tags=3; it must be a list of texts"),
    "a number as on_engine": ({"on_engine": 3}, TypeError, "^on_engine is an int; give a list"),
    "a number as columns": ({"columns": 3}, TypeError, "^columns=3; it must be a list of names"),
    "a model as data": (
        {"rows": torch.nn.Sequential(torch.nn.Linear(1, 1))},
        TypeError,
        r"data is a model, Sequential; cluster.broadcast\(model\) places",
    ),
    "a set as data": ({"rows": {1}}, TypeError, "data is a set; it must be a tuple of arrays as in .*, a dict"),
    "batch_size 0": ({"batch_size": 0}, ValueError, "batch_size=0; it must be at least 1"),
    "batch_size over the data": ({"batch_size": 65}, ValueError, "batch_size=65 is more than the 64 samples"),
    "batch_size under the ranks": ({"batch_size": 1}, ValueError, "batch_size=1 is less than the 2 ranks"),
    "batch_size of another type": ({"batch_size": 2.5}, TypeError, "batch_size=2.5; it must be an integer"),
    "neither epochs nor steps": ({"steps": None}, ValueError, "say how long"),
    "no loss": ({"loss": None}, ValueError, "give either loss"),
    "a loss class": ({"loss": nn.CrossEntropyLoss}, TypeError, "is a class; give an instance"),
    "a loss that isn't reduced": ({"loss": nn.CrossEntropyLoss(reduction="none")}, ValueError, "reduction='none'"),
    "an optimiser, not a function": ({"optimizer": sgd(net().parameters())}, TypeError, "function from parameters"),
    "nothing to train": ({"model": frozen()}, ValueError, "no parameter that requires a gradient"),
    "a model class": ({"model": nn.Identity}, TypeError, "model is the class Identity; give an instance"),
    "no model": ({"model": 3}, TypeError, "model is an int; it must be a torch.nn.Module"),
    "a lazy model": ({"model": nn.LazyLinear(3)}, ValueError, "has no shape yet"),
    "a model that can't be sent": ({"model": HoldsALock()}, dtkit.errors.SerializationError, "gate"),
    "a loss that can't be sent": (
        {"loss": HoldsALock().gated},
        dtkit.errors.SerializationError,
        r"^loss\.__self__\..*lock",
    ),
    "a loss with a default that can't be sent": (
        {"loss": lambda output, target, l=GATE: nn.functional.cross_entropy(output, target)},
        dtkit.errors.SerializationError,
        r"^loss= \(default l=\): cannot pickle '_thread.lock'",
    ),
    "an optimizer with a default that can't be sent": (
        {"optimizer": lambda parameters, lr=0.1, *, gate=GATE: sgd(parameters)},
        dtkit.errors.SerializationError,
        r"^optimizer= \(default gate=\): ",
    ),
    "a callback on engines that can't be sent": (
        {"on_engine": [Gated()]},
        dtkit.errors.SerializationError,
        r"^on_engine\[0\]\.gate: ",
    ),
    "an unknown shuffle": ({"shuffle": "yes"}, ValueError, "shuffle='yes'; it must be 'shard'"),
    "a strategy class": ({"strategy": dtkit.DataParallel}, TypeError, "is a class; give an instance"),
    "a strategy's name": ({"strategy": "ddp"}, TypeError, "must be a dtkit strategy"),
    "an empty name": ({"name": " "}, TypeError, "name=' '; it must be a text"),
    "one text as tags": ({"tags": "baseline"}, TypeError, r"tags='baseline'; it must be a list of texts"),
    "a scheduler's class": (
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR},
        TypeError,
        r"lr_scheduler=StepLR also needs step_size, .*lambda optimizer: StepLR\(optimizer, step_size=...\)",
    ),
    "a seed below 0": ({"seed": -1}, ValueError, "seed=-1; it must be an integer from 0 up"),
}


def test_a_function_that_uses_the_cluster_is_refused_with_what_to_do(cluster: dtkit.Cluster):
    message = r"\(closure variable 'cluster'\): a cluster stays in its notebook, .* give the function what it needs"
    with pytest.raises(dtkit.errors.SerializationError, match=message):
        cluster.run(lambda: cluster.world_size)


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_of_train_is_refused_and_the_cluster_stays_usable(cluster: dtkit.Cluster, name: str):
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        train(cluster, **options)
    assert cluster.current_run is None
    check_usable(cluster)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), r"Cluster\(0\): a cluster needs at least one engine"),
        ((-1,), r"Cluster\(-1\)"),
        (
            (100_000,),
            r"Cluster\(100000\): this machine's free memory \(.*\) suffices for \d+ engines.*Use Cluster\(\d+\)",
        ),
    ],
)
def test_an_impossible_number_of_engines_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dtkit.Cluster(*arguments)


def test_engines_beyond_memory_are_refused_with_the_number_of_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resources, "compute_max_engines", lambda: 160)
    monkeypatch.setattr(resources, "count_cores", lambda: 2)
    with pytest.raises(
        ValueError, match=r"for 160 engines .* It has 2 cores, which more .*\(2\), or at most Cluster\(160"
    ):
        dtkit.Cluster(180)


def test_invalid_options_of_a_cluster_are_refused():
    with pytest.raises(TypeError, match="must be an integer"):
        dtkit.Cluster("2")
    with pytest.raises(TypeError, match="must be an integer"):
        dtkit.Cluster(True)
    with pytest.raises(ValueError, match="device='tpu'; it must be"):
        dtkit.Cluster(1, device="tpu")
    with pytest.raises(ValueError, match="threads=0"):
        dtkit.Cluster(1, threads=0)
    with pytest.raises(ValueError, match="'lots' is not an amount of memory"):
        dtkit.Cluster(1, memory_limit="lots")


def test_calls_on_a_closed_cluster_are_refused(cluster: dtkit.Cluster):
    run = train(cluster)
    run.wait(60)
    weights = run.model.state_dict()
    cluster.close()
    cluster.close()
    assert repr(cluster) == "Cluster(closed)"
    calls = [
        lambda: cluster.run(print),
        lambda: cluster.submit(print),
        lambda: cluster.partition(data()),
        lambda: cluster.broadcast(net()),
        lambda: train(cluster),
        cluster.activate,
        cluster.refresh_nodes,
        cluster.interrupt,
        cluster._engine_group.membership.form_process_group,
    ]
    for call in calls:
        with pytest.raises(dtkit.errors.ClusterClosedError, match=r"was closed; start another one"):
            call()
    assert run.model.state_dict().keys() == weights.keys()  # fetched before, kept after
    with pytest.raises(dtkit.errors.RunError, match="was released when its cluster closed"):
        run.evaluate(data())


# -- strategies ----------------------------------------------------------------------------------------------


MISFITS: dict[str, tuple[dtkit.Strategy, str]] = {
    "too many stages": (dtkit.Pipeline(3, 4), "replicas 1 x stages 3 = 3, but there are 2 ranks"),
    "a table of too many stages": (dtkit.Pipeline(3, schedule=["F0 B0"] * 3), "stages 3 = 3, but there are 2 ranks"),
    "too many slices": (dtkit.TensorParallel(3), "replicas 1 x tp_size 3 = 3, but there are 2 ranks"),
    "too many replicas": (dtkit.Sharded(replicas=3), "replicas 3 x shards .*there are .* ranks"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_strategy_that_does_not_fit_the_world_size_is_refused(cluster: dtkit.Cluster, name: str):
    strategy, message = MISFITS[name]
    with pytest.raises(ValueError, match=message):
        train(cluster, strategy=strategy)
    check_usable(cluster)


def test_schedule_with_a_deadlock_is_refused_with_its_place(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match="a deadlock: after 2 of 8 actions"):
        train(cluster, strategy=dtkit.Pipeline(2, schedule="F0 B0 F1 B1\nF0 F1 B0 B1"))
    check_usable(cluster)


def test_sparse_embedding_cannot_be_sharded():
    with pytest.raises(ValueError, match="sparse"):
        check_shardable(nn.Sequential(nn.Embedding(3, 2, sparse=True)))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: dtkit.DataParallel(compress="zip"), "compress='zip'; it must be one of 'fp16', 'bf16', 'powersgd'"),
        (lambda: dtkit.DataParallel(precision="fp8"), "precision='fp8'; it must be one of 'bf16', 'fp16'"),
        (lambda: dtkit.DataParallel(accumulate=0), "accumulate=0; it must be at least 1"),
        (lambda: dtkit.DataParallel(clip_grad_norm=-1), "clip_grad_norm=-1; it must be a finite number above 0"),
        (lambda: dtkit.DataParallel(bucket_cap_mb=0), "bucket_cap_mb=0; it must be"),
        (lambda: dtkit.DataParallel(balance="always"), "balance='always'; it must be one of 'auto'"),
        (lambda: dtkit.ParameterAveraging(every=0), "every=0; it must be at least 1"),
        (
            lambda: dtkit.Pipeline(4, 1),
            r"stages=4 with micro_batches=1: .* use dtkit.Pipeline\(4, 16\) or .*'GPipe'; on one of n ranks, dtkit",
        ),
        (
            lambda: dtkit.Pipeline(5, 2),
            r"stages=5 .*: each stage .* of 5 ranks, use dtkit.Pipeline\(5, 20\) .*Pipeline\(n, 4 \* n\)$",
        ),
        (lambda: dtkit.Pipeline(2, 4, schedule="2F2B"), "schedule='2F2B'; it must be one of 'GPipe', '1F1B'"),
        (lambda: dtkit.Pipeline(0, 4), "stages=0; it must be at least 1"),
        (lambda: dtkit.OuterSGD(lr=0), "lr=0; it must be"),
        (lambda: dtkit.OuterSGD(momentum=1), "momentum=1; it must be"),
    ],
)
def test_option_with_a_bad_value_is_refused(make: Any, word: str):
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: dtkit.DataParallel(accumulate=2.5), "accumulate=2.5; it must be an integer"),
        (lambda: dtkit.DataParallel(clip_grad_norm="1"), "clip_grad_norm='1'; it must be a number"),
        (lambda: dtkit.ParameterAveraging(every="8"), "every='8'; it must be an integer"),
        (lambda: dtkit.ParameterAveraging(outer=0.7), "outer=0.7; it must be a dtkit.OuterSGD"),
    ],
)
def test_option_of_a_wrong_type_is_refused(make: Any, word: str):
    with pytest.raises(TypeError, match=word):
        make()


def test_more_micro_batches_than_samples_are_refused(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"accumulate=9 micro-batches of a step, but a rank has at most 8 samples"):
        train(cluster, strategy=dtkit.DataParallel(accumulate=9))
    check_usable(cluster)


def test_more_micro_batches_of_a_pipeline_than_samples_are_refused(cluster: dtkit.Cluster):
    rule = (
        r"micro_batches=17 with batch_size=16: 16 samples fill at most 16 micro-batches.* Use micro_batches=16 or less"
    )
    with pytest.raises(ValueError, match=rule):
        train(cluster, strategy=dtkit.Pipeline(2, 17))
    check_usable(cluster)


def test_micro_batches_of_a_pipeline_fit_the_share_of_each_replica():
    pipeline = dtkit.Pipeline(2, 64, replicas=2)
    pipeline.check(4, 128)
    with pytest.raises(
        ValueError, match=r"63 samples on each of 2 replicas fill at most 63 .* batch_size of 128 or more"
    ):
        pipeline.check(4, 127)


@pytest.mark.parametrize(
    ("rank", "factor", "word"),
    [(2, 2, "there are ranks 0 to 1"), (True, 2, "there are ranks"), (0, 0.5, "from 1"), (0, float("nan"), "from 1")],
)
def test_delay_of_a_bad_rank_or_factor_is_refused(cluster: dtkit.Cluster, rank: Any, factor: Any, word: str):
    run = train(cluster, steps=2)
    run.wait(60)
    with pytest.raises(ValueError, match=word):
        run.inject_delay(rank, factor)


def test_partition_by_speed_requires_a_model_and_a_loss(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match="give model= and loss="):
        cluster.partition(data(), by="speed")
    with pytest.raises(ValueError, match=r"give either loss, .* and Sequential doesn't return its own loss"):
        cluster.partition(data(), by="speed", model=net())
    with pytest.raises(ValueError, match="measures the weights itself"):
        cluster.partition(data(), by="speed", model=net(), loss=nn.CrossEntropyLoss(), weights=[1, 2])
    with pytest.raises(ValueError, match="'stratified', 'speed'"):
        dtkit.Partition(10, 2, by="foo")
    with pytest.raises(ValueError, match="by='speed' needs measured speeds"):
        dtkit.Partition(10, 2, by="speed")
    check_usable(cluster)


def take_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_bad_callback_is_refused(cluster: dtkit.Cluster):
    with pytest.raises(TypeError, match=r"callbacks=\[EarlyStopping\(...\)\]"):
        train(cluster, callbacks=dtkit.EarlyStopping())
    with pytest.raises(TypeError, match=r"class EarlyStopping; give an instance: callbacks=\[EarlyStopping\("):
        train(cluster, callbacks=[dtkit.EarlyStopping])
    with pytest.raises(TypeError, match="each must be a function of the run"):
        train(cluster, callbacks=["EarlyStopping"])
    with pytest.raises(ValueError, match="needs held-out data"):
        train(cluster, callbacks=[dtkit.EarlyStopping(monitor="accuracy")])
    with pytest.raises(ValueError, match="what is evaluated is loss, all of it on the validation data"):
        train(cluster, callbacks=[dtkit.EarlyStopping(monitor="val_loss")], validation=data())
    with pytest.raises(ValueError, match=r"monitor='acc'\), but what is evaluated is loss, all"):
        train(cluster, callbacks=[dtkit.EarlyStopping(monitor="acc")], validation=data())
    stopping, metrics = dtkit.EarlyStopping(monitor="acuracy"), {"accuracy": lambda output, target: 0.5}
    with pytest.raises(ValueError, match=r"evaluated is loss, accuracy, all of .* Use monitor='accuracy'$"):
        train(cluster, callbacks=[stopping], validation=data(), metrics=metrics)
    with pytest.raises(ValueError, match=r"monitor='acuracy'\), but what is evaluated is loss, .* Use monitor='loss'$"):
        train(cluster, callbacks=[stopping], validation=data(), loss=None, training_step=take_mean)
    with pytest.raises(ValueError, match="it must be a number of epochs from 1 up"):
        dtkit.EarlyStopping(patience=0)
    with pytest.raises(ValueError, match=r"The name of a metric is monitor="):
        dtkit.EarlyStopping("acc")  # type: ignore[arg-type]  # the mistake


class Logger:
    """Callback whose method takes too little."""

    def on_step(self, run: Any) -> None:
        """Never called."""


class Stepper:
    """Callback with another library's names."""

    def on_step_end(self, run: Any, step: Any) -> None:
        """Never called."""


class Starter:
    """Callback with a misspelled method next to a right one."""

    def on_step(self, run: Any, step: Any) -> None:
        """Called for every step."""

    def on_epoch_end(self, run: Any) -> None:
        """Never called."""


class EngineLogger(dtkit.EngineCallback):
    """Callback on engines whose method takes too much."""

    def after_step(self, context: Any, loss: float) -> None:  # type: ignore[override]  # the mistake
        """Never called."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"callbacks": [Logger()]},
            r"Logger\.on_step takes \(run\), .* with \(run, step\)\. .*on_step\(self, run, step\)",
        ),
        ({"callbacks": [lambda: None]}, r"callbacks\[0\]=lambda takes no argument, .* calls it with \(run\)"),
        ({"callbacks": [Stepper()]}, r"on_step_end is never called; did you mean def on_step\(self, run, step\)\?"),
        ({"on_engine": [EngineLogger()]}, r"EngineLogger\.after_step takes \(context, loss\), .* with \(context\)\."),
    ],
    ids=["method", "function", "name", "engine"],
)
def test_callback_that_takes_other_arguments_is_refused_at_once(
    cluster: dtkit.Cluster, options: dict[str, Any], expected: str
):
    with pytest.raises(TypeError, match=expected):
        train(cluster, **options)


def test_method_of_a_callback_that_is_never_called_is_told(cluster: dtkit.Cluster):
    expected = r"Starter\.on_epoch_end is never called; did you mean def __call__\(self, run\)\?"
    with pytest.warns(UserWarning, match=expected):
        train(cluster, callbacks=[Starter()], start=False).stop()


# -- streams -------------------------------------------------------------------------------------------------


def stream() -> Iterator[Any]:
    """Samples without end."""
    while True:
        yield torch.zeros(4), 0


BAD_STREAMS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "epochs": (stream, {"epochs": 2}, ValueError, r"epochs=2: the data is a stream without length.*Give steps="),
    "a global shuffle": (stream, {"shuffle": "global"}, ValueError, "shuffle='global': the data is a stream"),
    "fewer samples than ranks": (stream, {"batch_size": 1}, ValueError, "batch_size=1 is less than the 2 ranks"),
    "a generator": (stream(), {}, TypeError, "a generator that iterates in this process.*Give the function"),
    "arguments": (lambda path: [path], {}, TypeError, r"data is a function of \(path\)"),
    "a DataLoader with a batch sampler": (
        torch.utils.data.DataLoader([1], batch_sampler=[[0]]),
        {},
        ValueError,
        r"the DataLoader has .* a batch_sampler of its own.* Give its dataset with batch_size=",
    ),
    "a sampler of one rank": (
        data(),
        {"sampler": torch.utils.data.DistributedSampler(range(64), 2, 0)},  # type: ignore[arg-type]  # only its length counts
        ValueError,
        "DistributedSampler has the rows of one of 2 ranks.*most rows would be left out",
    ),
    "a stream to evaluate on": (data(), {"validation": stream}, ValueError, "an evaluation would have no end"),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_bad_stream_is_refused(cluster: dtkit.Cluster, name: str):
    rows, options, kind, message = BAD_STREAMS[name]
    with pytest.raises(kind, match=message):
        train(cluster, rows=rows, **options)
    check_usable(cluster)


def test_model_and_data_in_the_wrong_order_are_told(cluster: dtkit.Cluster):
    with pytest.raises(
        TypeError, match=r"got a tuple as the model, and the model Sequential as the data; exchange them"
    ):
        cluster.train(data(), net(), loss=F.cross_entropy, optimizer=sgd, batch_size=8, steps=1)


def test_blocks_to_compute_again_that_the_model_lacks_are_told(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"names 'encoder', and Sequential has no such module; it has 0, 1, 2"):
        train(cluster, activation_checkpointing=["encoder"])


def test_collate_fn_that_takes_no_samples_is_told(cluster: dtkit.Cluster):
    with pytest.raises(TypeError, match=r"collate_fn=lambda takes no argument, and dtkit calls it with \(samples\)"):
        train(cluster, None, list(zip(*data(), strict=True)), collate_fn=lambda: None)
