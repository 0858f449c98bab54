"""What `cluster.torchrun` may be asked for when an engine is lost, and the file that says which ranks are left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dtkit.integrations.horovod.exceptions import MeetingError
from dtkit.integrations.horovod.own_group import OwnGroup
from dtkit.rpc.script_ranks import ScriptFolder, ScriptRanks
from dtkit.training.elastic_script import ElasticPolicy, make_policy

if TYPE_CHECKING:
    from pathlib import Path

NONE = {"min_np": None, "max_np": None, "on_failure": None}


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, ElasticPolicy(1, 4, shrinks=False)),
        ({"min_np": 2}, ElasticPolicy(2, 4, shrinks=True)),
        ({"min_np": 2, "on_failure": "repair"}, ElasticPolicy(2, 4, shrinks=False)),
        ({"max_np": 3, "on_failure": "shrink"}, ElasticPolicy(1, 3, shrinks=True)),
        ({"max_np": 9}, ElasticPolicy(1, 4, shrinks=False)),
    ],
)
def test_policy_is_what_was_asked_for(options: dict[str, Any], policy: ElasticPolicy):
    assert make_policy(4, horovod=True, **(NONE | options)) == policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_np": 0}, "min_np=0; it must be a number of ranks from 1 up"),
        ({"max_np": 2.0}, r"max_np=2\.0; it must be a number of ranks from 1 up"),
        ({"min_np": True}, "min_np=True; it must be"),
        ({"min_np": 3, "max_np": 2}, "min_np=3 is more than max_np=2"),
        ({"min_np": 5}, "min_np=5, and the cluster has 4 engines; start a larger cluster"),
        ({"on_failure": "pause"}, "on_failure='pause'; for scripts it must be 'repair'.* or 'shrink'"),
    ],
)
def test_bad_request_is_refused_with_value_rule_and_remedy(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_policy(4, horovod=True, **(NONE | options))


def test_request_without_horovod_is_refused():
    with pytest.raises(ValueError, match=r"min_np=1: only scripts under hvd\.elastic\.run .*horovod=True"):
        make_policy(4, horovod=False, **(NONE | {"min_np": 1}))
    assert make_policy(4, horovod=False, **NONE) is None
    with pytest.raises(TypeError, match="horovod='yes'; it must be True or False"):
        make_policy(4, horovod="yes", **NONE)


def test_ranks_move_down_when_a_slot_is_dropped(tmp_path: Path):
    folder = ScriptFolder.create(tmp_path / "script", [0, 1, 2])
    folder.write(ScriptRanks(1, (0, 2)))
    ranks = folder.read()
    assert ranks == ScriptRanks(1, (0, 2))
    assert ranks.find_rank(1) is None
    environment = ranks.make_environment(2)
    assert environment["RANK"] == environment["HOROVOD_RANK"] == environment["LOCAL_RANK"] == "1"
    assert environment["WORLD_SIZE"] == environment["HOROVOD_SIZE"] == "2"
    folder.remove()
    assert not folder.path.exists()


def test_rank_does_not_wait_for_one_that_has_ended_the_script(tmp_path: Path):
    folder = ScriptFolder.create(tmp_path / "script", [0, 2])
    folder.mark_ended(2)
    with pytest.raises(MeetingError, match=r"since rank 1 ended the script before.*; run the script again"):
        OwnGroup()._meet(folder, 0)
    folder.remove()
    folder.mark_ended(0)  # the notebook has given the script up
    assert not folder.path.exists()


def test_ranks_that_have_all_arrived_meet_though_one_has_ended_since(tmp_path: Path):
    folder = ScriptFolder.create(tmp_path / "script", [0])
    folder.mark_ended(0)
    _, rank, size = OwnGroup()._meet(folder, 0)
    assert (rank, size) == (0, 1)
