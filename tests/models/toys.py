"""Small models that hold and call their blocks in every way that is met in the wild, and one step of any model."""

import copy
import random
from collections import OrderedDict
from dataclasses import dataclass

import numpy
import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 8


class Block(nn.Module):
    """Normalization, two linear layers, dropout, and a residual connection."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, scale=None):
        y = self.dropout(self.mix(self.norm(x)))
        return x + (y if scale is None else y * scale)


class ConvBlock(nn.Module):
    """A convolution with batch statistics, as in vision models."""

    def __init__(self, channels=WIDTH):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return x + self.act(self.norm(self.conv(x)))


class Loop(nn.Module):
    """The plain loop over a ModuleList."""

    def __init__(self, n=4, block=Block):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(n)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Vision(nn.Module):
    """A stem, stages of different depth as numbered attributes, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3)
        self.layer1 = nn.Sequential(*[ConvBlock() for _ in range(3)])
        self.layer2 = nn.Sequential(*[ConvBlock() for _ in range(5)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Keyword(Loop):
    def forward(self, x):
        x = self.embed(x)
        for i, layer in enumerate(self.layers[:3]):
            x = layer(scale=torch.full((), 0.5 + i), x=x)
        return self.head(x)


class TupleBlock(Block):
    def forward(self, x, memory):
        y = super().forward(x)
        return y, memory + y.mean(), None, {"weights": y.softmax(-1)}


class TupleLoop(nn.Module):
    """Two carried tensors, and a tuple with None and a dict in it; collects what the blocks give."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([TupleBlock() for _ in range(3)])

    def forward(self, x):
        memory, seen = torch.zeros(()), ()
        for block in self.h:
            x, memory, nothing, extra = block(x, memory)
            assert nothing is None
            seen = (*seen, extra["weights"])
        return {"out": x * memory, "weights": seen}


@dataclass
class Cache:
    keys: list

    def update(self, index, key):
        self.keys[index] = (
            key if self.keys[index] is None else torch.cat([self.keys[index], key], 1)
        )
        return self.keys[index]


class CacheBlock(Block):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x, cache=None):
        memory = cache.update(self.index, x).mean(1, keepdim=True)
        return super().forward(x + memory)


class CacheLoop(nn.Module):
    """Each block reads and writes a cache that is given back."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([CacheBlock(i) for i in range(3)])

    def forward(self, x, cache=None):
        cache = cache or Cache([None] * 3)
        for layer in self.layers:
            x = layer(x, cache=cache)
        return {"out": x, "cache": cache}


class Shared(nn.Module):
    """One module applied many times."""

    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList([Block()])

    def forward(self, x):
        for _ in range(4):
            x = self.groups[0](x)
        return x


class Repeated(nn.Module):
    """One module held many times by a list."""

    def __init__(self):
        super().__init__()
        block = Block()
        self.layers = nn.ModuleList([block, Block(), block])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Pairs(nn.Module):
    """A list of lists: attention-like and feed-forward-like modules in pairs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.LayerNorm(WIDTH), Mixer(), Block()]) for _ in range(3)]
        )

    def forward(self, x):
        for norm, mixer, block in self.layers:
            x = x + mixer(norm(x))
            x = block(x)
        return x


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Numbered(nn.Module):
    """Blocks as plain attributes."""

    def __init__(self):
        super().__init__()
        self.block1, self.block2, self.block3 = Block(), Block(), Block()

    def forward(self, x):
        return self.block3(self.block2(self.block1(x)))


class Direct(Loop):
    """Calls the layers' forward, past their hooks."""

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(x)


class Parts(nn.Module):
    """Never calls its layers, only what is in them."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])

        def forward(self, x):
            raise AssertionError

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer.first(x)
            for part in layer.parts:
                x = part(x)
        return x


class Skips(nn.Module):
    """A small U-Net with LayerDrop: skip connections across, calls in reverse, blocks left out at random."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleDict(OrderedDict((f"d{i}", Block()) for i in range(3)))
        self.up = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        seen = []
        for block in self.down.values():
            if torch.rand(()) > 0.3:
                x = block(x)
            seen.append(x)
        for block in reversed(self.up):
            x = block(x + seen.pop())
        return x


class Experts(nn.Module):
    """A list of layers, each with a list of experts that are no layers."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mixer, self.gate = nn.LayerNorm(WIDTH), Mixer(), nn.Linear(WIDTH, 8)
            self.experts = nn.ModuleList(
                [
                    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
                    for _ in range(8)
                ]
            )

        def forward(self, x):
            x = x + self.mixer(self.norm(x))
            gates = self.gate(x).softmax(-1).unbind(-1)
            return x + sum(g.unsqueeze(-1) * e(x) for g, e in zip(gates, self.experts, strict=True))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Mixes(nn.Module):
    """Attention and two linear layers, as in the blocks of vision transformers."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = self.first(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.mix(self.second(x)))


class Stage(nn.Module):
    """Blocks, and then, but for the last stage, a fourth of the places at twice the width."""

    def __init__(self, width, depth, last):
        super().__init__()
        self.blocks = nn.ModuleList(Mixes(width) for _ in range(depth))
        self.norm = None if last else nn.LayerNorm(4 * width)
        self.merge = None if last else nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.merge is None:
            return x
        batch, places, width = x.shape
        return self.merge(self.norm(x.reshape(batch, places // 4, 4 * width)))


class Pyramid(nn.Module):
    """Stages of unequal blocks, as in Swin and its like."""

    def __init__(self, width=16, depths=(2, 2, 6, 2)):
        super().__init__()
        self.embed = nn.Linear(48, width)
        last = len(depths) - 1
        self.stages = nn.ModuleList(
            Stage(width * 2**place, depth, place == last) for place, depth in enumerate(depths)
        )
        self.norm, self.head = nn.LayerNorm(width * 2**last), nn.Linear(width * 2**last, 10)

    def forward(self, x):
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).mean(1))


class Named(nn.Module):
    """Hands on a dict."""

    class Layer(Block):
        def forward(self, parts):
            return {"x": super().forward(parts["x"]), "seen": parts["seen"] + 1}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x):
        parts = {"x": x, "seen": 0}
        for layer in self.layers:
            parts = layer(parts)
        return parts["x"] * parts["seen"]


class Spiking(nn.Module):
    """State in plain attributes, which the model clears before each of its sequences."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.decay = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))
            self.potential, self.steps = 0.0, 0

        def forward(self, x):
            self.potential = self.potential * self.decay.sigmoid() + self.linear(x)
            self.steps += 1
            return x + torch.tanh(self.potential) / self.steps

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            layer.potential, layer.steps = 0.0, 0
        out = 0.0
        for now in x.unbind(1):
            for layer in self.layers:
                now = layer(now)
            out = out + now
        return out


class Codebooks(nn.Module):
    """Quantizers: codes that begin as their first inputs, follow by moving averages, and are replaced when unused."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("started", torch.tensor(False))
            self.register_buffer("codes", torch.zeros(4, WIDTH))
            self.register_buffer("counts", torch.zeros(4))

        def forward(self, x):
            flat = self.linear(x).flatten(0, -2)
            if not self.started:
                self.codes.data.copy_(flat.detach()[torch.randperm(len(flat))[:4]])
                self.started.fill_(True)
            nearest = torch.cdist(flat.detach(), self.codes).argmin(-1)
            chosen = F.one_hot(nearest, 4).float()
            self.counts.lerp_(chosen.sum(0), 0.2)
            self.codes.lerp_(
                chosen.T @ flat.detach() / chosen.sum(0).clamp(min=1).unsqueeze(-1), 0.2
            )
            unused = self.counts < 0.5
            self.codes.data[unused] = flat.detach()[torch.randint(len(flat), (4,))][unused]
            codes = self.codes[nearest]
            loss = (flat - codes).square().mean()
            return x + (flat + (codes - flat).detach()).view_as(x), loss

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return x, losses


class Learning(nn.Module):
    """Codes that learn in the forward, by an optimizer of their own."""

    class Layer(Block):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(4, WIDTH))
            self.optimizer = torch.optim.SGD([self.codes], lr=0.1, momentum=0.9)

        def forward(self, x):
            x = super().forward(x)
            nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
            (self.codes[nearest] - x.detach()).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return x * self.codes[nearest]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Searching(nn.Module):
    """Every other call of a block is given a memory to read and add to, whose index cannot be looked into."""

    class Memory:
        class Index(numpy.ndarray):
            pass

        def __init__(self):
            self.entries, self.index = 0, numpy.zeros(4).view(self.Index)

        def add(self, x):
            self.entries += 1
            self.index[self.entries % 4] += float(x.detach().mean())

    class Layer(Block):
        def forward(self, x, memory=None):
            if memory is not None:
                found = float(memory.index.sum())
                memory.add(x)
                x = x + found
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x):
        memory = self.Memory()
        for layer in self.layers:
            x = layer(layer(x), memory)
        return x


