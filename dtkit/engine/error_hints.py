"""Remedies for common errors of a first step, based on the shapes and types of its batches."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util import formatting
from dtkit.strategies.loss import get_labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DETACHED_MESSAGE = "does not require grad and does not have a grad_fn"
"""Part of torch's error for a loss that is cut off from the parameters."""
_DIMENSION_NAMES = {1: "length", 2: "height, width", 3: "depth, height, width"}


def add_hints(error: Exception, batches: Sequence[tuple[int, Any]], model: torch.nn.Module) -> None:
    """Add notes with remedies to an error of a step. `batches` are pairs of a number of samples and a batch."""
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
        _explain_output_shape(message),
        _explain_output_columns(message, target),
        _explain_output_type(message),
        _explain_detached(message),
        _explain_swapped_loss(message),
        _explain_target_type(message),
        _explain_forward(message, inputs, model),
        _explain_target(message, target, model),
    )
    for hint in filter(None, hints):
        error.add_note(hint)


def add_general_hint(error: BaseException) -> bool:
    """Add a note with a remedy to an error of any function of the user, and return whether there is one."""
    explain = (_explain_name, _explain_module, _explain_memory, _explain_mean, _explain_group)
    hint = next((text for each in explain if (text := each(error))), None)
    if hint and hint not in getattr(error, "__notes__", ()):
        error.add_note(hint)
    return bool(hint)


def _explain_name(error: BaseException) -> str | None:
    if type(error) is not NameError:  # an UnboundLocalError is a mistake within the function
        return None
    return (
        f"{error.name!r} is not defined where this ran. Is it defined in a later cell? Functions take along what they "
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


def _iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _iterate_tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _iterate_tensors(entry)


def _get_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    dtypes = [t.dtype for t in _iterate_tensors(inputs)]
    # Whole numbers next to floats may be indices, which are right as they are.
    data_dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else None)
    model_dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if data_dtype is None or model_dtype is None or data_dtype == model_dtype:
        return None
    name = _get_name(model_dtype)
    start = f"The data are {_get_name(data_dtype)}, and the model is {name}; convert the data, as in"
    if model_dtype == torch.bfloat16:  # which numpy doesn't have
        return f"{start} torch.from_numpy(X).bfloat16(), or keep the model in float32, with precision='bf16'"
    return f"{start} X.astype({name!r}), or X.to(torch.{name}) for a tensor"


