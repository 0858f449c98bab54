"""Files of runs and clusters for a notebook that takes them over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import dtkit
from dtkit._util.process import ProcessId
from dtkit.cluster import cluster_file
from dtkit.history import run_log
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.timeline import SPAN_DTYPE
from dtkit.messages import DispatchResult, JobPosition, Reply
from dtkit.training import recovery
from dtkit.training.recorder import Recorder
from dtkit.types import Evaluation, Event, ReplicaCheckResult


def rows(start: int, stop: int, ranks: int = 2) -> np.ndarray:
    found = np.zeros((stop - start) * ranks, ROW_DTYPE)
    found["step"], found["rank"] = np.repeat(np.arange(start, stop), ranks), np.tile(np.arange(ranks), stop - start)
    found["loss"], found["weight"], found["samples"] = found["step"] + 0.5, 1, 3
    return found


def written(folder: Path) -> History:
    history = History()
    history.append(rows(0, 3))
    run_log.RunLog(folder).start_recording(history)
    history.append(rows(3, 10))
    history.add(Event(10, "note", "half", 1.5))
    history.append(rows(6, 12))  # after it went back to a snapshot
    history.add(Evaluation(12, 4, {"loss": 0.25}))
    return history


def advance(start: int, stop: int) -> DispatchResult:
    found = rows(start, stop, ranks=1)
    found["loss"] = 1.0  # a loss that grows would be told as an event of its own
    return DispatchResult(found, stop, 0.1)


def test_a_history_is_read_as_it_was_written(tmp_path: Path):
    history = written(tmp_path / "run")
    found = run_log.read_history(tmp_path / "run", ranks_per_replica=1)
    assert np.array_equal(found.rows(), history.rows())
    assert np.array_equal(found.totals(), history.totals())
    assert (found.events, found.evaluations) == (history.events, history.evaluations)


def test_elapsed_time_is_read_as_it_was_written(tmp_path: Path):
    written(tmp_path / "run")
    assert run_log.read_elapsed(tmp_path / "run") == (0, 0.0)
    run_log.RunLog(tmp_path / "run").write_elapsed(7, 26.5)
    assert run_log.read_elapsed(tmp_path / "run") == (7, 26.5)
    (tmp_path / "run" / "elapsed.json").write_text('{"steps": 3')
    assert run_log.read_elapsed(tmp_path / "run") == (0, 0.0)


def make_spans(step: int, rank: int) -> np.ndarray:
    times = np.arange(3.0) + 10 * step
    phases = ("data", "forward", "update")
    return np.array([(step, rank, p, -1, -1, t, t + 1) for p, t in zip(phases, times, strict=True)], SPAN_DTYPE)


def test_the_last_step_is_read_as_it_was_written(tmp_path: Path):
    folder, check = tmp_path / "run", ReplicaCheckResult(7, (1, 2), 5, None)
    log = run_log.RunLog(folder)
    spans, unknown = run_log.read_last_step(folder, 3)
    assert (len(spans), unknown) == (0, None)
    written_spans = np.concatenate([make_spans(6, rank) for rank in range(3)])
    log.write_last_step(written_spans, check)
    spans, found = run_log.read_last_step(folder, 3)
    assert np.array_equal(spans, written_spans)
    assert found == check
    assert len(run_log.read_last_step(folder, 2)[0]) == 0  # of more ranks than there are now
    for name in ("last-step.npy", "replica-check.json"):
        (folder / name).write_bytes(b"cut o")
    spans, unknown = run_log.read_last_step(folder, 3)
    assert (len(spans), unknown) == (0, None)


def test_the_timeline_after_a_failure_is_that_of_the_last_common_step():
    """Rank 0 took a step more than rank 1, which failed; the last whole dispatch was long before."""
    history = History()
    group = cast("Any", SimpleNamespace(membership=SimpleNamespace(clock_offsets=[0.0, 100.0])))
    recorder = Recorder(group, history)
    spans = [[make_spans(step, rank) for step in range(5 - rank)] for rank in range(2)]
    ahead = dataclasses.replace(advance(0, 5), spans=np.concatenate(spans[0]))
    failed = dataclasses.replace(advance(0, 4), spans=np.concatenate(spans[1]))
    assert recorder.record_common_steps({0: Reply(value=(ahead, [])), 1: Reply(value=(failed, []))}) == 4
    found = recorder.merge_recent_spans()
    assert found["step"].max() == 3
    last = found[found["step"] == 3]
    assert last[last["rank"] == 1]["begin"].tolist() == [-70.0, -69.0, -68.0]  # on the clock of rank 0


def test_records_that_were_cut_off_are_left_out(tmp_path: Path):
    folder = tmp_path / "run"
    history = written(folder)
    with (folder / "rows.bin").open("ab") as file:
        file.write(b"half a row")
    with (folder / "notes.jsonl").open("a") as file:
        file.write('{"type": "event", "st')
    found = run_log.read_history(folder, ranks_per_replica=1)
    assert len(found) == len(history)
    assert found.events == history.events
    run_log.RunLog(folder).start_recording(found)  # a notebook that takes over continues after the last whole record
    found.append(rows(12, 14))
    found.add(Event(14, "note", "on", 2.5))
    again = run_log.read_history(folder, ranks_per_replica=1)
    assert np.array_equal(again.rows(), found.rows())
    assert again.events == found.events


def test_a_last_step_without_rows_that_engines_keep_is_left_out(tmp_path: Path):
    """The notebook was killed while it wrote them, or the disk was full."""
    history = written(tmp_path / "run")
    path, last_step = tmp_path / "run" / "rows.bin", int(history.rows()["step"][-1])
    path.write_bytes(path.read_bytes()[: -history.rows().itemsize])
    read = functools.partial(run_log.read_history, tmp_path / "run", ranks_per_replica=1)
    unread = {last_step: {0, 1}}
    found = read(list_unread_ranks=lambda step: unread.get(step, set()))
    assert np.array_equal(found.totals()["step"], history.totals()["step"][:-1])
    assert set(found.totals()["ranks"].tolist()) == {2}
    assert len(read()) == len(history) - 1  # of a lost engine, whose rows are nowhere


def test_an_older_notebook_does_not_change_the_new_files(tmp_path: Path):
    """The older notebook may not know of the takeover yet, and may end during a line."""
    folder = tmp_path / "run"
    older = written(folder)
    newer = run_log.read_history(folder, ranks_per_replica=1)
    run_log.RunLog(folder).start_recording(newer)
    older.append(rows(12, 14))
    older.add(Event(14, "error", "another notebook has taken this cluster over, as this long line says", 2.5))
    newer.add(Event(12, "note", "on", 2.5))
    newer.append(rows(12, 13))
    older.add(Event(14, "note", "still here", 3.5))
    found = run_log.read_history(folder, ranks_per_replica=1)
    assert np.array_equal(found.rows(), newer.rows())
    assert (found.events, found.evaluations) == (newer.events, newer.evaluations)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.jsonl", "rows.bin"]


def test_only_unreadable_lines_are_left_out(tmp_path: Path):
    folder = tmp_path / "run"
    history = written(folder)
    path = folder / "notes.jsonl"
    bad = b'ote", "text": "on"}\n[1]\n{"type": "plot"}\n{"type": "event", "colour": 1}\n\xff\n'
    path.write_bytes(bad + path.read_bytes())
    found = run_log.read_history(folder, ranks_per_replica=1)
    assert (found.events[:-1], found.evaluations) == (history.events, history.evaluations)
    assert (found.events[-1].kind, found.events[-1].step) == ("error", 12)
    assert found.events[-1].text.startswith("5 lines of this log can't be read and were left out")


def test_a_closed_log_has_no_open_file_and_writes_nothing(tmp_path: Path):
    """The disk can then be unmounted, and late events do not overwrite those of a newer notebook."""
    history = written(tmp_path / "run")
    before = (tmp_path / "run" / "notes.jsonl").read_bytes()

    def held() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [name for link in links if str(tmp_path) in (name := os.path.realpath(link))]

    assert len(held()) == 2
    kept = history.run_log
    history.close_run_log()
    history.close_run_log()
    history.add(Event(14, "note", "later", 2.5))
    assert kept is not None
    kept.append_event(Event(14, "note", "from a thread that was late", 2.5))
    assert held() == []
    assert (tmp_path / "run" / "notes.jsonl").read_bytes() == before


def test_threads_write_complete_lines(tmp_path: Path):
    history = written(tmp_path / "run")
    before = len(history.events)
    writers = [
        threading.Thread(target=lambda k=k: [history.add(Event(k, "note", "x" * 5000 * k, 0.0)) for _ in range(200)])
        for k in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    found = run_log.read_history(tmp_path / "run", ranks_per_replica=1)
    assert len(found.events) == before + 800
    assert {event.kind for event in found.events} == {"note"}


def test_a_log_without_rows_is_an_empty_history(tmp_path: Path):
    run_log.RunLog(tmp_path / "run").write_run_pickle(b"what was asked for")
    assert len(run_log.read_history(tmp_path / "run", ranks_per_replica=1)) == 0


def test_rows_that_a_full_disk_did_not_take_are_written_later(small_disk: Path):
    history = written(small_disk / "run")
    recorder = Recorder(cast("Any", None), history)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(2**20))
    for start in range(12, 212, 100):
        recorder.record_steps([(advance(start, start + 100), [])])
    assert history.rows()["step"][-1] == 211
    assert [event.kind for event in history.events] == ["note", "error"]  # reported once
    assert "No space left on device" in history.events[-1].text
    filler.unlink()
    recorder.record_steps([(advance(212, 213), [])])
    assert history.events[-1].text == "the history is on disk again"
    found = run_log.read_history(small_disk / "run", ranks_per_replica=1)
    assert np.array_equal(found.rows(), history.rows())
    assert found.events == history.events


def test_removed_log_has_no_run_pickle(tmp_path: Path):
    kept = run_log.RunLog(tmp_path / "run")
    kept.write_run_pickle(b"what was asked for")
    assert run_log.read_run_pickle(tmp_path / "run") == b"what was asked for"
    kept.remove()
    assert run_log.read_run_pickle(tmp_path / "run") is None


def paper(where: Path, name: str, **more: Any) -> cluster_file.ClusterInfo:
    folder = where / name
    folder.mkdir(mode=0o700)
    me = ProcessId.from_pid()
    settings: dict[str, Any] = {
        "owner": 1,
        "notebook": ProcessId(1, 0.0),
        "reaper": me,
        "engine_ids": (0, 1),
        "spare_ids": (),
    }
    found = cluster_file.ClusterInfo(
        folder=folder, started_at=time.time(), launch_config={"launcher": "local"}, **{**settings, **more}
    )
    found.write()
    return found


def test_a_cluster_is_found_by_its_file(tmp_path: Path):
    cluster = paper(tmp_path, "dtkit-a")
    paper(tmp_path, "dtkit-b", reaper=ProcessId(1, 0.0))  # whose processes have ended
    (tmp_path / "dtkit-c").mkdir(mode=0o700)
    assert cluster_file.find_running(tmp_path) == [cluster]
    assert cluster_file.choose_cluster([cluster], None) == cluster
    assert "dtkit-a: 2 engines" in cluster.describe()
    assert "its notebook has ended" in cluster.describe()


@pytest.mark.parametrize(
    ("changed", "version"),
    [
        ({"version": "99.0", "color": "red"}, r"99\.0"),
        ({"version": "0.0.1", "owner": None, "start": None, "spare_ids": None, "engine_ids": {"0": 7}}, r"0\.0\.1"),
        ({"color": "red"}, rf"{dtkit.__version__} \(another build\)"),
        ({"interface": None}, rf"{dtkit.__version__} \(another build\)"),
    ],
)
def test_a_cluster_of_another_version_is_listed_and_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], version: str
):
    """Other fields of its file may be unknown or missing."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    path = paper(tmp_path, "dtkit-a").folder / cluster_file.CLUSTER_FILE
    said = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))
    message = (
        rf"^dtkit-a was started by dtkit {version}, and this is {dtkit.__version__}\. Take it over with that version"
    )
    for name in (None, "dtkit-a"):
        with pytest.raises(dtkit.errors.VersionMismatchError, match=message):
            dtkit.attach(name)
    for name in ("dtkit-b", "dtkit-c"):  # both left in this folder
        paper(tmp_path, name)
    listed = rf"3 clusters are running; (?s:.*)\n  dtkit-a: of dtkit {version}, started .* ago, its notebook has ended"
    with pytest.raises(dtkit.errors.ClusterError, match=listed):
        dtkit.attach()