def image():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def sequence():
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


MODELS = {
    "loop": (Loop, sequence),
    "vision": (Vision, image),
    "keyword": (Keyword, sequence),
    "tuple": (TupleLoop, sequence),
    "cache": (CacheLoop, sequence),
    "shared": (Shared, sequence),
    "repeated": (Repeated, sequence),
    "pairs": (Pairs, sequence),
    "numbered": (Numbered, sequence),
    "direct": (Direct, sequence),
    "parts": (Parts, sequence),
    "skips": (Skips, sequence),
    "experts": (Experts, sequence),
    "named": (Named, sequence),
    "spiking": (Spiking, sequence),
    "codebooks": (Codebooks, sequence),
    "learning": (Learning, sequence),
    "searching": (Searching, sequence),
}


def step(model, *args, loss=None, **kwargs):
    """Do one training step from fixed seeds and give back all that can be told of it, as plain values and clones."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    output = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    value = sum_of(output) if loss is None else loss(output)
    value.backward()
    return {
        "loss": value.detach().clone(),
        "output": [(path, t.detach().clone()) for path, t in tensors(output)],
        "gradients": {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        },
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
    }


def sum_of(output):
    total = torch.zeros(())
    for place, (_, tensor) in enumerate(tensors(output)):
        if tensor.requires_grad:
            weights = torch.linspace(-1, 2, tensor.numel()).view(tensor.shape) + place
            total = total + (tensor * weights).sum()
    return total


def tensors(value, path=""):
    """List all tensors in a value with their paths, those in objects such as caches included."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from tensors(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from tensors(part, f"{path}[{place}]")
    elif hasattr(value, "__dict__") and not callable(value):
        yield from tensors(vars(value), path)


def same(one, other):
    """Tell whether two values are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(bits(one), bits(other))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def bits(tensor):
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8)
