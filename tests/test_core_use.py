"""Which other processes have the cores that nodes wait for: from the kernel's counts to the words of a verdict."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dtkit._util import processor_use
from dtkit._util.processor_use import ProcessorCount
from dtkit.history import core_use
from dtkit.history.core_use import CoreUse, name_largest, read_core_use, record_core_use
from dtkit.history.history import History
from dtkit.history.scalars import CORE_WAIT_NAME
from dtkit.training import core_disturbance, core_use_watch
from dtkit.training.core_use_watch import CoreUseWatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def write_process(
    proc: Path, pid: int, name: str, seconds: float, parent: int = 1, command: Sequence[str] = ()
) -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    fields = ["S", str(parent), *["0"] * 9, str(round(seconds * TICKS)), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)} 0 0")
    (proc / str(pid) / "cmdline").write_bytes("\0".join([*command, ""]).encode())


def count(proc: Path, monkeypatch: pytest.MonkeyPatch, at_s: float) -> ProcessorCount:
    monkeypatch.setattr(processor_use.time, "monotonic", lambda: at_s)
    return ProcessorCount.take(proc)


def test_processes_are_named_as_a_reader_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[tuple[int, str, int, Sequence[str]]] = [
        (19, "python", 1, ["python", "-m", "dtkit.cluster.forkserver", "folder", "4"]),
        (22, "dtkit-engine", 19, ["python", "-m", "dtkit.cluster.forkserver", "folder", "4"]),
        (os.getpid(), "python", 1, ["python", "-m", "ipykernel_launcher", "-f", "k.json"]),
        (10, "chromium", 1, []),
        (11, "chrome_child (x)", 10, []),
        (12, "python3", 1, ["/usr/bin/python3", "/usr/bin/jupyter-lab", "--no-browser"]),
        (13, "python", 1, ["python", "-m", "pytest", "-q"]),
        (14, "python", 1, ["python", "-u", "/home/a/train.py"]),
        (15, "python", 1, ["python", "-m", "ipykernel_launcher", "-f", "k.json"]),
        (18, "python3.11", 1, ["python", "-c", "while True: pass"]),
        (16, "ffmpeg", 1, ["ffmpeg"]),
        (17, "kworker/0:1", 2, []),
        (20, "python", 1, ["engine"]),
        (21, "python", 20, ["a worker of the engine"]),
    ]
    for pid, name, parent, command in commands:
        write_process(tmp_path, pid, name, 5.0, parent, command)
    (tmp_path / "99").mkdir()  # one that has just ended
    before = count(tmp_path, monkeypatch, 100.0)
    for place, (pid, name, parent, command) in enumerate(commands):
        write_process(tmp_path, pid, name, 5.0 + 0.2 * (len(commands) - place), parent, command)
    write_process(tmp_path, 30, "gzip", 0.1)  # started in between
    after = count(tmp_path, monkeypatch, 102.0)
    monkeypatch.setattr(processor_use, "in_notebook", lambda: True)
    cores = before.measure_others(after, [20], tmp_path)
    assert cores == pytest.approx(
        {
            "another cluster's engines": 2.7,
            "the browser": 2.1,
            "this notebook's kernel": 1.2,
            "Jupyter's server": 0.9,
            "pytest": 0.8,
            "train.py": 0.7,
            "another notebook's kernel": 0.6,
            "another Python program": 0.5,
            "ffmpeg": 0.4,
            "the operating system": 0.3,
            "gzip": 0.05,
        }
    )
    assert list(cores) == sorted(cores, key=lambda name: -cores[name])


def test_a_pid_that_was_used_again_counts_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_process(tmp_path, 10, "old", 50.0)
    before = count(tmp_path, monkeypatch, 0.0)
    write_process(tmp_path, 10, "new", 1.0)
    assert before.measure_others(count(tmp_path, monkeypatch, 2.0), [], tmp_path) == {"new": 0.5}
    assert before.measure_others(before, [], tmp_path) == {}


@pytest.mark.parametrize(
    ("cores", "needed", "expected"),
    [
        ({"the browser": 0.8, "this notebook's kernel": 0.5}, 0.3, "the browser and this notebook's kernel"),
        ({"the browser": 0.8, "this notebook's kernel": 0.1}, 0.3, "the browser"),
        ({"the browser": 0.8, "mypy": 0.2}, 0.3, "the browser"),
        ({"the browser": 0.8, "mypy": 0.7}, 0.3, "mypy and the browser"),  # and also if mypy uses a little more
        ({"the browser": 0.7, "mypy": 0.8}, 0.3, "mypy and the browser"),
        ({"a": 0.5, "b": 0.5, "c": 0.4, "d": 0.4}, 0.3, "a, b and others"),
        ({"the browser": 0.1}, 0.3, None),  # too little to explain the waits
        ({str(k): 0.04 for k in range(20)}, 0.3, None),
        ({}, 0.0, None),
    ],
)
def test_the_largest_processes_are_named(cores: dict[str, float], needed: float, expected: str | None):
    assert name_largest(cores, needed) == expected


def test_counts_of_the_measured_steps_count_and_else_the_last_one():
    history = History()
    assert read_core_use(history, 0, {"here"}) == {}
    for step, cores in ((5, {"a": 1.0}), (10, {"a": 0.5, "b": 0.25}), (20, {"b": 0.75})):
        record_core_use(history, CoreUse(step, "here", cores))
    assert read_core_use(history, 10, {"here"}) == {"b": 0.5, "a": 0.25}
    assert read_core_use(history, 50, {"here"}) == {"b": 0.75}
    assert read_core_use(history, 0, {"elsewhere"}) == read_core_use(history, 0, {"here", "elsewhere"}) == {}
    assert "a" in core_use.describe_cores({"a": 0.75, "b": 0.5})


def report(step: int, percent: float) -> Any:
    return SimpleNamespace(step=step, scalars={CORE_WAIT_NAME: [(step, 2 * percent, 2.0)]})


def test_processes_are_counted_less_and_less_often_while_an_engine_waits(monkeypatch: pytest.MonkeyPatch):
    clock, taken = SimpleNamespace(now=0.0), list[float]()

    class Count:
        def __init__(self) -> None:
            self.at_s = clock.now
            taken.append(self.at_s)

        def measure_others(self, later: Any, own_pids: Any) -> dict[str, float]:
            assert set(own_pids) == {7}
            return {"the browser": later.at_s - self.at_s}

    monkeypatch.setattr(core_use_watch, "ProcessorCount", SimpleNamespace(take=Count))
    monkeypatch.setattr(core_use_watch.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(core_use_watch.socket, "gethostname", lambda: "here")
    history = History()
    node, other = (SimpleNamespace(rank=k, host=host, pid=7 + k, device="cpu") for k, host in enumerate("hx"))
    node.host = "here"
    watch = CoreUseWatch(cast("Any", SimpleNamespace(nodes=[node, other])), history)

    def update(at_s: float, percent: float, rank: int = 0) -> None:
        clock.now = at_s
        watch.update([(rank, report(int(at_s), percent))])

    update(1.5, 1.0)  # it doesn't wait
    update(1.6, 30.0, rank=1)  # it is on another host
    for at_s in range(2, 50, 2):  # the engines' reports
        update(float(at_s), 30.0)
        update(at_s + 0.1, 30.0)
    assert taken == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 48.0]
    update(100.0, 9.0)  # after 52 s, in most of which it did not wait
    update(102.0, 9.0)
    uses = [(use.step, use.cores["the browser"]) for use in core_use._uses[history]]
    assert uses == [(2, 2.0), (4, 2.0), (8, 4.0), (16, 8.0), (32, 16.0), (48, 16.0), (102, 2.0)]


@pytest.mark.parametrize(
    ("others", "seconds", "host", "expected"),
    [
        ({"pytest": 1.2, "the browser": 0.2}, 3.0, "here", "other programs used 1.4 of 2 cores meanwhile: pytest"),
        ({str(k): 0.04 for k in range(20)}, 3.0, "here", "other programs used 0.8 of 2 cores"),
        ({"pytest": 0.2, "this Python process": 1.5}, 3.0, "here", ""),  # as much as is left anyway
        ({"pytest": 1.2}, 0.1, "here", ""),  # too short
        ({"pytest": 1.2}, 3.0, "elsewhere", ""),
    ],
)
def test_programs_that_disturb_a_measurement_are_named(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, float], seconds: float, host: str, expected: str
):
    times = iter([0.0, seconds])
    made = SimpleNamespace(
        take=lambda: SimpleNamespace(at_s=next(times), measure_others=lambda _later, pids: others if 7 in pids else {})
    )
    monkeypatch.setattr(core_disturbance, "ProcessorCount", made)
    monkeypatch.setattr(core_disturbance, "count_cores", lambda: 2)
    monkeypatch.setattr(core_disturbance.socket, "gethostname", lambda: "here")
    nodes: Any = [SimpleNamespace(host=host, device="cpu", pid=7 + rank, threads=1) for rank in range(2)]
    assert core_disturbance.CoreDisturbance(nodes).describe() == expected
