"""Unusual blocks, inputs and hooks: each agrees with the plain loop."""

import array
import collections
import contextlib
import contextvars
import dataclasses
import datetime
import enum
import fractions
import functools
import itertools
import logging
import pathlib
import random
import re
import threading
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockhooks import Checkpoint, apply_blocks
from tests.agree import Layer, agree, agrees, layers, leaf, no_trace, plain


class Mix(nn.Module):
    """Calls ``use(self, x)`` on what its linear layer gives."""

    def __init__(self, use, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.use = use

    def forward(self, x):
        return x + torch.tanh(self.use(self, self.linear(x)))


def two_batches(run, blocks, rows=3):
    xs = [leaf(rows, 4, number=n) for n in range(2)]
    losses = [run(blocks, x).square().sum() for x in xs]
    for loss in losses:
        with no_trace(list(blocks)):
            loss.backward()
    return losses, list(blocks), xs


# ---- modules of torch ------------------------------------------------------------------------------------------------


@agrees
def test_embedding_that_renormalises_its_weight(run):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4, max_norm=0.5)

        def forward(self, x):
            return x + torch.tanh(self.table(torch.arange(len(x))))

    blocks = [Looks(), Looks()]
    results = []
    for number in range(3):
        x = leaf(3, 4, number=number)
        loss = run(blocks, x).square().sum()
        loss.backward()
        results.append((loss.detach(), x))
    return results, blocks


def test_recurrent_and_attention_modules():
    # The work space that an LSTM saves is not all written: its values are no part of the step.
    agree(recurrent_and_attention, ["every block", "pairs", "tree", "to the end"])


def recurrent_and_attention(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

        def forward(self, x, mask):
            x = x + self.lstm(x)[0]
            x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            return self.encoder(x, src_mask=mask)

    blocks, x = [Block(), Block()], leaf(2, 5, 4)
    mask = torch.full((5, 5), float("-inf")).triu(1)
    run(blocks, x, mask).square().sum().backward()
    return [[(n, p.detach(), p.grad) for n, p in b.named_parameters()] for b in blocks], x


@agrees
def test_fake_quantisation_with_observers(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.low, self.high = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(()))

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.low.copy_(torch.minimum(self.low, y.min()))
                self.high.copy_(torch.maximum(self.high, y.max()))
                scale = float((self.high - self.low).clamp(min=1e-3) / 255)
            return torch.tanh(torch.fake_quantize_per_tensor_affine(y, scale, 0, -128, 127))

    return two_batches(run, [Block(), Block()])


@agrees
def test_parameter_lists_dicts_and_pruning(run):
    from torch.nn.utils import prune

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(2)])
            self.named = nn.ParameterDict({"shift": nn.Parameter(torch.rand(4))})
            self.linear = nn.Linear(4, 4)
            prune.random_unstructured(self.linear, "weight", amount=0.5)

        def forward(self, x):
            return torch.tanh(
                self.linear(x) * self.scales[0] * self.scales[1] + self.named["shift"]
            )

    blocks, x = [Block(), Block()], leaf(3, 4)
    for _ in range(2):
        run(blocks, x).square().sum().backward()
    return [[(n, p.detach(), p.grad) for n, p in b.named_parameters()] for b in blocks], x


@agrees
def test_functions_of_many_kinds(run):
    def block(x):
        x = torch.fft.irfft(torch.fft.rfft(x) * 1.1, n=4)
        x = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2)[0]
        x = torch.linalg.qr(x.t() @ x + torch.eye(4))[1][:3] + F.gelu(x)
        x = F.layer_norm(x, (4,)).cumsum(0).sort(-1)[0]
        return F.gumbel_softmax(x, tau=0.7) + torch.where(x > 0, x.sqrt().nan_to_num(), x.sin())

    x = leaf(3, 4)
    run([block, block], x).sum().backward()
    return x


# ---- what blocks reach -----------------------------------------------------------------------------------------------

GLOBAL_NORM = nn.BatchNorm1d(4)


def through_a_global(x):
    return torch.tanh(helper(x))


def helper(x):
    return GLOBAL_NORM(x)


