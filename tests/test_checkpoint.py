"""Checkpoints as files: complete or absent, refused when damaged, and data only."""

from __future__ import annotations

import ast
import collections
import dataclasses
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dtkit
from dtkit.checkpoint import checkpoint, folders, index, json_values, safetensors_file, validation
from dtkit.checkpoint.manager import CheckpointPolicy, CheckpointRequest
from dtkit.checkpoint.safetensors_file import FileReader
from dtkit.engine.data.random_state import GeneratorStates, derive_seed
from dtkit.engine.state import writer
from dtkit.engine.state.capture import assign_holders
from dtkit.engine.state.shards import MemoryReader, ShardedState, TensorShard, join_state_dict
from dtkit.history.history import History
from tests.support.checkpoints import (
    SPEC,
    make_manager,
    make_rank_state,
    rewrite_metadata,
    spec_fields,
    write_checkpoint,
    write_due_checkpoint,
)
from tests.support.small import net

# -- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, True, "x"], "$b": (1, (2,)), 3: math.inf},
        collections.Counter({30: 1, 60: 2}),
        (math.inf, -math.inf, 1e-323, 0.1),
        np.float32(0.1),
        torch.tensor(3.0),
    ],
    ids=repr,
)
def test_plain_values_survive_json(value: Any):
    found = json_values.decode(json.loads(json.dumps(json_values.encode(value, "it"), allow_nan=False)))
    assert found == value
    assert type(found) is type(value)


def test_a_value_that_is_not_plain_data_is_refused_by_name():
    with pytest.raises(
        json_values.UnsupportedValueError, match=r"the scheduler\['fn'\] is a builtin_function_or_method"
    ):
        json_values.encode({"fn": len}, "the scheduler")


def test_random_states_survive_json():
    np.random.randn()  # noqa: NPY002 - which keeps a second number for the next call
    random.gauss(0, 1)
    state = json.loads(json.dumps(json_values.encode(GeneratorStates.capture().encode(), "it")))
    expected = [draw_from_all_generators() for _ in range(3)]
    GeneratorStates.decode(json_values.decode(state)).restore()
    assert [draw_from_all_generators() for _ in range(3)] == expected
    assert derive_seed(0, 1, 2) != derive_seed(0, 1, 3)


def draw_from_all_generators() -> tuple[float, ...]:
    return random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))  # noqa: NPY002 - users' generator


# -- tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", safetensors_file.SAFETENSORS_NAMES, ids=str)
def test_tensor_files_can_be_read_by_safetensors(tmp_path: Path, dtype: torch.dtype):
    tensors = {"a": torch.arange(6).reshape(2, 3).to(dtype), "b": torch.tensor(1).to(dtype), "c": torch.zeros(0, 2)}
    written = safetensors_file.write_tensors(tmp_path / "x.safetensors", tensors)
    assert written == {
        "bytes": (tmp_path / "x.safetensors").stat().st_size,
        "digest": validation.compute_digest(tmp_path / "x.safetensors"),
    }
    found = load_file(tmp_path / "x.safetensors")
    assert {name: (t.dtype, t.tolist()) for name, t in found.items()} == {
        name: (t.dtype, t.tolist()) for name, t in tensors.items()
    }


def test_reader_joins_pieces_of_another_sharding(tmp_path: Path):
    whole = torch.arange(35.0).reshape(5, 7)
    parts = [TensorShard(part.contiguous(), (5, 7), (0, k)) for part, k in ((whole[:, :3], 0), (whole[:, 3:], 3))]
    for rank, shard in enumerate(parts):
        safetensors_file.write_tensors(tmp_path / folders.get_rank_filename(rank), {"w": shard.tensor})
    pieces = [[rank, list(shard.offset), list(shard.tensor.shape)] for rank, shard in enumerate(parts)]
    entries = {"w": {"dtype": "F32", "shape": [5, 7], "pieces": pieces}}
    files = [folders.get_rank_filename(rank) for rank in range(2)]
    with FileReader(tmp_path, entries, files, {}) as reader:
        for source in (reader, MemoryReader([{"w": shard} for shard in parts], {})):
            assert source.get_shape("w") == (5, 7)
            assert source.get_shape("v") is None
            assert torch.equal(source.read_slice("w", (1, 2), (3, 4)), whole[1:4, 2:6])
            assert source.read_slice("w", (5, 0), (0, 7)).shape == (0, 7)


