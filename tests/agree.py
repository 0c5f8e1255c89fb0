"""Does a step agree with the plain loop, bit for bit?

A *step* is a function ``step(run)`` that makes its own blocks, calls ``run(blocks, x, *args, **kwargs)`` in place of
the loop over them, and returns whatever is to be compared: tensors, modules, generators, any objects that hold some.
`agree` executes it with the plain loop and then with several chains, from the same seeds.
"""

import contextlib
import random
import types
from collections import deque

import numpy
import torch
from torch import nn

from blockhooks import Checkpoint, apply_blocks, plan

CHAINS = {
    "every block": lambda: [Checkpoint()],
    "pairs": lambda: [Checkpoint(plan.every(2))],
    "tree": lambda: [Checkpoint(plan.tree(2))],
    "to the end": lambda: [Checkpoint(early_stop=False)],
    "values": lambda: [Checkpoint(check="values")],
}


def plain(blocks, x, *args, **kwargs):
    """The loop that everything is measured by."""
    given = isinstance(x, torch.Tensor)
    for block in blocks:
        x = block(x, *args, **kwargs)
        if given and isinstance(x, (tuple, list)):
            x = x[0]
    return x


def through(hooks):
    """Run blocks through a hook chain."""

    def run(blocks, x, *args, **kwargs):
        return apply_blocks(blocks, x, *args, hooks=hooks, **kwargs)

    return run


def seed(number=0):
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def agree(step, chains=CHAINS):
    """Assert that a step gives the same with every chain as with the plain loop, random generators included."""
    expected = outcome(step, plain)
    for name in chains:
        found = outcome(step, through(CHAINS[name]()))
        difference = differs(found, expected)
        assert difference is None, f"{name}: {difference}"


def agrees(step):
    """Make a test of a step: it agrees with the plain loop through every chain."""

    def test():
        agree(step)

    test.__name__, test.__doc__, test.__module__ = step.__name__, step.__doc__, step.__module__
    return test


def outcome(step, run):
    """What a step returns, and where it leaves the global random generators, as comparable data."""
    seed()
    result = describe(step(run))
    return {"result": result, "generators": describe(generators())}


def generators():
    return torch.get_rng_state(), repr(random.getstate()), numpy.random.get_state()


def bits(tensor):
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes()


def describe(value, memo=None):
    """Any value as nested plain data, so that two executions can be compared."""
    memo = {} if memo is None else memo
    if isinstance(
        value, (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, range)
    ):
        return (type(value).__name__, repr(value))
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)):
        return ("named", getattr(value, "__qualname__", value.__name__))
    if id(value) in memo:
        return ("again", memo[id(value)][0])
    memo[id(value)] = (len(memo), value)
    if isinstance(value, torch.Tensor):
        told = {
            "kind": type(value).__name__,
            "dtype": str(value.dtype),
            "shape": tuple(value.shape),
            "layout": str(value.layout),
            "requires_grad": value.requires_grad,
        }
        if not value.is_meta:
            told["bits"] = bits(value)
        if value.is_leaf and value.grad is not None:
            told["grad"] = describe(value.grad, memo)
        return told
    if isinstance(value, numpy.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, torch.Generator):
        return ("generator", bits(value.get_state()))
    if isinstance(value, numpy.random.Generator):
        return ("generator", describe(value.bit_generator.state))
    if isinstance(value, numpy.random.RandomState):
        return ("generator", describe(value.get_state()))
    if isinstance(value, random.Random):
        return ("generator", hash(value.getstate()))
    if isinstance(value, dict):
        told = {repr(key): describe(item, memo) for key, item in dict.items(value)}
        told["type"] = (type(value).__name__, list(told))
        return told
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(map(repr, value)))
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *(describe(item, memo) for item in value)]
    if isinstance(value, types.MethodType):
        return ("method", value.__name__, describe(value.__self__, memo))
    names = [
        n
        for base in type(value).__mro__
        for n in getattr(base, "__slots__", ())
        if hasattr(value, n)
    ]
    attributes = {name: getattr(value, name) for name in names if not name.startswith("__")}
    attributes.update(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        attributes = {k: v for k, v in attributes.items() if "hooks" not in k}
        attributes["hooks"] = [
            len(d) for k, d in vars(value).items() if "hooks" in k and isinstance(d, dict)
        ]
    return {"object": type(value).__name__, **{k: describe(v, memo) for k, v in attributes.items()}}


def differs(found, expected, path="step"):
    """Where two descriptions differ first, or None."""
    if type(found) is not type(expected):
        return f"{path}: {found!r:.200} instead of {expected!r:.200}"
    if isinstance(found, dict):
        if list(found) != list(expected):
            return f"{path}: has {list(found)} instead of {list(expected)}"
        return next(
            filter(None, (differs(found[k], expected[k], f"{path}.{k}") for k in found)), None
        )
    if isinstance(found, (list, tuple)):
        if len(found) != len(expected):
            return f"{path}: {len(found)} instead of {len(expected)} items"
        pairs = enumerate(zip(found, expected, strict=True))
        return next(filter(None, (differs(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), None)
    return None if found == expected else f"{path}: {found!r:.200} instead of {expected!r:.200}"


def identities(value, memo=None):
    """The identity of everything that is reachable from a value, gradients left out, by path."""
    memo = {} if memo is None else memo
    found = {}

    def walk(item, path):
        if isinstance(
            item, (type(None), bool, int, float, str, torch.Tensor, torch.Generator, type)
        ):
            found[path] = item if isinstance(item, (bool, int, float, str)) else id(item)
            return
        if id(item) in memo:
            return
        memo[id(item)] = item
        found[path] = id(item)
        if isinstance(item, dict):
            for key, inner in dict.items(item):
                walk(inner, f"{path}[{key!r}]")
        elif isinstance(item, (list, tuple, deque)):
            for index, inner in enumerate(item):
                walk(inner, f"{path}[{index}]")
        elif hasattr(item, "__dict__") and not isinstance(
            item, (type, types.FunctionType, types.ModuleType)
        ):
            for name, inner in vars(item).items():
                walk(inner, f"{path}.{name}")

    walk(value, "")
    return found


@contextlib.contextmanager
def no_trace(*values):
    """Assert that a backward leaves the same objects in the same places."""
    before = [identities(value) for value in values]
    yield
    for value, then in zip(values, before, strict=True):
        now = identities(value)
        changed = [path for path in then.keys() | now.keys() if then.get(path) != now.get(path)]
        assert not changed, f"changed by the backward: {sorted(changed)[:5]}"


def leaf(*shape, dtype=torch.float32, number=7, grad=True):
    """A leaf tensor of known values."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


class Layer(nn.Module):
    """A residual block with two linear layers and dropout."""

    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


def layers(count=3, width=4, dropout=0.0):
    return nn.ModuleList(Layer(width, dropout) for _ in range(count))
