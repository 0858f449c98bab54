"""The trial of the first rows in the notebook: what it refuses, what it leaves alone, and what it doesn't change."""

from __future__ import annotations

import copy
import random
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit.cluster.sigterm import exit_on_sigterm
from dtkit.errors import FirstBatchError
from dtkit.testing.fake_transport import FakeTransport
from tests.support.small import accuracy, data, net, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RecordingTransport(FakeTransport):
    """Two doubles of engines that record which operations they were asked for."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked: list[bytes] = []

    def send(self, rank: int, message: bytes, listen: Any = None) -> Any:
        self.asked.append(message)
        return super().send(rank, message, listen)

    @property
    def has_sent(self) -> bool:
        return any(b"load_data" in message or b"receive_model" in message for message in self.asked)


@pytest.fixture
def transport() -> RecordingTransport:
    return RecordingTransport()


@pytest.fixture
def cluster(transport: RecordingTransport) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_transport(transport, device="cpu") as made:
        yield made


INPUTS, TARGETS = data()
DOUBLES = (INPUTS.numpy().astype("float64"), TARGETS.numpy())


class Samples(torch.utils.data.Dataset):
    """Dataset that opens a file at its first sample, which would keep it from being sent."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs, self.opened = inputs, None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> Any:
        self.opened = (value for value in ())  # as an open file, a generator can't be pickled
        return self.inputs[row], TARGETS[row]