def test_engines_with_dtkit_of_another_folder_are_refused_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    other, reached = tmp_path / "clone" / "dtkit", []
    shutil.copytree(dtkit.__path__[0], other, ignore=shutil.ignore_patterns("__pycache__", "*.js", "*.css"))
    info = paper(tmp_path, "dtkit-a", package_folder=str(other))

    def stop(info: cluster_file.ClusterInfo) -> None:
        reached.append(info.name)
        raise dtkit.errors.ClusterError("taken")

    monkeypatch.setattr("dtkit.cluster.start.reattach", stop)
    with pytest.raises(dtkit.errors.ClusterError, match="taken"):  # equal files
        dtkit.attach()
    (other / "mesh.py").write_text("changed = True")
    reached.clear()
    message = rf"the engines of dtkit-a run dtkit of {other}, and this notebook that of .* differs in 1 file\."
    with pytest.raises(dtkit.errors.VersionMismatchError, match=message):
        dtkit.attach()
    assert reached == []
    with pytest.raises(dtkit.errors.ClusterError, match="taken"):
        dtkit.attach(info.name, force=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"reaper": {"pid": 1, "start_time": 0.0}},
        {"reaper": "me"},
        {"reaper": {"pid": -1, "start_time": 0.0}},
        {"started_at": "today"},
    ],
)
def test_ended_cluster_of_another_version_is_not_listed(tmp_path: Path, changed: dict[str, Any]):
    path = paper(tmp_path, "dtkit-a").folder / cluster_file.CLUSTER_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": "99.0", **changed}))
    assert cluster_file.find_running(tmp_path) == []