@pytest.mark.parametrize("dim", [0, 1])
def test_reader_joins_pieces_of_fused_blocks(tmp_path: Path, dim: int):
    """Each of two ranks has half of the rows (or columns) of the queries, the keys and the values."""
    whole = torch.arange(144.0).reshape(12, 12)
    parts = [torch.cat([third.chunk(2, dim)[rank] for third in whole.chunk(3, dim)], dim) for rank in range(2)]
    offsets = [(0, 0), (2, 0) if dim == 0 else (0, 2)]
    shards = [TensorShard(part.contiguous(), (12, 12), at, 3, dim) for part, at in zip(parts, offsets, strict=True)]
    reports = []
    for rank, shard in enumerate(shards):
        facts = {"layout": {}, "values": {}, "optimizers": {}, "aliases": {}, "extra": {}, "per_rank": {}, "frozen": {}}
        reports.append(
            writer._write_tensors(tmp_path / folders.get_rank_filename(rank), ShardedState({"w": shard}, facts))
        )
    entries = index.build_index(json.loads(json.dumps(reports)))
    assert index.is_fully_covered(entries["w"], 2)
    assert not index.is_fully_covered({**entries["w"], "pieces": entries["w"]["pieces"][1:]}, 2)
    with FileReader(tmp_path, entries, [folders.get_rank_filename(r) for r in range(2)], {}) as reader:
        for source in (reader, MemoryReader([{"w": shard} for shard in shards], {})):
            assert torch.equal(source.read_slice("w", (0, 0), (12, 12)), whole)
            assert torch.equal(source.read_slice("w", (3, 1), (6, 8)), whole[3:9, 1:9])
    states = [ShardedState({"model/w": shard}, {**facts, "aliases": {"model": {"tied": "w"}}}) for shard in shards]
    joined = join_state_dict(states)
    assert torch.equal(joined["w"], whole)
    assert joined["tied"] is joined["w"]
    with pytest.raises(ValueError, match=r"model/w came in parts at \[\(., .\)\] of \(12, 12\); one is missing"):
        join_state_dict(states[1:])


def test_each_shared_tensor_has_one_holder_and_bytes_are_balanced():
    common = [("a", (0,), 8), ("b", (0,), 8), ("c", (0,), 16)]
    given = assign_holders([common, [*common, ("d", (4,), 4)]])
    assert given[0] & given[1] == set()
    assert given[0] | given[1] == {"a", "b", "c", "d"}
    assert assign_holders([[("e", (0,), 1)], [("e", (2,), 1)]]) == [{"e"}, {"e"}]


# -- a checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path).future.result(20).path


def test_checkpoint_loads_weights_without_engines(whole: Path, tmp_path: Path):
    assert sorted(path.name for path in whole.iterdir()) == [
        "checkpoint.json",
        "history.jsonl",
        "rank-000.safetensors",
        "rank-001.safetensors",
    ]
    found = dtkit.Checkpoint(tmp_path)
    assert (found.path, found.step, found.world_size) == (whole, 5, 2)
    other = net()
    with torch.no_grad():
        other[0].weight.zero_()
    state = found.load_into(other).state_dict()
    assert all(torch.equal(state[name], value) for name, value in net().state_dict().items())
    for text in (repr(found), found._repr_html_(), repr(dtkit.list_checkpoints(tmp_path))):
        assert "DataParallel() on 2 ranks" in text.replace("<wbr>", "")
        assert "67" in text


