"""One rank's slices of a model's parameters: what tensor parallel and sharded training do alike.

A sliced parameter is a torch DTensor: this rank's part of it, and the mesh of ranks among which it was cut. What is
done with gradients here (their norm, clipping, the check that they are finite) is done on the parts that lie on this
rank, with one number summed over all ranks: a part that lies on `copies` ranks counts for 1 / `copies` on each.

A parameter may be several in one: of the rows of queries, keys and values, a rank that holds some heads has a part
of each. To torch that is a DTensor cut by rows like any other; the parameter says of how many such blocks its part is
made (:func:`folds`), and wherever numbers come in or go out, that is undone.

A rank never copies the whole model: a skeleton of it without numbers is cut, and this rank's slices of the numbers
are put into it.

A DTensor and the hooks that were put on the module hold the process group that they were made with. When an error
elsewhere has the group formed anew, another skeleton is cut, and the slices that there are go into that as they are:
nothing is copied or sent, and the optimiser's state moves along. That is done when the job is next used and not at
once, since ranks need not hold the same jobs then. torch takes meshes of the same ranks and names for equal, and what
it keeps about one (which process group to use among it) for true of the other; so here names carry the generation.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from dtkit.engine.observe.collective_probe import CollectiveScope
from dtkit.mesh import Mesh
from dtkit.strategies import gradients
from dtkit.strategies.base import Outcome, Setting, Strategy, Worker, make_optimizer
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.options import check_count, check_positive
from dtkit.strategies.replicated import Replica, Tally, bits, kept
from dtkit.training.state_dict import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import Microscope
    from dtkit.engine.state.capture import Archive
    from dtkit.strategies.loss import Objective
    from dtkit.types import Fingerprint


class Slicing(Strategy):
    """What strategies have in common that cut parameters: replicas of the model, and micro-batches for less memory."""

    replicas: int
    clip_norm: float | None
    accumulate: int

    partial = True

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_count("replicas", self.replicas)
        check_positive("clip_norm", self.clip_norm)
        check_count("accumulate", self.accumulate)

    @property
    def parts(self) -> int:
        """`accumulate`."""
        return self.accumulate

    def check(self, world_size: int, batch_size: int) -> None:
        """Raise ValueError where nobody could have so many micro-batches."""
        self._alone.check(self.mesh(world_size).replicas, batch_size)

    def setup(self, model: nn.Module, objective: Objective, optimizer: Callable[..., Any], setting: Setting) -> Worker:
        """This rank's slices. The parameters must be equal on all ranks already; alone, a plain training."""
        make = self._alone.setup if setting.group is None else self._worker
        return make(model, objective, optimizer, setting)

    @property
    def _alone(self) -> DataParallel:
        """The same training where nothing is cut."""
        return DataParallel(clip_norm=self.clip_norm, accumulate=self.accumulate)

    @abc.abstractmethod
    def _worker(
        self, model: nn.Module, objective: Objective, optimizer: Callable[..., Any], setting: Setting
    ) -> Sliced:
        """This rank's slices of `model`."""


