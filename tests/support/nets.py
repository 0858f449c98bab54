"""Small networks of each kind that strategies must train exactly, and where on an engine their parts lie."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from dtkit.history.timeline import COMPUTE_PHASES
from tests.support.oracle import BOUND, CLASSES, FEATURES, mlp, momentum

if TYPE_CHECKING:
    from collections.abc import Callable

    import dtkit
    from dtkit.strategies.tensor.plan import TensorPlan

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

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.place = nn.Parameter(torch.randn(FEATURES, WIDTH) / 4)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=dropout, batch_first=True)
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


class Attention(nn.Module):
    """Causal attention with queries, keys and values from one layer, written as nanoGPT writes it."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, *, dropout: float = 0.0, flash: bool = True) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.dropout, self.flash = heads, width, dropout, flash
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(FEATURES, FEATURES)).view(1, 1, FEATURES, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.parts(x)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))

    def parts(self, x: torch.Tensor) -> Any:
        return self.c_attn(x).split(self.n_embd, dim=2)


class GPT(nn.Module):
    """As nanoGPT: blocks of such attention and an MLP."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(12, WIDTH), nn.Embedding(FEATURES, WIDTH)
        self.h = nn.ModuleList([GPTBlock(attention(), dropout) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 2).round().long().clamp(-6, 5) + 6
        z = self.wte(tokens) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            z = block(z)
        return self.lm_head(self.ln_f(z))[:, -1]


class GPTBlock(nn.Module):
    def __init__(self, attention: nn.Module, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)))))


class Translator(nn.Module):
    """Torch's layers of an encoder and of a decoder with masks of both kinds, and attention whose weights are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(12, WIDTH), nn.Parameter(torch.randn(FEATURES, 1, WIDTH) / 4)
        how: dict[str, Any] = {"dropout": 0.0, "norm_first": True, "bias": False}
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **how)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0)
        self.look = nn.MultiheadAttention(WIDTH, HEADS, kdim=2, vdim=2, batch_first=True)
        self.out = nn.Linear(WIDTH + FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 2).round().long().clamp(-6, 5) + 6
        padding = x > 1
        padding[:, 0] = False  # a row that may look at nothing has no softmax
        causal = torch.ones(FEATURES, FEATURES, device=x.device).triu(1).bool()
        z = self.embed(tokens.T) + self.place
        memory = self.encoder(z, src_key_padding_mask=padding)
        z = self.decoder(z, memory, tgt_mask=causal, memory_key_padding_mask=padding, tgt_is_causal=True)
        numbers = x[..., None].expand(-1, -1, 2)
        # The trial of a plan is made in evaluation, and so meets the other way.
        found, weights = self.look(z.transpose(0, 1), numbers, numbers, average_attn_weights=self.training)
        weights = weights if self.training else weights.mean(1)
        return self.out(torch.cat([found.mean(1), weights.mean(1) * x], 1))


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
    "gpt": GPT,
    "gpt by hand": functools.partial(GPT, functools.partial(Attention, flash=False)),
    "translator": Translator,
    "decoder of four blocks": functools.partial(Decoder, blocks=4),
    "decoder tied": functools.partial(Decoder, tied=True),
    "deep": deep,
    "wide": wide,
    "scaled": Scaled,
}
KINDS = ("mlp", "convolution", "encoder", "decoder")
"""One net of each kind that every strategy must train."""


IN_PROJECTIONS = {
    "encoder": "layers.layers.1.self_attn.in_proj_weight",
    "decoder fused": "h.1.c_attn.weight",
    "gpt": "h.1.attn.c_attn.weight",
    "gpt by hand": "h.1.attn.c_attn.weight",
    "translator": "decoder.multihead_attn.in_proj_weight",
}
"""Queries, keys and values in one parameter: 3 x WIDTH rows."""


def net(name: str | Callable[[], nn.Module]) -> nn.Module:
    """One of NETS, or what a function makes, in float64 and the same each time."""
    torch.manual_seed(4)
    return (NETS[name] if isinstance(name, str) else name)().double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS = {"momentum": momentum, "adamw": adamw}


def bound(name: str, optimizer: str) -> float:
    """AdamW amplifies rounding where the true gradient is zero: the key bias of attention."""
    return 1e-10 if optimizer == "adamw" and name.startswith(("encoder", "decoder", "gpt", "translator")) else BOUND


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
    from dtkit.engine.state.dtensor_shards import get_local_tensor

    mine = worker()
    parameters = [get_local_tensor(p) for p in set(mine._sharded_parameters.values())]
    state = [v for s in mine.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(p.nbytes for p in parameters), sum(get_local_tensor(v).nbytes for v in state)


def slices(name: str) -> torch.Tensor:
    """On an engine: what lies here of a parameter."""
    from dtkit.engine.state.dtensor_shards import get_local_tensor

    return get_local_tensor(worker()._sharded_parameters[name]).detach().clone()


def cut_by_heads(plan: TensorPlan) -> list[str]:
    """The layers of attention of which a rank computes some heads."""
    return [row.name for row in plan.rows if row.note.endswith("on each rank") and row.style in ("heads", "fused")]


def forwards(run: dtkit.Run) -> list[int]:
    """How many micro-batches each rank took in the last step, as the timeline saw it; collectives may part a pass."""
    last = run.timeline.steps[-1]
    found = []
    for rank in run.timeline.ranks:
        phases = [s["phase"] for s in sorted(run.timeline.select_spans(last, rank), key=lambda s: s["begin"])]
        passes = [phase for phase, _ in itertools.groupby(phase for phase in phases if phase in COMPUTE_PHASES)]
        found.append(passes.count("forward"))
    return found


def go(run: dtkit.Run) -> None:
    """Resume, and wait for the end."""
    run.resume()
    run.wait(60)