@agrees
def test_function_that_uses_a_global_module(run):
    GLOBAL_NORM.reset_parameters()
    GLOBAL_NORM.zero_grad()
    x = leaf(6, 4)
    run([through_a_global, through_a_global], x).square().sum().backward()
    return x, GLOBAL_NORM


@agrees
def test_generators_in_functions_that_a_module_holds(run):
    one, two, three = (torch.Generator().manual_seed(n) for n in range(3))

    def noise(self, y):
        return y * torch.rand(4, generator=one)

    def partial(self, y, generator):
        return y * torch.rand(4, generator=generator)

    blocks = [
        Mix(noise),
        Mix(functools.partial(partial, generator=two)),
        Mix(
            lambda self, y: self.inner["draw"][0](y),
            inner={"draw": [lambda y: y * torch.rand(4, generator=three)]},
        ),
    ]
    x = leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return x, [(b.linear.weight, b.linear.weight.grad) for b in blocks], one, two, three


@agrees
def test_generators_in_functions_given_as_side_inputs(run):
    rng = torch.Generator().manual_seed(1)

    def block(x, noise, *, more):
        return torch.tanh(x * noise(x) + more["function"](x))

    x, python = leaf(3, 4), random.Random(3)
    noises = {"function": functools.partial(lambda x, rng: x * rng.random(), rng=python)}
    run([block] * 3, x, lambda x: torch.rand(4, generator=rng), more=noises).sum().backward()
    return x, rng, python


@agrees
def test_modules_given_as_side_inputs(run):
    def block(x, head, *, more):
        return torch.tanh(head(x)) + more["norm"](x)

    head, more = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)),
        {"norm": nn.BatchNorm1d(4)},
    )
    x = leaf(6, 4)
    run([block] * 3, x, head, more=more).square().sum().backward()
    return x, head, more


@agrees
def test_modules_held_outside_of_the_registry(run):
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.BatchNorm1d(4), {"deep": (nn.Linear(4, 4), nn.Dropout(0.2))}]
            object.__setattr__(
                self,
                "own",
                Mix(lambda self, y: y * self.count(), count=itertools.count(1).__next__),
            )

        def forward(self, x):
            linear, dropout = self.hidden[1]["deep"]
            return torch.tanh(dropout(linear(self.hidden[0](x))))

    blocks = [Hides(), Hides()]
    x = leaf(6, 4)
    run(blocks, x).square().sum().backward()
    return x, [b.hidden for b in blocks]


@agrees
def test_attributes_of_kinds_that_are_left_alone(run):
    class Colour(enum.Enum):
        RED = 1

    lock, event = threading.Lock(), threading.Event()
    attributes = {
        "lock": lock, "event": event, "logger": logging.getLogger("x"), "path": pathlib.Path("."), "colour": Colour.RED,
        "pattern": re.compile("a"), "day": datetime.date(2020, 1, 1), "half": fractions.Fraction(1, 2), "dtype": torch.float32,
        "device": torch.device("cpu"), "scalar": numpy.float32(3), "view": memoryview(b"abc"), "kinds": (int, nn.Linear),
        "frozen": frozenset({1}), "weak": weakref.ref(event), "context": contextvars.ContextVar("c"), "size": torch.Size([2]),
        "partial": functools.partial(int, "3"), "method": lock.acquire, "np_dtype": numpy.dtype("f4"), "none": None,
    }  # fmt: skip
    blocks = [Mix(lambda self, y: y * float(self.half), **attributes) for _ in range(2)]
    x = leaf(3, 4)
    loss = run(blocks, x).square().sum()
    loss.backward()
    assert all(
        getattr(blocks[0], name) is value for name, value in attributes.items() if name != "method"
    )
    return x, [b.linear for b in blocks]


def count_with_itertools(self, y):
    return y / next(self.counter)


def count_in_a_user_dict(self, y):
    self.counter["calls"] = self.counter.get("calls", 0) + 1
    return y / self.counter["calls"]


def count_in_an_array(self, y):
    self.counter[0] += 1
    return y / self.counter[0]


def count_in_a_chain_map(self, y):
    self.counter["calls"] = self.counter.get("calls", 0) + 1
    return y / self.counter["calls"]


def count_in_a_cached_property(self, y):
    self.counter.expensive.append(1)
    return y / len(self.counter.expensive)


