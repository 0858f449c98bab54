"""A JupyterLab server for tests: on loopback, with separate configuration, data and runtime folders."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from tests.support.kernel import TRANSPORT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CLASSES = {"jupyterlab": "LabApp", "notebook": "JupyterNotebookApp"}
START_S = 60
STOP_S = 15

# JupyterLab's settings, by schema: no dialogs and messages that a test didn't cause.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},  # tests save explicitly
}


@dataclasses.dataclass(frozen=True)
class Server:
    """Address of a running JupyterLab, and the folder that it serves."""

    url: str
    token: str
    root: Path
    pid: int


@contextmanager
def jupyterlab(folder: Path, app: str = "jupyterlab") -> Iterator[Server]:
    """Run JupyterLab (or the app "notebook") with all its files in `folder`, and end it with its processes."""
    root = folder / "root"
    root.mkdir(parents=True)
    sockets = tempfile.mkdtemp(prefix="sockets-")
    token = secrets.token_hex(16)
    command = [
        *(sys.executable, "-m", app, "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"),
        *(f"--{_CLASSES[app]}.expose_app_in_browser=True", f"--ServerApp.root_dir={root}"),
        # This database lists trusted outputs; the user's must stay unchanged.
        f"--NotebookNotary.db_file={folder / 'signatures.db'}",
        # The path of a socket has 100 characters at most, and pytest's folders are long.
        *(f"--KernelManager.transport={TRANSPORT}", f"--KernelManager.ip={sockets}/kernel"),
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
        _wait_until_listening(url)
        yield Server(url, token, root, process.pid)
    finally:
        _stop(process)
        shutil.rmtree(sockets)


def _wait_until_listening(url: str) -> None:
    """Wait until the server accepts connections, which may be a moment after it prints its address."""
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
    """Return the environment without Jupyter's variables, and with folders for this server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON"))}
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",  # hides the user's kernels and extensions
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    for name in folders.values():
        (folder / name).mkdir()
    for schema, values in SETTINGS.items():
        file = folder / "settings" / f"{schema}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    paths = {variable: str(folder / name) for variable, name in folders.items()}
    # The token is in the environment, since every user of the machine can read command lines.
    return kept | paths | {"JUPYTER_TOKEN": token, "JUPYTER_PREFER_ENV_PATH": "1"}


def _wait_for_url(process: subprocess.Popen[str]) -> str:
    """Return the address that the server prints on stderr. Raises RuntimeError with all of stderr without one."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stderr is not None
    threading.Thread(target=_drain, args=(process.stderr, lines), daemon=True).start()
    deadline = time.monotonic() + START_S
    printed: list[str] = []
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError(f"JupyterLab printed no address within {START_S} s, but:\n{''.join(printed)}")
        printed.append(line)
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            return match[0]


def _drain(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Read until the server ends, since a full pipe would block it."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str]) -> None:
    """End the server, which ends its kernels, and then the processes that a kernel left."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
    _, alive = psutil.wait_procs(children, timeout=STOP_S)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=STOP_S)
