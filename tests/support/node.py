"""Modules of the page, run by a node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dtkit.dashboard.live.bundle import STATIC_FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_node() -> str:
    """Return the path of a node.js: the one that comes with Playwright, or the system's."""
    playwright = pytest.importorskip("playwright")
    own = Path(playwright.__file__).parent / "driver" / "node"
    found = str(own) if own.exists() else shutil.which("node")
    return found or pytest.skip("no node.js")


def evaluate_page_code(folder: Path, module: str, names: Sequence[str], expression: str) -> Any:
    """Return the value of an expression with `names` of one of the page's modules. It uses `folder` for its files."""
    shutil.copytree(STATIC_FOLDER, folder / "static")
    (folder / "package.json").write_text('{"type": "module"}')
    code = f'import {{ {", ".join(names)} }} from "./static/{module}";\nconsole.log(JSON.stringify({expression}));'
    (folder / "run.js").write_text(code)
    command = [find_node(), "run.js"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
