"""What a parallelism is: how a model is placed on the ranks, and what one synchronised step does.

A `Strategy` is what the user passes: a small frozen description, without state. On each engine, `setup` turns it
into a `Worker`: that rank's part of one job, with its module and optimiser.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtkit.mesh import Mesh
from dtkit.strategies.loss import EvalOutput

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.phase_timer import PhaseTimer
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.planning.cost_model import Benchmark, Cost, ModelProfile
    from dtkit.schedules.schedule import Schedule
    from dtkit.strategies.loss import Loss
    from dtkit.types import Fingerprint, NonFiniteLocations


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Where a worker works. `group` is None where one process plays all shards alone."""

    group: Group | None
    device: torch.device
    phases: PhaseTimer
    """Where the worker says what it is doing, step by step."""
    shards: Sequence[int]
    """The parts of each batch that this worker takes."""
    mesh: Mesh = dataclasses.field(default_factory=lambda: Mesh({"dp": 1}))
    """How the strategy arranges the ranks."""
    make_sample_batch: Callable[[int], Any] | None = None
    """A batch of so many rows, for strategies that must see the model at work before they can place it."""
    max_local_samples: int = 0
    """The most samples that this worker's part of a batch may have."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One step of one rank. Loss and weight stay on the device."""

    loss: torch.Tensor | None
    """Mean over this rank's samples; None without any."""
    loss_weight: torch.Tensor | float
    is_finite: bool
    """Whether the gradients, reduced over all ranks, are finite: equal on all ranks. If not, nothing was updated."""
    grad_norm: float
    """Of the gradient that was updated with, before clipping; NaN where there was none."""
    nonfinite: NonFiniteLocations = ()
    """Where it is not finite: what this rank's stages made that is not, for a model in stages."""




EvalFunction = Callable[[Any], "EvalOutput | None"]
"""None on ranks that don't speak for their model: another one does."""


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """What the engines are to do with the batches: all that a user gave to `train` besides model and data."""

    loss_fn: Loss
    optimizer: Callable[..., Any]
    strategy: Strategy
    lr_scheduler: Callable[..., Any] | None = None
    """A function from the optimiser to a torch scheduler."""
    lr_scheduler_interval: str = "step"
    """"step" or "epoch"."""
    has_validation: bool = False
    """Whether there is held-out data: a scheduler that wants a loss then gets that one."""


ALWAYS_SHOWN = {"shown": True}
"""Metadata of a field that is a strategy's very point, and told also at its default."""


