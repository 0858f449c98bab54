"""Checkpoints as files: whole or not at all, refused when damaged, and never anything but data."""

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
from dtkit.checkpoint import checkpoint, json_values
from dtkit.checkpoint.manager import CheckpointManager, CheckpointPolicy, CheckpointRequest
from dtkit.engine import rng
from dtkit.engine.state import safetensors_file, writer
from dtkit.engine.state.capture import MemoryReader, ShardedState, TensorShard, assign_holders
from dtkit.engine.state.safetensors_file import FileReader
from dtkit.engine.state.tensor_part import TensorPart
from dtkit.history.history import History
from dtkit.training.state_dict import join_state_dicts
from dtkit.types import RunSpec
from tests.cluster.small import net

SPEC = RunSpec("Net", "DataParallel()", 2, 64, 16, 20, 4, "global", 0, "loss", "SGD")


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
def test_plain_values_come_back_as_they_were(value: Any):
    found = json_values.decode(json.loads(json.dumps(json_values.encode(value, "it"), allow_nan=False)))
    assert found == value
    assert type(found) is type(value)


def test_what_is_no_data_is_refused_by_name():
    with pytest.raises(
        json_values.UnsupportedValueError, match=r"the scheduler\['fn'\] is a builtin_function_or_method"
    ):
        json_values.encode({"fn": len}, "the scheduler")


def test_random_states_come_back():
    state = json.loads(json.dumps(json_values.encode(rng.get_global_states(), "it")))
    wanted = random.random(), float(np.random.random())  # noqa: NPY002 - whose state is shared
    rng.set_global_states(json_values.decode(state))
    assert (random.random(), float(np.random.random())) == wanted  # noqa: NPY002 - as above
    assert rng.derive_seed(0, 1, 2) != rng.derive_seed(0, 1, 3)


# -- tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", safetensors_file.SAFETENSORS_NAMES, ids=str)
def test_files_are_safetensors(tmp_path: Path, dtype: torch.dtype):
    tensors = {"a": torch.arange(6).reshape(2, 3).to(dtype), "b": torch.tensor(1).to(dtype), "c": torch.zeros(0, 2)}
    written = safetensors_file.write_tensors(tmp_path / "x.safetensors", tensors)
    assert written == {
        "bytes": (tmp_path / "x.safetensors").stat().st_size,
        "digest": checkpoint.compute_digest(tmp_path / "x.safetensors"),
    }
    found = load_file(tmp_path / "x.safetensors")
    assert {name: (t.dtype, t.tolist()) for name, t in found.items()} == {
        name: (t.dtype, t.tolist()) for name, t in tensors.items()
    }


def test_a_part_is_put_together_from_pieces_that_were_cut_otherwise(tmp_path: Path):
    whole = torch.arange(35.0).reshape(5, 7)
    parts = [TensorShard(part.contiguous(), (5, 7), (0, k)) for part, k in ((whole[:, :3], 0), (whole[:, 3:], 3))]
    for rank, slab in enumerate(parts):
        safetensors_file.write_tensors(tmp_path / checkpoint.get_rank_filename(rank), {"w": slab.tensor})
    pieces = [[rank, list(slab.offset), list(slab.tensor.shape)] for rank, slab in enumerate(parts)]
    index = {"w": {"dtype": "F32", "shape": [5, 7], "pieces": pieces}}
    files = [checkpoint.get_rank_filename(rank) for rank in range(2)]
    with FileReader(tmp_path, index, files, {}) as reader:
        for source in (reader, MemoryReader([{"w": slab} for slab in parts], {})):
            assert source.get_shape("w") == (5, 7)
            assert source.get_shape("v") is None
            assert torch.equal(source.read_slice("w", (1, 2), (3, 4)), whole[1:4, 2:6])
            assert source.read_slice("w", (5, 0), (0, 7)).shape == (0, 7)