class Cached:
    @functools.cached_property
    def expensive(self):
        return [1]


@dataclasses.dataclass(slots=True)
class Slots:
    calls: int = 0


def count_in_slots(self, y):
    self.counter.calls += 1
    return y / self.counter.calls


def make_an_iterator(self, y):
    self.counter.append(iter([1.0, 2.0]))
    return y * next(self.counter[-1])


COUNTERS = [
    (count_with_itertools, lambda: itertools.count(1)),
    (count_in_a_user_dict, collections.UserDict),
    (count_in_an_array, lambda: array.array("d", [0.0])),
    (count_in_a_chain_map, lambda: collections.ChainMap({}, {})),
    (count_in_a_cached_property, Cached),
    (count_in_slots, Slots),
]


@pytest.mark.parametrize(("use", "make"), COUNTERS, ids=[use.__name__ for use, _ in COUNTERS])
def test_counters(use, make):
    def step(run):
        blocks = [Mix(use, counter=make()) for _ in range(3)]
        xs = [leaf(3, 4, number=n) for n in range(2)]
        losses = [run(blocks, x).square().sum() for x in xs]
        for loss in losses:
            loss.backward()
        counters = [
            repr(block.counter) if isinstance(block.counter, itertools.count) else block.counter
            for block in blocks
        ]
        return xs, counters, [(b.linear.weight, b.linear.weight.grad) for b in blocks]

    agree(step)


# ---- hooks -----------------------------------------------------------------------------------------------------------

SCALE = contextvars.ContextVar("scale", default=1.0)


@agrees
def test_hooks_that_draw_from_numpy(run):
    blocks, log = layers(3), []
    for block in blocks:
        block.up.register_forward_hook(lambda m, a, o: log.append(numpy.random.rand()))
        block.register_forward_hook(lambda m, a, o: o * numpy.random.rand())
    x = leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_hooks_that_draw_from_a_generator_of_the_block(run):
    blocks = layers(3)
    for block in blocks:
        block.rng = torch.Generator().manual_seed(3)
        block.up.register_forward_hook(lambda m, a, o, block=block: setattr_noise(block))
        block.register_forward_hook(lambda m, a, o: o * torch.rand(4, generator=m.rng))
    x = leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


def setattr_noise(block):
    torch.rand(2, generator=block.rng)


@agrees
def test_hooks_that_set_a_context_variable(run):
    blocks = [Mix(lambda self, y: y * SCALE.get()) for _ in range(3)]
    for number, block in enumerate(blocks):
        block.linear.register_forward_hook(
            lambda m, a, o, number=number: SCALE.set(number + 2.0) and None
        )
    token = SCALE.set(1.0)
    x = leaf(3, 4)
    run(blocks, x).square().sum().backward()
    SCALE.reset(token)
    return [(b.linear.weight, b.linear.weight.grad) for b in blocks], x


@agrees
def test_hooks_that_change_the_output_in_place(run):
    blocks = layers(3)
    for block in blocks:
        block.up.register_forward_hook(
            lambda m, a, o: o.mul_(2) and None if len(o) == 0 else _double(o)
        )
        block.down.register_forward_pre_hook(lambda m, a: None)
    x = leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


def _double(tensor):
    tensor.mul_(2)


@agrees
def test_hook_objects_whose_state_changes_the_value(run):
    class Warm:
        def __init__(self):
            self.calls, self.history = 0, []

        def __call__(self, module, args, output):
            self.calls += 1
            self.history.append(self.calls)
            return output / len(self.history)

    blocks, hooks = layers(2), [Warm(), Warm()]
    for block, hook in zip(blocks, hooks, strict=True):
        block.up.register_forward_hook(hook)
    told = two_batches(run, blocks)
    return told, [(hook.calls, hook.history) for hook in hooks]


