"""Ranks as a grid with named axes. Pure arithmetic.

The axes are "dp" (replicas of the model), "pp" (stages of a pipeline) and "tp" (slices of each layer). Their sizes
multiply to the world size. The last axis varies fastest, so its ranks are next to each other, and likely on one host.
Therefore the axis that communicates most is the last one.
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
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def num_replicas(self) -> int:
        """Number of copies of the whole model, which is the number of parts of every batch."""
        return self.axes.get("dp", 1)

    def get_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.size}; there are ranks 0 to {self.size - 1}")
        coordinates = {}
        for name, size in reversed(list(self.axes.items())):
            rank, coordinates[name] = divmod(rank, size)
        return {name: coordinates[name] for name in self.axes}

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank at these coordinates; an axis without one counts as 0."""
        unknown = coordinates.keys() - self.axes.keys()
        if unknown:
            raise ValueError(f"no axis {', '.join(sorted(unknown))}; the axes are {', '.join(self.axes)}")
        rank = 0
        for name, size in self.axes.items():
            rank = rank * size + coordinates.get(name, 0)
        return rank

    def check(self, world_size: int, **names: str) -> Mesh:
        """Return this mesh; ValueError if its size is not `world_size`, with the nearest sizes that fit.

        `names` are the user's names of the axes: ``check(4, pp="stages")``.
        """
        if self.size == world_size:
            return self

        def format_axes(axes: Mapping[str, int]) -> str:
            return " x ".join(f"{names.get(name, name)} {size}" for name, size in axes.items())

        nearest = "; ".join(map(format_axes, self._find_nearest(world_size)))
        raise ValueError(
            f"{format_axes(self.axes)} = {self.size}, but there are {world_size} ranks: the degrees must multiply to "
            f"the number of ranks. The nearest that work with {world_size}: {nearest}. Or start {self.size} engines"
        )

    def _find_nearest(self, world_size: int, max_count: int = 3) -> list[dict[str, int]]:
        """Return sizes that multiply to `world_size`, ordered by the factors in which they differ from these.

        Among equally near ones, those that only change the number of replicas come first.
        """
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        names = list(self.axes)
        candidates = [
            dict(zip(names, sizes, strict=True))
            for sizes in itertools.product(divisors, repeat=len(names))
            if math.prod(sizes) == world_size
        ]

        def get_distance(axes: Mapping[str, int]) -> tuple[float, int]:
            factors = sum(abs(math.log(axes[n] / max(1, self.axes[n]))) for n in names)
            return round(factors, 9), sum(axes[n] != self.axes[n] for n in names if n != "dp")

        return sorted(candidates, key=get_distance)[:max_count]
