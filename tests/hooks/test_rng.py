"""`RNGSnapshot`: each recompute draws the random numbers of its forward."""

import contextvars
import functools
import random
import threading
import types
import weakref

import numpy
import pytest
import torch
from torch import nn

from blockhooks import (
    Checkpoint,
    HookChain,
    HookError,
    RNGSnapshot,
    apply_blocks,
    hookimpl,
    plan,
)
from tests.agree import agree, agrees, differs, layers, leaf, outcome, plain, through


class Noisy(nn.Module):
    """Multiplies by what ``draw()`` gives: any random number between 0 and 1."""

    def __init__(self, draw, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__.update(attributes)
        self.draw = draw

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * (0.5 + self.draw(self))


def steps(run, blocks, count=2):
    xs = [leaf(3, 4, number=n) for n in range(count)]
    losses = [run(blocks, x).square().sum() for x in xs]
    for loss in losses:
        loss.backward()
    return losses, xs, blocks


OF_A_MODULE = {
    "torch.Generator": (
        lambda s: torch.Generator().manual_seed(s),
        lambda g: torch.rand((), generator=g),
    ),
    "random.Random": (random.Random, lambda g: g.random()),
    "numpy Generator": (numpy.random.default_rng, lambda g: float(g.random())),
    "numpy RandomState": (numpy.random.RandomState, lambda g: float(g.rand())),
    "numpy MT19937": (
        lambda s: numpy.random.Generator(numpy.random.MT19937(s)),
        lambda g: float(g.normal()),
    ),
    "numpy Philox": (
        lambda s: numpy.random.Generator(numpy.random.Philox(s)),
        lambda g: float(g.integers(9)),
    ),
}


@pytest.mark.parametrize(("make", "draw"), OF_A_MODULE.values(), ids=OF_A_MODULE)
def test_generator_of_a_module(make, draw):
    def step(run):
        return steps(run, [Noisy(lambda self: draw(self.own), own=make(s)) for s in range(3)])

    agree(step)


@pytest.mark.parametrize(("make", "draw"), OF_A_MODULE.values(), ids=OF_A_MODULE)
def test_generator_shared_by_blocks(make, draw):
    def step(run):
        shared = make(3)
        return steps(
            run, [Noisy(lambda self: draw(self.own), own=shared) for _ in range(4)]
        ), shared

    agree(step)


@pytest.mark.parametrize(("make", "draw"), OF_A_MODULE.values(), ids=OF_A_MODULE)
def test_generator_in_a_container_or_object(make, draw):
    def step(run):
        blocks = [
            Noisy(lambda self: draw(self.own[0]), own=[make(1)]),
            Noisy(lambda self: draw(self.own["one"][1]), own={"one": (None, make(2))}),
            Noisy(
                lambda self: draw(self.own.inner.rng),
                own=types.SimpleNamespace(inner=types.SimpleNamespace(rng=make(3))),
            ),
        ]
        return steps(run, blocks)

    agree(step)


@pytest.mark.parametrize(("make", "draw"), OF_A_MODULE.values(), ids=OF_A_MODULE)
def test_generator_as_a_side_input(make, draw):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, rng, *, more):
            return torch.tanh(self.linear(x)) * draw(rng) + draw(more["rng"])

    def step(run):
        blocks, x, one, other = [Block() for _ in range(3)], leaf(3, 4), make(1), make(2)
        run(blocks, x, one, more={"rng": other}).sum().backward()
        return blocks, x, one, other

    agree(step)


@pytest.mark.parametrize(("make", "draw"), OF_A_MODULE.values(), ids=OF_A_MODULE)
def test_generator_in_a_closure_or_default_or_partial(make, draw):
    def step(run):
        one, two, three, four = map(make, range(4))

        def closure(x):
            return torch.tanh(x * draw(one))

        def default(x, rng=two):
            return torch.tanh(x + draw(rng))

        def partial(x, rng):
            return torch.sin(x + draw(rng))

        class Owner:
            def __init__(self):
                self.rng = four

            def method(self, x):
                return torch.cos(x * draw(self.rng))

        blocks = [closure, default, functools.partial(partial, rng=three), Owner().method]
        x = leaf(3, 4)
        run(blocks, x).sum().backward()
        return x, one, two, three, four

    agree(step)


