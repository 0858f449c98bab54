"""A plan and a benchmark, without engines."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dtkit
from dtkit.planning.cost_model import Benchmark, LinearFit, MemoryBudget, ModelProfile
from dtkit.planning.plan import Plan, PlanRow, build_rows
from dtkit.strategies.averaging import ParameterAveraging

MB = 10**6


def make_benchmark(
    ranks: int = 2, overlap: float = 0.0, all_reduce: Any = ((8, 1e-4), (1000, 1e-3), (5000, 3e-3))
) -> Any:
    nan = math.nan
    links = tuple(tuple(nan if a == b else 1e-4 for b in range(ranks)) for a in range(ranks))
    return Benchmark("float32", "gloo", (1e9,) * ranks, all_reduce, links, links, overlap, 1.0)


def make_profile(**changes: Any) -> ModelProfile:
    base = ModelProfile(
        rows=8,
        sent_model=100 * MB,
        parameters=100 * MB,
        gradients=80 * MB,
        optimizer_state=160 * MB,
        update_temporaries=20 * MB,
        activations=LinearFit(10 * MB, 5 * MB),
        forward_s=LinearFit(0.01, 0.01),
        backward_s=LinearFit(0.02, 0.02),
        update_s=0.005,
        gradient_shapes=((1000, 1000), (19_000_000,)),
    )
    return dataclasses.replace(base, **changes)


LINKS = make_benchmark(all_reduce=((8, 1e-4), (25 * 2**20, 0.025), (50 * 2**20, 0.05)))


def make_plan(ranks: int = 2, free: int = 1000 * MB, model: str = "Net") -> Plan:
    budgets = [MemoryBudget(f"host {r}", free) for r in range(ranks)]
    rows: list[PlanRow] = []
    for strategy in (dtkit.DataParallel(), ParameterAveraging(every=4)):
        costs = [strategy.estimate_cost(make_profile(), LINKS)] * ranks
        rows += build_rows(repr(strategy), [make_profile()] * ranks, costs, budgets)
    return Plan(model, 64, ranks, tuple(rows), make_benchmark(ranks), ("a note",))
