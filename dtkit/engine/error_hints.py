"""Remedies for common errors of a first step, based on the shapes and types of its batches."""

from __future__ import annotations

import inspect
import math
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util import formatting
from dtkit.engine import loss_hints
from dtkit.engine.attribute_hints import explain_attribute
from dtkit.engine.key_hints import explain_key
from dtkit.engine.keyword_hints import explain_keyword
from dtkit.engine.layer_input_hints import explain_layer_input, explain_whole_batch
from dtkit.engine.loss_hints import iterate_tensors, name_dtype
from dtkit.engine.optimizer_hints import explain_optimizer
from dtkit.strategies.loss import get_labels
from dtkit.strategies.sharded_outputs import explain_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIMENSION_NAMES = {1: "length", 2: "height, width", 3: "depth, height, width"}


def add_hints(
    error: Exception,
    batches: Sequence[tuple[int, Any]],
    model: torch.nn.Module,
    all_labels: torch.Tensor | None = None,
) -> None:
    """Add notes with remedies to an error of a step. `batches` are pairs of a number of samples and a batch.

    `all_labels` are those of the whole data, if they are known.
    """
    if add_general_hint(error) or not batches:
        return
    batch, message = batches[0][1], str(error)
    target = get_labels(batch)
    inputs = batch[:-1] if isinstance(batch, tuple) and len(batch) > 1 else batch
    if swapped := _explain_swapped(inputs, target):
        error.add_note(swapped)
        return
    hints = (
        _explain_device(message),
        _explain_dtype(message, inputs, model),
        _explain_convolution(message, inputs, model),
        _explain_features(message, inputs),
        _explain_dimensions(message, inputs),
        _explain_embedding(message, inputs, model),
        explain_whole_batch(error, batch, model) or explain_layer_input(message, inputs),
        _explain_unpacked_keys(message, batch),
        _explain_forward(message, inputs, model),
        _explain_keyword(message, model),
        _explain_in_place(message),
        _explain_second_backward(message),
        *loss_hints.list_hints(message, target, model, all_labels),
    )
    for hint in filter(None, hints):
        error.add_note(hint)


def add_general_hint(error: BaseException) -> bool:
    """Add a note with a remedy to an error of any function of the user, and return whether there is one."""
    explain_kinds = (
        _explain_name,
        _explain_module,
        _explain_memory,
        _explain_mean,
        explain_in_place,
        _explain_group,
        _explain_schedule_end,
        explain_attribute,
        explain_key,
        explain_keyword,
        explain_optimizer,
    )
    hint = next((text for explain in explain_kinds if (text := explain(error))), None)
    if hint and hint not in getattr(error, "__notes__", ()):
        error.add_note(hint)
    return bool(hint)


def _explain_name(error: BaseException) -> str | None:
    if type(error) is not NameError:  # an UnboundLocalError is a mistake within the function
        return None
    in_text = re.search(r"name '(\w+)' is not defined", str(error))  # all that a DataLoader's worker sends
    name = error.name or (in_text and in_text[1])
    if not name:
        return None
    return (
        f"{name!r} is not defined where this ran. Is it defined in a later cell? Functions take along what they "
        "use from the notebook as it is when they are sent. Run the cell that defines the name first, or import it "
        "inside the function"
    )


def _explain_module(error: BaseException) -> str | None:
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    return (
        f"{error.name.partition('.')[0]!r} is not installed for {sys.executable}; install it there. A file of your own "
        "is found in the folder of the notebook"
    )


def _explain_memory(error: BaseException) -> str | None:
    asked = re.search(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+ \w+)", str(error))
    if asked is None and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return None
    amount = "" if asked is None else f" for {formatting.format_bytes(int(asked[1])) if asked[1] else asked[2]} more"
    return (
        f"this rank's memory does not suffice{amount}. In a training, use a smaller batch_size, accumulate=, or a "
        "strategy that splits the model; cluster.plan(...) shows what fits"
    )


