"""Ranks as a grid: which rank is which replica, stage or slice. Pure arithmetic.

A strategy arranges the ranks along named axes, "dp" (replicas of the model), "pp" (stages of a pipeline) and "tp"
(slices of each layer); their sizes multiply to the world size. The last axis varies fastest: its neighbours are ranks
next to each other, which are most likely on one host, and it is the axis that talks most.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Axes by name and size, outermost first: ``Mesh({"dp": 2, "pp": 4})`` has 8 ranks."""

    axes: Mapping[str, int]

    @property
    def size(self) -> int:
        """The ranks in it."""
        return math.prod(self.axes.values())

    @property
    def num_replicas(self) -> int:
        """Copies of the whole model: parts that every batch is cut into."""
        return self.axes.get("dp", 1)

    def get_coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.size}; there are ranks 0 to {self.size - 1}")
        found = {}
        for name, size in reversed(list(self.axes.items())):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}

    def get_rank(self, **coordinates: int) -> int:
        """The rank that stands there; an axis that is not named counts as 0."""
        unknown = coordinates.keys() - self.axes.keys()
        if unknown:
            raise ValueError(f"no axis {', '.join(sorted(unknown))}; the axes are {', '.join(self.axes)}")
        found = 0
        for name, size in self.axes.items():
            found = found * size + coordinates.get(name, 0)
        return found

    def get_ranks_along(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from `rank` at most on that axis, in order: with whom it talks there."""
        here = self.get_coordinates(rank)
        return [self.get_rank(**{**here, axis: k}) for k in range(self.axes[axis])]

    def check(self, world_size: int, **names: str) -> Mesh:
        """This mesh; or ValueError with the equation and what would work, where the sizes don't make `world_size`.

        `names` are what the user calls the axes: ``check(4, pp="stages")``.
        """
        if self.size == world_size:
            return self

        def told(way: Mapping[str, int]) -> str:
            return " x ".join(f"{names.get(name, name)} {size}" for name, size in way.items())

        equation, ways = told(self.axes), "; ".join(map(told, self._find_nearest(world_size)))
        raise ValueError(
            f"{equation} = {self.size}, but there are {world_size} ranks: the degrees must multiply to the number of "
            f"ranks. What works with {world_size} and is nearest: {ways}. Or start {self.size} engines"
        )

    def _find_nearest(self, world_size: int, max_count: int = 3) -> list[dict[str, int]]:
        """Degrees that multiply to `world_size`, the nearest to these first (by the factors they differ in).

        Of ways as near as each other, those that only change the number of replicas come first.
        """
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        names = list(self.axes)
        ways = [
            dict(zip(names, sizes, strict=True))
            for sizes in itertools.product(divisors, repeat=len(names))
            if math.prod(sizes) == world_size
        ]

        def distance(way: Mapping[str, int]) -> tuple[float, int]:
            factors = sum(abs(math.log(way[n] / max(1, self.axes[n]))) for n in names)
            return round(factors, 9), sum(way[n] != self.axes[n] for n in names if n != "dp")

        return sorted(ways, key=distance)[:max_count]
