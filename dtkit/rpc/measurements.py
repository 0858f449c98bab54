"""Operations that measure engines, links, models and steps: see :mod:`dtkit.rpc.protocol`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtkit.history.profile import RankProfile
    from dtkit.history.workload import Workload
    from dtkit.planning.cost_model import ActivationPeak, AvailableMemory, LinkSpeeds, ModelSizes, StepTimings
    from dtkit.planning.layer_chain import LayerChain


class BenchmarkOperations(ABC):
    """Measurements: see :mod:`dtkit.engine.benchmark`."""

    @abstractmethod
    def measure_links(self, *, dtype: str) -> LinkSpeeds:
        """Measure the speed of the engine and of its links. A collective."""

    @abstractmethod
    def measure_available_memory(self, *, free_caches: bool) -> AvailableMemory:
        """Measure the memory that the engine can get, optionally after freeing unused memory."""

    @abstractmethod
    def measure_model_sizes(self, *, program: bytes, model: str | None) -> ModelSizes:
        """Measure a model's memory, except activations. `model` is None if the program contains the model."""

    @abstractmethod
    def measure_activation_peaks(
        self, *, program: bytes, model: str | None, data: str, rows: tuple[int, ...], precision: str | None = None
    ) -> tuple[list[ActivationPeak], str]:
        """Measure forward and backward on tensors without memory; without a result, the text gives the reason."""

    @abstractmethod
    def measure_layers(
        self, *, program: bytes, model: str | None, data: str, rows: int, timed: bool
    ) -> tuple[LayerChain | None, str]:
        """Measure the layers of a model's chain; without a result, the text gives the reason."""

    @abstractmethod
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

    @abstractmethod
    def measure_strategy_step(
        self, *, program: bytes, strategy: bytes, model: str, data: str, counts: tuple[int, ...], alone: bool = False
    ) -> float:
        """Return the mean seconds of a step under a strategy. A collective, unless one rank takes all `alone`."""


class ProfileOperations(ABC):
    """Profiles of steps: see :mod:`dtkit.engine.observe.step_profile`."""

    @abstractmethod
    def start_profile(self, *, job: str) -> None:
        """Record all operators of the process from now on, for a job."""

    @abstractmethod
    def stop_profile(self, *, job: str) -> RankProfile | None:
        """Return the profile since `start_profile`; None if this is another process, which recorded nothing."""

    @abstractmethod
    def measure_workload(self, *, job: str, model: str) -> Workload:
        """Count the operations and the tokens of a sample. No collective."""
