"""Small networks of each kind that strategies must train exactly, and queries for their parts on engines."""

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
    """Convolutions; the `view` would raise for an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 2), nn.Tanh())
        self.out = nn.Linear(4 * (FEATURES - 3), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.filters(x[:, None]).view(len(x), -1))


class Encoder(nn.Module):
    """torch's transformer encoder, over the features as a sequence of numbers."""

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
    """Decoder block in the usual form of GPT-like models."""

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
        parts = self.c_attn(z).split(width, 2) if self.attention == "fused" else (self.q(z), self.k(z), self.v(z))
        q, k, v = (t.view(rows, length, self.n_head, width // self.n_head).transpose(1, 2) for t in parts)
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
    """GPT-like model that turns the features into tokens and predicts the class of the last one."""

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
    """Causal attention in nanoGPT's form, with queries, keys and values from one layer."""

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
    """nanoGPT's model: blocks of attention and an MLP."""

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
    """torch's encoder and decoder layers with both kinds of masks, and attention whose weights are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(12, WIDTH), nn.Parameter(torch.randn(FEATURES, 1, WIDTH) / 4)
        options: dict[str, Any] = {"dropout": 0.0, "norm_first": True, "bias": False}
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **options)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0)
        self.look = nn.MultiheadAttention(WIDTH, HEADS, kdim=2, vdim=2, batch_first=True)
        self.out = nn.Linear(WIDTH + FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 2).round().long().clamp(-6, 5) + 6
        padding = x > 1
        padding[:, 0] = False  # a row with everything masked has no softmax
        causal = torch.ones(FEATURES, FEATURES, device=x.device).triu(1).bool()
        z = self.embed(tokens.T) + self.place
        memory = self.encoder(z, src_key_padding_mask=padding)
        z = self.decoder(z, memory, tgt_mask=causal, memory_key_padding_mask=padding, tgt_is_causal=True)
        numbers = x[..., None].expand(-1, -1, 2)
        # A plan is checked in eval mode, and so takes the other branch.
        attended, weights = self.look(z.transpose(0, 1), numbers, numbers, average_attn_weights=self.training)
        weights = weights if self.training else weights.mean(1)
        return self.out(torch.cat([attended.mean(1), weights.mean(1) * x], 1))


def deep() -> nn.Module:
    """Return eight pairs of layers in a chain: two parts for each of four ranks."""
    width = 12
    layers = [nn.Linear(FEATURES, width), *(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, CLASSES)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def wide() -> nn.Module:
    """Return a model of eight classes, of which the data has three."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 8))


class Scaled(nn.Module):
    """Model with a scalar parameter, a frozen one, and one with fewer rows than ranks."""

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
"""One net of each kind, which every strategy must train."""


IN_PROJECTIONS = {
    "encoder": "layers.layers.1.self_attn.in_proj_weight",
    "decoder fused": "h.1.c_attn.weight",
    "gpt": "h.1.attn.c_attn.weight",
    "gpt by hand": "h.1.attn.c_attn.weight",
    "translator": "decoder.multihead_attn.in_proj_weight",
}
"""Parameters that hold queries, keys and values together: 3 x WIDTH rows."""


def make_net(name: str | Callable[[], nn.Module]) -> nn.Module:
    """Return one of NETS, or the result of a function, in float64 and the same each time."""
    torch.manual_seed(4)
    return (NETS[name] if isinstance(name, str) else name)().double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS = {"momentum": momentum, "adamw": adamw}


def get_bound(name: str, optimizer: str) -> float:
    """Return the tolerance. AdamW amplifies rounding where the true gradient is zero: the key bias of attention."""
    return 1e-10 if optimizer == "adamw" and name.startswith(("encoder", "decoder", "gpt", "translator")) else BOUND


class Clipped:
    """Optimizer for the reference loop that clips before each step."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], limit: float) -> None:
        self._make, self._limit = optimizer, limit

    def __call__(self, parameters: Any) -> Any:
        clipped = list(parameters)
        optimizer = self._make(clipped)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(clipped, self._limit)

        optimizer.register_step_pre_hook(clip)
        return optimizer


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


# -- functions that run on engines ----------------------------------------------------------------------------------


def get_worker() -> Any:
    """Return the worker of the newest job of this engine."""
    from dtkit.engine import session

    return list(session.get_session().state.jobs.values())[-1]._worker


def measure_local_bytes() -> tuple[int, int]:
    """Return the bytes of this rank's parameters and of its optimizer state."""
    from dtkit.engine.state.dtensor_shards import get_local_tensor

    worker = get_worker()
    parameters = [get_local_tensor(p) for p in set(worker._sharded_parameters.values())]
    state = [v for s in worker.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(p.nbytes for p in parameters), sum(get_local_tensor(v).nbytes for v in state)


def get_slice(name: str) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    from dtkit.engine.state.dtensor_shards import get_local_tensor

    return get_local_tensor(get_worker()._sharded_parameters[name]).detach().clone()


def list_attention_rows(plan: TensorPlan) -> list[str]:
    """Return the attention layers of which a rank computes only some heads."""
    return [row.name for row in plan.rows if row.note.endswith("on each rank") and row.style in ("heads", "fused")]


def count_forward_passes(run: dtkit.Run) -> list[int]:
    """Return the micro-batches of each rank in the timeline's last step. Collectives may split a pass."""
    last = run.timeline.steps[-1]
    counts = []
    for rank in run.timeline.ranks:
        phases = [s["phase"] for s in sorted(run.timeline.select_spans(last, rank), key=lambda s: s["begin"])]
        passes = [phase for phase, _ in itertools.groupby(phase for phase in phases if phase in COMPUTE_PHASES)]
        counts.append(passes.count("forward"))
    return counts


def resume_and_wait(run: dtkit.Run) -> None:
    """Resume the run and wait for its end."""
    run.resume()
    run.wait(60)