def _explain_mean(error: BaseException) -> str | None:
    mean = re.search(r"mean\(\): could not infer output dtype.* Got: (\w+)", str(error))
    if mean is None:
        return None
    kind = "A comparison gives booleans, which" if mean[1] == "Bool" else "Whole numbers"
    return f"{kind} have no mean in torch; convert them first, as in (output.argmax(1) == target).float().mean()"


def _explain_group(error: BaseException) -> str | None:
    if "initialize the default process group twice" not in str(error):
        return None
    return (
        "dtkit has formed the process group of all ranks already, so leave init_process_group() out. A script that "
        "forms its own runs by cluster.torchrun(...)"
    )


def _explain_schedule_end(error: BaseException) -> str | None:
    found = re.search(r"Tried to step \d+ times\. The specified number of total steps is (\d+)", str(error))
    if found is None:
        return None
    return (
        f"The schedule of OneCycleLR ends after {found[1]} steps. A longer run needs one as long as the whole "
        "training: cluster.train(run.model, ...) with a new lr_scheduler="
    )


def _explain_device(message: str) -> str | None:
    if not re.search(r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|same device", message):
        return None
    return (
        "dtkit moves model and batches to the rank's device, so leave .to('cuda') and .cuda() out. For a tensor of "
        "your own, use the device of the output, as in weights.to(output.device)"
    )


def _explain_dtype(message: str, inputs: Any, model: torch.nn.Module) -> str | None:
    if not re.search(r"same dtype|same type|should be the same|expected scalar type", message):
        return None
    dtypes = [t.dtype for t in iterate_tensors(inputs)]
    # Whole numbers next to floats may be indices, which are right as they are.
    data_dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else None)
    model_dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if data_dtype is None or model_dtype is None or data_dtype == model_dtype:
        return None
    name = name_dtype(model_dtype)
    start = f"The data are {name_dtype(data_dtype)}, and the model is {name}; convert the data, as in"
    if model_dtype == torch.bfloat16:  # which numpy doesn't have
        return f"{start} torch.from_numpy(X).bfloat16(), or keep the model in float32, with precision='bf16'"
    return f"{start} X.astype({name!r}), or X.to(torch.{name}) for a tensor"


def _explain_swapped(inputs: Any, target: Any) -> str | None:
    """Return the remedy where labels are in the place of the inputs: one whole number for each row of floats."""
    first, last = (list(iterate_tensors(part)) for part in (inputs, target))
    if len(first) != 1 or len(last) != 1 or first[0].dim() != 1 or last[0].dim() < 2:
        return None
    if first[0].is_floating_point() or not last[0].is_floating_point():
        return None
    return (
        f"The inputs have shape {tuple(first[0].shape)} and type {name_dtype(first[0].dtype)}, and the targets have "
        f"shape {tuple(last[0].shape)}: data are pairs (inputs, targets), and these look swapped; pass (X, y)"
    )


def _explain_convolution(message: str, inputs: Any, model: torch.nn.Module) -> str | None:
    convolution = re.search(r"input to conv(\d)d|to have \d+ channels", message)
    sample = _get_sample_shape(inputs)
    layers = [m for m in model.modules() if isinstance(m, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d))]
    if convolution is None or sample is None or not layers:
        return None
    channels, dimensions = layers[0].in_channels, len(layers[0].kernel_size)
    start = f"A sample has shape {sample}, and {type(layers[0]).__name__} expects"
    if len(sample) == dimensions + 1 and sample[-1] == channels:
        order = ", ".join(map(str, (0, dimensions + 1, *range(1, dimensions + 1))))
        return (
            f"{start} {(channels, *sample[:-1])}, channels first; move them, as in X.transpose({order}), or "
            f"X.permute({order}) for a tensor"
        )
    extents = _guess_extents(sample, channels, dimensions)
    expected = f"{channels}, {_DIMENSION_NAMES[dimensions] if extents is None else ', '.join(map(str, extents))}"
    return f"{start} ({expected}); reshape the data, as in X.reshape(-1, {expected})"


def _guess_extents(sample: tuple[int, ...], channels: int, dimensions: int) -> tuple[int, ...] | None:
    """Return the extents of an image whose channels or rows were flattened; None if they can't be known."""
    if len(sample) == dimensions and channels == 1:
        return sample
    pixels, rest = divmod(math.prod(sample), channels)
    side = round(pixels ** (1 / dimensions))
    return (side,) * dimensions if len(sample) == 1 and not rest and side**dimensions == pixels else None