@agrees
def test_hook_that_raises(run):
    blocks = layers(2)
    raises = [True]

    def hook(module, args, output):
        if raises[0]:
            raise LookupError("hook")

    blocks[1].up.register_forward_hook(hook)
    with pytest.raises(LookupError, match="hook"):
        run(blocks, leaf(3, 4))
    assert [type(h).__name__ for h in blocks[1].up._forward_hooks.values()] == ["function"]
    raises[0] = False
    x = leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_hooks_of_inputs_and_outputs_with_keywords(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, scale):
            return torch.tanh(self.linear(x)) * scale

    log, blocks = [], [Block(), Block()]
    for block in blocks:
        block.register_forward_pre_hook(
            lambda m, a, k: (a, {"scale": k["scale"] * 2}), with_kwargs=True
        )
        block.register_forward_hook(
            lambda m, a, k, o: log.append(k["scale"].detach().clone()), with_kwargs=True
        )
    x, scale = leaf(3, 4), leaf(1, number=3)
    run(blocks, x, scale=scale).square().sum().backward()
    return log, x, scale, [dict(b.named_parameters()) for b in blocks]


@agrees
def test_activations_collected_by_hooks_on_the_parent(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.features = layers(3, dropout=0.1), {}
            for name, block in self.blocks.named_children():
                block.register_forward_hook(functools.partial(self.collect, name))

        def collect(self, name, module, args, output):
            self.features[name] = output

        def forward(self, x):
            return run(self.blocks, x)

    net, x = Net(), leaf(3, 4)
    out = net(x)
    (out.square().sum() + sum(f.exp().mean() for f in net.features.values())).backward()
    assert list(net.features) == ["0", "1", "2"]
    return out, [(n, p.detach(), p.grad) for n, p in net.named_parameters()], net.features, x


# ---- gradients -------------------------------------------------------------------------------------------------------


@agrees
def test_local_losses_with_a_backward_in_the_forward(run):
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            if torch.is_grad_enabled():
                self.head(torch.tanh(self.linear(x.detach()))).square().mean().backward()
            return x + y

    blocks, x = [Local() for _ in range(3)], leaf(3, 4)
    for _ in range(2):
        run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_forces_with_respect_to_an_input_without_grad(run):
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.enable_grad():
                position = x if x.requires_grad else x.requires_grad_()
                energy = torch.tanh(self.linear(position)).square().sum()
                (force,) = torch.autograd.grad(energy, position, create_graph=True)
            return x - 0.1 * force

    blocks, x = [Energy() for _ in range(2)], leaf(3, 4, grad=False)
    run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_optimizer_steps_in_the_backward(run):
    blocks, x = layers(4, dropout=0.1), leaf(3, 4)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in blocks.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(3):
        loss = run(blocks, x).square().sum()
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.detach() for p in blocks.parameters()], x


@agrees
def test_gradients_kept_inside_of_a_block(run):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.hidden = nn.Linear(4, 4), None

        def forward(self, x):
            self.hidden = torch.tanh(self.linear(x))
            self.hidden.retain_grad()
            return x + self.hidden.exp()

    blocks, x = [Keeps(), Keeps()], leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return [(b.hidden.detach(), b.hidden.grad) for b in blocks], [b.linear for b in blocks], x


@agrees
def test_hooks_put_on_x_inside_of_a_block(run):
    log = []

    def block(x):
        x.register_hook(lambda g: log.append(g.clone()) or g * 2)
        return torch.tanh(x.exp())

    x = leaf(3, 4)
    run([block, block], x * 1.0).sum().backward()
    return log, x


@agrees
def test_several_losses_and_gradient_tensors(run):
    blocks, x = layers(3, dropout=0.2), leaf(3, 4)
    out = run(blocks, x)
    first, second = out.chunk(2, dim=-1)
    torch.autograd.backward(
        [first, second], [torch.ones(3, 2), torch.full((3, 2), 0.5)], retain_graph=True
    )
    first.sum().backward(retain_graph=True)
    second.exp().sum().backward()
    return blocks, x


@agrees
def test_outputs_of_which_some_are_dropped(run):
    def block(given):
        return {
            "x": torch.tanh(given["x"] * 2).exp(),
            "unused": given["x"].exp().sin(),
            "kept": given["kept"],
        }

    x = leaf(3, 4)
    out = run([block] * 3, {"x": x, "unused": None, "kept": torch.arange(3)})
    del out["unused"]
    out["x"].sum().backward()
    return out, x


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@agrees
def test_reentrant_torch_checkpoints_inside(run):
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layer(dropout=0.2)

        def forward(self, x):
            return torch.tanh(checkpoint(self.inner, x, use_reentrant=True)).exp()

    blocks, x = [Block() for _ in range(2)], leaf(3, 4)
    run(blocks, x * 1.0).sum().backward()
    return blocks, x


