"""A JupyterLab server of the tests' own: own configuration, data and runtime folders; on loopback only."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CLASSES = {"jupyterlab": "LabApp", "notebook": "JupyterNotebookApp"}
START_S = 60
STOP_S = 15

# JupyterLab's settings, by schema: no question and no message that a test didn't cause.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},  # a test says when it saves
}


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a running JupyterLab listens, and the folder that it serves."""

    url: str
    token: str
    root: Path
    pid: int


@contextmanager
def jupyterlab(folder: Path, app: str = "jupyterlab") -> Iterator[Server]:
    """Run JupyterLab (or the app "notebook") with all its files under `folder`, and end it with all that it started."""
    root = folder / "root"
    root.mkdir(parents=True)
    token = secrets.token_hex(16)
    command = [
        *(sys.executable, "-m", app, "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"),
        *(f"--{_CLASSES[app]}.expose_app_in_browser=True", f"--ServerApp.root_dir={root}"),
        # The notebook's own outputs are trusted only where this database says so: keep the user's out of it.
        f"--NotebookNotary.db_file={folder / 'signatures.db'}",
    ]
    process = subprocess.Popen(
        command,
        env=_environment(folder, token),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = _wait_for_url(process)
        _wait_until_it_listens(url)
        yield Server(url, token, root, process.pid)
    finally:
        _stop(process)


def _wait_until_it_listens(url: str) -> None:
    """It may announce its address a moment before that."""
    address = urlsplit(url)
    deadline, pause = time.monotonic() + START_S, threading.Event()
    while True:
        try:
            socket.create_connection((address.hostname or "", address.port or 0), timeout=START_S).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            pause.wait(0.05)
        else:
            return


def _environment(folder: Path, token: str) -> dict[str, str]:
    """This process's environment without what steers Jupyter, and with folders of the server's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON"))}
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",  # keeps a user's kernels and extensions out
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    for place in places.values():
        (folder / place).mkdir()
    for schema, values in SETTINGS.items():
        file = folder / "settings" / f"{schema}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    own = {name: str(folder / place) for name, place in places.items()}
    # The token goes by the environment: a command line can be read by every user of the machine.
    return kept | own | {"JUPYTER_TOKEN": token, "JUPYTER_PREFER_ENV_PATH": "1"}


def _wait_for_url(process: subprocess.Popen[str]) -> str:
    """The address that the server announces on stderr; raises with all of stderr where none comes."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stderr is not None
    threading.Thread(target=_drain, args=(process.stderr, lines), daemon=True).start()
    deadline = time.monotonic() + START_S
    seen: list[str] = []
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError(f"JupyterLab gave no address within {START_S} s. It said:\n{''.join(seen)}")
        seen.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]


def _drain(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Read to the end, for as long as the server lives: a full pipe would stop it."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str]) -> None:
    """End the server, which ends its kernels; then, by pid, what a kernel left."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
    _, left = psutil.wait_procs(family, timeout=STOP_S)
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=STOP_S)
