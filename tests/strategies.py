"""Hypothesis strategies: stacks of unlike blocks, hidden states, side inputs, plans, observers, chains."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass

import numpy
import torch
from hypothesis import strategies as st
from torch import nn

from blockhooks import Checkpoint, Profile, hookimpl
from blockhooks.testing import plans

B, T, D = 2, 3, 6

# ---- blocks: each takes and returns a tensor of shape (B, T, D), and may be given a scale as a side input ----------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, scale=1.0):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out((q @ k.transpose(1, 2)).softmax(-1) @ v) * scale


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Dropout(0.4)

    def forward(self, x, scale=1.0):
        return x + self.dropout(self.down(torch.tanh(self.up(x)))) * scale


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x, scale=1.0):
        return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2)) * scale


class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))

    def forward(self, x, scale=1.0):
        return x + self.linear(x) * scale


class WeightNorm(nn.Module):
    """The old weight norm: a forward pre-hook sets the weight as an attribute."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still in use
            self.linear = nn.utils.weight_norm(nn.Linear(D, D))

    def forward(self, x, scale=1.0):
        return x + self.linear(x) * scale


class Router(nn.Module):
    """Experts with counters in a buffer, an attribute and a list, on which the result depends."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = (
            nn.Linear(D, 2),
            nn.ModuleList(nn.Linear(D, D) for _ in range(2)),
        )
        self.register_buffer("counts", torch.zeros(2))
        self.calls, self.history = 0, []

    def forward(self, x, scale=1.0):
        scores = self.router(x).softmax(-1)
        self.counts += scores.detach().argmax(-1).flatten().bincount(minlength=2)
        self.calls += 1
        self.history.append(self.calls)
        bias = self.counts / self.counts.sum() + len(self.history)
        return (
            x
            + sum(e(x) * (scores[..., i, None] - bias[i]) for i, e in enumerate(self.experts))
            * scale
        )


class Draws(nn.Module):
    """Draws from generators of all kinds; `generator` may be shared with other blocks."""

    def __init__(self, generator, numbers):
        super().__init__()
        self.linear, self.generator, self.numbers = nn.Linear(D, D), generator, numbers

    def forward(self, x, scale=1.0):
        x = x + torch.rand(x.shape, generator=self.generator) * random.random()
        return self.linear(x) * (numpy.random.rand() + self.numbers.normal()) * scale


class InPlace(nn.Module):
    """Works in place on its input, so it can never be executed again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, scale=1.0):
        x = x.mul_(1.25).add_(0.5)
        return x + self.linear(x) * scale


class OnItself(nn.Module):
    """Works in place on what it makes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, scale=1.0):
        return x + torch.relu_(self.linear(x).add_(0.5)) * scale


def sine(x, scale=1.0):
    return x + torch.sin(x) * scale


class Pair(nn.Module):
    """A block whose x is a tuple of a tensor, a dict with a tensor, and a number."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, *args, **kwargs):
        hidden, more, count = x
        hidden = self.block(hidden, *args, **kwargs)
        return hidden, {"mean": more["mean"] * 0.5 + hidden.mean(1)}, count + 1


KINDS = {
    "attention": Attention,
    "mlp": Mlp,
    "batch norm": BatchNorm,
    "spectral norm": SpectralNorm,
    "weight norm": WeightNorm,
    "router": Router,
    "draws": Draws,
    "in place": InPlace,
    "on itself": OnItself,
    "function": lambda: sine,
}


@dataclass(frozen=True)
class Stack:
    """How to build blocks, x and side inputs; each call of `build` gives the same ones anew."""

    kinds: tuple[str, ...]
    repeated: int = 0
    frozen: tuple[int, ...] = ()
    shared_generator: bool = True
    pair: bool = False
    scale: str = "none"
    needs_gradient: bool = True
    seed: int = 0

    def build(self):
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        shared = torch.Generator().manual_seed(self.seed), numpy.random.default_rng(self.seed)
        blocks = []
        for place, kind in enumerate(self.kinds):
            own = torch.Generator().manual_seed(place), numpy.random.default_rng(place)
            drawing = shared if self.shared_generator else own
            blocks.append(KINDS[kind](*drawing) if kind == "draws" else KINDS[kind]())
        for place in self.frozen:
            if isinstance(blocks[place % len(blocks)], nn.Module):
                blocks[place % len(blocks)].requires_grad_(False)
        blocks += blocks[: self.repeated]  # shared weights
        x = torch.randn(B, T, D, requires_grad=self.needs_gradient)
        scale = torch.rand(D, requires_grad=self.scale == "with gradient")
        side = {} if self.scale == "none" else {"scale": scale}
        if self.pair:
            return [Pair(block) for block in blocks], (x, {"mean": torch.zeros(B, D)}, 0), side
        return blocks, x, side

    def __len__(self):
        return len(self.kinds) + min(self.repeated, len(self.kinds))


def stacks(*, max_size=4, without=()):
    """Stacks of one to six blocks of the kinds that are not left out."""
    kinds = st.lists(
        st.sampled_from([kind for kind in KINDS if kind not in without]),
        min_size=1,
        max_size=max_size,
    )
    return st.builds(
        Stack,
        kinds.map(tuple),
        repeated=st.sampled_from([0, 0, 1, 2]),
        frozen=st.lists(st.integers(0, 3), max_size=2).map(tuple),
        shared_generator=st.booleans(),
        pair=st.booleans(),
        scale=st.sampled_from(["none", "without gradient", "with gradient"]),
        needs_gradient=st.booleans(),
        seed=st.integers(0, 3),
    )


# ---- chains ----------------------------------------------------------------------------------------------------------


class Fixed:
    """A plan function that knows one plan."""

    def __init__(self, segments):
        self.segments = segments

    def __call__(self, n):
        return self.segments

    def __repr__(self):
        return f"Fixed({', '.join(map(_describe, self.segments))})"


def _describe(segment):
    inside = f"[{', '.join(map(_describe, segment.children))}]" if segment.children else ""
    return f"{segment}{'' if segment.mode == 'recompute' else '~'}{inside}"


class Watch:
    """An observer of everything."""

    @hookimpl(wrapper=True)
    def run_blocks(self):
        return (yield)

    @hookimpl(wrapper=True)
    def run_segment(self):
        return (yield)

    @hookimpl(wrapper=True)
    def run_block(self):
        return (yield)

    @hookimpl
    def recompute_context(self):
        return None


class First:
    """An observer that asks to be outermost."""

    @hookimpl(wrapper=True, tryfirst=True)
    def run_block(self, x):
        assert x is not None
        return (yield)


class Last:
    """An observer that asks to be innermost, and ends a step only in ``finally``."""

    @hookimpl(wrapper=True, trylast=True)
    def run_block(self):
        try:
            return (yield)
        finally:
            self.ended = True


def observers():
    return st.lists(st.sampled_from([Watch, First, Last, Profile]), max_size=3)


def checkpoints(n, **options):
    """A `Checkpoint` with any plan of `n` blocks."""
    given = {
        "early_stop": st.booleans(),
        "check": st.sampled_from(["shapes", "shapes", "values", "none"]),
        **options,
    }
    return st.builds(lambda plan, **given: Checkpoint(Fixed(plan), **given), plans(n), **given)


def chains(n):
    """Lists of plugins in any order: a `Checkpoint` or none, and observers."""
    checkpoint = st.one_of(checkpoints(n).map(lambda c: [c]), st.just([]))
    return st.builds(
        lambda checkpoint, kinds: [*checkpoint, *(kind() for kind in kinds)],
        checkpoint,
        observers(),
    ).flatmap(st.permutations)