@agrees
def test_inner_loops_of_meta_learning(run):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4) / 2)

        def forward(self, x):
            weight = self.weight
            for _ in range(2):
                loss = (torch.tanh(x @ weight) - x).square().mean()
                (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
                weight = weight - 0.1 * gradient
            return torch.tanh(x @ weight)

    blocks, x = [Inner(), Inner()], leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


# ---- inputs ----------------------------------------------------------------------------------------------------------


@agrees
def test_block_that_gives_a_side_input(run):
    memory, x = leaf(3, 4, number=2), leaf(3, 4)
    blocks = [lambda x, m: torch.tanh(x * m), lambda x, m: m, lambda x, m: x.exp() * m]
    run(blocks, x, memory).sum().backward()
    return memory, x


@agrees
def test_x_changed_by_its_owner_after_the_forward(run):
    def block(given):
        given["calls"] += 1
        return {
            "x": torch.tanh(given["x"] * given["scale"][0]),
            "scale": given["scale"],
            "calls": given["calls"],
        }

    x = leaf(3, 4)
    given = {"x": x, "scale": [2.0], "calls": 0}
    out = run([block] * 3, given)
    given["scale"][0] = 5.0
    given["x"] = None
    with no_trace(given):
        out["x"].sum().backward()
    return out, x, given


@agrees
def test_packed_sequences_and_results_with_names(run):
    from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, packed):
            return PackedSequence(torch.tanh(self.linear(packed.data)), *packed[1:])

    def names(result):
        return torch.max(
            torch.tanh(result.values.expand(3, 4) * result.indices), dim=0, keepdim=True
        )

    blocks, x = [Block(), Block()], leaf(2, 3, 4)
    out = run(blocks, pack_padded_sequence(x, [3, 2], batch_first=True))
    out.data.sum().backward()
    y = leaf(3, 4)
    other = run([names, names], torch.max(y, dim=0, keepdim=True))
    other.values.sum().backward()
    return out.data, blocks, x, other.values, y


@agrees
def test_x_of_several_dtypes_and_none(run):
    def block(given):
        ids, x, mask, nothing = given
        return ids + 1, torch.tanh(x * mask) + F.one_hot(ids % 4, 4), ~mask, nothing

    x = leaf(3, 4, dtype=torch.float64)
    out = run(
        [block] * 3, (torch.tensor([0, 1, 2]), x, torch.tensor([True, False, True, True]), None)
    )
    out[1].sum().backward()
    return out, x


@agrees
def test_blocks_on_token_ids_that_give_ids(run):
    table = nn.Embedding(10, 10)
    ids = torch.tensor([[1, 2], [3, 4]])
    out = run([lambda ids: (ids * 3) % 10, lambda ids: table(ids), nn.Tanh()], ids)
    out.sum().backward()
    return out, table


@agrees
def test_recurrent_state_as_a_mutable_side_input(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, state):
            state["hidden"] = torch.tanh(self.linear(x) + state["hidden"])
            state["window"].append(state["hidden"].detach())
            state["step"] += 1
            return x + state["hidden"] * len(state["window"]) / state["step"]

    blocks, x = [Block() for _ in range(3)], leaf(3, 4)
    state = {"hidden": torch.zeros(4), "window": collections.deque(maxlen=2), "step": 0}
    outs = [run(blocks, part, state) for part in x.unbind(0)]
    with no_trace(state):
        torch.stack(outs).square().sum().backward()
    return outs, state, blocks, x