@pytest.mark.parametrize(("make", "draw"), OF_A_MODULE.values(), ids=OF_A_MODULE)
def test_generator_inside_x(make, draw):
    def block(given):
        return {"x": torch.tanh(given["x"] * draw(given["rng"])), "rng": given["rng"]}

    def step(run):
        x, rng = leaf(3, 4), make(1)
        run([block, block, block], {"x": x, "rng": rng})["x"].sum().backward()
        return x, rng

    agree(step)


GLOBAL_TORCH = torch.Generator()
GLOBAL_PYTHON = random.Random()
GLOBAL_NUMPY = numpy.random.default_rng()
GLOBALS = {"torch": torch.Generator(), "python": [random.Random()]}


def draw_deep():
    return GLOBAL_PYTHON.random() + draw_deeper()


def draw_deeper():
    return float(GLOBAL_NUMPY.random())


class FromGlobals(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.factor()

    def factor(self):
        return torch.rand((), generator=GLOBAL_TORCH) + draw_deep()


class FromGlobalContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        noise = torch.rand((), generator=GLOBALS["torch"])
        return torch.tanh(self.linear(x)) * noise * (1 + GLOBALS["python"][0].random())


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * (1 + GLOBAL_PYTHON.random())

    return wrapper


def wrapped_without_a_trace(function):
    return lambda *args: function(*args)


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @decorated
    @wrapped_without_a_trace
    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.noise * self.more()

    @property
    def noise(self):
        return torch.rand((), generator=GLOBAL_TORCH)

    @staticmethod
    def more():
        return float(GLOBAL_NUMPY.random())


@pytest.mark.parametrize("kind", [FromGlobals, FromGlobalContainers, Decorated])
def test_generators_that_are_globals_of_the_blocks_module(kind):
    def step(run):
        GLOBAL_TORCH.manual_seed(1)
        GLOBAL_PYTHON.seed(2)
        GLOBALS["torch"].manual_seed(3)
        GLOBALS["python"][0].seed(4)
        global GLOBAL_NUMPY
        GLOBAL_NUMPY = numpy.random.default_rng(5)
        told = steps(run, [kind() for _ in range(3)])
        return told, GLOBAL_TORCH, GLOBAL_PYTHON, GLOBAL_NUMPY, GLOBALS

    agree(step)


class Streams:
    """Somebody's own keeper of generators."""

    of_the_class = random.Random(1)

    def __init__(self):
        self.own = torch.Generator()
        self.deep = types.SimpleNamespace(inner={"one": [random.Random()]})

    def draw(self):
        return torch.rand((), generator=self.own)

    def __call__(self):
        return float(GLOBAL_NUMPY.random())

    @classmethod
    def of_class(cls):
        return cls.of_the_class.random()

    @property
    def elsewhere(self):
        return float(GLOBAL_NUMPY.random())


STREAMS = Streams()
NESTED = {"a": {"b": STREAMS.own}, "c": STREAMS}


@functools.lru_cache
def remembered(seed):
    return random.Random(seed)


OF_OBJECTS = {
    "method": lambda _: STREAMS.draw(),
    "call": lambda _: STREAMS(),
    "class method": lambda _: Streams.of_class(),
    "class": lambda _: Streams.of_the_class.random(),
    "property": lambda _: STREAMS.elsewhere,
    "deep": lambda _: STREAMS.deep.inner["one"][0].random(),
    "nested dicts": lambda _: torch.rand((), generator=NESTED["a"]["b"]),
    "object in a dict": lambda _: NESTED["c"].draw(),
    "cached function": lambda _: remembered(3).random(),
}


@pytest.mark.parametrize("way", OF_OBJECTS)
def test_generators_that_global_objects_hold(way):
    def step(run):
        STREAMS.own.manual_seed(1)
        Streams.of_the_class.seed(2)
        STREAMS.deep.inner["one"][0].seed(3)
        remembered(3).seed(4)
        global GLOBAL_NUMPY
        GLOBAL_NUMPY = numpy.random.default_rng(5)
        told = steps(run, [Noisy(OF_OBJECTS[way]) for _ in range(3)])
        return told, STREAMS.own, Streams.of_the_class, STREAMS.deep.inner["one"][0], GLOBAL_NUMPY

    agree(step)


def hooked(register):
    def make(rng):
        block = Noisy(lambda _: 0.5)
        register(block.linear, rng)
        return block

    return make


class Scales:
    """A hook with a generator of its own."""

    def __init__(self, rng):
        self.rng = rng

    def hook(self, module, args, output):
        return output * self.rng.random()


def noisy_forward(noise):
    class Block(Noisy):
        def forward(self, x):
            return super().forward(x) * noise(self, x)

    return Block(lambda _: 0.5)


def decorated(rng):
    def scaled(forward):
        @functools.wraps(forward)
        def wrapper(self, x):
            return forward(self, x) * rng.random()

        return wrapper

    class Block(Noisy):
        forward = scaled(Noisy.forward)

    return Block(lambda _: 0.5)


def in_a_class_closure(rng):
    return noisy_forward(lambda self, x: rng.random())


def by_default(rng):
    class Block(Noisy):
        def forward(self, x, *, own=rng):
            return super().forward(x) * own.random()

    return Block(lambda _: 0.5)


def in_a_property(rng):
    class Block(Noisy):
        @property
        def noise(self):
            return rng.random()

        def forward(self, x):
            return super().forward(x) * self.noise

    return Block(lambda _: 0.5)


def in_an_autograd_function(rng):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = rng.random()
            return x * ctx.factor

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor

    return noisy_forward(lambda self, x: torch.sigmoid(Scale.apply(x)))


def in_a_constructor(rng):
    class Noise:
        def __init__(self):
            self.value = rng.random()

    return noisy_forward(lambda self, x: torch.sigmoid(x * Noise().value))


def in_a_function_attribute(rng):
    def noise(self, x):
        return torch.sigmoid(x * noise.own.random())

    noise.own = rng
    return noisy_forward(noise)


def in_a_context_variable(rng):
    variable = contextvars.ContextVar("own")
    variable.set(rng)
    return noisy_forward(lambda self, x: variable.get().random())


def in_a_threads_storage(rng):
    storage = threading.local()
    storage.own = rng
    return noisy_forward(lambda self, x: storage.own.random())


def in_a_weak_reference(rng):
    reference = weakref.ref(rng)
    return noisy_forward(lambda self, x: reference().random())


def in_a_parametrization(rng):
    class Scaled(nn.Module):
        def forward(self, weight):
            return weight * rng.random()

    block = Noisy(lambda _: 0.5)
    nn.utils.parametrize.register_parametrization(block.linear, "weight", Scaled())
    return block


class Rng(random.Random):
    """One that can be referred to weakly."""


OUT_OF_THE_WAY = {
    "forward hook": hooked(
        lambda m, rng: m.register_forward_hook(lambda _, __, out: out * rng.random())
    ),
    "pre-hook": hooked(
        lambda m, rng: m.register_forward_pre_hook(lambda _, args: (args[0] * rng.random(),))
    ),
    "method as a hook": hooked(lambda m, rng: m.register_forward_hook(Scales(rng).hook)),
    "partial as a hook": hooked(
        lambda m, rng: m.register_forward_hook(
            functools.partial(lambda own, _, __, out: out * own.random(), rng)
        )
    ),
    "method in an attribute": lambda rng: Noisy(
        lambda self: self.own(0, 0, 1.0), own=Scales(rng).hook
    ),
    "built-in method in an attribute": lambda rng: Noisy(lambda self: self.own(), own=rng.random),
    "decorator": decorated,
    "closure in a class": in_a_class_closure,
    "default by keyword": by_default,
    "property": in_a_property,
    "autograd function": in_an_autograd_function,
    "constructor": in_a_constructor,
    "function attribute": in_a_function_attribute,
    "context variable": in_a_context_variable,
    "thread's storage": in_a_threads_storage,
    "weak reference": in_a_weak_reference,
    "parametrization": in_a_parametrization,
}


@pytest.mark.parametrize("way", OUT_OF_THE_WAY)
def test_generators_out_of_the_way(way):
    def step(run):
        rngs = [Rng(seed) for seed in range(2)]
        return steps(run, [OUT_OF_THE_WAY[way](rng) for rng in rngs]), rngs

    agree(step)


@agrees
def test_generator_of_a_hook_of_all_modules(run):
    rng = random.Random(3)
    handle = nn.modules.module.register_module_forward_hook(lambda _, __, out: out * rng.random())
    try:
        return steps(run, layers(3)), rng
    finally:
        handle.remove()


MADE = {}
KEEPER = types.SimpleNamespace(own=None)
MADE_GLOBAL = None


def made_global():
    global MADE_GLOBAL
    if MADE_GLOBAL is None:
        MADE_GLOBAL = random.Random(3)
    return MADE_GLOBAL.random()


def made_by_an_object():
    if KEEPER.own is None:
        KEEPER.own = torch.Generator().manual_seed(4)
    return torch.rand((), generator=KEEPER.own)


MADE_WHEN_NEEDED = {
    "global": lambda _: made_global(),
    "object": lambda _: made_by_an_object(),
    "dict": lambda _: MADE.setdefault("one", numpy.random.default_rng(5)).random(),
    "cached function": lambda _: remembered(6).random(),
}


@pytest.mark.parametrize("way", MADE_WHEN_NEEDED)
def test_a_generator_that_the_first_forward_makes_for_all(way):
    def step(run):
        global MADE_GLOBAL
        MADE_GLOBAL = KEEPER.own = None
        MADE.clear()
        remembered.cache_clear()
        return steps(run, [Noisy(MADE_WHEN_NEEDED[way]) for _ in range(3)])

    agree(step)


def test_a_block_that_makes_a_generator_for_all_keeps_what_it_saved():
    MADE.clear()
    told = []

    class Told:
        @hookimpl
        def run_blocks(self, run, x):
            told.append(run)

    blocks = [Noisy(MADE_WHEN_NEEDED["dict"]) for _ in range(3)]
    apply_blocks(blocks, leaf(3, 4), hooks=[Told(), Checkpoint()]).sum().backward()
    assert {segment.start: reason for segment, reason in told[0].kept.items()} == {
        0: "it makes a random generator that outlives it"
    }


LATER = None


class FromAGlobalMadeLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * (1.0 if LATER is None else LATER.random())


@agrees
def test_global_generator_made_after_a_first_step(run):
    global LATER
    LATER = None
    blocks = [FromAGlobalMadeLater() for _ in range(3)]
    first = steps(run, blocks)
    LATER = random.Random(3)
    return first, steps(run, blocks), LATER


class OfItsClass(nn.Module):
    rng = random.Random(3)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.rng.random()


@agrees
def test_generator_of_a_class(run):
    OfItsClass.rng.seed(3)
    return steps(run, [OfItsClass() for _ in range(3)]), OfItsClass.rng


@agrees
def test_global_generators_in_all_their_ways(run):
    def draw(self):
        branch = random.choice([0.1, 0.2, 0.3]) + random.gauss(0, 0.1)
        span = numpy.random.randint(0, 9) / 9 + numpy.random.randn() * 0.1
        return (
            torch.rand(4) + branch + span + torch.randperm(4) / 4 + torch.empty(4).normal_() * 0.1
        )

    return steps(run, [Noisy(draw) for _ in range(4)])


@agrees
def test_dropout_of_all_kinds(run):
    blocks = [
        nn.Sequential(
            nn.Linear(4, 4), nn.Dropout(0.4), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.1)
        )
        for _ in range(3)
    ]
    return steps(run, blocks)


