"""Shared memory: one mapped file for all engines of a host."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from dtkit._util import resources
from dtkit._util.process import ProcessId
from dtkit.rpc import shared_memory
from dtkit.rpc.shared_memory import SharedBuffer, map_buffers

# A process that prints a line when it runs and ends when its standard input does.
WAIT = "print('up', flush=True); input()"


def child(code: str = WAIT) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=30)


def files(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.iterdir())


def test_written_buffers_are_mapped_and_aligned(tmp_path: Path) -> None:
    arrays = [np.arange(5, dtype=np.uint8), np.empty(0), np.linspace(0, 1, 1001), np.ones((3, 4), order="C")]
    handle = shared_memory.write_buffers(arrays, directories=[str(tmp_path)])
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert all(offset % shared_memory.ALIGNMENT == 0 for offset, _ in handle.spans)
    views = map_buffers(handle)
    assert [view.nbytes for view in views] == [array.nbytes for array in arrays]
    for view, array in zip(views, arrays, strict=True):
        assert bytes(view) == array.tobytes()


def test_empty_buffers_are_stored_in_a_file(tmp_path: Path) -> None:
    for buffers in ([], [b""], [b"", b"ab"]):
        handle = shared_memory.write_buffers(buffers, directories=[str(tmp_path)])
        assert [bytes(view) for view in map_buffers(handle)] == buffers
        shared_memory.remove_file(handle)
    assert files(tmp_path) == []


def test_a_file_is_private_and_in_shared_memory() -> None:
    handle = shared_memory.write_buffers([b"secret"])
    try:
        status = Path(handle.path).stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert str(Path(handle.path).parent) == shared_memory.get_default_directories()[0]
    finally:
        shared_memory.remove_file(handle)
    shared_memory.remove_file(handle)  # idempotent
    assert not Path(handle.path).exists()


def test_changes_to_a_mapping_do_not_reach_other_mappings_or_the_file(tmp_path: Path) -> None:
    handle = shared_memory.write_buffers([b"abcd"], directories=[str(tmp_path)])
    (mine,), (yours,) = map_buffers(handle), map_buffers(handle)
    mine[0] = ord("X")
    assert (bytes(mine), bytes(yours), Path(handle.path).read_bytes()) == (b"Xbcd", b"abcd", b"abcd")


def test_views_keep_the_mapping_alive_after_the_file_is_removed(tmp_path: Path) -> None:
    handle = shared_memory.write_buffers([b"abcd", b"efgh"], directories=[str(tmp_path)])
    array = np.frombuffer(map_buffers(handle)[1], dtype=np.uint8)
    shared_memory.remove_file(handle)
    assert array.tobytes() == b"efgh"
    assert array.flags.writeable


def test_a_temporary_file_is_used_if_shared_memory_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, big = tmp_path / "small", tmp_path / "big"
    small.mkdir()
    big.mkdir()

    def reserve(descriptor: int, size: int, real=shared_memory._reserve) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent == small:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, size)

    monkeypatch.setattr(shared_memory, "_reserve", reserve)
    missing = str(tmp_path / "missing")
    handle = shared_memory.write_buffers([b"abcd"], directories=[missing, str(small), str(big)])
    assert Path(handle.path).parent == big
    assert files(small) == []
    with pytest.raises(OSError, match=r"no room for .* MB .*No such file.*No space left.*--shm-size"):
        shared_memory.write_buffers([b"abcd"], directories=[missing, str(small)])


def test_a_file_size_limit_raises_before_any_byte_is_written(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from dtkit.rpc import shared_memory as shared\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "try: shared.write_buffers([bytes(100000)], directories=[sys.argv[1]])\n"
        "except OSError as error: print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "no room" in ran.stdout
    assert files(tmp_path) == []


def test_writing_more_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "read_memory", lambda: resources.HostMemory(2_000_000, 1_000_000))
    with pytest.raises(OSError, match="only 1 MB of memory are free"):
        shared_memory.write_buffers([bytes(2_000_000)], directories=["/dev/shm"])


def test_a_file_with_the_wrong_size_or_type_is_not_mapped(tmp_path: Path) -> None:
    handle = shared_memory.write_buffers([b"abcd"], directories=[str(tmp_path)])
    with pytest.raises(OSError, match="holds 4 of 64 bytes"):
        map_buffers(SharedBuffer(handle.path, ((0, 64),)))
    link = tmp_path / "link"
    link.symlink_to(handle.path)
    with pytest.raises(OSError, match="symbolic"):
        map_buffers(SharedBuffer(str(link), handle.spans))
    with pytest.raises(PermissionError, match="not a file of this user"):
        map_buffers(SharedBuffer("/dev/null", ()))


def test_remove_orphans_deletes_only_files_of_dead_processes(tmp_path: Path) -> None:
    place = [str(tmp_path)]
    process = child()
    mine = shared_memory.write_buffers([b"a"], directories=place)
    theirs = shared_memory.write_buffers([b"b"], file_owner=ProcessId.from_pid(process.pid), directories=place)
    reused = shared_memory.write_buffers(
        [b"c"], file_owner=ProcessId(os.getpid(), ProcessId.from_pid().start_time - 10), directories=place
    )
    name = Path(theirs.path).name
    # Must not be deleted: the name of another uid, another host, another program, a link, a folder.
    others = [
        name.replace(f"dtkit-{os.getuid()}-", f"dtkit-{os.getuid() + 1}-"),
        f"dtkit-{os.getuid()}-{2**22}-1-{'0' * 24}",
        f"other-{os.getuid()}-{2**22}-1-{'0' * 24}",
    ]
    for other in others:
        (tmp_path / other).touch()
    gone = shared_memory._make_filename(ProcessId(2**22 + 1, 1))
    (tmp_path / gone).symlink_to(tmp_path)
    (tmp_path / shared_memory._make_filename(ProcessId(2**22 + 1, 1))).mkdir()

    assert shared_memory.remove_orphans(place) == [reused.path]
    end(process)
    assert shared_memory.remove_orphans([str(tmp_path / "missing"), *place]) == [theirs.path]
    assert shared_memory.remove_orphans(place) == []
    assert Path(mine.path).exists()
    assert len(files(tmp_path)) == 1 + len(others) + 2


def test_files_of_a_zombie_are_removed_as_orphans(tmp_path: Path) -> None:
    process = child()
    handle = shared_memory.write_buffers(
        [b"a"], file_owner=ProcessId.from_pid(process.pid), directories=[str(tmp_path)]
    )
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert shared_memory.remove_orphans([str(tmp_path)]) == [handle.path]
    process.communicate(timeout=30)


def test_the_file_of_a_killed_writer_is_removed_as_an_orphan(tmp_path: Path) -> None:
    code = (
        f"from dtkit.rpc import shared_memory as shared; shared.write_buffers([b'a'], "
        f"directories=[{str(tmp_path)!r}]); {WAIT}"
    )
    process = child(code)
    assert shared_memory.remove_orphans([str(tmp_path)]) == []
    process.kill()
    process.communicate(timeout=30)
    assert len(shared_memory.remove_orphans([str(tmp_path)])) == 1


def test_remove_owned_files_deletes_only_the_files_of_that_owner(tmp_path: Path) -> None:
    place = [str(tmp_path)]
    other = ProcessId(os.getppid(), 1)
    kept = shared_memory.write_buffers([b"a"], file_owner=other, directories=place)
    taken = {shared_memory.write_buffers([b"b"], directories=place).path for _ in range(2)}
    assert set(shared_memory.remove_owned_files(ProcessId.from_pid(), place)) == taken
    assert files(tmp_path) == [kept.path]


def test_start_time_is_read_for_a_process_name_with_spaces_and_parentheses() -> None:
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'a) R (1 2', 0, 0, 0)\n"
        "from dtkit._util.process import ProcessId; print(ProcessId.from_pid().start_time)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert float(ran.stdout) >= ProcessId.from_pid().start_time


def test_mapped_memory_is_shared_and_not_copied(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 20_000_000, dtype=np.uint8)
    handle = shared_memory.write_buffers([data], directories=[str(tmp_path)])
    before = psutil.Process().memory_full_info().uss
    # Twice, since pages that only one mapping has touched count as this process's own.
    views = map_buffers(handle) + map_buffers(handle)
    assert [int(np.frombuffer(view, np.uint8).sum()) for view in views] == [int(data.sum())] * 2
    assert psutil.Process().memory_full_info().uss - before < data.nbytes / 4
