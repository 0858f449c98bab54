"""Formation of a process group after one that failed, and lifetime of one that is left while work is in flight."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from dtkit.engine.comm.process_group import hold_group_until_done

if TYPE_CHECKING:
    from pathlib import Path


class Work:
    """Work in flight until a test ends it; torch's group waits for its work when it is freed."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Group:
    """Object that can be freed."""


def test_a_group_is_held_while_it_is_in_use_and_freed_in_a_thread():
    work, group, gone = Work(), Group(), threading.Event()
    by: list[str] = []
    weakref.finalize(group, lambda: (by.append(threading.current_thread().name), gone.set()))
    held: Any = work
    hold_group_until_done(held, group, 60)
    del group
    assert not gone.is_set()
    work.ended.set()
    assert gone.wait(10)
    assert by == ["dtkit-held"]


# An engine of rank RANK in two groups. In the first one, rank 1 arrives and never connects.
ENGINE = """
import sys
from pathlib import Path
from dtkit._util.resources import find_loopback_interface
from dtkit.engine.comm.process_group import Group
from dtkit.messages import GroupSpec

def join(generation, timeout_s):
    path = str(Path(sys.argv[1]) / f"store-{generation}")
    Path(path).touch()
    return Group(
        GroupSpec(rank, 2, generation, "gloo", "cpu", path, find_loopback_interface(), 1, timeout_s)
    )

rank = int(sys.argv[2])
if rank == 0:
    (Path(sys.argv[1]) / "store-0.1").touch()
    try:
        join(0, 1.0)
    except RuntimeError as error:
        assert "timeout" in str(error), error
    else:
        raise AssertionError("nobody else was there")
join(1, 20.0).barrier()
print("formed")
"""


def test_group_is_formed_with_a_new_engine_after_one_that_could_not_be_formed(tmp_path: Path):
    command = [sys.executable, "-c", ENGINE, str(tmp_path)]
    engines = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        assert [engine.communicate(timeout=60)[0] for engine in engines] == ["formed\n", "formed\n"]
    finally:
        for engine in engines:
            engine.kill()