def test_without_a_name_the_cluster_without_a_notebook_is_chosen(tmp_path: Path):
    free = paper(tmp_path, "dtkit-a")
    taken = paper(tmp_path, "dtkit-b", notebook=ProcessId.from_pid())
    assert cluster_file.choose_cluster([free, taken], None) == free
    assert cluster_file.choose_cluster([free, taken], "dtkit-b") == taken
    both = [free, dataclasses.replace(free, folder=tmp_path / "dtkit-z")]
    with pytest.raises(dtkit.errors.ClusterError, match=r"2 clusters are running; name one, as in attach\('dtkit-z'\)"):
        cluster_file.choose_cluster(both, None)
    with pytest.raises(dtkit.errors.ClusterError, match=r"no cluster 'x' is running; there are:\n  dtkit-a"):
        cluster_file.choose_cluster(both, "x")


def test_cluster_left_in_this_folder_is_chosen_among_others(tmp_path: Path):
    ours = paper(tmp_path, "dtkit-a")
    others = [
        dataclasses.replace(ours, folder=tmp_path / "dtkit-b", directory="/elsewhere"),
        dataclasses.replace(ours, folder=tmp_path / "dtkit-c", environment="/other"),
    ]
    assert cluster_file.choose_cluster([ours, *others], None) == ours
    with pytest.raises(dtkit.errors.ClusterError, match="2 clusters are running; name one"):
        cluster_file.choose_cluster(others, None)


