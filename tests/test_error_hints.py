"""Remedies in the errors of a first step."""

from __future__ import annotations

import os
import re
from collections import UserDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.engine.error_hints import add_general_hint, add_hints
from dtkit.engine.observe.error_report import format_message

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = torch.zeros(5, 64)
LABELS = torch.zeros(5, dtype=torch.int64)


def test_forward_of_other_inputs_gets_the_remedy():
    model = nn.Linear(64, 10)
    with pytest.raises(TypeError) as caught:
        model(ROWS, ROWS)
    add_hints(caught.value, [(5, (ROWS, ROWS, LABELS))], model)
    assert (
        "but the last, which is the target: here 2 inputs. Give data with as many inputs as Linear.forward takes"
        in (format_message(caught.value))
    )


class Masked(nn.Linear):
    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs * mask)


class MaskedByName(nn.Linear):
    def forward(self, inputs: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs * mask)


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (
            Masked(64, 10),
            (ROWS,),
            "Masked.forward needs 'mask', and a batch gives 1 input and the target. Give it a .* training_step=",
        ),
        (MaskedByName(64, 10), (ROWS,), "needs 'mask', .* default in forward, write it before the \\* in forward"),
        (Masked(64, 10), {"inputs": ROWS}, "needs 'mask', and the data have 'inputs'. .* add it to the data by this"),
        (nn.Sequential(Masked(64, 10)), (ROWS,), "module that calls Masked has to give it 'mask', or Masked.forward a"),
    ],
    ids=["positional", "keyword", "dict", "inner"],
)
def test_required_input_that_the_data_lack_is_named(model: nn.Module, inputs: Any, expected: str):
    with pytest.raises(TypeError) as caught:
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    add_hints(caught.value, [(5, inputs if isinstance(inputs, dict) else (*inputs, LABELS))], model)
    assert re.search(expected, format_message(caught.value))


def test_a_second_process_group_gets_the_remedy():
    error = ValueError("trying to initialize the default process group twice!")
    assert add_general_hint(error)
    assert "leave init_process_group() out" in error.__notes__[0]


def test_a_name_that_a_loading_worker_lacks_gets_the_remedy():
    error = NameError("Caught NameError in DataLoader worker process 0.\nNameError: name 'crop' is not defined")
    assert add_general_hint(error)
    assert error.__notes__[0].startswith("'crop' is not defined where this ran.")
    assert not add_general_hint(NameError("no such crop"))


class Outputs(UserDict[str, torch.Tensor]):
    """Outputs of a model, whose class looks a key up in Python."""


@pytest.mark.parametrize("make", [dict, Outputs])
def test_a_missing_key_of_a_local_dict_names_the_keys_that_there_are(make):
    def choose(outputs: Any) -> Any:
        return outputs["logit"]

    with pytest.raises(KeyError) as caught:
        choose(make(logits=ROWS, hidden=ROWS))
    assert add_general_hint(caught.value)
    assert caught.value.__notes__ == ["outputs has 'logits', 'hidden', and no 'logit'; did you mean 'logits'?"]


@pytest.mark.parametrize("look_up", [lambda: os.environ["RANKS"], lambda: KNOWN_ON_ENGINES["loss"], lambda: {}["a"]])
def test_a_missing_key_of_what_an_engine_may_have_gets_no_hint(look_up):
    with pytest.raises(KeyError) as caught:
        look_up()
    assert not add_general_hint(caught.value)


KNOWN_ON_ENGINES: dict[str, int] = {"losses": 1}


def fail(model: nn.Module, inputs: Any, target: Any, loss: Callable[..., Any] = nn.functional.cross_entropy) -> str:
    """Return the message of the error that a step with this batch raises."""
    with pytest.raises(
        (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError, NameError, AssertionError)
    ) as caught:
        loss(model(inputs), target)
    add_hints(caught.value, [(5, (inputs, target))], model)
    return format_message(caught.value)


def use_unknown_name(output: Any, target: Any) -> Any:
    return unknown_loss(output, target)  # noqa: F821 - the error that is tested