def test_what_is_several_in_one_is_put_together_from_parts_of_each(tmp_path: Path):
    """Queries, keys and values: each of two ranks has half of the rows of each."""
    whole = torch.arange(24.0).reshape(12, 2)
    parts = [torch.cat([third.chunk(2)[rank] for third in whole.chunk(3)]) for rank in range(2)]
    slabs = [TensorShard(part, (12, 2), (2 * rank, 0), fused_blocks=3) for rank, part in enumerate(parts)]
    reports = []
    for rank, slab in enumerate(slabs):
        facts = {"layout": {}, "values": {}, "optimizers": {}, "aliases": {}, "extra": {}, "own": {}}
        reports.append(
            writer._write_tensors(tmp_path / checkpoint.get_rank_filename(rank), ShardedState({"w": slab}, facts))
        )
    index, files = (
        checkpoint.build_index(json.loads(json.dumps(reports))),
        [checkpoint.get_rank_filename(r) for r in range(2)],
    )
    assert checkpoint._is_fully_covered(index["w"], 2)
    assert not checkpoint._is_fully_covered({**index["w"], "pieces": index["w"]["pieces"][1:]}, 2)
    with FileReader(tmp_path, index, files, {}) as reader:
        for source in (reader, MemoryReader([{"w": slab} for slab in slabs], {})):
            assert torch.equal(source.read_slice("w", (0, 0), (12, 2)), whole)
            assert torch.equal(source.read_slice("w", (3, 1), (6, 1)), whole[3:9, 1:])
    pieces = [{"w": TensorPart(part, 0, rank, fused_blocks=3)} for rank, part in enumerate(parts)]
    assert torch.equal(join_state_dicts(pieces)["w"], whole)


def test_what_several_hold_one_gives_and_bytes_are_balanced():
    common = [("a", (0,), 8), ("b", (0,), 8), ("c", (0,), 16)]
    given = assign_holders([common, [*common, ("d", (4,), 4)]])
    assert given[0] & given[1] == set()
    assert given[0] | given[1] == {"a", "b", "c", "d"}
    assert assign_holders([[("e", (0,), 1)], [("e", (2,), 1)]]) == [{"e"}, {"e"}]


# -- a checkpoint ------------------------------------------------------------------------------------------


def captured(rank: int) -> ShardedState:
    """Each of two ranks has half of the rows of every matrix, and rank 0 what is no matrix."""
    slabs = {}
    for name, tensor in net().state_dict().items():
        here = tensor.chunk(2)[rank].contiguous()
        offset = (rank * len(tensor.chunk(2)[0]), *(0 for _ in tensor.shape[1:]))
        slabs[f"model/{name}"] = TensorShard(here, tuple(tensor.shape), offset)
    facts = {"layout": {}, "values": {}, "optimizers": {}, "aliases": {}, "extra": {}, "own": {str(rank): {}}}
    return ShardedState(slabs, facts)


def saver(history: History, path: Path, keep: int = 3) -> CheckpointManager:
    found = CheckpointManager(history, lambda: None)
    found.policy = CheckpointPolicy(5, path, keep)
    found.describe = lambda: {"spec": {**vars_of(SPEC)}, "called": 0, "callbacks": []}
    return found


def vars_of(spec: RunSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def write_one(path: Path, step: int = 5, keep: int | None = None, history: History | None = None) -> CheckpointRequest:
    """Save by hand, with the ranks' part done here."""
    made = saver(History() if history is None else history, path)
    made.add_request(CheckpointRequest(path, keep))
    return write_with(made, step)


def write_with(made: CheckpointManager, step: int) -> CheckpointRequest:
    """The save that is due, with the ranks' part done here."""
    assert made.is_due(step, 10**9)
    save = made.begin_next(step)
    assert save is not None
    assert save.folder is not None
    for rank in range(2):
        assert writer._reserve_report(save.folder, rank) is None
        writer._write_files(save.folder, rank, captured(rank))
    made.on_result(save, step, [{"error": None, "seconds": 0.0, "torch": "2"}] * 2)
    return save


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_one(tmp_path).future.result(20).path


def test_a_checkpoint_gives_its_weights_without_engines(whole: Path, tmp_path: Path):
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
        assert "DataParallel() on 2 ranks" in text
        assert "67" in text


def test_every_damage_is_named(whole: Path, tmp_path: Path):
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


def rewritten(folder: Path, change: Any) -> None:
    """A checkpoint.json that somebody wrote with a digest that is right."""
    head = json.loads((folder / "checkpoint.json").read_text())
    head.pop("digest")
    change(head)
    (folder / "checkpoint.json").write_text(json.dumps({**head, "digest": checkpoint._compute_metadata_digest(head)}))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "rank-000.safetensors/../x", "rank-000.pkl"])