def _explain_features(message: str, inputs: Any) -> str | None:
    shapes = re.search(r"shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)", message)
    sample = _get_sample_shape(inputs)
    if shapes is None or sample is None:
        return None
    num_rows, got, expected = map(int, shapes.groups())
    num_samples = len(next(iterate_tensors(inputs)))
    if num_rows > num_samples and num_rows * got == num_samples * expected != num_samples * math.prod(sample):
        return (
            f"A layer expects {expected} values for each sample, and got {num_rows // num_samples} rows of {got}; put "
            "nn.Flatten() before that layer"
        )
    start = f"A sample has shape {sample}. A layer expects {expected} values in its last dimension, and got {got}"
    if len(sample) > 1 and math.prod(sample) == expected:
        return f"{start}; put nn.Flatten() before that layer, or reshape the data, as in X.reshape(len(X), -1)"
    return f"{start}; make that layer nn.Linear({got}, ...), or reshape the data"


def _explain_dimensions(message: str, inputs: Any) -> str | None:
    """Return the remedy where a layer, such as a batch norm, expects inputs with other dimensions."""
    kinds = re.search(r"expected ((?:\dD or )?\dD) input \(got (\d)D input\)", message)
    if kinds is None:
        return None
    layer = {"2": "nn.BatchNorm1d", "3": "nn.BatchNorm1d", "4": "nn.BatchNorm2d", "5": "nn.BatchNorm3d"}.get(kinds[2])
    remedy = f"For batches of shape {_name_axes(int(kinds[2]))} use {layer}, or" if layer else "Change the layer, or"
    return (
        f"A layer gets a batch with {kinds[2]} dimensions, and expects {kinds[1]} input; a sample of the data has "
        f"shape {_get_sample_shape(inputs)}. {remedy} reshape the data"
    )


def _name_axes(num_dimensions: int) -> str:
    """Return the shape of a batch in words, as in "(samples, channels, height, width)"."""
    extents = _DIMENSION_NAMES.get(num_dimensions - 2)
    return f"(samples, channels, {extents})" if extents else "(samples, features)"


def _explain_embedding(message: str, inputs: Any, model: torch.nn.Module) -> str | None:
    """Return the remedy where an embedding gets numbers that are no rows of its table."""
    tensors = list(iterate_tensors(inputs))
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    if not tensors or not sizes:
        return None
    indices = [t for t in tensors if not t.is_floating_point() and t.numel()]
    if "index out of range in self" in message and indices:
        return _explain_rows_of_embedding(min(int(t.min()) for t in indices), max(int(t.max()) for t in indices), sizes)
    if re.search(r"argument #1 'indices' to have .* scalar types", message):
        return (
            f"The inputs are {name_dtype(tensors[0].dtype)}, and an embedding needs whole numbers; convert them, as in "
            "X.astype('int64'), or X.long() for a tensor"
        )
    return None


def _explain_rows_of_embedding(low: int, high: int, sizes: Sequence[int]) -> str:
    """Return the remedy for inputs from `low` to `high` and tables of these sizes."""
    tables = " and ".join(f"{size:,}" for size in sizes)
    remedy = f"Use nn.Embedding({high + 1}, ...)"
    if low < 0:
        remedy = "Number them from 0; padding needs a row of its own, as in nn.Embedding(..., padding_idx=0)"
    elif len(sizes) > 1:
        remedy = "Give each table a row for every number that it gets"
    return (
        f"Inputs of this batch lie between {low:,} and {high:,}, and the model's embeddings have {tables} rows; inputs "
        f"must be 0 to the number of rows - 1. {remedy}"
    )


def _explain_unpacked_keys(message: str, batch: Any) -> str | None:
    """Return the remedy where code takes a dict apart as if it were a tuple, which yields its keys."""
    if not isinstance(batch, dict) or not re.search(r"must be Tensor, not str|'str' object has no attribute", message):
        return None
    keys = list(map(str, batch))
    return (
        f"A batch of this data is a dict with {', '.join(map(repr, keys[:6]))}. inputs, target = batch yields these "
        f"names. Use batch[{keys[0]!r}], or model(**batch)"
    )