def test_damage_to_any_file_is_reported_with_its_name(whole: Path, tmp_path: Path):
    for name in sorted(path.name for path in whole.iterdir()):
        kept = (whole / name).read_bytes()
        places = random.Random(name).sample(range(len(kept)), min(25, len(kept)))
        for damaged in [kept[:k] for k in places] + [kept[:k] + bytes([kept[k] ^ 1]) + kept[k + 1 :] for k in places]:
            (whole / name).write_bytes(damaged)
            with pytest.raises(dtkit.errors.CheckpointError, match=name):
                dtkit.Checkpoint(whole).check_files()
        (whole / name).unlink()
        with pytest.raises(dtkit.errors.CheckpointError, match=name):
            dtkit.Checkpoint(whole).check_files()
        (whole / name).write_bytes(kept)
    dtkit.Checkpoint(whole).check_files()
    (whole / "rank-001.safetensors").write_bytes(b"")
    assert "DAMAGED: rank-001.safetensors" in repr(dtkit.list_checkpoints(tmp_path))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "rank-000.safetensors/../x", "rank-000.pkl"])
def test_file_names_outside_the_folder_are_refused(whole: Path, name: str):
    rewrite_metadata(whole, lambda head: head["files"].update({name: {"bytes": 1, "digest": ""}}))
    with pytest.raises(dtkit.errors.CheckpointError, match="is not a file of a checkpoint"):
        dtkit.Checkpoint(whole)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "x"}, "says format='x', which must be an integer from 1 up"),
        ({"step": "x"}, "says step='x', which must be an integer from 0 up"),
        ({"step": -1}, "says step='-1', which must be"),
        ({"step": True}, "says step='True', which must be"),
        ({"created": None}, "says created='None', which must be a finite number"),
        ({"spec": {}}, "lacks spec/name"),
        ({"spec": []}, r"says spec='\[\]', which must be an object"),
        ({"spec": {**spec_fields(SPEC), "steps_per_epoch": 0}}, "says spec/steps_per_epoch='0', which must be"),
        ({"facts": {}}, "lacks facts/layout"),
        ({"files": 3}, "says files='3', which must be an object"),
        ({"files": {"rank-000.safetensors": {}}}, "lacks fields that a checkpoint must have"),
    ],
    ids=str,
)
def test_invalid_metadata_fields_are_refused(whole: Path, change: dict[str, Any], expected: str):
    rewrite_metadata(whole, lambda head: head.update(change))
    with pytest.raises(dtkit.errors.CheckpointError, match=rf"checkpoint\.json {expected}.*Use an older checkpoint"):
        dtkit.Checkpoint(whole)
    found = dtkit.list_checkpoints(whole.parent)
    assert (len(found), list(found.broken)) == (0, [whole])


@pytest.mark.parametrize("text", ["[]", "[1]", "3", "null", '"digest"'])
def test_metadata_that_is_not_an_object_breaks_only_its_checkpoint(whole: Path, text: str):
    other = write_checkpoint(whole.parent, 6).future.result(20).path
    (whole / "checkpoint.json").write_text(text)
    with pytest.raises(dtkit.errors.CheckpointError, match="not the JSON of a checkpoint"):
        dtkit.Checkpoint(whole)
    assert [one.path for one in dtkit.list_checkpoints(whole.parent)] == [other]


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("", ValueError, "=''.*: this is not the name of a folder. Use a name such as 'checkpoints/first'"),
        ("a\0b", ValueError, "this is not the name of a folder"),
        (5, TypeError, "=5.*: it must be the name of a folder, a text or a Path"),
        ("~nobody-of-that-name/x", ValueError, "there is no such user"),
    ],
    ids=repr,
)
def test_an_invalid_path_is_refused_with_the_call(path: Any, kind: type[Exception], expected: str):
    for read in (dtkit.Checkpoint, dtkit.list_checkpoints):
        with pytest.raises(kind, match=rf"^{read.__name__}\(path{expected}" if "=" in expected else expected):
            read(path)


