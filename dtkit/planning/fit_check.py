"""Refusal of models that can't fit the memory, before a training starts.

The check counts only memory that is certainly needed, so it never refuses a model that might fit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.data.broadcast import ModelHandle
from dtkit.data.program import pickle_program
from dtkit.planning import plan
from dtkit.planning.cost_model import Benchmark, MemoryBudget, ModelProfile
from dtkit.planning.planner import list_candidates
from dtkit.planning.profiler import get_model_name, measure_memory_budgets, trains_on_host
from dtkit.rpc.measurements import BenchmarkOperations
from dtkit.rpc.protocol import make_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.planning.cost_model import Cost
    from dtkit.planning.plan import Shortage
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import Strategy

_NEGLIGIBLE_BYTES = 64 << 20  # less than what an engine takes for itself, so engines aren't asked for their memory
_CERTAIN_FIT_FACTOR = 12  # times a model's parameters: gradients, and more state than any common optimizer has


def check_fits(engine_group: EngineGroup, model: Any, optimizer: Callable[..., Any], strategy: Strategy) -> None:
    """Raise ValueError if a model and its optimizer can't fit some rank's memory, whatever the batch.

    The need is the model as sent, the copy that trains, gradients and optimizer state. It is compared with free memory,
    swap space, and memory that an earlier run frees. Only for large models, the optimizer is tried on the meta device.
    """
    sent = 0 if isinstance(model, ModelHandle) else _count_model_bytes(model)
    certain_bytes = [_CERTAIN_FIT_FACTOR * (sent or model.nbytes)] * engine_group.world_size
    if certain_bytes[0] < _NEGLIGIBLE_BYTES:
        return
    if plan.find_shortage(certain_bytes, measure_memory_budgets(engine_group, free_caches=False)) is None:
        return
    key = model.key if isinstance(model, ModelHandle) else None
    program = pickle_program(engine_group, model, None, None, optimizer)
    call = make_call(BenchmarkOperations.measure_model_sizes, program=program, model=key)
    (sizes,) = engine_group.call_all(call, ranks=[0])
    budgets = measure_memory_budgets(engine_group, free_caches=True)
    profile = ModelProfile(
        rows=0,
        sent_model=sent if trains_on_host(engine_group) else 0,
        parameters=sizes.parameters,
        gradients=sizes.gradients,
        optimizer_state=sizes.optimizer_state or 0,
        update_temporaries=0,
        gradient_shapes=sizes.shapes,
    )
    refused = _StrategyFit.check(strategy, profile, budgets)
    if refused.shortage is not None:
        others = [s for s in list_candidates(engine_group, model) if repr(s) != repr(strategy)]
        fitting = [s for s in others if _StrategyFit.check(s, profile, budgets).shortage is None]
        raise ValueError(_format_refusal(get_model_name(model), strategy, refused, refused.shortage, fitting))


@dataclasses.dataclass(frozen=True)
class _StrategyFit:
    """Persistent memory of a strategy, and the shortage if some rank lacks it."""

    sent_model: int
    cost: Cost
    shortage: Shortage | None

    @classmethod
    def check(cls, strategy: Strategy, profile: ModelProfile, budgets: Sequence[MemoryBudget]) -> _StrategyFit:
        """Compare the memory that the strategy certainly needs with each rank's available memory."""
        profile = _drop_uncertain_memory(strategy, profile)
        cost = strategy.estimate_cost(profile, Benchmark.memory_only(len(budgets)))
        needed = [profile.sent_model + cost.persistent_bytes] * len(budgets)
        return cls(profile.sent_model, cost, plan.find_shortage(needed, budgets))


def _drop_uncertain_memory(strategy: Strategy, profile: ModelProfile) -> ModelProfile:
    """Return the profile without memory that this strategy may not need."""
    if strategy.shards_model:  # engines map the model as sent, and keep only their shards
        profile = dataclasses.replace(profile, sent_model=0)
    if getattr(strategy, "find_unused_parameters", False):  # unused parameters have no gradient and no state
        profile = dataclasses.replace(profile, gradients=0, optimizer_state=0, gradient_shapes=())
    return profile


def _format_refusal(
    name: str, strategy: Strategy, refused: _StrategyFit, shortage: Shortage, others: Sequence[Strategy]
) -> str:
    parts = plan.describe_persistent(refused.cost, refused.sent_model)
    if others:
        remedy = f"These would fit: {', '.join(map(repr, others))}"
    else:
        remedy = (
            "No other strategy fits either: use a smaller model, an optimizer with less state (SGD without momentum "
            "has none), or engines with more memory"
        )
    return (
        f"{name} does not fit rank {shortage.rank} with {strategy!r}: it needs "
        f"{formatting.format_bytes(shortage.needed)} there before the first activation ({parts}), and "
        f"{formatting.format_bytes(shortage.free)} are free for it. {remedy}"
    )


def _count_model_bytes(model: Any) -> int:
    from dtkit.strategies.meta_copy import count_bytes

    return count_bytes([*model.parameters(), *model.buffers()])