class Sliced(Replica, abc.ABC):
    """One rank's slices. Subclasses cut the model, and say what a step is."""

    collective = True
    _strategy: Slicing

    def __init__(
        self,
        strategy: Slicing,
        model: nn.Module,
        objective: Objective,
        optimizer: Callable[..., Any],
        setting: Setting,
    ) -> None:
        """`model` is the whole one, and stays as it is. `optimizer` makes one, once parameters are cut."""
        assert setting.group is not None
        self._strategy, self._setting = strategy, setting
        self._skeleton, self._stale = skeleton(model), False
        mine = copy.deepcopy(self._skeleton)
        self._cut(mine, setting.group)
        take_slices(model, mine, setting.device)
        super().__init__(mine, objective, make_optimizer(optimizer, mine), setting, clip_norm=strategy.clip_norm)
        self._note(mine)

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], microscope: Microscope | None = None
    ) -> Outcome:
        """One step; the collectives in it are told to a microscope."""
        self._renew()
        if not isinstance(microscope, CollectiveScope):
            return self._step(batches, counts)
        with microscope.watching():
            outcome = self._step(batches, counts)
        microscope.loss(outcome.loss, float(outcome.weight) if self._speaks else 0.0, 0.0)
        if outcome.finite:
            microscope.updated(float(self.optimizer.param_groups[0]["lr"]))
        return outcome

    @abc.abstractmethod
    def _step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> Outcome:
        """One step, in the process group that there is now."""

    def microscope(self, **where: int) -> Microscope:
        """What looks at this rank's collectives. A collective itself, where the process group is a new one."""
        self._renew()
        group = self._group
        assert group is not None
        return CollectiveScope(self._model, lambda: self._phases.around, group.sent_bytes, speaks=self._speaks, **where)

    @abc.abstractmethod
    def _cut(self, model: nn.Module, group: Group) -> None:
        """Cut the parameters of `model`, a skeleton without numbers. A collective."""

    @property
    @abc.abstractmethod
    def _replica(self) -> int:
        """Which copy of the model this rank's slices belong to."""

    def _note(self, model: nn.Module) -> None:
        """Keep the slices at hand: while FSDP is at work, its modules have whole parameters in their place."""
        self._model = model
        self._slices = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        world = self._setting.group.world_size if self._setting.group is not None else 1
        self._copies = [world // parts(p) for p in self._parameters]

    def exchange(self, archive: Archive) -> None:
        """As of a whole copy, slice by slice."""
        self._renew()
        super().exchange(archive)

    def _named(self) -> dict[str, nn.Parameter]:
        return self._slices

    # -- gradients --------------------------------------------------------------------------------------------

    def _gradients(self) -> list[torch.Tensor]:
        """What lies on this rank of the gradients that there are."""
        return [local(p.grad) for p in self._parameters if p.grad is not None]

    def _norm(self) -> float:
        """Of the whole gradient: the squares of all parts, summed over ranks in float64."""
        pairs = [(local(p.grad), n) for p, n in zip(self._parameters, self._copies, strict=True) if p.grad is not None]
        total = squares([gradient for gradient, _ in pairs], [n for _, n in pairs], self._setting.device).sum()
        assert self._group is not None
        self._phases.enter("sync")
        self._group.all_reduce(total)
        self._phases.enter("update")
        return float(total.sqrt())

    def _all_finite(self) -> bool:
        assert self._group is not None
        return not self._group.any(not all(bool(g.isfinite().all()) for g in self._gradients()))

    def _announce(self, tally: Tally) -> torch.futures.Future[list[torch.Tensor]] | None:
        """Of ranks that take the same samples, one tells their weight."""
        if self._speaks:
            return super()._announce(tally)
        mute = Tally(1)
        mute.form = tally.form
        return super()._announce(mute)

    @property
    def _speaks(self) -> bool:
        """Whether this rank speaks for the samples that it takes."""
        return True

    # -- the whole model --------------------------------------------------------------------------------------

    def pieces(self) -> dict[str, Any]:
        """The slices of the first copy of the model; from rank 0, what is not cut too."""
        assert self._group is not None
        found: dict[str, Any] = {}
        with self.whole() as model:
            for name, value in model.state_dict().items():
                cut = place_of(value) if isinstance(value, DTensor) else None
                if cut is not None and self._replica == 0:
                    found[name] = Piece(kept(local(value)), *cut, folds(self._slices[name]))
                elif cut is None and self._group.rank == 0:
                    found[name] = kept(local(value) if isinstance(value, torch.Tensor) else value)
        return found

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The module, its batch statistics averaged over ranks while it lasts."""
        self._renew()
        with super().whole() as model:
            yield model

    def fingerprint(self) -> Fingerprint:
        """A checksum of the slices, to be equal in all replicas, and one of what is not cut and lies on all ranks."""
        assert self._group is not None
        mine = self._strategy.part_of(self._group.world_size, self._group.rank)
        whole = [local(p) for p in self._parameters if parts(p) == 1]
        cut = [local(p) for p in self._parameters if parts(p) > 1]
        return {part: bits(tensors) for part, tensors in (((), whole), (mine, cut)) if tensors}

    # -- another process group --------------------------------------------------------------------------------

    def regroup(self, group: Group) -> None:
        """Go on in a new generation of the process group, from the next use on."""
        super().regroup(group)
        self._stale = True

    def _renew(self) -> None:
        """Move to the process group that there is now. A collective where it is a new one."""
        if not self._stale:
            return
        assert self._group is not None
        fresh = copy.deepcopy(self._skeleton)
        self._cut(fresh, self._group)
        move_optimizer(self.optimizer, move_slices(self._slices, self._model, fresh))
        self._note(fresh)
        self._stale = False


def grid(group: Group, mesh: Mesh, device: torch.device) -> dict[str, DeviceMesh]:
    """Groups along each axis of several ranks by name, and along all as "": unlike any of another generation."""
    names = {axis: f"{axis}{group.generation}" for axis in mesh.axes}
    whole = group.grid(Mesh({names[axis]: size for axis, size in mesh.axes.items()}), device)
    return {"": whole} | {axis: whole[name] for axis, name in names.items() if name in (whole.mesh_dim_names or ())}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What lies here of a tensor, without copying; the tensor itself where it is no DTensor."""
    with torch.no_grad():
        found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # waits: a collective, limited by the process group's timeout
        return found.wait() if isinstance(found, AsyncCollectiveTensor) else found


def place_of(tensor: DTensor) -> tuple[int, int] | None:
    """(the dimension along which it is cut, the how-manieth part lies here); None where all of it does."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            return placement.dim, coordinate[axis]  # type: ignore[attr-defined]  # Shard has a dim
    return None


def parts(tensor: torch.Tensor) -> int:
    """Into how many parts a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    cuts = [n for n, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if placement.is_shard()]
    return cuts[0] if cuts else 1


def folds(parameter: torch.Tensor) -> int:
    """Of how many equal blocks of rows a rank has its part each: 3 where queries, keys and values are one parameter."""
    found: int = getattr(parameter, _FOLDS, 1)
    return found


def fold(parameter: nn.Parameter, blocks: int) -> nn.Parameter:
    """Say of how many blocks of rows a parameter, cut by rows, has a part each."""
    setattr(parameter, _FOLDS, blocks)
    return parameter


_FOLDS = "dtkit_folds"


def squares(tensors: Sequence[torch.Tensor], copies: Sequence[int], device: torch.device) -> torch.Tensor:
    """The sum of squares of each tensor's numbers, over its copies, in float64."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return gradients.squares(tensors) / torch.tensor(copies, dtype=torch.float64, device=device)


def skeleton(model: nn.Module) -> nn.Module:
    """A copy without numbers, which takes no memory: parameters and buffers on the meta device."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def take_slices(whole: nn.Module, mine: nn.Module, device: torch.device) -> None:
    """Give `mine`, a skeleton that was cut, copies of this rank's slices of a whole model's numbers."""

    def lay(p: nn.Parameter, like: nn.Parameter) -> nn.Parameter:
        if not isinstance(like, DTensor):
            return nn.Parameter(p.detach().to(device, copy=True), p.requires_grad)
        part = this_part(p.detach(), like).to(device, copy=True, memory_format=torch.contiguous_format)
        return nn.Parameter(of_part(part, like), p.requires_grad)

    _fill(mine, dict(whole.named_parameters(remove_duplicate=False)), lay)
    copies: dict[int, torch.Tensor] = {}
    for before, after in zip(whole.modules(), mine.modules(), strict=True):
        for name, buffer in before.named_buffers(recurse=False):
            copies.setdefault(id(buffer), buffer.to(device, copy=True))
            setattr(after, name, copies[id(buffer)])


def move_slices(
    slices: Mapping[str, nn.Parameter], old: nn.Module, fresh: nn.Module
) -> dict[nn.Parameter, nn.Parameter]:
    """Put slices, and the buffers and plain settings of `old`, into `fresh`, cut alike. {old parameter: new one}."""

    def lay(p: nn.Parameter, like: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(relaid(p, like), p.requires_grad) if isinstance(like, DTensor) else p

    moved = _fill(fresh, slices, lay)
    for before, after in zip(old.modules(), fresh.modules(), strict=True):
        after.__dict__.update({k: v for k, v in vars(before).items() if isinstance(v, (bool, int, float, str))})
        for name, buffer in before.named_buffers(recurse=False):
            setattr(after, name, buffer)
    return moved


def _fill(
    model: nn.Module,
    numbers: Mapping[str, nn.Parameter],
    lay: Callable[[nn.Parameter, nn.Parameter], nn.Parameter],
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace a model's parameters by what `lay` makes of others of the same name. {other: what was made of it}."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, like in list(model.named_parameters(remove_duplicate=False)):
        p = numbers[name]
        if p not in made:
            made[p] = fold(lay(p, like), folds(like))
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, made[p])
    return made


def this_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a tensor that is to be cut like another: parts as torch.chunk makes them, or none."""
    cut = place_of(like)
    if cut is None:
        return whole
    if folds(like) > 1:
        return torch.cat([block.chunk(parts(like))[cut[1]] for block in whole.chunk(folds(like))])
    chunks = whole.chunk(parts(like), cut[0])
    return chunks[cut[1]] if cut[1] < len(chunks) else whole.narrow(cut[0], 0, 0)


def of_part(part: torch.Tensor, like: DTensor) -> DTensor:
    """The tensor of which this is what lies here, laid out as another is."""
    mesh, stride = like.device_mesh, like.stride()
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=stride)


@torch.no_grad()
def relaid(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """The same numbers on another mesh."""
    placements = tensor.placements if isinstance(tensor, DTensor) else like.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local(tensor), like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def move_optimizer(optimizer: torch.optim.Optimizer, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Have an optimiser go on with other parameters, its state moved to their mesh."""
    for group in optimizer.param_groups:
        group["params"] = [moved[p] for p in group["params"]]
    for old, new in moved.items():
        if old is new or old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        assert isinstance(new, DTensor)
        optimizer.state[new] = {k: relaid(v, new) if isinstance(v, DTensor) else v for k, v in state.items()}