def test_a_folder_that_cannot_be_created_is_reported_with_a_remedy():
    manager = make_manager(History(), Path("unused"))
    wanted = CheckpointRequest(Path("/proc/x"), None)
    manager.add_request(wanted)
    assert manager.begin_next(5) is None
    with pytest.raises(
        dtkit.errors.CheckpointError,
        match=r"/proc/x: No such file.* Name a folder with free space that the notebook and all",
    ):
        wanted.result(1)


def test_newer_formats_missing_pieces_and_other_models_are_refused(whole: Path):
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2).double())
    with pytest.raises(dtkit.errors.CheckpointError, match=r"2.bias has shape \(3,\) in it and \(2,\) in the model"):
        dtkit.Checkpoint(whole).load_into(other)
    with pytest.raises(
        dtkit.errors.CheckpointError, match=r"it lacks y; the model lacks 0.bias, 0.weight, 2.bias, 2.weight"
    ):
        dtkit.Checkpoint(whole).check_fits({"y": other[0].weight})
    with pytest.raises(dtkit.errors.CheckpointError, match=r"0.bias is F32 in it and F64 in the model"):
        dtkit.Checkpoint(whole).load_into(net().double())
    rewrite_metadata(whole, lambda head: head["index"]["model/0.weight"]["pieces"].pop())
    with pytest.raises(dtkit.errors.CheckpointError, match=r"lacks parts of model/0.weight"):
        dtkit.Checkpoint(whole)
    rewrite_metadata(whole, lambda head: head.update(format=99))
    with pytest.raises(dtkit.errors.CheckpointError, match="has format 99"):
        dtkit.Checkpoint(whole)


def test_no_module_that_reads_checkpoints_can_unpickle(root: Path):
    """They import no pickling module, and don't call torch.load."""
    paths = [path for folder in ("checkpoint", "engine/state") for path in (root / "dtkit" / folder).glob("*.py")]
    names = [path.relative_to(root / "dtkit").as_posix() for path in paths]
    names += ["training/resume.py", "engine/rng.py", "engine/data/random_state.py"]
    assert "checkpoint/safetensors_file.py" in names
    for name in names:
        tree = ast.parse((root / "dtkit" / name).read_text())
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not modules & {"pickle", "cloudpickle", "dill", "shelve", "marshal", "dtkit.rpc.pickling"}, name
        assert not calls & {"torch.load", "torch.save", "eval", "exec", "np.load", "numpy.load"}, name


# -- saves that end before they are done ---------------------------------------------------------------------


def test_an_interrupted_save_leaves_the_previous_checkpoint_intact(whole: Path, tmp_path: Path):
    """A save that ended at any byte before the rename is ignored, and the next save removes it."""
    kept = {path.name: path.read_bytes() for path in sorted(whole.iterdir())}
    order = [name for name in kept if name != "checkpoint.json"] + ["checkpoint.json"]
    cuts = random.Random(5)
    for done, name in enumerate(order):
        for size in {0, len(kept[name]), *(cuts.randrange(len(kept[name])) for _ in range(20))}:
            left = tmp_path / f".saving-{folders.socket.gethostname()}-{_dead()}-0a0b0c0d"
            left.mkdir()
            for finished in order[:done]:
                (left / finished).write_bytes(kept[finished])
            (left / name).write_bytes(kept[name][:size])
            found = dtkit.Checkpoint(tmp_path)
            assert found.path == whole
            assert found.verify_files() == []
            shutil.rmtree(left)
    left.mkdir()
    write_checkpoint(tmp_path, 6).future.result(20)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000005", "step-00000006"]


def _dead() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    return process.pid


KILLED = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from tests.support.checkpoints import write_checkpoint
print("ready", flush=True)
for step in range(100, 10**6):
    write_checkpoint(pathlib.Path(sys.argv[1]), step, keep_last=2).future.result(20)
