"""Rules and remedies for the arguments that torch's optimizers refuse: their errors name the value alone."""

from __future__ import annotations

import re
import traceback

_NOT_NEGATIVE = "must not be negative"
_SHARE = "must be from 0 to below 1"
_RULES: dict[str, tuple[str, str, str]] = {
    "learning rate": ("lr", _NOT_NEGATIVE, "lr=0.1 for SGD, or lr=0.001 for Adam"),
    "momentum": ("momentum", _NOT_NEGATIVE, "momentum=0.9"),
    "beta parameter at index 0": ("betas[0]", _SHARE, "betas=(0.9, 0.999)"),
    "beta parameter at index 1": ("betas[1]", _SHARE, "betas=(0.9, 0.999)"),
    "epsilon": ("eps", _NOT_NEGATIVE, "eps=1e-8"),
    "weight_decay": ("weight_decay", _NOT_NEGATIVE, "weight_decay=0.01"),
    "alpha": ("alpha", _NOT_NEGATIVE, "alpha=0.99"),
    "rho": ("rho", "must be from 0 to 1", "rho=0.9"),
    "lr_decay": ("lr_decay", _NOT_NEGATIVE, "lr_decay=0"),
    "momentum_decay": ("momentum_decay", _NOT_NEGATIVE, "momentum_decay=0.004"),
}
"""What torch calls an argument: its name, what it must be, and a usual value."""
_NAMES = "|".join(map(re.escape, _RULES))
_REFUSED = re.compile(rf"Invalid ({_NAMES})(?: value)?: (.+)|Learning rate should be >= 0 but is: (.+)")
_REMEDIES = {
    "Nesterov momentum requires": "Give both, as in torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)",
    "optimizer got an empty parameter list": (
        "The function in optimizer= has left out all parameters that it gets; choose at least one of them"
    ),
    "some parameters appear in more than one parameter group": (
        "Give each parameter to one group: leave those of the other groups out of the last one"
    ),
    "You must define either total_steps": (
        "The run takes one step for each update: total_steps=epochs * math.ceil(samples / batch_size)"
    ),
    "Expected 1 lr_lambdas": "The optimizer has one parameter group: give one function instead of a list",
}
"""Remedies by how torch's errors begin that name no value."""


def explain_optimizer(error: BaseException) -> str | None:
    """Return the rule and the remedy for an argument of an optimizer or a schedule; None for another error."""
    if not isinstance(error, ValueError) or not _is_raised_by_optimizer(error):
        return None
    if remedy := next((text for start, text in _REMEDIES.items() if str(error).startswith(start)), None):
        return remedy
    found = _REFUSED.fullmatch(str(error))
    if found is None:
        return None
    name, rule, usual = _RULES[found[1] or "learning rate"]
    return f"{name} is {found[2] or found[3]} and {rule}. Correct it in optimizer=: {usual} is usual"


def _is_raised_by_optimizer(error: BaseException) -> bool:
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith("torch.optim")
