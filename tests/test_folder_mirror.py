"""A host's folder follows the notebook's flags, and reports its own changes once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dtkit.cluster.agent.folder_mirror import FolderMirror, list_flags, list_runs
from dtkit.cluster.agent.protocol import MirrorReply, MirrorRequest
from dtkit.cluster.launchers.host_access import HostAccess
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path


def request(*, reader: str = "one", flags: tuple[str, ...] = (), runs: tuple[str, ...] = ()) -> MirrorRequest:
    return MirrorRequest(reader, frozenset(flags), frozenset(runs))


def test_flags_and_runs_follow_the_notebook(tmp_path: Path):
    mirror = FolderMirror(tmp_path)
    mirror.exchange(request(flags=("end-early-job-1", "store-2.off"), runs=("job-1",)))
    assert sorted(list_flags(tmp_path)) == ["end-early-job-1", "store-2.off"]
    assert list_runs(tmp_path) == ["job-1"]
    mirror.exchange(request())
    assert list_flags(tmp_path) == list_runs(tmp_path) == []


def test_changes_are_reported_once_and_again_to_another_reader(tmp_path: Path):
    mirror = FolderMirror(tmp_path)
    mirror.exchange(request(runs=("job-1",)))
    (tmp_path / "status-0.json").write_bytes(b"{}")
    (tmp_path / "runs/job-1/unread-0.7").write_bytes(b"rows")
    expected = {"status-0.json": b"{}", "runs/job-1/unread-0.7": b"rows"}
    assert mirror.exchange(request(runs=("job-1",))) == MirrorReply(expected, [])
    assert mirror.exchange(request(runs=("job-1",))) == MirrorReply({}, [])
    assert mirror.exchange(request(reader="two", runs=("job-1",))).files == expected
    (tmp_path / "status-0.json").write_bytes(b"{1}")
    (tmp_path / "runs/job-1/unread-0.7").unlink()
    reply = mirror.exchange(request(reader="two", runs=("job-1",)))
    assert reply == MirrorReply({"status-0.json": b"{1}"}, ["runs/job-1/unread-0.7"])


def test_a_host_cannot_write_outside_the_clusters_folder(tmp_path: Path):
    (tmp_path / "cluster").mkdir()
    access = HostAccess(tmp_path / "cluster", list, lambda _: None)  # type: ignore[arg-type]  # no agent is asked
    with pytest.raises(ClusterError, match="outside the cluster's folder"):
        access._store(MirrorReply({"../stolen": b""}, []))
    assert [path.name for path in tmp_path.iterdir()] == ["cluster"]
