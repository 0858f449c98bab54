"""Observing operations costs no load of torch's compiler."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import sys
import torch
from torch import nn
from dtkit.data.pairing import PairingDetector
from dtkit.engine.dry_run import AllocationTracker

model, data = nn.Linear(2, 2), torch.zeros(3, 2)
with PairingDetector("the loss", 3, data, model).watch():
    model(data).sum().backward()
with AllocationTracker():
    model(data).sum().backward()
print("torch._dynamo" in sys.modules)
"""


def test_observed_operations_do_not_load_the_compiler():
    """It takes half a second, at each first training of a notebook."""
    output = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.split() == ["False"]
