"""Measurements of the engine, of its links and of a user's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dtkit.rpc.measurements import BenchmarkOperations
from dtkit.rpc.payload import Payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.engine.benchmark import BenchmarkContext
    from dtkit.engine.ops.state import EngineState
    from dtkit.planning.cost_model import ActivationPeak, AvailableMemory, LinkSpeeds, ModelSizes, StepTimings
    from dtkit.planning.layer_chain import LayerChain

R = TypeVar("R")


class BenchmarkOps(BenchmarkOperations):
    """See :class:`~dtkit.rpc.measurements.BenchmarkOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def _make_context(self) -> BenchmarkContext:
        from dtkit.engine.benchmark import BenchmarkContext

        state = self._state
        models = {key: model for key, model in state.models.items() if not isinstance(model, Payload)}
        return BenchmarkContext(state.get_group(), state.get_device(), models, state.data)

    def _try_out(self, work: Callable[[], R]) -> R:
        """Return the result of work that runs the user's code. What this logs belongs to no step."""
        from dtkit.engine.observe.call_output import ignore_logged, redirect_log

        with redirect_log(ignore_logged):
            return self._state.run_abortable(work)

    def measure_links(self, *, dtype: str) -> LinkSpeeds:
        """Measure the speed of the engine and of its links. A collective."""
        from dtkit.engine import benchmark

        context = self._make_context()
        return self._state.run_abortable(lambda: benchmark.measure_links(context, dtype))

    def measure_available_memory(self, *, free_caches: bool) -> AvailableMemory:
        """Measure the memory that the engine can get, optionally after freeing unused memory."""
        from dtkit.engine import memory

        context = self._make_context()
        return self._state.run_abortable(
            lambda: memory.measure_available_memory(context.device, context.models.values(), tidy_up=free_caches)
        )

    def measure_model_sizes(self, *, program: bytes, model: str | None) -> ModelSizes:
        """Measure a model's memory, except activations."""
        from dtkit.engine import benchmark

        context = self._make_context()
        return self._try_out(lambda: benchmark.measure_model_sizes(context, program, model))

    def measure_activation_peaks(
        self, *, program: bytes, model: str | None, data: str, rows: tuple[int, ...], precision: str | None = None
    ) -> tuple[list[ActivationPeak], str]:
        """Measure forward and backward on tensors without memory; without a result, the text gives the reason."""
        from dtkit.engine import benchmark

        context = self._make_context()
        return self._try_out(lambda: benchmark.measure_activation_peaks(context, program, model, data, rows, precision))

    def measure_layers(
        self, *, program: bytes, model: str | None, data: str, rows: int, timed: bool
    ) -> tuple[LayerChain | None, str]:
        """Measure the layers of a model's chain; without a result, the text gives the reason."""
        from dtkit.engine import benchmark

        context = self._make_context()
        return self._try_out(lambda: benchmark.measure_layers(context, program, model, data, rows, timed=timed))

    def measure_step_times(
        self,
        *,
        program: bytes,
        model: str,
        data: str,
        rows: int,
        precision: str | None = None,
        track_allocations: bool = False,
    ) -> StepTimings:
        """Take real steps on all ranks at the same time. A collective."""
        from dtkit.engine import benchmark

        context = self._make_context()
        return self._try_out(
            lambda: benchmark.measure_step_times(
                context, program, model, data, rows, precision, track_allocations=track_allocations
            )
        )

    def measure_strategy_step(
        self, *, program: bytes, strategy: bytes, model: str, data: str, counts: tuple[int, ...], alone: bool = False
    ) -> float:
        """Return the mean seconds of a step under a strategy. A collective, unless one rank takes all `alone`."""
        from dtkit.engine import strategy_trial

        context = self._make_context()
        return self._try_out(
            lambda: strategy_trial.measure_strategy_step(context, program, strategy, model, data, counts, alone=alone)
        )