def use_cuda(output: Any, target: Any) -> Any:
    raise AssertionError("Torch not compiled with CUDA enabled")


def detach_loss(output: Any, target: Any) -> Any:
    loss = nn.functional.cross_entropy(output, target).detach()
    loss.backward()


class Named(nn.Module):
    def forward(self, inputs: torch.Tensor) -> Any:
        return {"logits": inputs}


class WithoutReturn(nn.Module):
    def forward(self, inputs: torch.Tensor) -> None:
        self.output = inputs


CONVOLUTION = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))


@pytest.mark.parametrize(
    ("model", "inputs", "target", "loss", "expected"),
    [
        (nn.Linear(64, 10), ROWS.double(), LABELS, None, r"data are float64, and the model is float32; .*'float32'\)"),
        (nn.Linear(64, 10).double(), ROWS, LABELS, None, r"data are float32, and the model is float64; .*'float64'\)"),
        (nn.Linear(64, 10), ROWS.byte(), LABELS, None, r"data are uint8, and the model is float32; .*'float32'\)"),
        (CONVOLUTION, torch.zeros(5, 1, 8, 8).byte(), LABELS, None, r"data are uint8, and the model is float32;"),
        (nn.Linear(64, 10), ROWS, LABELS, detach_loss, "has no gradient, so it can't train the model. detach"),
        (
            nn.Linear(64, 10),
            ROWS,
            ("cat",) * 5,
            None,
            r"targets of a batch are of type tuple, as texts are. Give numbers",
        ),
        (nn.Module(), ROWS, LABELS, None, r"has to define forward\(self, ...\), with this spelling"),
        (
            Named(),
            ROWS,
            LABELS,
            None,
            r"that is of type dict. Choose the tensor, .*cross_entropy\(output\['logits'\], t",
        ),
        (WithoutReturn(), ROWS, LABELS, None, r"model returns None, .* end forward\(\) with return"),
        (
            nn.Linear(64, 3),
            ROWS,
            torch.zeros(5),
            lambda output, target: ((output - target) ** 2).mean(),
            r"model has 3 outputs for each sample, and the targets have shape \(5,\), one .* use nn.CrossEntropyLoss",
        ),
        (
            nn.Linear(64, 10),
            ROWS,
            LABELS,
            lambda output, target: nn.functional.cross_entropy(target, output),
            r"softmax of whole numbers, which look like labels\. dtkit calls loss\(output, target\) in this order",
        ),
        (
            nn.Linear(64, 10),
            ROWS,
            LABELS,
            lambda output, target: nn.functional.cross_entropy(output, target[:, None]),
            r"shape \(5,\), as class labels must, so the loss takes something else .* are they swapped\?",
        ),
        (nn.Linear(64, 10), LABELS, ROWS, None, r"inputs have shape \(5,\) and type int64, .* swapped; pass \(X, y\)"),
        (
            nn.Linear(64, 1),
            ROWS,
            torch.zeros(5),
            nn.functional.binary_cross_entropy_with_logits,
            r"outputs of a batch have shape \(5, 1\), and the targets \(5,\);.* y\.reshape\(-1, 1\)",
        ),
        (
            nn.Sequential(nn.Linear(64, 1), nn.Sigmoid()),
            ROWS,
            torch.zeros(5),
            nn.functional.binary_cross_entropy,
            r"outputs of a batch have shape \(5, 1\), and the targets \(5,\);.* output\.squeeze\(1\)",
        ),
        (
            nn.Linear(64, 10).bfloat16(),
            ROWS,
            LABELS,
            None,
            r"model is bfloat16; .*torch\.from_numpy\(X\)\.bfloat16\(\)",
        ),
        (CONVOLUTION, ROWS, LABELS, None, r"shape \(64,\), and Conv2d expects \(1, 8, 8\); .*X.reshape\(-1, 1, 8, 8\)"),
        (CONVOLUTION, ROWS[:, :60], LABELS, None, r"shape \(60,\), and Conv2d expects \(1, height, width\);"),
        (CONVOLUTION, torch.zeros(5, 8, 9), LABELS, None, r"shape \(8, 9\), and Conv2d expects \(1, 8, 9\); reshape"),
        (CONVOLUTION, torch.zeros(5, 8, 9, 1), LABELS, None, r"expects \(1, 8, 9\), .*first.*transpose\(0, 3, 1, 2\)"),
        (CONVOLUTION, torch.zeros(5, 3, 8, 8), LABELS, None, r"shape \(3, 8, 8\), and Conv2d expects \(1, height"),
        (
            nn.Linear(32, 10),
            ROWS,
            LABELS,
            None,
            r"shape \(64,\)\. A layer expects 32 values .* got 64; make that layer nn.Linear\(64",
        ),
        (
            nn.Linear(64, 10),
            ROWS.reshape(-1, 1, 8, 8),
            LABELS,
            None,
            r"shape \(1, 8, 8\)\. .*put nn\.Flatten\(\) before",
        ),
        (
            nn.Linear(64, 10),
            ROWS,
            LABELS.float(),
            None,
            r"targets are float32, and class labels must be int64; .* or y.long",
        ),
        (nn.Linear(64, 10), ROWS, LABELS[:, None], None, r"have shape \(5, 1\), .* shape \(5,\), .*as in y\[:, 0\]"),
        (nn.Linear(64, 10), ROWS, nn.functional.one_hot(LABELS, 10), None, r"have shape \(5, 10\), .*y\.argmax\(1\)"),
        (nn.Linear(64, 10), ROWS, LABELS.int(), None, r"targets are int32, and class labels must be int64"),
        (
            nn.Linear(64, 10),
            ROWS,
            LABELS + 10,
            None,
            r"between 10 and 10, and the model's last layer has 10 outputs; labels must .* sample 0 is the first with",
        ),
        (nn.Linear(64, 10), ROWS, LABELS, use_unknown_name, r"'unknown_loss' is not defined where this ran"),
        (nn.Linear(64, 10), ROWS, LABELS, use_cuda, r"moves model and batches .* leave \.to\('cuda'\) and .* out"),
    ],
)
def test_error_names_the_remedy(model: nn.Module, inputs: Any, target: Any, loss: Any, expected: str):
    message = fail(model, inputs, target, loss or nn.functional.cross_entropy)
    assert re.search(expected, message), message


