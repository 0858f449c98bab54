"""Errors of misspelled, missing and wrong arguments of every public call, as a notebook shows them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import dtkit
import dtkit.lessons
from dtkit.checkpoint.checkpoint import Checkpoint
from dtkit.dashboard.compare import Comparison
from dtkit.dashboard.summary.verdict import Verdict
from dtkit.data.broadcast import ModelHandle
from dtkit.explain.base import Explanation
from dtkit.history.profile import Profile
from dtkit.history.timeline import Timeline
from dtkit.history.workload import Efficiency
from dtkit.planning.memory_report import Memory
from dtkit.planning.plan import Plan
from dtkit.rpc.verification import Verification
from dtkit.training.task import Task
from tests.support.small import accuracy, data, net, train

RESULTS = (
    Comparison,
    Efficiency,
    Explanation,
    Memory,
    ModelHandle,
    Plan,
    Profile,
    Task,
    Timeline,
    Verdict,
    Verification,
    dtkit.Cluster,
    dtkit.History,
    dtkit.Partition,
    dtkit.Run,
    dtkit.Schedule,
    dtkit.lessons.Lesson,
    Checkpoint,
)
OPTIONS = (
    dtkit.Batch,
    dtkit.Cluster,
    dtkit.DataParallel,
    dtkit.EarlyStopping,
    dtkit.ExponentialMovingAverage,
    dtkit.MPI,
    dtkit.NaiveDataParallel,
    dtkit.OuterSGD,
    dtkit.ParameterAveraging,
    dtkit.Pipeline,
    dtkit.SSH,
    dtkit.Schedule,
    dtkit.Sharded,
    dtkit.Slurm,
    dtkit.TensorParallel,
)


def list_methods(cls: type) -> list[str]:
    """Return the methods that the Tab key offers and that take no names of their own."""
    names = [name for name in dir(object.__new__(cls)) if not name.startswith("_")]
    functions = {name: inspect.getattr_static(cls, name) for name in names}
    return [
        name
        for name, function in functions.items()
        if inspect.isfunction(function)
        and function.__name__ == name
        and not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    ]


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls in RESULTS if cls is not Explanation for name in list_methods(cls)]
)
def test_every_method_refuses_a_misspelled_name(cls: type, name: str):
    with pytest.raises(
        TypeError, match=rf"^{cls.__name__}.{name}\(\) has no argument zzz=; (it takes|did you mean)"
    ) as caught:
        getattr(object.__new__(cls), name)(zzz=1)
    assert hasattr(caught.value, "_render_traceback_")


def test_all_misspelled_names_are_told_at_once():
    with pytest.raises(TypeError) as caught:
        dtkit.compare(label=1, sorted_by=1, yyy=1, zzz=1)
    first, second, third = str(caught.value).splitlines()
    assert first == "compare() has no argument label=; did you mean labels=?"
    assert second == "compare() has no argument sorted_by=; did you mean sort_by=?"
    assert third.startswith("compare() has no argument yyy= and zzz=; it takes ")


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_every_class_refuses_a_misspelled_option(cls: type):
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) has no (argument|option) zzz=; it takes ") as caught:
        cls(zzz=1)
    assert hasattr(caught.value, "_render_traceback_")


@pytest.mark.parametrize(
    "name",
    [
        *("dtkit.attach", "dtkit.compare", "dtkit.list_checkpoints", "dtkit.panel"),
        *(f"dtkit.lessons.{name}" for name in dtkit.lessons.__all__ if name != "Lesson"),
    ],
)
def test_every_function_refuses_a_misspelled_name(name: str):
    function = eval(name, {"dtkit": dtkit})
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) has no argument zzz=; "):
        function(zzz=1)


def take_output(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def take_model(model: nn.Module) -> torch.Tensor:
    return next(model.parameters()).sum()


class TakesOutput(nn.Module):
    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output.sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": take_output},
            r"loss=take_output takes \(output\).*with \(output, target\)\. .*def take_output\(output, t",
        ),
        ({"loss": TakesOutput()}, r"loss=TakesOutput takes \(output\), and dtkit calls it with \(output, target\)"),
        ({"loss": lambda: 1}, "loss=lambda takes no argument.* Write it as loss=lambda output, target: "),
        ({"loss": None, "training_step": take_model}, r"training_step=take_model takes \(model\).*\(model, batch\)"),
        ({"validation": data(), "metrics": {"acc": take_output}}, r"metrics\['acc'\]=take_output takes \(output\)"),
        ({"optimizer": lambda: 1}, r"optimizer=lambda takes no argument, and dtkit calls it with \(params\)"),
        ({"lr_scheduler": lambda: 1}, r"lr_scheduler=lambda takes no argument.*\(optimizer\)"),
        ({"callbacks": 3}, "callbacks is an int; give a list"),
        ({"callbacks": print}, r"callbacks is a function; give a list, also of one: callbacks=\[function\]"),
        (
            {"callbacks": dtkit.EarlyStopping()},
            r"callbacks is an EarlyStopping; .*: callbacks=\[EarlyStopping\(...\)\]",
        ),
    ],
    ids=[
        "loss",
        "module",
        "lambda",
        "step",
        "metric",
        "optimizer",
        "scheduler",
        "callbacks",
        "one function",
        "one object",
    ],
)
def test_function_with_other_parameters_is_refused(cluster: dtkit.Cluster, options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=f"^{message}"):
        train(cluster, **options)


def test_functions_with_defaults_and_of_libraries_are_taken(cluster: dtkit.Cluster):
    def weigh(output: torch.Tensor, target: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        return weight * nn.functional.cross_entropy(output, target)

    train(cluster, loss=weigh, validation=data(), metrics={"acc": accuracy}).stop()
    train(cluster, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD).stop()


def test_evaluate_memory_and_plan_check_their_arguments(cluster: dtkit.Cluster):
    run = train(cluster, start=False)
    with pytest.raises(TypeError, match=r"metrics\['acc'\]=take_output takes \(output\)"):
        run.evaluate(data(), metrics={"acc": take_output})
    with pytest.raises(TypeError, match=r"memory\(plan=3\): it must be a plan"):
        run.memory(3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ValueError, match="format='onx'; it must be 'hf'"):
        run.save(format="onx")
    run.stop()
    options: dict[str, Any] = {"batch_size": 8, "data": data(), "optimizer": torch.optim.SGD}
    with pytest.raises(TypeError, match=r"loss=take_output takes \(output\)"):
        cluster.plan(net(), loss=take_output, **options)
    with pytest.raises(TypeError, match=r"strategies=3; it must be a list"):
        cluster.plan(net(), loss=nn.CrossEntropyLoss(), strategies=3, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.pause("soon"), "timeout='soon'; it must be a number of seconds"),
        (lambda run: run.report(3), "path=3; it must be a text such as"),
        (lambda run: run.verify("all"), "steps='all'; verify needs an integer"),
        (lambda run: run.history.loss("a"), "rank='a'; there are rows of rank 0, 1"),
        (lambda run: run.extend(steps="a"), "steps='a'; it must be an integer"),
        (lambda run: run.history.to_jsonl(3), "path=3; it must be a text such as"),
        (lambda run: run.step(3, n=3), r"Run.step\(\) got n twice, once by its name; give it once"),
        (
            lambda _: dtkit.Pipeline(stages=3),
            r"Pipeline\(stages=3\) trains on 3 engines, or .* the number of micro-batches .*micro_batches=12",
        ),
        (lambda _: dtkit.log("kl", 0.5), r"dtkit.log\('kl', ...\): each number needs its name"),
        (
            lambda run: run.history.rows("a"),
            r"rows\(start='a'\): a whole number is needed, as in history.rows\(0, 100\)",
        ),
        (lambda run: run.history.totals(0, 1.5), r"totals\(stop=1.5\): a whole number is needed"),
        (lambda run: run.history.to_jsonl("/"), r"to_jsonl\('/'\): this is a folder; name a file in it"),
        (lambda run: run.report("/"), r"report\('/'\): this is a folder; name a file in it"),
        (lambda run: run.report(single_process=3), "single_process=3; it must be the run of one engine, or that"),
        (lambda run: run.subscribe(3), r"subscribe\(3\): it takes a function without arguments"),
        (lambda run: dtkit.compare(run, run, labels=3), "labels=3: a list with a name for each run"),
        (lambda run: run.history.loss([1]), r"rank=\[1\]; there are rows of rank 0, 1"),
        (lambda run: run.history.loss(7), "rank=7; there are rows of rank 0, 1"),
        (lambda run: run.history.column("los"), "no column 'los'; did you mean 'loss'"),
        (lambda run: run.history.scalar("kl"), "no numbers were logged as 'kl'; there are none. dtkit.log"),
        (lambda run: run.history.to_jsonl("/nowhere/h.jsonl"), "the folder /nowhere does not exist"),
        (lambda _: dtkit.History.from_jsonl("nowhere.jsonl"), "there is no such file"),
        (lambda _: dtkit.History.from_jsonl(__file__), "line 1 of .* is not a record of a history"),
        (lambda _: dtkit.lessons.draw_pipeline("a"), "stages='a'; the drawing has room for 2 to 4"),
        (lambda _: dtkit.lessons.adapt_to_themes(3), "figure=3; it must be a matplotlib Figure"),
        (lambda run: dtkit.lessons.wait_until(run, 3), "condition=3; it must be a function"),
        (lambda _: dtkit.lessons.Lessn, "dtkit.lessons has no attribute 'Lessn'; did you mean dtkit.lessons.Lesson"),
        (lambda run: run.status.stte, "status has no attribute 'stte'; did you mean status.state"),
        (lambda run: run.spec.strtegy, "spec has no attribute 'strtegy'; did you mean spec.strategy"),
        (
            lambda run: dtkit.compare([run]).reprot,
            "comparison has no attribute 'reprot'; did you mean comparison.report",
        ),
    ],
)
def test_wrong_values_are_refused_without_frames_of_dtkit(cluster: dtkit.Cluster, call: Any, message: str):
    run = train(cluster)
    run.wait(60)
    with pytest.raises((TypeError, ValueError, AttributeError, OSError), match=message) as caught:
        call(run)
    shown = "".join(caught.value._render_traceback_())  # type: ignore[union-attr]  # IPython's protocol
    assert "dtkit/dtkit" not in shown.replace(str(dtkit.__path__[0]), "dtkit/dtkit")


@pytest.mark.parametrize("index", ["loss", 1.5, slice(0, 3), None])
def test_an_index_of_a_history_is_a_whole_number(index: Any):
    with pytest.raises(TypeError, match=r"history\[.*\]: an index is a whole number; history.rows\(0, 100\) returns"):
        dtkit.History()[index]


CELLS = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell("import dtkit, dtkit.lessons; history, lesson = dtkit.History(), dtkit.lessons.Lesson()")
for cell in (
    "dtkit.compare(history, label=['a'])",
    "dtkit.compare(history, 3, labels=['a', 'b'])",
    "history.scalar('kl')",
    "lesson.claim('messages', 3, 'N - 1', 3, tolernce=1)",
    "lesson.claim('messages', 'three', 'N - 1', 3)",
    "dtkit.Pipeline(stages=3)",
):
    print("CELL")
    shell.run_cell(cell)
"""


def test_notebook_shows_one_line_of_each_bad_call():
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=60, check=True)
    _, *shown = done.stdout.split("CELL\n")
    assert len(shown) == 6
    for text in shown:
        assert "dtkit/" not in text
        assert "<string>" not in text  # of a generated __init__
        assert len(text.splitlines()) <= 15
    assert "TypeError: compare() has no argument label=; did you mean labels=?" in shown[0]
    assert "Lesson.claim() has no argument tolernce=; did you mean tolerance=?" in shown[3]


@pytest.mark.parametrize("name", ["DataParallel", "Sharded", "Pipeline", "EarlyStopping", "SSH", "Slurm", "MPI"])
def test_help_on_the_constructor_describes_the_options(name: str):
    kind = getattr(dtkit, name)
    assert kind.__doc__
    assert inspect.getdoc(kind.__init__) == inspect.getdoc(kind)
