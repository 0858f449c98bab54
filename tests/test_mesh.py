"""Arithmetic of a mesh: ranks, coordinates, and axes."""

from __future__ import annotations

import pytest

from dtkit.mesh import Mesh


def test_the_last_axis_varies_fastest():
    mesh = Mesh({"dp": 2, "pp": 3})
    assert mesh.size == 6
    assert mesh.num_replicas == 2
    assert [mesh.get_coordinates(rank) for rank in range(4)] == [
        {"dp": 0, "pp": 0},
        {"dp": 0, "pp": 1},
        {"dp": 0, "pp": 2},
        {"dp": 1, "pp": 0},
    ]
    assert all(mesh.get_rank(**mesh.get_coordinates(rank)) == rank for rank in range(6))


def test_degrees_that_do_not_multiply_to_the_world_size_are_refused():
    with pytest.raises(ValueError, match=r"dp 2 x pp 3 = 6, but there are 4 ranks") as error:
        Mesh({"dp": 2, "pp": 3}).check(4)
    assert "work with 4: dp 2 x pp 2; dp 1 x pp 4" in str(error.value)
    with pytest.raises(ValueError, match="work with 4: dp 2 x tp 2; dp 1 x tp 4"):  # both are equally near
        Mesh({"dp": 1, "tp": 2}).check(4)
    assert Mesh({"dp": 2, "pp": 2}).check(4).size == 4


def test_unknown_ranks_and_axes_are_refused():
    with pytest.raises(ValueError, match="rank 4 is not in a mesh of 4"):
        Mesh({"pp": 4}).get_coordinates(4)
    with pytest.raises(ValueError, match="no axis tp; the axes are pp"):
        Mesh({"pp": 4}).get_rank(tp=1)