def call_unknown(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return written_in_a_later_cell(output, target)  # noqa: F821 - the error that is tested


def lose_reduction(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none")


def log_text(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtkit.log(kind="0.5")
    return F.cross_entropy(output, target)


def log_several(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtkit.log(output=output)
    return F.cross_entropy(output, target)


def log_reserved(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtkit.log(rank=1)
    return F.cross_entropy(output, target)


def log_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtkit.log(loss=1.0)
    return F.cross_entropy(output, target)


def log_system(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtkit.log(**{"system/load": 1.0})
    return F.cross_entropy(output, target)


def ask_for_attribute(output: torch.Tensor, target: Any) -> torch.Tensor:
    return F.cross_entropy(output, target.nope)


class Named(nn.Linear):
    """Returns its output by name."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return {"logits": super().forward(inputs)}


def choose_unknown(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logit"], target)


def detach_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.detach(), target)


def exit_process(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    sys.exit("no data")


CONVOLUTION = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))
IMAGES = np.zeros((64, 64), np.float32)


@pytest.mark.parametrize(
    ("model", "rows", "options", "expected"),
    [
        (net(), DOUBLES, {}, r"data are float64, and the model is float32; .*X.astype\('float32'\)"),
        (net(), {"x": DOUBLES[0], "y": DOUBLES[1]}, {"target": "y"}, "data are float64"),
        (net(), Samples(INPUTS.double()), {}, "data are float64"),
        (net(), list(zip(INPUTS.double(), TARGETS, strict=True)), {}, "data are float64"),
        (CONVOLUTION, (IMAGES, DOUBLES[1]), {}, r"sample has shape \(64,\), and Conv2d expects \(1, 8, 8\)"),
        (net(), (INPUTS, TARGETS.float()), {}, "class labels must be int64"),
        (net(), (INPUTS, TARGETS), {"loss": call_unknown}, "NameError: .*written_in_a_later_cell.*later cell"),
        (net(), (INPUTS, TARGETS), {"loss": lose_reduction}, r"loss returned a tensor of shape \(8,\).*'mean'"),
        (net(), (INPUTS, TARGETS), {"loss": log_text}, r"dtkit\.log\(kind=str\): values must be numbers"),
        (net(), (INPUTS, TARGETS), {"loss": log_several}, r"dtkit\.log\(output=Tensor\): values must be numbers"),
        (net(), (INPUTS, TARGETS), {"loss": log_reserved}, r"dtkit\.log\(rank=.*use another name"),
        (net(), (INPUTS, TARGETS), {"loss": log_loss}, r"dtkit\.log\(loss=.*as in my_loss="),
        (net(), (INPUTS, TARGETS), {"loss": log_system}, r"names that begin with 'system/' are dtkit's own"),
        (
            net(),
            (INPUTS, TARGETS),
            {"loss": ask_for_attribute},
            r"AttributeError: 'Tensor' object has no attribute 'nope'",
        ),
        (Named(), (INPUTS, TARGETS), {"loss": choose_unknown}, r"KeyError: 'logit'.*did you mean 'logits'\?"),
        (net(), (INPUTS, TARGETS), {"loss": detach_output}, r"The loss has no gradient.*detach\(\)"),
    ],
    ids=[
        "float64",
        "dict",
        "Dataset",
        "samples",
        "images",
        "labels",
        "name",
        "loss",
        "text",
        "several",
        "reserved",
        "column",
        "own name",
        "attribute",
        "key",
        "detached",
    ],
)
def test_first_rows_are_refused_before_anything_is_sent(
    cluster: dtkit.Cluster, transport: RecordingTransport, model: Any, rows: Any, options: dict[str, Any], expected: str
):
    with pytest.raises(FirstBatchError, match=r"^the first batch fails, before the training starts: ") as caught:
        train(cluster, model, rows, **options)
    assert re.search(expected, str(caught.value), re.DOTALL), caught.value
    assert len(str(caught.value).splitlines()) <= 15
    assert "Traceback" in caught.value.full
    assert not transport.has_sent


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"loss": exit_process}, "the first batch fails, before the training starts"),
        ({"validation": data(), "metrics": {"acc": exit_process}}, "the first batch of validation= fails, before the"),
    ],
    ids=["loss", "metric"],
)
def test_exit_in_the_first_batch_is_an_error(
    cluster: dtkit.Cluster, transport: RecordingTransport, options: dict[str, Any], start: str
):
    with pytest.raises(FirstBatchError, match=rf"(?s)^{start}.*SystemExit: no data\..*raise an error.*in exit_process"):
        train(cluster, **options)
    assert not transport.has_sent


def test_sigterm_in_the_first_batch_still_ends_a_script(cluster: dtkit.Cluster):
    def end(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        exit_on_sigterm()
        with pytest.raises(SystemExit, match="143"):
            train(cluster, loss=end)
    finally:
        signal.signal(signal.SIGTERM, before)


class Overwriting(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(super().forward(inputs))
        hidden += 1
        return hidden


def call_backward(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (Overwriting(4, 3), {}, r"changes the output of Sigmoid in place"),
        (net(), {"loss": None, "training_step": call_backward}, r"leave loss\.backward\(\), optimizer\.step\(\) and"),
    ],
    ids=["in place", "second backward"],
)
def test_backward_of_the_first_rows_is_tried_before_anything_is_sent(
    cluster: dtkit.Cluster, transport: RecordingTransport, model: nn.Module, options: dict[str, Any], expected: str
):
    with pytest.raises(FirstBatchError, match=expected):
        train(cluster, model, **options)
    assert not transport.has_sent


def take_step(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.binary_cross_entropy_with_logits(model(inputs)[:, 0], targets.float())


@pytest.mark.parametrize(
    ("layer", "options", "expected"),
    [
        (nn.Softmax(1), {}, r"are probabilities.*Leave the softmax out"),
        (nn.Softmax(1), {"loss": lambda *pair: F.cross_entropy(*pair, label_smoothing=0.1)}, "Leave the softmax out"),
        (nn.Softmax(1), {"loss": nn.NLLLoss()}, r"are probabilities.*Use log_softmax in place of softmax"),
        (nn.Identity(), {"loss": nn.NLLLoss()}, r"go up to 0\.\d+: .*Use CrossEntropyLoss.*nn\.LogSoftmax\(1\)"),
        (nn.Sigmoid(), {"loss": None, "training_step": take_step}, r"been through a sigmoid.*Leave the sigmoid out"),
    ],
    ids=["class", "function", "logarithm", "logits", "sigmoid"],
)
def test_outputs_that_a_loss_is_not_made_for_are_told_once(
    cluster: dtkit.Cluster, layer: nn.Module, options: dict[str, Any], expected: str
):
    with pytest.warns(UserWarning, match=expected) as caught:
        train(cluster, nn.Sequential(net(), layer), start=False, **options).stop()
    assert len(caught) == 1


def test_classes_as_targets_of_a_binary_loss_are_told(cluster: dtkit.Cluster):
    rows = INPUTS, torch.arange(len(INPUTS)).float()[:, None] % 3
    with pytest.warns(UserWarning, match=r"targets between 0 and 1, and these lie between 0 and 2, .*CrossEntropyLoss"):
        train(cluster, nn.Linear(4, 1), rows, loss=nn.BCEWithLogitsLoss(), start=False).stop()


@pytest.mark.parametrize(
    ("layer", "loss"), [(nn.LogSoftmax(1), nn.NLLLoss()), (nn.Identity(), nn.CrossEntropyLoss())], ids=["NLL", "CE"]
)
@pytest.mark.filterwarnings("error")
def test_outputs_that_a_loss_expects_are_not_told(cluster: dtkit.Cluster, layer: nn.Module, loss: nn.Module):
    train(cluster, nn.Sequential(net(), layer), loss=loss, start=False).stop()


class Counted(nn.Module):
    """Model that counts its calls, and keeps statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not self.training:
            assert not torch.is_grad_enabled()
        return self.layers(inputs)


def load_samples(inputs: torch.Tensor) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, TARGETS), batch_size=16)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((INPUTS, TARGETS.float()), r"training has targets of type int64, validation float32\. .*astype\('int64'\)"),
        ((INPUTS[:20, :3], TARGETS[:20]), r"training has 4 columns in the inputs, validation 3\. Prepare both"),
        (DOUBLES, r"training has inputs of type float32, validation float64\. Convert .*\.to\(torch\.float32\)"),
        ((INPUTS, TARGETS[:, None]), r"training has targets of shape \(rows,\), validation \(rows, 1\)\. Prepare"),
        ((INPUTS, F.one_hot(TARGETS)), r"training has targets of shape \(rows,\), validation \(rows, 3\)\. Prepare"),
        (INPUTS, r"training has 2 arrays, validation 1\. Give both the same parts"),
        (Samples(INPUTS.double()), "training has inputs of type float32, validation float64"),
        (load_samples(INPUTS.double()), "training has inputs of type float32, validation float64"),
    ],
    ids=["labels", "features", "float64", "column", "one-hot", "no target", "Dataset", "DataLoader"],
)
def test_first_rows_of_validation_data_are_refused_before_anything_is_sent(
    cluster: dtkit.Cluster, transport: RecordingTransport, rows: Any, expected: str
):
    with pytest.raises(FirstBatchError, match=r"^the first batch of validation= fails, before ") as error:
        train(cluster, validation=rows)
    assert re.search(expected, str(error.value), re.DOTALL), error.value
    assert not transport.has_sent


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (DOUBLES, r"training has inputs of type float32, evaluation float64\. Convert .*\.to\(torch\.float32\)"),
        ((INPUTS[:20, :3], TARGETS[:20]), r"training has 4 columns in the inputs, evaluation 3\. Prepare both"),
        (Samples(INPUTS.double()), "training has inputs of type float32, evaluation float64"),
    ],
    ids=["float64", "features", "Dataset"],
)
def test_evaluate_refuses_the_first_rows_before_an_engine_is_asked(
    cluster: dtkit.Cluster, transport: RecordingTransport, rows: Any, expected: str
):
    run = train(cluster, start=False)
    transport.asked.clear()
    with pytest.raises(FirstBatchError, match=r"^the first batch of run\.evaluate\(data\) fails, ") as error:
        run.evaluate(rows)
    assert re.search(expected, str(error.value), re.DOTALL), error.value
    assert not transport.asked
    run.stop()