def test_names_stay_within_the_folder(whole: Path, name: str):
    rewritten(whole, lambda head: head["files"].update({name: {"bytes": 1, "digest": ""}}))
    with pytest.raises(dtkit.errors.CheckpointError, match="is no file of a checkpoint"):
        dtkit.Checkpoint(whole)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "x"}, "says format='x', which must be an integer from 1 up"),
        ({"step": "x"}, "says step='x', which must be an integer from 0 up"),
        ({"step": -1}, "says step='-1', which must be"),
        ({"step": True}, "says step='True', which must be"),
        ({"created": None}, "says created='None', which must be a finite number"),
        ({"spec": {}}, "lacks spec/name"),
        ({"spec": []}, r"says spec='\[\]', which must be an object"),
        ({"spec": {**vars_of(SPEC), "steps_per_epoch": 0}}, "says spec/steps_per_epoch='0', which must be"),
        ({"facts": {}}, "lacks facts/layout"),
        ({"files": 3}, "says files='3', which must be an object"),
        ({"files": {"rank-000.safetensors": {}}}, "lacks what a checkpoint must say"),
    ],
    ids=str,
)
def test_what_a_forged_head_says_is_looked_at(whole: Path, change: dict[str, Any], told: str):
    rewritten(whole, lambda head: head.update(change))
    with pytest.raises(dtkit.errors.CheckpointError, match=rf"checkpoint\.json {told}.*Use an older checkpoint"):
        dtkit.Checkpoint(whole)
    found = dtkit.list_checkpoints(whole.parent)
    assert (len(found), list(found.broken)) == (0, [whole])


@pytest.mark.parametrize("text", ["[]", "[1]", "3", "null", '"digest"'])
def test_a_head_that_is_no_object_costs_its_checkpoint_alone(whole: Path, text: str):
    other = write_one(whole.parent, 6).future.result(20).path
    (whole / "checkpoint.json").write_text(text)
    with pytest.raises(dtkit.errors.CheckpointError, match="no JSON of a checkpoint"):
        dtkit.Checkpoint(whole)
    assert [one.path for one in dtkit.list_checkpoints(whole.parent)] == [other]


@pytest.mark.parametrize(
    ("path", "kind", "told"),
    [
        ("", ValueError, "=''.*: no folder is called that. Name one, such as 'checkpoints/first'"),
        ("a\0b", ValueError, "no folder is called that"),
        (5, TypeError, "=5.*: it is the name of a folder, a text or a Path"),
        ("~nobody-of-that-name/x", ValueError, "there is no such user"),
    ],
    ids=repr,
)
def test_a_path_that_is_none_is_named(path: Any, kind: type[Exception], told: str):
    for read in (dtkit.Checkpoint, dtkit.list_checkpoints):
        with pytest.raises(kind, match=rf"^{read.__name__}\(path{told}" if "=" in told else told):
            read(path)


def test_a_folder_that_cannot_be_made_is_told_with_what_to_do():
    made = saver(History(), Path("unused"))
    wanted = CheckpointRequest(Path("/proc/x"), None)
    made.add_request(wanted)
    assert made.begin_next(5) is None
    with pytest.raises(
        dtkit.errors.CheckpointError, match=r"/proc/x: No such file.* Name a folder that the notebook and all"
    ):
        wanted.result(1)


