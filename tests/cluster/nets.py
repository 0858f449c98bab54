"""Small networks of each kind that strategies must train exactly, and where on an engine their parts lie."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.cluster.oracle import BOUND, CLASSES, FEATURES, mlp, momentum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import dtkit

WIDTH, HEADS = 8, 4


class Convolution(nn.Module):
    """An empty batch would raise in its `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 2), nn.Tanh())
        self.out = nn.Linear(4 * (FEATURES - 3), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.filters(x[:, None]).view(len(x), -1))


class Encoder(nn.Module):
    """Torch's transformer encoder over the features as a sequence of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.place = nn.Parameter(torch.randn(FEATURES, WIDTH) / 4)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embed(x[..., None]) + self.place).mean(1))


class Block(nn.Module):
    """A decoder's block, as GPT-like models are mostly written."""

    def __init__(self, attention: str = "torch", dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head, self.attention = HEADS, attention
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if attention == "fused":
            self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("past", torch.ones(FEATURES, FEATURES).tril().bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        z = self.first(x)
        found = self.c_attn(z).split(width, 2) if self.attention == "fused" else (self.q(z), self.k(z), self.v(z))
        q, k, v = (t.view(rows, length, self.n_head, width // self.n_head).transpose(1, 2) for t in found)
        if self.attention == "by hand":
            scores = q @ k.transpose(-2, -1) / (width // self.n_head) ** 0.5
            y = scores.masked_fill(~self.past[:length, :length], float("-inf")).softmax(-1) @ v
        elif self.attention == "mask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.past[:length, :length])
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).contiguous().view(rows, length, width)))
        return x + self.dropout(self.mlp(self.second(x)))


class Decoder(nn.Module):
    """A GPT-like model: the features are made into tokens, the last one's class is predicted."""

    def __init__(self, attention: str = "torch", *, blocks: int = 2, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(12, WIDTH), nn.Embedding(FEATURES, WIDTH)
        self.h = nn.ModuleList([Block(attention, dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 12 if tied else CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 2).round().long().clamp(-6, 5) + 6
        z = self.wte(tokens) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            z = block(z)
        return self.head(self.norm(z))[:, -1]


def deep() -> nn.Module:
    """Eight pairs of layers in a chain: two parts of a model for each of four ranks."""
    width = 12
    layers = [nn.Linear(FEATURES, width), *(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, CLASSES)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def wide() -> nn.Module:
    """Eight classes, of which the data has three."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8))


class Scaled(nn.Module):
    """A parameter without a dimension, one that is frozen, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first, self.second = nn.Linear(FEATURES, 1), nn.Linear(1, CLASSES)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x) * self.scale))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolution": Convolution,
    "encoder": Encoder,
    "decoder": Decoder,
    "decoder by hand": functools.partial(Decoder, "by hand"),
    "decoder with a mask": functools.partial(Decoder, "mask"),
    "decoder fused": functools.partial(Decoder, "fused"),
    "decoder of four blocks": functools.partial(Decoder, blocks=4),
    "decoder tied": functools.partial(Decoder, tied=True),
    "deep": deep,
    "wide": wide,
    "scaled": Scaled,
}
KINDS = ("mlp", "convolution", "encoder", "decoder")
"""One net of each kind that every strategy must train."""


def net(name: str | Callable[[], nn.Module]) -> nn.Module:
    """One of NETS, or what a function makes, in float64 and the same each time."""
    torch.manual_seed(4)
    return (NETS[name] if isinstance(name, str) else name)().double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS = {"momentum": momentum, "adamw": adamw}


def bound(name: str, optimizer: str) -> float:
    """AdamW amplifies rounding where the true gradient is zero: the key bias of attention."""
    return 1e-10 if optimizer == "adamw" and name.startswith(("encoder", "decoder")) else BOUND


class Clipped:
    """An optimiser for the reference loop, that clips before each step."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], limit: float) -> None:
        self._make, self._limit = optimizer, limit

    def __call__(self, parameters: Any) -> Any:
        held = list(parameters)
        made = self._make(held)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(held, self._limit)

        made.register_step_pre_hook(clip)
        return made


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


# -- what engines are asked ----------------------------------------------------------------------------------


def worker() -> Any:
    """On an engine: this rank's part of the newest job."""
    from dtkit.engine import session

    return list(session._session._jobs.values())[-1]._worker


def held() -> tuple[int, int]:
    """On an engine: bytes of the numbers that lie here, of parameters and of the optimiser's state."""
    from dtkit.strategies.sliced import local

    mine = worker()
    parameters = [local(p) for p in mine._slices.values()]
    state = [v for s in mine.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(p.nbytes for p in parameters), sum(local(v).nbytes for v in state)


@contextlib.contextmanager
def quickly(seconds: float) -> Iterator[None]:
    """What happens within must not take longer."""
    import time

    begun = time.perf_counter()
    yield
    assert time.perf_counter() - begun < seconds


def forwards(run: dtkit.Run) -> list[int]:
    """How many micro-batches each rank took in the last step, as the timeline saw it; "sync" may part a pass in two."""
    last = run.timeline.steps[-1]
    found = []
    for rank in run.timeline.ranks:
        phases = [s["phase"] for s in sorted(run.timeline.of(last, rank), key=lambda s: s["begin"])]
        passes = [phase for phase, _ in itertools.groupby(phase for phase in phases if phase != "sync")]
        found.append(passes.count("forward"))
    return found


def go(run: dtkit.Run) -> None:
    """Resume, and wait for the end."""
    run.resume()
    run.wait(60)