def test_validation_data_of_a_partition_are_tried_too(cluster: dtkit.Cluster):
    partition = cluster.partition(DOUBLES)
    with pytest.raises(
        FirstBatchError, match=r"of validation= fails.* training has inputs of type float32, validation float64"
    ):
        train(cluster, validation=partition)


def test_validation_targets_that_torch_repeats_are_refused(transport: RecordingTransport, cluster: dtkit.Cluster):
    inputs = torch.randn(28, 8)
    with pytest.raises(FirstBatchError, match=r"of validation= .* shape \(8, 1\) with targets of shape \(8,\)"):
        train(
            cluster,
            nn.Linear(8, 1),
            (inputs, inputs[:, :1]),
            loss=nn.MSELoss(),
            validation=(inputs, inputs[:, 0]),
        )
    assert not transport.has_sent


def test_table_of_validation_data_is_tried_with_the_columns_of_the_training_data(cluster: dtkit.Cluster):
    table = pd.DataFrame({**{f"x{k}": INPUTS[:, k].numpy() for k in range(4)}, "y": TARGETS.numpy()})
    more = table.assign(unused=1.0)[["unused", "y", "x3", "x2", "x1", "x0"]]
    train(cluster, rows=table, target="y", validation=more, metrics={"acc": accuracy}, start=False).stop()
    with pytest.raises(
        FirstBatchError, match=r"of validation= fails.* training has inputs of type float32, validation float64"
    ):
        train(cluster, rows=table, target="y", validation=DOUBLES)