@agrees
def test_static_caches_written_with_gradients(run):
    class Cache:
        def __init__(self):
            self.keys, self.filled = torch.zeros(2, 6, 4), 0

        def update(self, index, keys):
            place = torch.arange(self.filled, self.filled + len(keys))
            self.keys = self.keys.clone()
            self.keys[index].index_copy_(0, place, keys)
            self.filled += len(keys) if index == 1 else 0
            return self.keys[index]

    class Block(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.query, self.key, self.index = nn.Linear(4, 4), nn.Linear(4, 4), index

        def forward(self, x, cache):
            keys = cache.update(self.index, self.key(x))
            return x + (self.query(x) @ keys.t()).softmax(-1) @ keys

    blocks, cache, x = [Block(0), Block(1)], Cache(), leaf(4, 4)
    outs = [run(blocks, part, cache) for part in x.split(2)]
    with no_trace(cache):
        torch.cat(outs).square().sum().backward()
    return outs, cache, blocks, x


# ---- others ----------------------------------------------------------------------------------------------------------


@agrees
def test_context_managers_and_generators_inside(run):
    @contextlib.contextmanager
    def scope(self):
        self.depth += 1
        try:
            yield self.depth
        finally:
            self.depth -= 1

    def parts(y):
        for part in y.split(2, dim=-1):
            yield part.exp()

    def use(self, y):
        with scope(self) as depth, torch.profiler.record_function("block"):
            return torch.cat(list(parts(y)), -1) / depth

    return two_batches(run, [Mix(use, depth=0) for _ in range(2)])


@agrees
def test_threads_inside_of_a_block(run):
    def use(self, y):
        results = {}

        def work():
            results["y"] = torch.tanh(y.detach()).sum().item()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return y * results["y"]

    return two_batches(run, [Mix(use) for _ in range(2)])


@agrees
def test_a_block_that_gives_up_on_an_error_of_torch(run):
    def use(self, y):
        try:
            return y @ y
        except RuntimeError:
            return y.exp().sin()

    return two_batches(run, [Mix(use) for _ in range(2)])


@agrees
def test_layers_skipped_at_random_with_their_drop_rate(run):
    class Drop(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.layer, self.rate, self.skipped = Layer(dropout=0.1), rate, 0

        def forward(self, x):
            if self.training and random.random() < self.rate:
                self.skipped += 1
                return x
            return self.layer(x) / (1 - self.rate)

    return two_batches(run, [Drop(0.5) for _ in range(6)])


def test_a_block_that_knows_its_model_does_not_answer_for_it():
    """Other parts of the model may change between the region's forward and its backward."""
    model = nn.Module()
    model.blocks = layers(3)
    model.norm = nn.BatchNorm1d(4)
    for block in model.blocks:
        block.parents = [model]
    x = leaf(6, 4)
    expected = torch.autograd.grad(plain(model.blocks, x).sum(), x)[0]
    out = apply_blocks(model.blocks, x, hooks=[Checkpoint()])
    model.norm(out.detach())
    out.sum().backward()
    assert model.norm.num_batches_tracked == 1
    assert torch.equal(x.grad, expected)


class Model(nn.Module):
    """Blocks that are methods of their model, or functions that close over it."""

    def __init__(self, run, how):
        super().__init__()
        self.run, self.how, self.calls = run, how, 0
        self.first, self.second = (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            Layer(dropout=0.2),
        )
        self.head = nn.BatchNorm1d(4)

    def one(self, x):
        self.calls += 1
        return self.inner(x) / self.calls

    def inner(self, x):
        return torch.tanh(self.first(x))

    def two(self, x):
        return self.second(x).sin()

    def forward(self, x):
        if self.how == "methods":
            blocks = [self.one, self.two]
        elif self.how == "lambdas":
            blocks = [lambda x: self.one(x), lambda x: self.second(x).sin()]
        else:
            blocks = [lambda x, name=name: getattr(self, name)(x) for name in ("one", "two")]
        return self.head(self.run(blocks, x))


@pytest.mark.parametrize("how", ["methods", "lambdas", "getattr"])
def test_parts_of_the_model_as_blocks(how):
    def step(run):
        model = Model(run, how)
        xs = [leaf(6, 4, number=n) for n in range(2)]
        for x in xs:
            model(x).square().sum().backward()
        return (
            [(n, p.detach(), p.grad) for n, p in model.named_parameters()],
            dict(model.named_buffers()),
            model.calls,
            xs,
        )

    agree(step)


# ---- whole models and training loops ---------------------------------------------------------------------------------


@agrees
def test_skip_connections_through_a_shared_store(run):
    """A U-Net whose blocks push to and pop from one list that they all hold."""

    class Down(nn.Module):
        def __init__(self, store):
            super().__init__()
            self.linear, self.store = nn.Linear(4, 4), store

        def forward(self, x):
            self.store.append(x)
            return torch.tanh(self.linear(x))

    class Up(Down):
        def forward(self, x):
            return torch.tanh(self.linear(x) + self.store.pop())

    store, x = [], leaf(3, 4)
    blocks = [Down(store), Down(store), Up(store), Up(store)]
    run(blocks, x).square().sum().backward()
    return x, [block.linear for block in blocks], store


@agrees
def test_skip_connections_through_a_side_input(run):
    down, up = nn.Linear(4, 4), nn.Linear(4, 4)

    def push(x, store):
        store.append(x)
        return torch.tanh(down(x))

    def pull(x, store):
        return torch.tanh(up(x) + store.pop())

    store, x = [], leaf(3, 4)
    run([push, push, pull, pull], x, store).square().sum().backward()
    return x, down, up, store


@agrees
def test_dense_blocks_that_hand_on_a_growing_list(run):
    class Dense(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.linear = nn.Linear(4 * index, 4)

        def forward(self, features):
            return [*features, torch.relu(self.linear(torch.cat(features, -1)))]

    blocks, x = [Dense(index + 1) for index in range(3)], leaf(3, 4)
    torch.cat(run(blocks, [x]), -1).square().sum().backward()
    return blocks, x


@agrees
def test_residual_blocks_in_place(run):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 3, padding=1, bias=False)
            self.norm, self.activation = nn.BatchNorm2d(3), nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.norm(self.convolution(x))
            y += x
            return self.activation(y)

    blocks, x = [Residual() for _ in range(3)], leaf(2, 3, 5, 5)
    for _ in range(2):
        run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_router_that_balances_its_load(run):
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = (
                nn.Linear(4, 3),
                nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
            )
            self.load, self.bias = nn.Buffer(torch.zeros(3)), nn.Buffer(torch.zeros(3))
            self.auxiliary = None

        def forward(self, x):
            probability = (self.gate(x) + self.bias).softmax(-1)
            pick = probability.argmax(-1)
            self.load += torch.bincount(pick, minlength=3)
            self.auxiliary = (probability.mean(0) * self.load / self.load.sum()).sum()
            self.bias = self.bias + 0.1 * torch.sign(self.load.mean() - self.load)
            return x + torch.tanh(
                torch.stack([self.experts[int(k)](row) for k, row in zip(pick, x, strict=True)])
            )

    blocks, xs = [Router(), Router()], [leaf(5, 4, number=n) for n in range(2)]
    for x in xs:
        out = run(blocks, x)
        (out.square().sum() + sum(block.auxiliary for block in blocks)).backward()
    return blocks, xs


@agrees
def test_two_networks_against_each_other(run):
    generator, critic = layers(2, dropout=0.1), layers(2)
    steps = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
    losses = []
    for number in range(2):
        fake = run(generator, leaf(3, 4, number=number))
        loss = run(critic, fake.detach()).square().mean()
        steps[1].zero_grad()
        loss.backward()
        steps[1].step()
        critic.requires_grad_(False)
        score = -run(critic, fake).mean()
        steps[0].zero_grad()
        score.backward()
        steps[0].step()
        critic.requires_grad_(True)
        losses.append((loss.detach(), score.detach()))
    return losses, generator, critic


@agrees
def test_a_teacher_that_follows_its_student(run):
    student, teacher = layers(2, dropout=0.1), layers(2).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    losses = []
    for number in range(3):
        x = leaf(3, 4, number=number, grad=False)
        with torch.no_grad():
            target = run(teacher, x)
        loss = (run(student, x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    return losses, student, teacher


@agrees
def test_embeddings_tied_to_the_output(run):
    table = nn.Embedding(7, 4)
    blocks = [table, *layers(2), lambda hidden: hidden @ table.weight.t()]
    run(blocks, torch.tensor([1, 2, 3])).square().sum().backward()
    return table, blocks[1]


@agrees
def test_gradients_arrive_in_the_same_order(run):
    order, blocks, x = [], layers(3), leaf(3, 4)
    for index, parameter in enumerate(blocks.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: order.append(index))
    run(blocks, x).sum().backward()
    return order, [p.grad for p in blocks.parameters()], x


@agrees
def test_functional_call_with_other_buffers(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)
            )

        def forward(self, x):
            return run(self.blocks, x)

    net = Net()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    out = torch.func.functional_call(net, (parameters, buffers), (leaf(6, 4),))
    out.square().sum().backward()
    return out, parameters, buffers, dict(net.named_buffers())


@agrees
def test_a_forward_that_replaces_itself(run):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def first(self, x):
            self.forward = self.later
            return torch.tanh(self.linear(x))

        def later(self, x):
            return torch.sin(self.linear(x)).exp()

        def forward(self, x):
            return self.first(x)

    blocks, x = [Changes(), Changes()], leaf(3, 4)
    for _ in range(2):
        run(blocks, x).sum().backward()
    return [block.linear for block in blocks], x


# ---- x of unusual classes --------------------------------------------------------------------------------------------


class Strict:
    """Cannot be compared, hashed, asked for its truth, or changed."""

    __hash__ = None

    def __init__(self, x):
        object.__setattr__(self, "x", x)

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def __getattr__(self, name):
        raise AttributeError(name)

    def __eq__(self, other):
        raise TypeError("no comparison")

    def __bool__(self):
        raise TypeError("no truth")

    def __len__(self):
        return 0


def batch_encoding(x):
    from transformers import BatchEncoding

    return BatchEncoding({"x": x})


def read(value):
    return value.x if isinstance(value, Strict) else value["x"]


@pytest.mark.parametrize(
    "kind",
    [Strict, batch_encoding, lambda x: collections.UserDict(x=x)],
    ids=["strict", "BatchEncoding", "UserDict"],
)
def test_x_of_unusual_classes(kind):
    def step(run):
        x = leaf(3, 4)
        read(
            run([lambda value: kind(torch.tanh(read(value) * 2).exp())] * 2, kind(x))
        ).sum().backward()
        return x

    agree(step)


@agrees
def test_jagged_tensors(run):
    x = leaf(5, 4)
    jagged = torch.nested.nested_tensor_from_jagged(x * 1.0, torch.tensor([0, 2, 5]))
    out = run([lambda t: torch.sin(t * 2), lambda t: t.exp()], jagged)
    out.values().sum().backward()
    return out.values(), x


# ---- autograd's further ways inside of a block -----------------------------------------------------------------------


def with_vjp(x):
    value, pull = torch.func.vjp(torch.sin, x)
    return pull(value)[0].exp()


def with_jvp(x):
    return torch.func.jvp(torch.sin, (x,), (x * 2,))[1].exp()


def with_hessian(x):
    return torch.func.vmap(torch.func.hessian(lambda row: row.sin().prod()))(x).sum(-1).exp()


def with_dual_numbers(x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent
    return tangent.exp()


@pytest.mark.filterwarnings("ignore:.*jit.script.*")  # of torch itself
@pytest.mark.parametrize(
    "block", [with_vjp, with_jvp, with_hessian, with_dual_numbers], ids=lambda f: f.__name__
)
def test_derivatives_inside_of_a_block(block):
    def step(run):
        x = leaf(3, 4)
        run([torch.sin, block, block], x).sum().backward()
        return x

    agree(step)


@agrees
def test_reversible_blocks(run):
    """A function of its own that computes its gradient by a backward inside of its backward."""

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.layer = layer
            ctx.save_for_backward(x)
            with torch.no_grad():
                return layer(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                ctx.layer(x).backward(grad)
            return x.grad, None

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return torch.tanh(Reversible.apply(x, self.layer))

    blocks, x = [Block(), Block()], leaf(3, 4)
    run(blocks, x * 1.0).sum().backward()
    return blocks, x


@agrees
def test_modes_around_the_forward_and_the_step(run):
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    blocks, x = layers(2, dropout=0.1), leaf(3, 4)
    with Looks():
        loss = run(blocks, x).sum()
    loss.backward()
    with FlopCounterMode(display=False):
        run(blocks, x).sum().backward()
    return blocks, x
