"""Check of the optimizer's options in the notebook, before anything is sent: what torch refuses, with a remedy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dtkit.training.settings import describe_value

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_REMEDIES = {
    r"learning rate": "A learning rate is a number from 0 up, as in lr=0.1",
    r"momentum value": "A momentum is a number from 0 up, as in momentum=0.9",
    r"weight_decay value": "A weight decay is a number from 0 up, as in weight_decay=0.01",
    r"epsilon value": "It is a number from 0 up, as in eps=1e-8",
    r"beta parameter": "Each of them is from 0 to below 1, as in betas=(0.9, 0.999)",
    r"alpha value|rho value": "It is a number from 0 up, and mostly below 1, as in 0.99",
}
"""Options as torch's messages name them, with the rule and an example."""


def check_optimizer_options(model: torch.nn.Module, factory: Callable[..., Any]) -> None:
    """Raise ValueError if torch refuses a number in the user's optimizer.

    The function is tried on parameters without values. Any other error may come from these, so engines report it. A
    function of the model is not tried, since it may change the model.
    """
    from dtkit.strategies.base import get_first_parameter_name
    from dtkit.strategies.meta_copy import make_empty_like

    if (first := get_first_parameter_name(factory)) == "model":
        return
    try:
        pairs = [(name, make_empty_like(p)) for name, p in model.named_parameters() if p.requires_grad]
        factory(pairs if first == "named_parameters" else [p for _, p in pairs])
    except ValueError as error:
        message = str(error)
        remedy = next((text for name, text in _REMEDIES.items() if re.match(rf"Invalid ({name})", message)), None)
        if remedy is not None:
            raise ValueError(f"optimizer={describe_value(factory)}: {message}. {remedy}") from error
    except Exception:  # noqa: BLE001, S110 - may come from the stand-ins, such as that fused updates need values
        pass