def _explain_keyword(message: str, model: torch.nn.Module) -> str | None:
    """Return the remedy where a dict of the data has a name that the model's forward doesn't know."""
    name = re.search(rf"{type(model).__name__}\.forward\(\) got an unexpected keyword argument '(\w+)'", message)
    if name is None:
        return None
    takes = ", ".join(inspect.signature(model.forward).parameters)
    return (
        f"The data have {name[1]!r}, and {type(model).__name__}.forward takes {takes}. Rename it in the data, or leave "
        "it out"
    )


def _explain_in_place(message: str) -> str | None:
    """Return the remedy where an operation overwrites what the backward pass needs."""
    if "modified by an inplace operation" in message:
        output = re.search(r"which is output \d+ of (\w+?)(?:Backward\d*)?,", message)
        what = f"the output of {output[1]}" if output else "a tensor"
        return (
            f"The model changes {what} in place, and the backward pass needs it as it was. Make a new tensor: h = h + "
            "1 instead of h += 1, relu() instead of relu_(), and inplace=False in layers"
        )
    if "leaf Variable that requires grad" in message and "in-place" in message:
        return (
            "The step changes a parameter in place, which only the optimizer may do. Compute a new tensor, as in "
            "weight = self.weight + 0.1, or use torch.no_grad() around the change"
        )
    return None


def _explain_second_backward(message: str) -> str | None:
    if "backward through the graph a second time" not in message:
        return None
    return (
        "dtkit calls backward() on the loss that a step returns, so leave loss.backward(), optimizer.step() and "
        "zero_grad() out. A tensor that one step keeps for the next one needs detach()"
    )


def _explain_forward(message: str, inputs: Any, model: torch.nn.Module) -> str | None:
    """Return the remedy where the model has no forward, or one of other inputs than a batch has."""
    name = type(model).__name__
    if 'is missing the required "forward" function' in message:
        return "The class of this module has to define forward(self, ...), with this spelling, indented in the class"
    if missing := re.search(r"(\w+)\.forward\(\) missing \d+ required (keyword-only|positional) arg\w+: (.+)", message):
        return _explain_missing_input(missing, inputs, model)
    if f"{name}.forward() " not in message or "positional argument" not in message or isinstance(inputs, dict):
        return None
    return (
        f"The model gets all parts of a batch but the last, which is the target: here {_count_inputs(inputs)}. Give "
        f"data with as many inputs as {name}.forward takes, or training_step=, a function of (model, batch) that calls "
        "the model itself"
    )


def _explain_missing_input(missing: re.Match[str], inputs: Any, model: torch.nn.Module) -> str | None:
    """Return the remedy where forward has a required parameter that the data don't fill."""
    layer, kind, names = missing.groups()
    if layer != type(model).__name__:
        if all(type(module).__name__ != layer for module in model.modules()):
            return None
        return f"The module that calls {layer} has to give it {names}, or {layer}.forward a default, as in mask=None"
    if isinstance(inputs, dict):
        given = f"the data have {', '.join(map(repr, inputs))}"
        remedy = "add it to the data by this name"
    else:
        given = f"a batch gives {_count_inputs(inputs)} and the target"
        remedy = "put it into the data before the target, as in (x, mask, y)"
    if kind == "keyword-only" and not isinstance(inputs, dict):
        remedy = "write it before the * in forward and put it into the data, as in (x, mask, y)"
    return (
        f"{layer}.forward needs {names}, and {given}. Give it a default in forward, {remedy}, or write training_step=, "
        "a function of (model, batch) that calls the model itself"
    )


def _count_inputs(inputs: Any) -> str:
    return formatting.format_count(len(inputs) if isinstance(inputs, tuple) else 1, "input")


def _get_sample_shape(inputs: Any) -> tuple[int, ...] | None:
    first = next(iterate_tensors(inputs), None)
    return None if first is None or not first.dim() else tuple(first.shape[1:])