def test_only_cluster_of_another_folder_must_be_named(tmp_path: Path):
    other = dataclasses.replace(paper(tmp_path, "dtkit-a"), directory="/elsewhere")
    message = r"^no cluster of a notebook in this folder .* as in attach\('dtkit-a'\):\n  dtkit-a: .*, in /elsewhere"
    with pytest.raises(dtkit.errors.ClusterError, match=message):
        cluster_file.choose_cluster([other], None)
    assert cluster_file.choose_cluster([other], "dtkit-a") == other


def test_cluster_is_listed_with_its_latest_run(tmp_path: Path):
    info = paper(tmp_path, "dtkit-a")
    for k, name in enumerate(("First", "Second")):
        log = run_log.RunLog(info.folder / run_log.RUNS_FOLDER / f"job-{k}")
        log.write_label(run_log.RunLabel(name, 58, ()))
        os.utime(log.folder / "run.json", (k, k))
        log.close()
    (info.folder / run_log.RUNS_FOLDER / "job-0" / "run.json").write_text("{}")
    assert info.describe().startswith("dtkit-a: 2 engines, with the run Second of 58 steps, started")


def test_run_with_a_missing_module_is_refused_before_the_cluster_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    info = paper(tmp_path, "dtkit-a")
    log = run_log.RunLog(info.folder / run_log.RUNS_FOLDER / "job")
    log.write_label(run_log.RunLabel("Net", 58, ("torch.nn", "absent.models")))
    log.close()
    before = (info.folder / cluster_file.CLUSTER_FILE).read_text()
    with pytest.raises(dtkit.errors.ClusterError, match=r"needs the module 'absent'.* The cluster is as it was"):
        dtkit.attach()
    assert (info.folder / cluster_file.CLUSTER_FILE).read_text() == before