@agrees
def test_draws_between_forward_and_backward_and_after(run):
    blocks, x = layers(3, dropout=0.4), leaf(3, 4)
    out = run(blocks, x)
    between = torch.rand(2), random.random(), numpy.random.rand()
    out.square().sum().backward()
    return between, torch.rand(2), random.random(), numpy.random.rand(), x, blocks


@agrees
def test_draws_in_the_backward_itself(run):
    class NoisyGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.randn_like(grad) + random.random()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return NoisyGradient.apply(torch.dropout(torch.tanh(self.linear(x)), 0.3, True))

    return steps(run, [Block() for _ in range(3)])


@agrees
def test_seed_set_inside_of_a_block(run):
    def block(x):
        torch.manual_seed(5)
        random.seed(6)
        numpy.random.seed(7)
        return torch.tanh(x * torch.rand(4) * random.random() * numpy.random.rand())

    x = leaf(3, 4)
    run([block, block], torch.dropout(x, 0.2, True)).sum().backward()
    return x, torch.rand(2), random.random(), numpy.random.rand()


@agrees
def test_fork_rng_inside_of_a_block(run):
    def block(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = torch.dropout(x, 0.3, True)
        return torch.tanh(torch.dropout(x, 0.3, True))

    x = leaf(3, 4)
    run([block] * 3, x).sum().backward()
    return x


@agrees
def test_three_backwards_of_one_graph(run):
    blocks, x = layers(3, dropout=0.4), leaf(3, 4)
    out = run(blocks, x)
    out.sum().backward(retain_graph=True)
    torch.rand(1)
    out.square().sum().backward(retain_graph=True)
    out.exp().sum().backward()
    return blocks, x


@agrees
def test_generator_replaced_between_forward_and_backward(run):
    blocks = [
        Noisy(lambda self: torch.rand((), generator=self.own), own=torch.Generator().manual_seed(s))
        for s in (1, 2)
    ]
    x = leaf(3, 4)
    loss = run(blocks, x).square().sum()
    for block in blocks:
        block.own = torch.Generator().manual_seed(9)
    loss.backward()
    return blocks, x


@agrees
def test_generator_made_in_the_forward(run):
    def draw(self):
        if not hasattr(self, "own"):
            self.own = torch.Generator().manual_seed(3)
            self.python = random.Random(4)
        return torch.rand((), generator=self.own) + self.python.random()

    return steps(run, [Noisy(draw) for _ in range(3)])


@agrees
def test_subclass_of_random(run):
    class Halved(random.Random):
        def random(self):
            return super().random() / 2

    return steps(run, [Noisy(lambda self: self.own.random(), own=Halved(s)) for s in range(2)])


def test_only_what_was_drawn_from_is_restored():
    """A generator that nobody of the blocks draws from may move on in the backward, by a gradient hook."""
    x, rng = leaf(3, 4), random.Random(1)
    block = layers(1)[0]
    block.own = rng
    out = apply_blocks([block], x, hooks=[Checkpoint()])
    rng.seed(5)
    expected = random.Random(5).getstate()
    out.sum().backward()
    assert rng.getstate() == expected


def test_generators_named_by_the_user():
    """The blocks reach this one in a way that nobody can see."""
    hidden = torch.Generator()

    def step(run):
        hidden.manual_seed(1)
        x, find = leaf(3, 4), weakref.WeakValueDictionary(rng=hidden)
        run(
            [lambda x: torch.tanh(x * torch.rand((), generator=find["rng"]))] * 2, x
        ).sum().backward()
        return x, hidden

    expected = outcome(step, plain)
    assert differs(outcome(step, through([Checkpoint(), RNGSnapshot([hidden])])), expected) is None
    assert differs(outcome(step, through([Checkpoint()])), expected) is not None, "the control"


def test_something_else_than_a_generator_is_refused():
    with pytest.raises(
        HookError, match=r"RNGSnapshot\(generators=\.\.\.\) expected random generators .* found 3"
    ):
        RNGSnapshot([3])


@pytest.mark.parametrize("generators", [3, None, torch.Generator()], ids=str)
def test_generators_are_a_sequence(generators):
    with pytest.raises(
        HookError, match=r"expected a sequence of .* write RNGSnapshot\(\[generator\]\)"
    ):
        RNGSnapshot(generators)


def test_without_it_the_masks_differ():
    """The control: these tests could fail."""

    def step(run):
        x = leaf(30, 4)
        run(layers(1, dropout=0.5), x).square().sum().backward()
        return x

    chain = HookChain([Checkpoint()], without=("RNGSnapshot",))
    difference = differs(outcome(step, through(chain)), outcome(step, plain))
    assert difference is not None
    assert "grad" in difference


def test_nothing_is_read_without_a_recompute(monkeypatch):
    reads = []
    monkeypatch.setattr(random, "getstate", lambda: reads.append(1))
    with torch.no_grad():
        apply_blocks(layers(2), leaf(3, 4), hooks=[Checkpoint()])
    apply_blocks(layers(2), leaf(3, 4), hooks=[Checkpoint(plan.blocks([]))])
    assert not reads


def test_steps_in_several_threads():
    def work(results, number, run):
        # A thread's own generators: the global ones are shared by all threads.
        rng = torch.Generator().manual_seed(number)
        torch.manual_seed(0)
        blocks = [Noisy(lambda self: torch.rand((), generator=self.own), own=rng) for _ in range(3)]
        for block in blocks:
            nn.init.constant_(block.linear.weight, 0.1 + number)
            nn.init.zeros_(block.linear.bias)
        for step in range(4):
            run(blocks, leaf(3, 4, number=step)).square().sum().backward()
        results[number] = [p.grad for block in blocks for p in block.parameters()]

    expected, found = {}, {}
    for number in range(3):
        work(expected, number, plain)
    threads = [
        threading.Thread(target=work, args=(found, n, through([Checkpoint()]))) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert all(map(torch.equal, expected[number], found[number]))