class Recurrent(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> Any:
        return nn.functional.linear(nn.LSTM(64, 3, batch_first=True)(inputs), torch.zeros(3, 3))  # type: ignore[arg-type]  # the mistake


class Overwriting(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = torch.sigmoid(super().forward(inputs))
        hidden += 1
        return hidden


class ChangesParameter(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        self.weight += 0.1
        return super().forward(inputs)


TABLE = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
TOKENS = torch.tensor([[0, 6]] * 5)


class TwoTables(nn.Module):
    """A recommender's model: a table of users, and one of items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.head = nn.Embedding(100, 4), nn.Embedding(5, 4), nn.Linear(8, 3)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> Any:
        return self.head(torch.cat([self.users(users), self.items(items)], 1))


TABLES = TwoTables()
DEEP = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(72, 10))


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (
            DEEP,
            torch.zeros(5, 1, 8, 8),
            r"expects 72 values for each sample, and got 12 rows of 6; put nn\.Flatten",
        ),
        (
            nn.BatchNorm2d(64),
            ROWS,
            r"2 dimensions, and expects 4D .* shape \(64,\)\. .*, features\) use nn\.Bat",
        ),
        (nn.BatchNorm1d(1), torch.zeros(5, 1, 8, 8), r"expects 2D or 3D .*\(samples, channels, height, width\) .*2d"),
        (TABLE, TOKENS, r"lie between 0 and 6, and the model's embeddings have 5 rows; .* Use nn\.Embedding\(7, "),
        (TABLE, -TOKENS, r"lie between -6 and 0, .* Number them from 0; padding needs a row of its own"),
        (
            TABLES,
            (TOKENS[:, 0], TOKENS[:, 1]),
            r"between 0 and 6, .* have 100 and 5 rows; .* Give each table a row for",
        ),
        (
            TABLE,
            TOKENS.float(),
            r"inputs are float32, and an embedding needs whole numbers; .*X\.long\(\)",
        ),
        (nn.Linear(64, 10), ({"text": "a", "x": ROWS},), r"are a dict with 'text', 'x', .*as in inputs\['x'\]"),
        (nn.Linear(64, 10), ([ROWS, ROWS],), r"are a list of 2 values, and a layer needs one tensor\. Have collate_fn"),
        (Recurrent(), ROWS, r"linear\(\) within the model gets a tuple, .* as nn\.LSTM .*outputs, _ = self\.lstm"),
        (ChangesParameter(64, 10), ROWS, r"changes a parameter in place, .*weight = self\.weight \+ 0\.1"),
    ],
    ids=[
        "flatten",
        "rows",
        "images",
        "tokens",
        "negative",
        "tables",
        "floats",
        "dict",
        "list",
        "recurrent",
        "parameter",
    ],
)
def test_layer_that_refuses_its_input_gets_the_remedy(model: nn.Module, inputs: Any, expected: str):
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)) as caught:
        model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    add_hints(caught.value, [(5, (*given, LABELS))], model)
    assert re.search(expected, format_message(caught.value)), format_message(caught.value)


def test_backward_of_an_overwritten_output_gets_the_remedy():
    message = fail(Overwriting(64, 10), ROWS, LABELS, lambda output, _: output.sum().backward())
    assert re.search(r"changes the output of Sigmoid in place, .* h = h \+ 1 instead of h \+= 1", message), message


def test_second_backward_gets_the_remedy():
    def step(output: Any, target: Any) -> Any:
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        loss.backward()

    assert re.search(
        r"dtkit calls backward\(\) on the loss .* leave loss\.backward", fail(nn.Linear(64, 10), ROWS, LABELS, step)
    )


class Keywords(nn.Module):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return {"loss": input_ids.sum()}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda model, _: model(input_ids=ROWS, label=LABELS),
            "have 'label', and Keywords.forward takes input_ids, labels",
        ),
        (lambda model, _: model(input_ids=ROWS).loss, r"This is a dict, .* use output\['loss'\] instead of \.loss"),
        (
            lambda _, batch: nn.functional.linear(next(iter(batch)), ROWS),
            r"dict with 'input_ids', 'labels'\. .*\*batch",
        ),
    ],
    ids=["name", "attribute", "keys"],
)
def test_mistakes_with_batches_in_dicts_get_the_remedy(call: Callable[..., Any], expected: str):
    model, batch = Keywords(), {"input_ids": ROWS, "labels": LABELS}
    with pytest.raises((TypeError, AttributeError)) as caught:
        call(model, batch)
    add_hints(caught.value, [(5, batch)], model)
    assert re.search(expected, format_message(caught.value)), format_message(caught.value)


def use_too_early(output: Any, target: Any) -> Any:
    total = early + output.sum()  # noqa: F821 - the error that is tested
    early = target
    return total + early


def test_variable_used_before_its_assignment_gets_no_advice_on_cells():
    assert "cell" not in fail(nn.Linear(64, 10), ROWS, LABELS, use_too_early)


def test_other_errors_stay_as_they_are():
    error = RuntimeError("something else")
    add_hints(error, [(5, {"input_ids": ROWS})], nn.Linear(64, 10))
    add_hints(error, [], nn.Linear(64, 10))
    assert format_message(error) == "something else"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModuleNotFoundError("No module named 'einops.layers'", name="einops.layers"), "'einops' is not installed for"),
        (MemoryError(), "memory does not suffice. In a training, use a smaller batch_size"),
        (RuntimeError("can't allocate memory: you tried to allocate 4000000000 bytes."), "not suffice for 4 GB more"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "not suffice for 2.00 GiB more"),
    ],
)
def test_errors_of_any_function_name_the_remedy_once(error: Exception, expected: str):
    assert add_general_hint(error)
    assert add_general_hint(error)
    (note,) = error.__notes__
    assert expected in note


def resize(image: Any, *, width: int, height: int) -> None:
    """Take two keywords."""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: torch.optim.SGD([ROWS], learning_rate=0.1),
            r"^SGD .* learning_rate=; did you mean lr=\?$",
        ),
        (lambda: torch.optim.Adam([ROWS], lr=0.1, weight_deca=0.1), "^Adam .* did you mean weight_decay="),
        (lambda: nn.Linear(in_feature=3, out_features=2), "^Linear .* did you mean in_features="),
        (lambda: nn.Conv2d(3, 4, 3, strides=2), "^Conv2d has no argument strides=; did you mean stride="),
        (lambda: F.cross_entropy(ROWS, LABELS, reductoin="sum"), "^cross_entropy .* did you mean reduction="),
        (lambda: resize(ROWS, widht=3, height=2), "^resize .* did you mean width="),
        (lambda: nn.ReLU(threshold=1), "^ReLU has no argument threshold=; it takes inplace$"),
    ],
    ids=["rate", "similar", "layer", "other library", "function", "own", "list"],
)
def test_unknown_keyword_of_a_function_names_what_was_meant(call: Any, expected: str):
    with pytest.raises(TypeError) as caught:
        call()
    assert add_general_hint(caught.value)
    (note,) = caught.value.__notes__
    assert re.search(expected, note), note


def test_unknown_keyword_of_a_forward_is_left_to_the_data():
    with pytest.raises(TypeError) as caught:
        nn.Linear(3, 2)(ROWS, widht=3)
    assert not add_general_hint(caught.value)


def test_other_errors_of_functions_get_no_hint():
    error = ValueError("a value")
    assert not add_general_hint(error)
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("model", [nn.Linear(64, 10), nn.Sequential(nn.Linear(64, 10))], ids=["layer", "sequential"])
def test_a_model_that_gets_the_whole_batch_is_told_to_get_its_inputs(model: nn.Module):
    batch = (ROWS, LABELS)
    with pytest.raises(TypeError) as caught:
        F.cross_entropy(model(batch), batch[1])
    add_hints(caught.value, [(5, batch)], model)
    assert "a tuple of 2 with the targets last. Give it the inputs" in format_message(caught.value)
    assert "LSTM" not in format_message(caught.value)


def test_a_layer_after_a_recurrent_one_is_told_to_get_its_tensor():
    model = nn.Sequential(nn.LSTM(64, 8), nn.Linear(8, 10))
    with pytest.raises(TypeError) as caught:
        model(ROWS)
    add_hints(caught.value, [(5, (ROWS, LABELS))], model)
    assert "as nn.LSTM and nn.GRU do" in format_message(caught.value)
    assert "whole batch" not in format_message(caught.value)


def test_outputs_without_a_dimension_of_classes_get_the_shape_that_the_loss_takes():
    model = nn.Sequential(nn.Linear(64, 10), nn.Flatten(0))
    with pytest.raises(ValueError, match="1D input") as caught:
        F.cross_entropy(model(ROWS), LABELS)
    add_hints(caught.value, [(5, (ROWS, LABELS))], model)
    assert "a loss of classes takes (5, number of classes) for 5 targets" in format_message(caught.value)


@pytest.mark.parametrize(
    ("code", "meant"),
    [(lambda: F.crossentropy(ROWS, LABELS), "cross_entropy"), (lambda: ROWS.argmx(1), "argmax")],  # type: ignore[attr-defined]
    ids=["function", "method"],
)
def test_a_misspelled_name_of_torch_is_corrected(code: Callable[[], Any], meant: str):
    with pytest.raises(AttributeError) as caught:
        code()
    assert add_general_hint(caught.value)
    assert f"Did you mean {meant!r}?" in format_message(caught.value)


def test_a_name_like_no_other_gets_no_correction():
    with pytest.raises(AttributeError) as caught:
        ROWS.wombat  # type: ignore[attr-defined]  # noqa: B018
    assert not add_general_hint(caught.value)