def _explain_swapped(inputs: Any, target: Any) -> str | None:
    """Return the remedy where labels are in the place of the inputs: one whole number for each row of floats."""
    first, last = (list(_iterate_tensors(part)) for part in (inputs, target))
    if len(first) != 1 or len(last) != 1 or first[0].dim() != 1 or last[0].dim() < 2:
        return None
    if first[0].is_floating_point() or not last[0].is_floating_point():
        return None
    return (
        f"The inputs have shape {tuple(first[0].shape)} and type {_get_name(first[0].dtype)}, and the targets have "
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
    shapes = re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", message)
    sample = _get_sample_shape(inputs)
    if shapes is None or sample is None:
        return None
    start = (
        f"A sample has shape {sample}. A layer expects {shapes[2]} values in its last dimension, and got {shapes[1]}"
    )
    if len(sample) > 1 and math.prod(sample) == int(shapes[2]):
        return f"{start}; put nn.Flatten() before that layer, or reshape the data, as in X.reshape(len(X), -1)"
    return f"{start}; make that layer nn.Linear({shapes[1]}, ...), or reshape the data"


def _explain_output_shape(message: str) -> str | None:
    """Return the remedy where a loss needs equal shapes, and outputs have a last dimension of 1."""
    sizes = re.search(r"arget size \(torch\.Size\(\[(\d+)\]\)\) .*input size \(torch\.Size\(\[(\d+), 1\]\)\)", message)
    if sizes is None or sizes[1] != sizes[2]:
        return None
    return (
        f"The outputs of a batch have shape ({sizes[2]}, 1), and the targets ({sizes[1]},); they must be equal. "
        "Convert the targets, as in y.reshape(-1, 1), or the outputs, as in output.squeeze(1)"
    )


def _explain_output_columns(message: str, target: Any) -> str | None:
    """Return the remedy where a loss compares several outputs of a sample with its one target."""
    sizes = re.search(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dim.* 1", message)
    targets = next(_iterate_tensors(target), None)
    if sizes is None or targets is None or targets.dim() != 1 or int(sizes[2]) != len(targets):
        return None
    return (
        f"The model has {sizes[1]} outputs for each sample, and the targets have shape ({sizes[2]},), one number for "
        "each sample. For class labels use nn.CrossEntropyLoss(); for one number, end the model with nn.Linear(..., 1) "
        "and reshape the targets, as in y.reshape(-1, 1)"
    )


def _explain_output_type(message: str) -> str | None:
    """Return the remedy where a loss of torch gets what the model returned, and that is not a tensor."""
    kind = re.search(r"argument 'input' \(position 1\) must be Tensor, not (\w+)", message)
    if kind is None:
        return None
    key = "['logits']" if kind[1] in ("dict", "OrderedDict") else "[0]" if kind[1] in ("tuple", "list") else ".logits"
    return (
        f"The loss gets what the model returns as its output, and that is of type {kind[1]}. Choose the tensor, as in "
        f"loss=lambda output, target: nn.functional.cross_entropy(output{key}, target)"
    )


def _explain_target_type(message: str) -> str | None:
    """Return the remedy where targets are not numbers."""
    kind = re.search(r"argument 'target' \(position 2\) must be Tensor, not (\w+)", message)
    if kind is None:
        return None
    return (
        f"The targets of a batch are of type {kind[1]}, as texts are. Give numbers: for classes, as in "
        "numpy.unique(labels, return_inverse=True)[1]"
    )


def _explain_forward(message: str, inputs: Any, model: torch.nn.Module) -> str | None:
    """Return the remedy where the model has no forward, or one of other inputs than a batch has."""
    name = type(model).__name__
    if 'is missing the required "forward" function' in message:
        return "The class of this module has to define forward(self, ...), with this spelling, indented in the class"
    if f"{name}.forward() " not in message or "positional argument" not in message or isinstance(inputs, dict):
        return None
    count = len(inputs) if isinstance(inputs, tuple) else 1
    return (
        f"The model gets all parts of a batch but the last, which is the target: here "
        f"{formatting.format_count(count, 'input')}. Give data with as many inputs as {name}.forward takes, or "
        "training_step=, a function of (model, batch) that calls the model itself"
    )


def _explain_detached(message: str) -> str | None:
    if DETACHED_MESSAGE not in message:
        return None
    return (
        "The loss has no gradient, so it can't train the model. detach(), item(), numpy(), argmax() or torch.no_grad() "
        "cut it off from the parameters; compute it from the model's output by torch's functions alone"
    )


def _explain_swapped_loss(message: str) -> str | None:
    if not re.search(r"softmax\w*\"? not implemented for '(Long|Int|Short|Char|Byte)'", message):
        return None
    return (
        "The loss takes the softmax of whole numbers, which look like labels. dtkit calls loss(output, target) in this "
        "order, and torch's losses take both in the same order; swap them"
    )


def _explain_target(message: str, target: Any, model: torch.nn.Module) -> str | None:
    targets = next(_iterate_tensors(target), None)
    if targets is None:
        return None
    name = _get_name(targets.dtype)
    if re.search(r"expected target dtype|scalar type Long but|nll_loss.* not implemented", message):
        return f"The targets are {name}, and class labels must be int64; convert them, as in y.astype('int64')"
    if re.search(r"Found dtype Long but expected", message):
        return f"The targets are {name}, and this loss expects floats; convert them, as in y.astype('float32')"
    if re.search(r"multi-target not supported|floating point type for target with class probabilities", message):
        remedy = "y[:, 0]" if targets.shape[1:] == (1,) else "y.argmax(1) for rows of 0 and 1"
        return (
            f"The targets of a batch have shape {tuple(targets.shape)}, and class labels must have shape "
            f"{tuple(targets.shape[:1])}, one number for each sample; convert them, as in {remedy}"
        )
    if re.search(r"Target -?\d+ is out of bounds", message):
        low, high = int(targets.min()), int(targets.max())
        sizes = [m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear)]
        outputs = f", and the model's last layer has {sizes[-1]} outputs" if sizes else ""
        return (
            f"The targets of this batch lie between {low} and {high}{outputs}; labels must be 0 to the number of "
            "classes - 1"
        )
    return None


def _get_sample_shape(inputs: Any) -> tuple[int, ...] | None:
    first = next(_iterate_tensors(inputs), None)
    return None if first is None or not first.dim() else tuple(first.shape[1:])