def test_newer_formats_holes_and_other_models_are_refused(whole: Path):
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2).double())
    with pytest.raises(dtkit.errors.CheckpointError, match=r"2.bias has shape \(3,\) there and \(2,\) in the model"):
        dtkit.Checkpoint(whole).load_into(other)
    with pytest.raises(
        dtkit.errors.CheckpointError, match=r"it lacks y; the model lacks 0.bias, 0.weight, 2.bias, 2.weight"
    ):
        dtkit.Checkpoint(whole).check_fits({"y": other[0].weight})
    with pytest.raises(dtkit.errors.CheckpointError, match=r"0.bias is F32 there and F64 in the model"):
        dtkit.Checkpoint(whole).load_into(net().double())
    rewritten(whole, lambda head: head["index"]["model/0.weight"]["pieces"].pop())
    with pytest.raises(dtkit.errors.CheckpointError, match=r"lacks parts of model/0.weight"):
        dtkit.Checkpoint(whole)
    rewritten(whole, lambda head: head.update(format=99))
    with pytest.raises(dtkit.errors.CheckpointError, match="has format 99"):
        dtkit.Checkpoint(whole)


def test_nothing_in_a_checkpoint_is_unpickled(root: Path):
    """What reads checkpoints imports nothing that can, and calls no torch.load."""
    files = ["checkpoint/checkpoint.py", "checkpoint/manager.py", "checkpoint/json_values.py", "training/resume.py"]
    engine = ["state/capture.py", "state/safetensors_file.py", "state/writer.py", "rng.py"]
    for name in [*files, *(f"engine/{name}" for name in engine)]:
        tree = ast.parse((root / "dtkit" / name).read_text())
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not modules & {"pickle", "cloudpickle", "dill", "shelve", "marshal", "dtkit.rpc.pickling"}, name
        assert not calls & {"torch.load", "torch.save", "eval", "exec", "np.load", "numpy.load"}, name


# -- saves that end before they are done ---------------------------------------------------------------------


def test_whatever_is_cut_off_the_checkpoint_before_stays(whole: Path, tmp_path: Path):
    """A save that ended at any byte of any file, before the rename, is not seen; the next save removes it."""
    kept = {path.name: path.read_bytes() for path in sorted(whole.iterdir())}
    order = [name for name in kept if name != "checkpoint.json"] + ["checkpoint.json"]
    cuts = random.Random(5)
    for done, name in enumerate(order):
        for size in {0, len(kept[name]), *(cuts.randrange(len(kept[name])) for _ in range(20))}:
            left = tmp_path / f".saving-{checkpoint.socket.gethostname()}-{_dead()}-0a0b0c0d"
            left.mkdir()
            for finished in order[:done]:
                (left / finished).write_bytes(kept[finished])
            (left / name).write_bytes(kept[name][:size])
            found = dtkit.Checkpoint(tmp_path)
            assert found.path == whole
            assert found.verify_files() == []
            shutil.rmtree(left)
    left.mkdir()
    write_one(tmp_path, 6).future.result(20)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000005", "step-00000006"]


def _dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    return process.pid


KILLED = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from tests.test_checkpoint import write_one
print("ready", flush=True)
for step in range(100, 10**6):
    write_one(pathlib.Path(sys.argv[1]), step, keep=2).done.result(20)
"""


def test_a_process_that_is_killed_while_it_saves_leaves_whole_checkpoints(whole: Path, tmp_path: Path, root: Path):
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
    saved = write_one(tmp_path, 10**7).future.result(20)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert dtkit.Checkpoint(tmp_path).path == saved.path


def test_the_last_ones_stay_and_none_is_written_over(tmp_path: Path):
    for step in (10, 5, 5):
        write_one(tmp_path, step, keep=2).future.result(20)
    assert [one.path.name for one in dtkit.list_checkpoints(tmp_path)] == ["step-00000005", "step-00000005.2"]
    assert dtkit.Checkpoint(tmp_path).path.name == "step-00000005.2"


def test_of_two_runs_in_one_folder_neither_removes_what_the_other_wrote(tmp_path: Path):
    saved = [write_one(tmp_path, 1).future.result(20).path]  # by hand: it belongs to no line
    for step in (5, 10, 15):
        for name in ("first", "second"):
            made = saver(History(), tmp_path)
            made.policy = dataclasses.replace(made.policy, keep_last=2, lineage=(name,))
            saved.append(write_with(made, step).future.result(20).path)
    assert dtkit.list_checkpoints(tmp_path).broken == {}
    assert sorted(one.path for one in dtkit.list_checkpoints(tmp_path)) == sorted([saved[0], *saved[-4:]])


def test_what_stays_is_not_read_again_with_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A large model's checkpoint.json takes long to read."""
    read, seen = checkpoint.read_metadata, []
    monkeypatch.setattr(checkpoint, "read_metadata", lambda folder: seen.append(folder) or read(folder))
    made = saver(History(), tmp_path)
    made.policy = dataclasses.replace(made.policy, keep_last=4, lineage=("first",))
    saved = [write_with(made, step).future.result(20).path for step in range(5, 35, 5)]
    assert sorted(seen) == saved
    assert sorted(tmp_path.iterdir()) == saved[-4:]
    shutil.copy(saved[2] / "history.jsonl", saved[-1] / "checkpoint.json")  # who changes one has it read anew
    other = saver(History(), tmp_path)
    other.policy = dataclasses.replace(other.policy, keep_last=1, lineage=("first",))
    last = write_with(other, 35).future.result(20).path
    assert sorted(tmp_path.iterdir()) == [saved[-1], last]  # what can't be read is nobody's to remove


