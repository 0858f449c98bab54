"""Base classes of all parallelisms, which define how ranks hold a model and take a synchronized step.

The user passes a `Strategy`: a small frozen description without state. On each engine, `setup` turns it into a
`Worker`: that rank's part of one job, with its module and optimizer.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dtkit._util.completion import list_options
from dtkit.mesh import Mesh

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Mapping, Sequence

    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.messages import Fingerprint, NonFiniteLocations
    from dtkit.planning.cost_model import Benchmark, Cost, ModelProfile
    from dtkit.schedules.schedule import Schedule
    from dtkit.strategies.loss import EvalOutput, Loss


class StepResult(NamedTuple):
    """Result of one step on one rank. Loss and weight stay on the device."""

    loss: torch.Tensor | float | None
    """Mean over this rank's samples; None without samples."""
    loss_weight: torch.Tensor | float
    is_finite: bool
    """Whether the reduced gradients are finite, equal on all ranks. If not, the step updated nothing."""
    grad_norm: float
    """Norm of the gradient before clipping; NaN without a gradient."""
    nonfinite: NonFiniteLocations = ()
    """Nonfinite outputs and gradients of this rank's stages, for a model in stages."""


EvalFunction = Callable[[Any], "EvalOutput | None"]
"""Function from a batch to its output; None on ranks for which another rank reports."""


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """Program that engines run on batches: the user's arguments of `train` besides model and data."""

    loss_fn: Loss
    optimizer: Callable[..., Any]
    strategy: Strategy
    lr_scheduler: Callable[..., Any] | None = None
    """Function from the optimizer to a torch scheduler."""
    lr_scheduler_interval: str = "step"
    """"step" or "epoch"."""
    has_validation: bool = False
    """Whether there is validation data: a scheduler that needs a loss then gets the validation loss."""
    on_engine: Sequence[Any] = ()
    """Callbacks on the engines: :class:`dtkit.engine.callbacks.EngineCallback`."""
    activation_checkpointing: bool | Sequence[str] = False
    """Names of the modules that compute again in backward; True for the model's blocks."""
    checkpoint_trainable_only: bool = False
    """Whether checkpoints leave frozen parameters out."""
    sampler: Any = None
    """Iterable of the row numbers of an epoch; None for dtkit's own order."""
    metric_modules: Sequence[str] = ()
    """Modules of the metrics, imported before the first step: that may take seconds, which no run should wait for."""


ALWAYS_SHOWN = {"shown": True}
"""Metadata of a field that `repr` shows even at its default."""


def format_options(obj: Any) -> str:
    """Return a dataclass as users type it, without options at their defaults (but see `ALWAYS_SHOWN`)."""
    shown = [f for f in dataclasses.fields(obj) if f.metadata == ALWAYS_SHOWN or getattr(obj, f.name) != f.default]
    options = [f"{f.name}={getattr(obj, f.name)!r}" for f in shown]
    return f"{type(obj).__name__}({', '.join(options)})"