class Strategy(abc.ABC):
    """How to parallelise. Subclasses are frozen dataclasses (with ``repr=False``: see `__repr__`)."""

    def __repr__(self) -> str:
        """What the user typed: options at their defaults are left out, save those marked by SHOWN."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        told = [f for f in fields if f.metadata == ALWAYS_SHOWN or getattr(self, f.name) != f.default]
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in told]
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def num_micro_batches(self) -> int:
        """How many parts a rank's samples of a step come in."""
        return 1

    balance: str | None = None
    """"auto" where faster ranks are to take more of each batch."""
    supports_explain: bool = True
    """Whether a step can be taken apart."""
    pipeline_schedule: Schedule | None = None
    """In a pipeline, what each rank does in which order."""
    shards_model: bool = False
    """Whether a rank keeps a part of the model only: it is then given the model itself, to copy its part of."""

    def build_mesh(self, world_size: int) -> Mesh:
        """How it arranges so many ranks; ValueError where its degrees don't multiply to that."""
        return Mesh({"dp": world_size})

    def model_shard_id(self, world_size: int, rank: int) -> tuple[int, ...]:
        """Which part of the model a rank holds: ranks with the same answer hold the same."""
        here = self.build_mesh(world_size).get_coordinates(rank)
        return tuple(place for axis, place in here.items() if axis != "dp")

    def check(self, world_size: int, batch_size: int) -> None:  # noqa: B027 - most strategies work on any size
        """Raise ValueError where these sizes can't work."""

    def check_model(self, model: torch.nn.Module) -> None:  # noqa: B027 - most strategies take any model
        """Raise ValueError for a model that it can't place, as far as can be seen of it in the notebook."""

    def preload(self) -> None:  # noqa: B027 - most need nothing that is not there
        """Load on an engine what setting up would load, before the memory is counted that a model takes."""

    def describe_plan(self, model: torch.nn.Module) -> Any:  # noqa: ARG002 - most have nothing to show
        """What to show of `model` before training begins: a table; None where nobody asked for one."""
        return None

    def equivalence_notes(self) -> tuple[str, ...]:
        """Why its training is not that of one process even in exact arithmetic, or far less exact; mostly nothing."""
        return ()

    @abc.abstractmethod
    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """What one step asks of one rank, told from what was measured: see :mod:`dtkit.planning.cost_model`."""

    @abc.abstractmethod
    def setup(
        self,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> Worker:
        """Place `model`, the same on every rank, and make its optimiser."""


class Worker(abc.ABC):
    """One rank's part of one job."""

    optimizer: torch.optim.Optimizer
    model: torch.nn.Module
    """What this rank holds of the model."""
    forward_is_collective: bool = False
    """Whether a forward pass is a collective, so that all ranks must make equally many."""
    placement: Any = None
    """Which part of the model lies where, as a table; None where every rank has all of it, or an even part."""
    batch_per_shard: bool = False
    """Whether it takes one batch for each of its shards, in place of micro-batches of all of them together."""
    step_result: StepResult | None = None
    """Of the step that is being taken, once it is known: a step counts whose update was made, whatever fails then."""

    @abc.abstractmethod
    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """One synchronised step on micro-batches (samples, batch), none where this rank has no sample.

        `row_counts` is by shard, of all ranks. With a `microscope` the step is taken apart for it.
        """

    def make_step_probe(self, **position: int) -> StepProbe:
        """What `step` is taken apart for; `position`: rank, step and epoch."""
        from dtkit.engine.observe.step_probe import StepProbe

        return StepProbe(self.model, **position)

    @abc.abstractmethod
    def state_dict_parts(self) -> dict[str, Any]:
        """Tensors, or :class:`~dtkit.training.state_dict.TensorPart` objects, that this rank adds to the model's state dict.

        A collective. The tensors may be in use: copy what is to be kept.
        """

    @abc.abstractmethod
    def eval_mode(self) -> contextlib.AbstractContextManager[EvalFunction]:
        """While it lasts, the model is evaluated: a function from a batch to its :class:`EvalOutput`.

        A collective: all ranks enter it together, and those that share a model call it on the same batches.
        """

    @abc.abstractmethod
    def set_process_group(self, group: Group) -> None:
        """Go on in a new generation of the process group."""

    def visit_state(self, visitor: StateVisitor) -> None:
        """Show all state that a step depends on to `archive`, which takes it or fills it in. A collective."""
        raise NotImplementedError(f"{type(self).__name__} works alone, and is made anew where it is needed")

    def compute_fingerprint(self) -> Fingerprint | None:
        """Of the trainable parameters that lie here; None where ranks need not agree now."""
        return None


def split_state_dict(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(buffers, what is no tensor) of a model's state dict, by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rest = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in parameters}
    buffers = {name: value for name, value in rest.items() if hasattr(value, "dtype")}
    return buffers, {name: value for name, value in rest.items() if name not in buffers}


def make_optimizer(factory: Callable[..., Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """The user's optimiser, with a clear word where it isn't one."""
    import torch

    optimizer = factory([p for p in model.parameters() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer(params) returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer, as in "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss as often as it likes in each step, and ranks take one "
            "gradient a step together. Use an optimiser whose step() needs no closure, such as SGD or AdamW"
        )
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not held or any(id(p) not in own for p in held):
        raise ValueError(
            f"the optimiser holds {len(held)} parameters, not all of them the model's; build it from the `params` that "
            "the function is given: the engine's copy of the model has parameters of its own"
        )
    return optimizer