"""


def test_a_process_killed_while_saving_leaves_complete_checkpoints(whole: Path, tmp_path: Path, root: Path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 60
    while dtkit.Checkpoint(tmp_path).step < 103:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    process.stdout.close()
    found = dtkit.list_checkpoints(tmp_path)
    assert not found.broken
    assert [one.verify_files() for one in found] == [[]] * len(found)
    saved = write_checkpoint(tmp_path, 10**7).future.result(20)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert dtkit.Checkpoint(tmp_path).path == saved.path


def test_a_checkpoint_that_a_run_removes_meanwhile_gives_way_to_a_newer_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    newer: list[Path] = []

    def find_before_the_run_saves(path: Path) -> Path:
        found = folders.find_newest(path)
        if not newer:
            newer.append(write_checkpoint(tmp_path, 6, keep_last=1).future.result(20).path)
        return found

    monkeypatch.setattr(checkpoint, "find_newest", find_before_the_run_saves)
    assert dtkit.Checkpoint(tmp_path).path == newer[0]
    assert not whole.exists()


def test_keep_last_removes_older_checkpoints_and_overwrites_none(tmp_path: Path):
    for step in (10, 5, 5):
        write_checkpoint(tmp_path, step, keep_last=2).future.result(20)
    assert [one.path.name for one in dtkit.list_checkpoints(tmp_path)] == ["step-00000005", "step-00000005.2"]
    assert dtkit.Checkpoint(tmp_path).path.name == "step-00000005.2"


def test_two_runs_in_one_folder_keep_each_others_checkpoints(tmp_path: Path):
    saved = [write_checkpoint(tmp_path, 1).future.result(20).path]  # by hand: it has no lineage
    for step in (5, 10, 15):
        for name in ("first", "second"):
            manager = make_manager(History(), tmp_path)
            manager.policy = dataclasses.replace(manager.policy, keep_last=2, lineage=(name,))
            saved.append(write_due_checkpoint(manager, step).future.result(20).path)
    assert dtkit.list_checkpoints(tmp_path).broken == {}
    assert sorted(one.path for one in dtkit.list_checkpoints(tmp_path)) == sorted([saved[0], *saved[-4:]])


def test_metadata_of_kept_checkpoints_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The checkpoint.json of a large model takes a long time to read."""
    read, seen = validation.read_metadata, []
    monkeypatch.setattr(folders, "read_metadata", lambda folder: seen.append(folder) or read(folder))
    manager = make_manager(History(), tmp_path)
    manager.policy = dataclasses.replace(manager.policy, keep_last=4, lineage=("first",))
    saved = [write_due_checkpoint(manager, step).future.result(20).path for step in range(5, 35, 5)]
    assert sorted(seen) == saved
    assert sorted(tmp_path.iterdir()) == saved[-4:]
    shutil.copy(saved[2] / "history.jsonl", saved[-1] / "checkpoint.json")  # a changed file is read again
    other = make_manager(History(), tmp_path)
    other.policy = dataclasses.replace(other.policy, keep_last=1, lineage=("first",))
    last = write_due_checkpoint(other, 35).future.result(20).path
    assert sorted(tmp_path.iterdir()) == [saved[-1], last]  # a damaged one is not removed


def test_sibling_runs_remove_checkpoints_of_their_parent_but_not_of_each_other(tmp_path: Path):
    def save(step: int, *line: str) -> Path:
        manager = make_manager(History(), tmp_path)
        manager.policy = dataclasses.replace(manager.policy, keep_last=2, lineage=line)
        return write_due_checkpoint(manager, step).future.result(20).path

    save(5, "root")
    save(10, "root")
    one, two = save(15, "root", "a"), save(20, "root", "a")
    other = save(15, "root", "b")
    assert sorted(path.path for path in dtkit.list_checkpoints(tmp_path)) == sorted([one, two, other])
    again = save(20, "root", "b")
    assert sorted(path.path for path in dtkit.list_checkpoints(tmp_path)) == sorted([one, two, other, again])