def test_cluster_of_a_living_notebook_is_not_taken_unasked(tmp_path: Path):
    """This process may take its own clusters; this one belongs to its parent."""
    used = paper(tmp_path, "dtkit-a", notebook=ProcessId.from_pid(os.getppid()))
    with pytest.raises(dtkit.errors.ClusterError, match=r"other notebooks use .*'dtkit-a', force=True\):\n  dtkit-a: "):
        cluster_file.choose_cluster([used], None)
    with pytest.raises(dtkit.errors.ClusterError, match=r"dtkit-a: .* still runs\. Close the cluster there, or take"):
        cluster_file.choose_cluster([used], "dtkit-a")
    assert cluster_file.choose_cluster([used], "dtkit-a", force=True) == used
    free = paper(tmp_path, "dtkit-b")
    assert cluster_file.choose_cluster([used, free], None) == free


def test_cluster_of_another_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    other = paper(tmp_path, "dtkit-a", environment="/elsewhere", directory="/books")
    assert "in /books, with the environment /elsewhere" in other.describe()
    with pytest.raises(dtkit.errors.ClusterError, match=r"uses the Python environment /elsewhere, and this notebook"):
        dtkit.attach("dtkit-a")


@pytest.mark.parametrize(
    ("standings", "parts", "expected"),
    [
        ({0: (5, True), 1: (6, True)}, [(), (), ()], (6, [1])),  # data parallel: the rank at the latest step
        ({0: (5, True), 1: (6, False)}, [(), ()], (5, [0])),  # except a rank with an incomplete update
        ({0: (5, True)}, [(0,), (1,)], None),  # no rank has the second part
        ({0: (5, True), 3: (5, True)}, [(0,), (1,), (0,), (1,)], (5, [0, 3])),  # two replicas together have all parts
        ({0: (6, True), 3: (5, True)}, [(0,), (1,), (0,), (1,)], None),  # parts of different steps
        ({0: (6, True), 1: (5, True), 2: (5, True)}, [(0,), (1,), (0,)], (5, [1, 2])),
        ({}, [()], None),
    ],
)
def test_recovery_chooses_ranks_that_have_the_whole_state(standings: dict[int, Any], parts: list[Any], expected: Any):
    found = {rank: JobPosition(step, whole) for rank, (step, whole) in standings.items()}
    assert recovery.choose_sources(found, dict(enumerate(parts))) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["start"], "pause"),  # charts mark where a run paused, before the mark of its resumption
        (["start", "pause", "resume", "evaluation"], "pause"),
        (["start", "pause"], "note"),
        (["start", "pause", "save"], "note"),
        (["start", "done"], "note"),
        (["start", "error"], "note"),
        (["start", "lost"], "repair"),
        (["start", "lost", "repair"], "pause"),
        ([], "note"),
    ],
)
def test_a_takeover_is_logged_as_what_the_log_lacks(kinds: list[str], expected: str):
    events = [Event(step, kind, kind, float(step), None) for step, kind in enumerate(kinds)]
    assert run_log.find_takeover_kind(events) == expected


@pytest.mark.parametrize(
    ("kind", "has_failed", "says_why"),
    [("pause", False, True), ("repair", False, True), ("pause", True, False), ("note", False, False)],
)
def test_the_log_says_why_a_takeover_pauses_a_run(kind: str, *, has_failed: bool, says_why: bool):
    text = run_log.describe_takeover(kind, 3498, "", has_failed=has_failed)
    assert text.startswith("taken over at step 3,498")
    assert ("pauses until run.resume()" in text) == says_why
