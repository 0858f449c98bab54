"""The environment of a script's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.engine import script_process
from dtkit.engine.observe.call_output import CallOutput

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

from dtkit.rpc.script import Script


def test_progress_bars_do_not_take_the_output_for_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    path, output = tmp_path / "t.py", CallOutput()
    path.write_text("from rich.console import Console\nprint(Console().is_terminal)")
    assert script_process.run_script(Script(str(path), folder=str(tmp_path)), {}, output) == 0
    assert output.items == [("text", "False")]
