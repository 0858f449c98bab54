"""Graphs of TensorFlow that hold collectives."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tensorflow")

SCRIPT = """
import tensorflow as tf
from dtkit.integrations.xla import refuse_xla

@tf.function
def step(x):
    refuse_xla()
    return x + 1

print(int(step(tf.constant(1))))
"""


def test_a_graph_with_collectives_is_traced_without_a_warning(tmp_path: Path):
    script = tmp_path / "script.py"  # AutoGraph reads source files
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.split() == ["2"], ran.stderr
    assert "AutoGraph" not in ran.stderr