class Strategy(abc.ABC):
    """A way to parallelize. Subclasses are frozen dataclasses (with ``repr=False``: see `__repr__`)."""

    def __dir__(self) -> list[str]:
        """Return the options, and methods for users, for the Tab key."""
        return list_options(self, ("plan_for",))

    def __repr__(self) -> str:
        """Return the strategy as users type it."""
        return format_options(self)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a rank's samples in a step."""
        return 1

    balance: str | None = None
    """"auto" if faster ranks take more of each batch."""
    supports_explain: bool = True
    """Whether a step can be explained."""
    pipeline_schedule: Schedule | None = None
    """The order of each rank's actions, in a pipeline."""
    divides_batch: bool = True
    """Whether the losses of parts of a batch make one gradient, so that a loss must be a mean over samples."""
    shares_router_losses: bool = False
    """Whether ranks compute the routers' losses of a mixture of experts together."""

    @property
    def unused_parameter_error(self) -> str:
        """Why a step without a gradient of some parameter fails, and the remedy; empty if it doesn't."""
        return ""

    shards_model: bool = False
    """Whether a rank keeps only a part of the model. `setup` then gets the whole model, to copy that part."""

    def build_mesh(self, world_size: int) -> Mesh:
        """Return the arrangement of the ranks; raise ValueError if the degrees don't multiply to `world_size`."""
        return Mesh({"dp": world_size})

    def model_shard_id(self, world_size: int, rank: int) -> tuple[int, ...]:
        """Return an id of the part of the model that a rank holds. Ranks with equal ids hold the same part."""
        coordinates = self.build_mesh(world_size).get_coordinates(rank)
        return tuple(coordinate for axis, coordinate in coordinates.items() if axis != "dp")

    def check(self, world_size: int, batch_size: int) -> None:  # noqa: B027 - most strategies work on any size
        """Raise ValueError if these sizes can't work."""

    def check_model(self, model: torch.nn.Module) -> None:  # noqa: B027 - most strategies take any model
        """Raise ValueError if this model can't be placed, as far as the notebook knows."""

    def preload(self, model: torch.nn.Module | None, group: Group | None) -> None:  # noqa: B027 - most need no imports
        """Import the modules that `setup` needs, so that they don't count as a model's memory.

        `model` is None if this rank has only the file of the model.
        """

    def reduce_batch(self, batch: Any) -> Any:
        """Return the part of a batch that other ranks of a replica need from the rank that has loaded it."""
        return batch

    def describe_plan(self, model: torch.nn.Module) -> Any:  # noqa: ARG002 - most have nothing to show
        """Return a table to show before training begins, or None."""
        return None

    def equivalence_notes(self) -> tuple[str, ...]:
        """Return the reasons why training with this strategy differs from one process; usually none."""
        return ()

    @property
    def rounds_by_part(self) -> bool:
        """Whether the only such reason is rounding of sums over the samples that a rank computes together."""
        return False

    @abc.abstractmethod
    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Return the estimated cost of one step on one rank: see :mod:`dtkit.planning.cost_model`."""

    @abc.abstractmethod
    def setup(
        self,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> Worker:
        """Place `model`, which is equal on all ranks, and build its optimizer."""


class Worker(abc.ABC):
    """One rank's part of one job."""

    optimizer: torch.optim.Optimizer
    model: torch.nn.Module
    """This rank's part of the model."""
    forward_is_collective: bool = False
    """Whether a forward pass is a collective, so that all ranks need equally many."""
    placement: Any = None
    """Table of the parts of the model by rank; None if all ranks hold equal parts."""
    takes_whole_batch: bool = False
    """Whether `step` takes one batch of all samples, never parts of it."""
    batch_per_shard: bool = False
    """Whether `step` takes one batch for each shard, instead of micro-batches of all shards."""
    notes: Sequence[str] = ()
    """Lines to show once the training runs."""
    step_result: StepResult | None = None
    """Result of the current step, set once the update is made: the step counts even if it fails later."""

    @abc.abstractmethod
    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """Take one synchronized step on micro-batches (samples, batch); none if this rank has no sample.

        `counts` holds the number of samples of each shard, of all ranks. A `probe` records the parts of the step.
        """

    def make_step_probe(self, **position: int) -> StepProbe:
        """Return a probe for `step`; `position` is rank, step and epoch."""
        from dtkit.engine.observe.step_probe import StepProbe

        return StepProbe(self.model, **position)

    @abc.abstractmethod
    def eval_mode(self) -> contextlib.AbstractContextManager[EvalFunction]:
        """Evaluate the model within the context, by a function from a batch to its :class:`EvalOutput`.

        A collective: all ranks enter it together. Ranks that share a model call the function on the same batches.
        """

    @abc.abstractmethod
    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group."""

    def settle(self) -> None:  # noqa: B027 - most workers have nothing to move
        """Move to the current process group, if this was postponed until the next step. A collective if the group is
        new.
        """

    @abc.abstractmethod
    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's parameters, or its parts of them, by all of their names in the model."""

    @abc.abstractmethod
    def visit_model(self, visitor: StateVisitor) -> None:
        """Pass the model's parameters, buffers and extra state to `visitor`. A collective."""

    def visit_state(self, visitor: StateVisitor) -> None:
        """Pass all state that a step depends on to `visitor`, which saves or restores it. A collective."""
        raise NotImplementedError(f"{type(self).__name__} simulates all ranks in one process; its state isn't saved")

    def compute_fingerprint(self) -> Fingerprint | None:
        """Return checksums of this rank's trainable parameters, or None if ranks may differ now."""
        return None


def split_state_dict(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (buffers, entries that are not tensors) of a model's state dict, by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rest = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in parameters}
    buffers = {name: value for name, value in rest.items() if hasattr(value, "dtype")}
    return buffers, {name: value for name, value in rest.items() if name not in buffers}


def _get_first_parameter_name(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except ValueError:  # a builtin without a signature
        return ""


def _check_optimizer(optimizer: Any) -> None:
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer= returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer, as in "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1), or a list of some"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step() needs a closure that evaluates the loss several times, but all ranks "
            "compute one gradient per step. Use an optimizer without a closure, such as SGD or AdamW"
        )


def _call_factory(factory: Callable[..., Any], model: torch.nn.Module, whole: torch.nn.Module) -> Any:
    """Return what the user's function returns for the trainable parameters of `model`, or for the `whole` model."""
    parameter_name = _get_first_parameter_name(factory)
    try:
        if parameter_name == "model":
            return factory(whole)
        if parameter_name == "named_parameters":
            return factory([(name, p) for name, p in whole.named_parameters() if p.requires_grad])
        return factory([p for p in model.parameters() if p.requires_grad])
    except TypeError as error:
        if "not supported between instances of 'str' and" in str(error):
            error.add_note("An option of the optimizer is text. Give a number without quotes, as in lr=0.1")
        raise


def make_optimizer(
    factory: Callable[..., Any], model: torch.nn.Module, view: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    """Return the user's optimizer for the trainable parameters of `model`, after checking it.

    A function of ``model`` gets the model, or a `view` of it that has this rank's parameters under the model's names. A
    function of ``named_parameters`` gets (name, parameter) pairs. Any other one gets the parameters.
    """
    from dtkit.strategies.combined_optimizer import CombinedOptimizer

    optimizer = _call_factory(factory, model, model if view is None else view)
    several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in several:
        _check_optimizer(each)
    optimizer = several[0] if len(several) == 1 else CombinedOptimizer(several)
    model_ids = {id(p) for p in model.parameters()}
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimized or any(id(p) not in model_ids for p in optimized):
        raise ValueError(
            f"the optimizer holds {len(optimized)} parameters, not all of them the model's. Build it from the `params` "
            "that the function gets: the engine's copy of the model has its own parameters"
        )
    return optimizer