@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics")
@pytest.mark.parametrize(
    "rows",
    [(INPUTS, TARGETS), (INPUTS[:1], TARGETS[:1]), load_samples(INPUTS), Samples(INPUTS), lambda: DOUBLES],
    ids=["arrays", "one row", "DataLoader", "Dataset", "function"],
)
def test_fine_validation_data_are_tried_without_a_trace(cluster: dtkit.Cluster, rows: Any):
    model = Counted()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    train(cluster, model, validation=rows, metrics={"acc": accuracy}, start=False).stop()
    assert model.calls == 0
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_error_of_the_first_rows_names_the_users_line(cluster: dtkit.Cluster):
    with pytest.raises(FirstBatchError) as caught:
        train(cluster, loss=call_unknown)
    assert "test_first_batch.py, line" in str(caught.value)
    assert "in call_unknown\n    return written_in_a_later_cell(output, target)" in str(caught.value)


def test_partition_and_broadcast_model_are_tried_too(cluster: dtkit.Cluster):
    partition, model = cluster.partition(DOUBLES), cluster.broadcast(net())
    with pytest.raises(FirstBatchError, match="data are float64"):
        train(cluster, model, partition)


def compare_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


def name_wrong(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.arg_max(1).eq(target).float().mean()


def average_booleans(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).mean()


def need_one_value(output: torch.Tensor, target: torch.Tensor) -> float:
    return (output.argmax(1) == target).float().item()


def return_text(output: torch.Tensor, target: torch.Tensor) -> str:
    return "x"


def return_nothing(output: torch.Tensor, target: torch.Tensor) -> None:
    accuracy(output, target)


def compare_all(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output == target).float().mean()


def count_right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).sum()


def sum_errors(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output[:, 0] - target).abs().sum())


def find_recall(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target)[target == 2].float().mean().nan_to_num()


def give_sum_and_weight(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return count_right(output, target), len(target)


def return_three(output: torch.Tensor, target: torch.Tensor) -> tuple[float, float, float]:
    return 1.0, 2.0, 3.0


def need_two_classes(output: torch.Tensor, target: torch.Tensor) -> float:
    raise ValueError(f"only one class is in {target} and {output}")


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (compare_rows, r"TypeError: metric 'acc' returned a tensor of shape \(8,\).*\.float\(\)\.mean\(\)"),
        (average_booleans, r"metric 'acc': RuntimeError: mean\(\).*A comparison gives booleans.*\.float\(\)\.mean\(\)"),
        (need_one_value, r"metric 'acc': RuntimeError: .*cannot be converted to Scalar.*in need_one_value"),
        (name_wrong, r"metric 'acc': AttributeError: .*arg_max.*test_first_batch.py, line \d+, in name_wrong"),
        (return_text, r"TypeError: metric 'acc' returned 'x' \(a str\); it must return one number"),
        (return_nothing, r"metric 'acc' returned None; it must return one number"),
        (compare_all, r"shape \(8, 3\), a number for each class, and the targets \(8,\)\. Choose a class first"),
        (return_three, r"metric 'acc' returned \(1\.0, 2\.0, 3\.0\) .*; it must return one number"),
    ],
    ids=["shape", "booleans", "several values", "name", "text", "nothing", "all classes", "three"],
)
def test_metrics_are_tried_before_anything_is_sent(
    cluster: dtkit.Cluster, transport: RecordingTransport, metric: Any, expected: str
):
    with pytest.raises(FirstBatchError, match=r"^the first batch of validation= fails, before the training ") as caught:
        train(cluster, validation=data(), metrics={"acc": metric})
    assert re.search(expected, str(caught.value), re.DOTALL), caught.value
    assert not transport.has_sent


