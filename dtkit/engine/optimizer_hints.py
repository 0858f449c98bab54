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


def explain_optimizer(error: BaseException) -> str | None:
    """Return the rule and the remedy for an argument of an optimizer; None for another error."""
    found = _REFUSED.fullmatch(str(error)) if isinstance(error, ValueError) else None
    if found is None or not _is_raised_by_optimizer(error):
        return None
    name, rule, usual = _RULES[found[1] or "learning rate"]
    return f"{name} is {found[2] or found[3]} and {rule}. Correct it in optimizer=: {usual} is usual"


def _is_raised_by_optimizer(error: BaseException) -> bool:
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith("torch.optim")
