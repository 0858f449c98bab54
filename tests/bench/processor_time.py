"""Processor time of a measurement's processes, by what they are. Other programs of the machine don't change it much."""

from __future__ import annotations

import collections
import os
import uuid

import psutil

_MARK = "DTKIT_BENCH"
_KINDS = (  # the first that is in the command line
    ("dtkit.cluster.forkserver", "engines"),
    ("ipyparallel.engine", "engines"),
    ("ipyparallel.controller", "controller"),
    ("ipykernel_launcher", "notebook"),
    ("jupyterlab", "Jupyter server"),
    ("--type=renderer", "page"),
    ("--type=gpu-process", "browser's drawing"),
    ("--type=utility", "browser's network"),
    ("chrom", "browser"),
)


def mark_processes() -> None:
    """Mark this process, so that `read_processor_times` finds its descendants, also those of ended parents."""
    os.environ[_MARK] = uuid.uuid4().hex


def read_processor_times() -> dict[str, float]:
    """Return the processor seconds of all marked processes and descendants until now, by kind."""
    mark, own = os.environ[_MARK], psutil.Process()
    found = {process.pid: process for process in own.children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process != own:
                found[process.pid] = process
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    seconds: collections.Counter[str] = collections.Counter()
    for process in found.values():
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        kind = next((kind for part, kind in _KINDS if part in command), "others")
        seconds[kind] += times.user + times.system
    return dict(seconds)