def test_error_of_a_metric_of_evaluate_names_the_evaluation(cluster: dtkit.Cluster):
    run = train(cluster, start=False)
    with pytest.raises(
        FirstBatchError, match=r"^the first batch of run\.evaluate\(data\) fails, before the evaluation "
    ):
        run.evaluate(data(), metrics={"acc": return_nothing})
    run.stop()


@pytest.mark.parametrize("labels", [TARGETS, torch.full_like(TARGETS, 5)], ids=["some right", "none right"])
@pytest.mark.parametrize("metric", [count_right, sum_errors])
def test_metric_that_is_a_sum_is_refused(
    cluster: dtkit.Cluster, transport: RecordingTransport, metric: Any, labels: torch.Tensor
):
    model = nn.Sequential(net(), nn.Linear(3, 6))
    with pytest.raises(ValueError, match=r"metric 'acc' is a sum over samples: .* Return the mean over samples, or"):
        train(cluster, model, validation=(INPUTS, labels), metrics={"acc": metric})
    assert not transport.has_sent


@pytest.mark.parametrize("metric", [accuracy, find_recall, give_sum_and_weight, lambda *_: 0.0, lambda *_: 3])
def test_metric_that_is_no_sum_is_taken(cluster: dtkit.Cluster, metric: Any):
    train(cluster, validation=data(), metrics={"acc": metric}, start=False).stop()


def test_metric_that_only_refuses_few_rows_is_left_to_the_engines(cluster: dtkit.Cluster):
    train(cluster, validation=data(), metrics={"auc": need_two_classes}, start=False).stop()


class ValidatedStep:
    """Step that evaluates a number of its own, as a module's validation step does."""

    __name__ = "training_step"

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: Any, _logged: Any) -> torch.Tensor:
        dtkit.log(val_accuracy=0.5)
        return self(model, batch)


def test_names_of_a_validation_step_are_tried_before_anything_is_sent(
    cluster: dtkit.Cluster, transport: RecordingTransport
):
    options: dict[str, Any] = {"loss": None, "training_step": ValidatedStep(), "validation": data()}
    with pytest.raises(ValueError, match=r"'acuracy'\), but what is evaluated is loss, val_accuracy, .*'val_acc.*'$"):
        train(cluster, callbacks=[dtkit.EarlyStopping(monitor="acuracy")], **options)
    assert not transport.has_sent
    train(cluster, callbacks=[dtkit.EarlyStopping(monitor="val_accuracy")], start=False, **options).stop()


def gather_first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(output)
    return F.cross_entropy(output, target)


def need_whole_batch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.view(8, 3), target)


LARGE = nn.Sequential(nn.Linear(4, 3), nn.Linear(5000, 5000))


@pytest.mark.parametrize(
    ("model", "rows", "options"),
    [
        (None, None, {"loss": gather_first}),
        (None, None, {"loss": need_whole_batch}),
        (LARGE, DOUBLES, {}),
        (net().half(), DOUBLES, {}),
        (None, lambda: DOUBLES, {}),
        (None, (np.zeros((64, 600_000), np.float32), DOUBLES[1]), {}),
    ],
    ids=["collective", "whole batch", "large model", "half", "function", "large rows"],
)
def test_what_can_not_be_tried_is_left_to_the_engines(
    cluster: dtkit.Cluster, transport: RecordingTransport, model: Any, rows: Any, options: dict[str, Any]
):
    run = train(cluster, model, rows, start=False, **options)
    assert transport.has_sent
    run.stop()


class Noisy(nn.Module):
    """Model that draws random numbers, counts its calls, and has buffers that change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        print("called")
        self.calls += 1
        return self.layers(inputs) + random.random() + float(np.random.random())  # noqa: NPY002 - the users' generators


def count_calls(calls: list[int]) -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return F.cross_entropy(output, target)

    return loss


@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics")
def test_trial_changes_nothing_in_the_notebook(cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    model, dataset, calls = Noisy(), Samples(INPUTS), []
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    capsys.readouterr()
    train(cluster, model, dataset, loss=count_calls(calls), start=False).stop()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.calls, dataset.opened, calls) == (0, None, [])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
    assert "called" not in capsys.readouterr().out