def test_the_newest_checkpoint_without_metadata_is_refused(tmp_path: Path):
    older, newest = (write_checkpoint(tmp_path, step).future.result(20).path for step in (5, 10))
    (newest / "checkpoint.json").unlink()
    with pytest.raises(
        dtkit.errors.CheckpointError, match=f"{newest.name} can't be used: checkpoint.json .*older checkpoint"
    ):
        dtkit.Checkpoint(tmp_path)
    assert dtkit.Checkpoint(older).step == 5
    assert [one.path for one in dtkit.list_checkpoints(tmp_path)] == [older]
    assert list(dtkit.list_checkpoints(tmp_path).broken) == [newest]


def test_a_path_may_begin_with_a_tilde(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dtkit.Checkpoint("~").path == whole
    assert [one.path for one in dtkit.list_checkpoints("~")] == [whole]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_error_fails_only_its_checkpoint(
    whole: Path, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    history = History()
    monkeypatch.setattr(safetensors_file, "write_tensors", full)
    with pytest.raises(dtkit.errors.CheckpointError, match=f"rank 0 on .*{os.strerror(code)}"):
        write_checkpoint(tmp_path, 6, history=history).future.result(20)
    assert [event.kind for event in history.events] == ["error"]
    assert list(tmp_path.iterdir()) == [whole]
    dtkit.Checkpoint(tmp_path).check_files()


def test_a_full_disk_error_is_written_to_the_report(tmp_path: Path):
    """Writes to /dev/full fail."""
    (tmp_path / "rank-000.safetensors").symlink_to("/dev/full")
    assert writer._reserve_report(tmp_path, 0) is None
    writer._write_files(tmp_path, 0, make_rank_state(0))
    report = json.loads((tmp_path / "report-000.json").read_text())
    assert "No space left on device" in report["error"]


def test_checkpoints_are_due_every_n_steps_and_at_the_end(tmp_path: Path):
    manager = make_manager(History(), tmp_path)
    assert [step for step in range(18) if manager.is_due(step, 17) and manager.begin_next(step)] == [5, 10, 15, 17]
    assert [manager.steps_until_due(step) for step in (0, 4, 5, 7)] == [5, 1, 5, 3]
    manager.reset_to(20)
    assert not manager.is_due(20, 100)
    save = manager.begin_next(25)
    assert save is not None
    manager.on_cancel(save)
    assert manager.is_due(25, 100)
    assert save.folder is None


def test_costly_checkpoints_for_recovery_are_rarer(tmp_path: Path):
    policy = CheckpointPolicy(folder=tmp_path, every_seconds=10.0, quiet=True, max_time_share=0.01)
    last = 5, time.monotonic() - 50
    assert policy.is_due(9, 100, last, 0.4)
    assert not policy.is_due(9, 100, last, 0.6)  # its hundredth is a minute
    assert dataclasses.replace(policy, max_time_share=None).is_due(9, 100, last, 0.6)


def test_failures_for_recovery_are_told_once_for_each_reason(tmp_path: Path):
    history = History()
    manager = make_manager(history, tmp_path)
    quiet = CheckpointPolicy(folder=tmp_path, quiet=True)
    for reason in ("full", "full", "gone"):
        manager.on_failure(CheckpointRequest(tmp_path, 2, quiet), 1, OSError(reason))
    assert [event.text.rpartition(": ")[2].partition(".")[0] for event in history.events] == ["full", "gone"]


def test_a_folder_alone_gets_a_checkpoint_of_the_last_step(tmp_path: Path):
    manager = make_manager(History(), tmp_path)
    manager.policy = CheckpointPolicy(folder=tmp_path)
    assert [step for step in range(18) if manager.is_due(step, 17) and manager.begin_next(step)] == [17]