def test_runs_that_go_on_from_the_same_one_remove_that_one_s_only(tmp_path: Path):
    def save(step: int, *line: str) -> Path:
        made = saver(History(), tmp_path)
        made.policy = dataclasses.replace(made.policy, keep_last=2, lineage=line)
        return write_with(made, step).future.result(20).path

    save(5, "root")
    save(10, "root")
    one, two = save(15, "root", "a"), save(20, "root", "a")
    other = save(15, "root", "b")
    assert sorted(path.path for path in dtkit.list_checkpoints(tmp_path)) == sorted([one, two, other])
    again = save(20, "root", "b")
    assert sorted(path.path for path in dtkit.list_checkpoints(tmp_path)) == sorted([one, two, other, again])


def test_the_newest_without_its_checkpoint_json_is_refused_and_no_older_one_taken(tmp_path: Path):
    older, newest = (write_one(tmp_path, step).future.result(20).path for step in (5, 10))
    (newest / "checkpoint.json").unlink()
    with pytest.raises(
        dtkit.errors.CheckpointError, match=f"{newest.name} can't be used: checkpoint.json .*older checkpoint"
    ):
        dtkit.Checkpoint(tmp_path)
    assert dtkit.Checkpoint(older).step == 5
    assert [one.path for one in dtkit.list_checkpoints(tmp_path)] == [older]
    assert list(dtkit.list_checkpoints(tmp_path).broken) == [newest]


def test_a_path_may_begin_at_home(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dtkit.Checkpoint("~").path == whole
    assert [one.path for one in dtkit.list_checkpoints("~")] == [whole]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_without_room_is_an_error_of_the_save_alone(
    whole: Path, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    history = History()
    monkeypatch.setattr(safetensors_file, "write_tensors", full)
    with pytest.raises(dtkit.errors.CheckpointError, match=f"rank 0 on .*{os.strerror(code)}"):
        write_one(tmp_path, 6, history=history).future.result(20)
    assert [event.kind for event in history.events] == ["error"]
    assert list(tmp_path.iterdir()) == [whole]
    dtkit.Checkpoint(tmp_path).check_files()


def test_a_real_full_disk(tmp_path: Path):
    """/dev/full takes nothing."""
    (tmp_path / "rank-000.safetensors").symlink_to("/dev/full")
    assert writer._reserve_report(tmp_path, 0) is None
    writer._write_files(tmp_path, 0, captured(0))
    report = json.loads((tmp_path / "report-000.json").read_text())
    assert "No space left on device" in report["error"]


def test_when_a_save_is_due(tmp_path: Path):
    made = saver(History(), tmp_path)
    assert [step for step in range(18) if made.is_due(step, 17) and made.begin_next(step)] == [5, 10, 15, 17]
    assert [made.steps_until_due(step) for step in (0, 4, 5, 7)] == [5, 1, 5, 3]
    made.reset_to(20)
    assert not made.is_due(20, 100)
    save = made.begin_next(25)
    assert save is not None
    made.on_cancel(save)
    assert made.is_due(25, 100)
    assert save.folder is None
