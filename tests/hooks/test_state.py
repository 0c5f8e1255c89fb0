"""`StateSnapshot`: the recompute sees what the forward saw, and leaves no trace."""

import collections
import gc
import re
import types
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from blockhooks import Checkpoint, apply_blocks, attach
from tests.agree import Layer, agree, agrees, layers, leaf, no_trace, plain, through
from tests.unit.test_memory import profiled_peak


def train(run, blocks, steps=2, width=4, rows=6):
    """Some steps of SGD; what a model has become after them tells of every error in between."""
    parameters = list(dict.fromkeys(p for block in blocks for p in block.parameters()))
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = run(blocks, leaf(rows, width, number=number)).square().sum()
        with no_trace(list(blocks)):
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(blocks)


# ---- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 1.0, None], ids=str)
def test_batch_norm_counts_a_batch_once(momentum):
    def step(run):
        blocks = [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.9), nn.Tanh())
            for _ in range(3)
        ]
        told = train(run, blocks)
        for block in blocks:
            block.eval()
        return told, run(blocks, leaf(2, 4))

    agree(step)


@agrees
def test_batch_norm_whose_momentum_is_turned_up_late(run):
    """Its statistics change without a new version of the buffers."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.0)) for _ in range(3)]
    train(run, blocks, steps=2)
    for block in blocks:
        block[1].momentum = 0.3
    return train(run, blocks, steps=1)


def test_batch_norm_without_running_statistics():
    def step(run):
        return train(
            run, [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))] * 2
        )

    agree(step)


@agrees
def test_other_norms_with_statistics(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(
                [
                    nn.InstanceNorm1d(3, track_running_stats=True),
                    nn.SyncBatchNorm(3).eval(),
                    nn.GroupNorm(1, 3),
                ]
            )
            self.lazy = nn.BatchNorm1d(3)

        def forward(self, x):
            for norm in self.norms:
                x = torch.tanh(norm(x))
            return self.lazy(x)

    blocks = [Block(), Block()]
    loss = run(blocks, leaf(4, 3, 5)).square().sum()
    with no_trace(blocks):
        loss.backward()
    return blocks


@agrees
def test_micro_batches_forward_forward_backward_backward(run):
    blocks = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh())
        for _ in range(3)
    ]
    xs = [leaf(6, 4, number=n) for n in range(3)]
    losses = [run(blocks, x).square().sum() for x in xs]
    for loss in losses:
        loss.backward()
    return blocks, xs


@agrees
def test_micro_batches_backward_in_the_other_order(run):
    blocks = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh())
        for _ in range(3)
    ]
    xs = [leaf(6, 4, number=n) for n in range(3)]
    losses = [run(blocks, x).square().sum() for x in xs]
    for loss in reversed(losses):
        loss.backward()
    return blocks, xs


@agrees
def test_eval_between_forward_and_backward(run):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(2)]
    x = leaf(6, 4)
    loss = run(blocks, x).square().sum()
    for block in blocks:
        block.eval()
    run(blocks, leaf(6, 4, number=3))
    with no_trace(blocks):
        loss.backward()
    return blocks, x


@agrees
def test_training_flag_that_the_forward_turns(run):
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.4)

        def forward(self, x):
            x = torch.tanh(self.dropout(self.linear(x)))
            self.dropout.train(not self.dropout.training)
            return x

    return train(run, [Turns(), Turns()], steps=3)


@agrees
def test_codebook_of_moving_averages(run):
    """Vector quantisation: cluster sizes and sums are moved in place, the codes are computed from them."""

    class Quantize(nn.Module):
        def __init__(self, codes=5, width=4):
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.register_buffer("codes", torch.randn(codes, width))
            self.register_buffer("size", torch.ones(codes))
            self.register_buffer("total", self.codes.clone())
            self.register_buffer("started", torch.tensor(False))

        def forward(self, x):
            x = self.linear(x)
            if not self.started:
                self.codes.data.copy_(x[: len(self.codes)].detach())
                self.total.data.copy_(self.codes)
                self.started.fill_(True)
            pick = torch.cdist(x, self.codes).argmin(-1)
            chosen = nn.functional.one_hot(pick, len(self.codes)).float()
            quantized = chosen @ self.codes
            if self.training:
                with torch.no_grad():
                    self.size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                    self.total.mul_(0.9).add_(chosen.t() @ x, alpha=0.1)
                    self.codes.copy_(self.total / self.size.clamp(min=1e-3)[:, None])
            return x + (quantized - x).detach() + torch.tanh(x)

    return train(run, [Quantize() for _ in range(2)], steps=4)


@agrees
def test_buffers_replaced_by_new_tensors(run):
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x.mean(0).detach()
            return torch.tanh(self.linear(x) * self.mean) + x

    return train(run, [Replaces() for _ in range(2)], steps=3)


@agrees
def test_buffer_changed_by_data(run):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            self.scale.data.mul_(0.5)
            return torch.tanh(self.linear(x) * self.scale) + x

    return train(run, [Hidden() for _ in range(2)], steps=5)


@agrees
def test_buffer_whose_data_is_replaced(run):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            self.scale.data = self.scale.data * 0.5
            return torch.tanh(self.linear(x) * self.scale) + x

    return train(run, [Hidden() for _ in range(2)], steps=5)


@agrees
def test_buffer_changed_for_the_first_time_in_a_later_step(run):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                self.scale.mul_(0.5)
            return torch.tanh(self.linear(x) * self.scale) + x

    return train(run, [Late() for _ in range(2)], steps=6)


@agrees
def test_buffers_and_modules_made_in_the_forward(run):
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if not hasattr(self, "first"):
                self.register_buffer("first", x.detach().mean(0))
                self.added = nn.Dropout(0.2)
                self.names = ["made"]
            return x + self.added(torch.tanh(self.linear(x) + self.first))

    blocks = [Makes() for _ in range(3)]
    return train(run, blocks, steps=2)


@agrees
def test_lazy_modules(run):
    blocks = [nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh()) for _ in range(3)]
    xs = [leaf(6, 4, number=n) for n in range(2)]
    for x in xs:
        run(blocks, x).square().sum().backward()
    return blocks, xs


# ---- parameters ------------------------------------------------------------------------------------------------------


@agrees
def test_weights_clipped_in_the_forward(run):
    class Clipped(nn.Module):
        def __init__(self, by_data):
            super().__init__()
            self.linear, self.by_data = nn.Linear(4, 4), by_data

        def forward(self, x):
            if self.by_data:
                self.linear.weight.data.clamp_(-0.2, 0.2)
            else:
                with torch.no_grad():
                    self.linear.weight.clamp_(-0.2, 0.2)
            return torch.tanh(self.linear(x)) + x

    return train(run, [Clipped(True), Clipped(False)], steps=3)


@agrees
def test_weights_changed_by_an_optimizer_in_every_forward(run):
    """As codebooks are that learn while they quantize."""

    class Learns(Layer):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(3, 4))
            self.optimizer = torch.optim.SGD([self.codes], lr=0.1, momentum=0.9)

        def forward(self, x):
            x = super().forward(x)
            nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
            (self.codes[nearest] - x.detach()).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return x * self.codes[nearest]

    return train(run, [Learns() for _ in range(3)], steps=4)


@agrees
def test_weights_scaled_in_every_forward(run):
    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
            return torch.tanh(self.linear(x)) + x

    return train(run, [Decays() for _ in range(3)], steps=3)


@agrees
def test_weight_used_before_the_forward_changes_it(run):
    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.gain = nn.Parameter(torch.randn(4))

        def forward(self, x):
            y = torch.tanh(x * self.gain)
            with torch.no_grad():
                self.weight.mul_(0.9)
            return x + torch.sin(y @ self.weight)

    return train(run, [Decays() for _ in range(2)], steps=3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@agrees
def test_old_style_norms_of_weights(run):
    blocks = [
        nn.Sequential(
            nn.utils.weight_norm(nn.Linear(4, 4)),
            nn.Tanh(),
            nn.utils.spectral_norm(nn.Linear(4, 4)),
            nn.Tanh(),
        )
        for _ in range(2)
    ]
    x = leaf(6, 4)
    results = []
    for _ in range(3):
        loss = run(blocks, x).square().sum()
        loss.backward()
        results.append(loss.detach())
    return results, x, [(dict(b.named_parameters()), dict(b.named_buffers())) for b in blocks]


@agrees
def test_parametrizations(run):
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

    def block():
        linear = parametrizations.spectral_norm(nn.Linear(4, 4), n_power_iterations=2)
        other = nn.Linear(4, 4)
        parametrize.register_parametrization(other, "weight", Symmetric())
        return nn.Sequential(
            linear, nn.Tanh(), other, parametrizations.weight_norm(nn.Linear(4, 4))
        )

    blocks = [block() for _ in range(2)]
    x = leaf(6, 4)
    for _ in range(2):
        run(blocks, x).square().sum().backward()
    return (
        x,
        [dict(b.named_parameters()) for b in blocks],
        [dict(b.named_buffers()) for b in blocks],
    )


@agrees
def test_cached_parametrizations_around_the_step(run):
    blocks = [parametrizations.orthogonal(nn.Linear(4, 4)) for _ in range(2)]
    x = leaf(6, 4)
    with parametrize.cached():
        loss = run(blocks, x).square().sum()
    loss.backward()
    return x, [dict(b.named_parameters()) for b in blocks]


@agrees
def test_functional_call_puts_other_parameters_in_place(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(layers(3, dropout=0.2))

        def forward(self, x):
            return run(self.blocks, x)

    net = Net()
    others = [
        {name: (p.detach() * scale).requires_grad_() for name, p in net.named_parameters()}
        for scale in (0.5, 2.0)
    ]
    x = leaf(3, 4)
    outs = [torch.func.functional_call(net, other, (x,)) for other in others]
    for out in outs:
        out.square().sum().backward()
    return outs, others, x, net


@agrees
def test_requires_grad_turned_between_forward_and_backward(run):
    blocks = layers(3)
    blocks[1].up.requires_grad_(False)
    x = leaf(3, 4)
    loss = run(blocks, x).square().sum()
    blocks[1].up.requires_grad_(True)
    blocks[0].down.requires_grad_(False)
    loss.backward()
    return blocks, x


@agrees
def test_parameter_replaced_between_forward_and_backward(run):
    blocks = layers(2)
    x = leaf(3, 4)
    old = blocks[0].up.weight
    loss = run(blocks, x).square().sum()
    blocks[0].up.weight = nn.Parameter(torch.zeros(8, 4))
    blocks[1].down = nn.Linear(8, 4)
    loss.backward()
    return blocks, x, old


@agrees
def test_model_moved_to_another_dtype_between_forward_and_backward(run):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())]
    x = leaf(6, 4)
    out = run(blocks, x)
    out.square().sum().backward()
    grads = [p.grad.clone() for p in blocks[0].parameters()]
    blocks[0].double()
    run(blocks, x.double()).square().sum().backward()
    return grads, blocks, x


# ---- attributes ------------------------------------------------------------------------------------------------------


class Holds(nn.Module):
    """Calls ``use(self, x)``, which reads and changes attributes and gives a factor."""

    def __init__(self, use, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__.update(attributes)
        self.use = use

    def forward(self, x):
        factor = self.use(self, x)
        return x + torch.tanh(self.linear(x) * factor)


class Slotted:
    __slots__ = ("count", "seen")

    def __init__(self):
        self.count, self.seen = 0, []


class Counter:
    def __init__(self):
        self.count, self.inner = 0, types.SimpleNamespace(total=0.0, kept=None)


def count(self, x):
    self.count += 1
    return self.count


def count_in_slots(self, x):
    self.slotted.count += 1
    self.slotted.seen.append(self.slotted.count)
    return self.slotted.count


def count_in_object(self, x):
    self.counter.count += 1
    self.counter.inner.total += 0.5
    self.counter.inner.kept = x
    return self.counter.count + self.counter.inner.total


def fill_deque(self, x):
    self.recent.append(float(x.detach().mean()))
    return sum(self.recent) + len(self.recent)


def fill_set(self, x):
    self.seen.add(len(self.seen))
    return len(self.seen)


def fill_defaultdict(self, x):
    self.counts["calls"] += 1
    self.lists[self.counts["calls"]].append("here")
    return len(self.lists)


def count_with_counter(self, x):
    self.tally.update(["a", "b"])
    return self.tally["a"]


def array_in_place(self, x):
    self.array += 1
    return float(self.array.sum())


def array_in_list_in_place(self, x):
    self.arrays[0][1] *= 2
    return float(self.arrays[0].sum())


def tensor_in_place(self, x):
    self.tensor.mul_(0.5)
    return self.tensor


def tensor_by_data(self, x):
    self.tensor.data.mul_(0.5)
    return self.tensor


def tensor_replaced(self, x):
    self.tensor = self.tensor + x.detach().mean()
    return self.tensor


def tensor_kept_with_graph(self, x):
    previous, self.tensor = self.tensor, (x * 2).mean()
    return previous.detach() + self.tensor


def tensors_in_list_in_place(self, x):
    self.tensors[0].add_(1)
    self.tensors[1].data.add_(1)
    return self.tensors[0] + self.tensors[1]


def tensors_in_dict_replaced(self, x):
    self.named["mean"] = x.detach().mean(0)
    self.named["calls"] = self.named.get("calls", torch.zeros(())) + 1
    return self.named["calls"]


def tensor_in_dict_in_place(self, x):
    self.named["sum"] += x.detach().mean(0)
    return self.named["sum"]


def tensor_in_object_in_place(self, x):
    self.holder.inner.value.add_(1)
    return self.holder.inner.value


def nested(self, x):
    self.deep["list"][0]["tuple"][1].append(1)
    return len(self.deep["list"][0]["tuple"][1])


def schedule(self, x):
    return next(self.steps)


def cycle(self, x):
    self.ring[0] += 1
    return self.ring[1][0]


def bytes_in_place(self, x):
    self.data[0] += 1
    return self.data[0]


ATTRIBUTES = [
    (count, lambda: {"count": 0}),
    (count_in_slots, lambda: {"slotted": Slotted()}),
    (count_in_object, lambda: {"counter": Counter()}),
    (fill_deque, lambda: {"recent": collections.deque(maxlen=3)}),
    (fill_set, lambda: {"seen": set()}),
    (
        fill_defaultdict,
        lambda: {"counts": collections.defaultdict(int), "lists": collections.defaultdict(list)},
    ),
    (count_with_counter, lambda: {"tally": collections.Counter()}),
    (array_in_place, lambda: {"array": numpy.zeros(3)}),
    (array_in_list_in_place, lambda: {"arrays": [numpy.ones(3)]}),
    (tensor_in_place, lambda: {"tensor": torch.ones(4)}),
    (tensor_by_data, lambda: {"tensor": torch.ones(4)}),
    (tensor_replaced, lambda: {"tensor": torch.ones(4)}),
    (tensor_kept_with_graph, lambda: {"tensor": torch.ones(())}),
    (tensors_in_list_in_place, lambda: {"tensors": [torch.ones(4), torch.ones(4)]}),
    (tensors_in_dict_replaced, lambda: {"named": {}}),
    (tensor_in_dict_in_place, lambda: {"named": {"sum": torch.zeros(4)}}),
    (
        tensor_in_object_in_place,
        lambda: {
            "holder": types.SimpleNamespace(inner=types.SimpleNamespace(value=torch.zeros(4)))
        },
    ),
    (nested, lambda: {"deep": {"list": [{"tuple": (0, [])}]}}),
    (schedule, lambda: {"steps": iter([1.0, 0.5, 0.25, 0.125])}),
    (bytes_in_place, lambda: {"data": bytearray(2)}),
]


@pytest.mark.parametrize(
    ("use", "attributes"), ATTRIBUTES, ids=[use.__name__ for use, _ in ATTRIBUTES]
)
def test_attribute(use, attributes):
    def step(run):
        return train(run, [Holds(use, **attributes()) for _ in range(3)], steps=3)

    agree(step)


# Plain autograd refuses to go back to a tensor that a later micro-batch has changed, or cannot see it.
LATER = [
    (use, a)
    for use, a in ATTRIBUTES
    if not re.search("tensors?_.*(in_place|by_data)", use.__name__)
]


@pytest.mark.parametrize(("use", "attributes"), LATER, ids=[use.__name__ for use, _ in LATER])
def test_attribute_of_micro_batches(use, attributes):
    def step(run):
        blocks = [Holds(use, **attributes()) for _ in range(3)]
        xs = [leaf(3, 4, number=n) for n in range(3)]
        losses = [run(blocks, x).square().sum() for x in xs]
        for loss in losses:
            loss.backward()
        return blocks, xs

    agree(step)


class Sealed(numpy.ndarray):
    """As a file in memory is: an array that is not copied."""


class Index:
    """Stands for a search index of compiled code: `found` cannot be looked into, and is as good as what is added."""

    def __init__(self):
        self.entries = 0
        self.found = numpy.zeros(4).view(Sealed)

    def add(self, x):
        self.entries += 1
        self.found[self.entries % 4] += float(x.detach().mean())
        return 1 + float(self.found.sum())


@agrees
def test_object_around_what_cannot_be_looked_into(run):
    def use(self, x):
        return self.index.add(x)

    return train(run, [Holds(use, index=Index()) for _ in range(2)], steps=3)


@agrees
def test_module_around_what_cannot_be_looked_into(run):
    return train(run, [Holds(Index.add, **vars(Index())) for _ in range(2)], steps=3)


@agrees
def test_side_input_around_what_cannot_be_looked_into(run):
    class Remembers(Layer):
        def forward(self, x, index):
            return super().forward(x) * index.add(x)

    index, blocks, x = Index(), [Remembers() for _ in range(3)], leaf(3, 4)
    for _ in range(3):
        run(blocks, x, index).square().sum().backward()
    return index, blocks, x


def test_what_cannot_be_looked_into_and_is_left_alone_costs_no_memory():
    block = Holds(lambda self, x: float(self.index.found.sum()), index=Index())
    model = nn.Sequential(block)
    with attach(model, [Checkpoint()], blocks=Holds) as handle:
        model(leaf(3, 4)).sum().backward()
        assert handle.report().stacks[0]["blocks"][0]["done"] == "recomputed"


@agrees
def test_attribute_reaching_itself(run):
    block = Holds(cycle)
    block.ring = [0, None]
    block.ring[1] = block.ring
    return train(run, [block], steps=3)


@agrees
def test_attribute_deleted_in_the_forward(run):
    def use(self, x):
        if hasattr(self, "first"):
            del self.first
            return 2.0
        return 1.0

    return train(run, [Holds(use, first=True) for _ in range(2)], steps=2)


@agrees
def test_attribute_shared_by_blocks(run):
    """A tracker, of which the user holds another reference."""
    tracker = Counter()
    tracker.losses = []

    def use(self, x):
        self.tracker.losses.append(x.square().mean())
        self.tracker.count += 1
        return 1.0 / self.tracker.count

    blocks = [Holds(use, tracker=tracker) for _ in range(3)]
    x = leaf(3, 4)
    out = run(blocks, x)
    (out.sum() + sum(tracker.losses)).backward()
    return tracker, blocks, x


@agrees
def test_auxiliary_loss_on_the_module(run):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.linear, self.auxiliary = nn.Linear(4, 4), nn.Linear(4, 4), None

        def forward(self, x):
            gate = self.gate(x).softmax(-1)
            self.auxiliary = gate.mean(0).square().sum()
            return x + gate * torch.tanh(self.linear(x))

    blocks = [Routed() for _ in range(3)]
    x = leaf(3, 4)
    out = run(blocks, x)
    (out.square().sum() + sum(block.auxiliary for block in blocks)).backward()
    return blocks, x


@agrees
def test_module_with_slots_and_plain_callable_objects(run):
    class Block:
        __slots__ = ("count", "linear")

        def __init__(self):
            self.linear, self.count = nn.Linear(4, 4), 0

        def __call__(self, x):
            self.count += 1
            return x + torch.tanh(self.linear(x) / self.count)

    class Open:
        def __init__(self):
            self.linear, self.count, self.history = nn.Linear(4, 4), 0, []

        def __call__(self, x):
            self.count += 1
            self.history.append(self.count)
            return x + torch.tanh(self.linear(x) / len(self.history))

        def method(self, x):
            self.count += 1
            return x * self.count

    blocks = [Block(), Open(), Open().method, Block()]
    xs = [leaf(3, 4, number=n) for n in range(2)]
    losses = [run(blocks, x).square().sum() for x in xs]
    for loss in losses:
        loss.backward()
    return blocks, xs


@agrees
def test_block_used_twice_in_a_stack(run):
    blocks = [Holds(count, count=0), Layer(dropout=0.2)]
    norm = nn.BatchNorm1d(4)
    return train(run, [blocks[0], norm, blocks[1], blocks[0], norm, blocks[1]], steps=3)


@agrees
def test_submodule_shared_by_blocks(run):
    shared = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Holds(count, count=0))
    return train(run, [nn.Sequential(shared, nn.Tanh()) for _ in range(3)])


@agrees
def test_half_done_changes_at_the_end_of_a_recompute(run):
    class Balanced(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.depth, self.stack = nn.Linear(4, 4), 0, []

        def forward(self, x):
            self.depth += 1
            self.stack.append(x)
            try:
                return torch.sigmoid(self.linear(x))
            finally:
                self.stack.pop()
                self.depth -= 1

    return train(run, [Balanced() for _ in range(3)])


@agrees
def test_class_attribute_counted_per_instance(run):
    class Counted(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            self.calls += 1
            return torch.tanh(self.linear(x) / self.calls) + x

    return train(run, [Counted() for _ in range(2)], steps=3)


@agrees
def test_config_changed_between_micro_batches(run):
    def use(self, x):
        return self.config["scale"] * self.mask

    blocks = [Holds(use, config={"scale": 1.0}, mask=None) for _ in range(2)]
    losses, xs = [], [leaf(3, 4, number=n) for n in range(3)]
    for number, x in enumerate(xs):
        for block in blocks:
            block.config["scale"] = 1.0 + number
            block.mask = torch.arange(4.0) + number
        losses.append(run(blocks, x).sum())
    for loss in losses:
        with no_trace(blocks):
            loss.backward()
    return blocks, xs


# ---- side inputs -----------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    """Attention over what a cache holds; ``update`` says how the cache is kept."""

    def __init__(self, index, update):
        super().__init__()
        self.query, self.key, self.index, self.update = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            index,
            update,
        )

    def forward(self, x, cache=None):
        keys = self.update(cache, self.index, self.key(x))
        return x + (self.query(x) @ keys.transpose(0, 1)).softmax(-1) @ keys


class ListCache:
    def __init__(self):
        self.keys, self.length = [torch.ones(1, 4), torch.zeros(1, 4)], 1

    def update(self, index, keys):
        self.keys[index] = torch.cat([self.keys[index], keys])
        self.length = len(self.keys[index])
        return self.keys[index]


class LayerCache:
    __slots__ = ("keys",)

    def __init__(self):
        self.keys = None

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys


class ObjectCache:
    def __init__(self):
        self.layers = [LayerCache(), LayerCache()]

    def update(self, index, keys):
        return self.layers[index].update(keys)


class GrowingCache:
    """Layers are appended as they come."""

    def __init__(self):
        self.layers = []

    def update(self, index, keys):
        if index == len(self.layers):
            self.layers.append([])
        self.layers[index].append(keys)
        return torch.cat(self.layers[index])


class StaticCache:
    def __init__(self):
        self.keys = [torch.zeros(8, 4), torch.zeros(8, 4)]
        self.filled = [0, 0]

    def update(self, index, keys):
        start = self.filled[index]
        place = torch.arange(start, start + len(keys))
        self.keys[index].index_copy_(0, place, keys.detach())
        self.filled[index] += len(keys)
        return self.keys[index].clone() + keys.sum()


class DictCache(dict):
    def update(self, index, keys):
        self[index] = torch.cat([self[index], keys]) if index in self else keys
        return self[index]


class TupleCache:
    def __init__(self):
        self.pairs = ((torch.ones(1, 4), 1), (torch.ones(1, 4), 1))

    def update(self, index, keys):
        pairs = list(self.pairs)
        pairs[index] = (torch.cat([pairs[index][0], keys]), pairs[index][1] + len(keys))
        self.pairs = tuple(pairs)
        return pairs[index][0]


CACHES = [ListCache, ObjectCache, GrowingCache, StaticCache, DictCache, TupleCache]


@pytest.mark.parametrize("kind", CACHES, ids=[c.__name__ for c in CACHES])
@pytest.mark.parametrize("keyword", [True, False], ids=["keyword", "positional"])
def test_cache_as_a_side_input(kind, keyword):
    def step(run):
        blocks = [Attend(i, lambda cache, i, keys: cache.update(i, keys)) for i in range(2)]
        cache, x = kind(), leaf(3, 4)
        out = run(blocks, x, cache=cache) if keyword else run(blocks, x, cache)
        with no_trace(cache, blocks):
            out.square().sum().backward()
        return out, cache, blocks, x

    agree(step)


@pytest.mark.parametrize("kind", CACHES, ids=[c.__name__ for c in CACHES])
def test_cache_of_several_calls_and_one_backward(kind):
    def step(run):
        blocks = [Attend(i, lambda cache, i, keys: cache.update(i, keys)) for i in range(2)]
        cache, x = kind(), leaf(3, 4)
        outs = [run(blocks, part, cache=cache) for part in x.split(1)]
        with no_trace(cache, blocks):
            torch.cat(outs).square().sum().backward()
        return outs, cache, blocks, x

    agree(step)


@agrees
def test_cache_in_a_dict_of_side_inputs(run):
    blocks = [Attend(i, lambda given, i, keys: given["cache"].update(i, keys)) for i in range(2)]
    cache, x = ListCache(), leaf(3, 4)
    run(blocks, x, cache={"cache": cache, "other": None}).sum().backward()
    return cache, blocks, x


@agrees
def test_transformers_cache(run):
    from transformers.cache_utils import DynamicCache

    class Block(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index = index
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, past_key_values):
            keys, values = past_key_values.update(
                self.key(x)[:, None], self.value(x)[:, None], self.index
            )
            return (
                x
                + (self.query(x)[:, None] @ keys.transpose(-1, -2)).softmax(-1).matmul(values)[:, 0]
            )

    blocks, cache, x = [Block(0), Block(1)], DynamicCache(), leaf(2, 6, 4)
    outs = [run(blocks, part, past_key_values=cache) for part in x.split(3, dim=1)]
    with no_trace(cache):
        torch.cat(outs, 1).square().sum().backward()
    return outs, [(layer.keys, layer.values) for layer in cache.layers], blocks, x


@agrees
def test_side_list_collects_losses_with_graphs(run):
    class Collects(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, losses):
            y = torch.tanh(self.linear(x))
            losses.append(y.square().mean())
            return x + y * len(losses)

    blocks, losses, x = [Collects() for _ in range(3)], [], leaf(3, 4)
    out = run(blocks, x, losses)
    assert len(losses) == 3
    (out.square().sum() + sum(losses)).backward()
    assert len(losses) == 3
    return out, losses, blocks, x


@agrees
def test_side_tensor_changed_in_place_by_the_blocks(run):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, counter):
            counter += 1
            return torch.tanh(self.linear(x) * counter.item())

    blocks, counter, x = [Counts() for _ in range(3)], torch.zeros(()), leaf(3, 4)
    run(blocks, x, counter).sum().backward()
    return counter, blocks, x


@agrees
def test_side_array_changed_in_place_by_the_blocks(run):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, counter):
            counter += 1
            return torch.tanh(self.linear(x) * float(counter.sum()))

    blocks, counter, x = [Counts() for _ in range(3)], numpy.zeros(2), leaf(3, 4)
    run(blocks, x, counter).sum().backward()
    return counter, blocks, x


@agrees
def test_side_input_changed_by_its_owner_before_the_backward(run):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, settings, more):
            return torch.tanh(self.linear(x) * settings["scale"] * more.scale[0])

    settings, more = {"scale": 0.5}, types.SimpleNamespace(scale=[2.0])
    blocks, x = [Reads() for _ in range(3)], leaf(3, 4)
    loss = run(blocks, x, settings, more=more).sum()
    settings["scale"] = 7.0
    more.scale[0] = 9.0
    settings["new"] = 1
    with no_trace(settings, more):
        loss.backward()
    return settings, more, blocks, x


# ---- hooks of modules ------------------------------------------------------------------------------------------------


@agrees
def test_observing_forward_hooks_fire_once(run):
    blocks, log = layers(3, dropout=0.2), []
    for index, block in enumerate(blocks):
        block.up.register_forward_hook(lambda m, a, o, i=index: log.append((i, o.detach().clone())))
        block.register_forward_pre_hook(
            lambda m, a, i=index: log.append((i, a[0].detach().clone()))
        )
        block.register_forward_hook(
            lambda m, a, k, o, i=index: log.append(("kw", i)), with_kwargs=True, always_call=True
        )
    x = leaf(3, 4)
    with no_trace(blocks):
        run(blocks, x).square().sum().backward()
    return log, blocks, x


@agrees
def test_hooks_that_change_values_fire_again(run):
    blocks = layers(3, dropout=0.2)
    for block in blocks:
        block.up.register_forward_hook(lambda m, a, o: o * 1.5)
        block.down.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
    x = leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_hooks_that_collect_losses_with_graphs(run):
    blocks, losses = layers(3, dropout=0.2), []
    for block in blocks:
        block.up.register_forward_hook(lambda m, a, o: losses.append(o.square().exp().mean()))
    x = leaf(3, 4)
    out = run(blocks, x)
    (out.square().sum() + sum(losses)).backward()
    return losses, blocks, x


@agrees
def test_hook_that_removes_itself_after_its_first_call(run):
    class Once:
        def __init__(self, module):
            self.calls, self.handle = 0, module.register_forward_hook(self)

        def __call__(self, module, args, output):
            self.calls += 1
            self.handle.remove()
            return output * 2

    blocks = layers(3, dropout=0.1)
    hooks = [Once(block.up) for block in blocks]
    xs = [leaf(3, 4, number=n) for n in range(2)]
    losses = [run(blocks, x).square().sum() for x in xs]
    for loss in losses:
        with no_trace(blocks):
            loss.backward()
    return blocks, xs, [hook.calls for hook in hooks]


@agrees
def test_hook_added_between_forward_and_backward_is_not_called(run):
    blocks, log, x = layers(2), [], leaf(3, 4)
    loss = run(blocks, x).square().sum()
    for block in blocks:
        block.up.register_forward_hook(lambda m, a, o: log.append(1) or o * 3)
    loss.backward()
    assert not log
    return blocks, x


@agrees
def test_hook_removed_between_forward_and_backward_still_acts(run):
    blocks, x = layers(2), leaf(3, 4)
    handles = [block.up.register_forward_hook(lambda m, a, o: o * 3) for block in blocks]
    loss = run(blocks, x).square().sum()
    for handle in handles:
        handle.remove()
    with no_trace(blocks):
        loss.backward()
    return blocks, x


@agrees
def test_hooks_that_count_on_the_module(run):
    blocks, x = layers(2), leaf(3, 4)

    def before(module, args):
        module.calls += 1

    def after(module, args, output):
        module.mean.mul_(0.5).add_(output.detach().mean(0))
        return output * module.calls

    for block in blocks:
        block.up.register_buffer("mean", torch.zeros(8))
        block.up.calls = 0
        block.up.register_forward_pre_hook(before)
        block.up.register_forward_hook(after)
    for _ in range(3):
        run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_pre_hook_that_prepares_a_weight(run):
    """As old-style weight norms do: the hook sets an attribute that the forward reads."""

    class Prepared(nn.Module):
        def __init__(self):
            super().__init__()
            self.direction, self.length = (
                nn.Parameter(torch.randn(4, 4)),
                nn.Parameter(torch.ones(4)),
            )
            self.register_forward_pre_hook(self.prepare)

        @staticmethod
        def prepare(self, args):
            self.weight = self.direction / self.direction.norm(dim=0) * self.length

        def forward(self, x):
            return torch.tanh(x @ self.weight)

    blocks, x = [Prepared() for _ in range(2)], leaf(3, 4)
    for _ in range(2):
        run(blocks, x).square().sum().backward()
    return [dict(b.named_parameters()) for b in blocks], x


@agrees
def test_hooks_that_draw_random_numbers(run):
    blocks, log, x = layers(3, dropout=0.3), [], leaf(3, 4)
    for block in blocks:
        block.up.register_forward_hook(lambda m, a, o: log.append(torch.rand(2)))
    loss = run(blocks, x).square().sum()
    loss.backward()
    return log[:3], blocks, x


@agrees
def test_global_module_hooks(run):
    log, blocks, x = [], layers(2), leaf(3, 4)
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, o: log.append(type(m).__name__)
    )
    try:
        run(blocks, x).square().sum().backward()
    finally:
        handle.remove()
    return log, blocks, x


# ---- what is left alone ----------------------------------------------------------------------------------------------


def test_list_in_a_plain_functions_closure_is_the_users_own():
    seen = []

    def block(x):
        seen.append(1)
        return torch.tanh(x)

    apply_blocks([block], leaf(3), hooks=[Checkpoint()]).sum().backward()
    assert len(seen) == 2


def test_constant_buffers_are_not_copied_after_the_first_forwards():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(64, 4))

        def forward(self, x):
            return torch.sin(x * self.table[: len(x)])

    blocks = nn.ModuleList([Rotary()])
    x = leaf(3, 4)
    for _ in range(2):
        apply_blocks(blocks, x, hooks=[Checkpoint()]).sum().backward()
    from torch.utils._python_dispatch import TorchDispatchMode

    class Clones(TorchDispatchMode):
        sizes = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "clone" in str(function):
                self.sizes.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    with Clones() as clones:
        apply_blocks(blocks, x, hooks=[Checkpoint()]).sum().backward()
    assert 64 * 4 not in clones.sizes


def test_copies_and_pickles_of_modules_after_a_step():
    import copy
    import pickle

    blocks = layers(2)
    blocks[0].register_forward_hook(_observe)
    apply_blocks(blocks, leaf(3, 4), hooks=[Checkpoint()]).sum().backward()
    for other in (copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
        assert list(other.state_dict()) == list(blocks.state_dict())
        other.zero_grad()
        through([Checkpoint()])(other, leaf(3, 4)).sum().backward()
        for ours, theirs in zip(blocks.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def _observe(module, args, output):
    return None


def test_without_it_batch_norm_counts_twice():
    """The control: these tests could fail."""
    from blockhooks import HookChain

    norm = nn.BatchNorm1d(4)
    chain = HookChain([Checkpoint()], without=("StateSnapshot",))
    apply_blocks([norm], leaf(6, 4), hooks=chain).square().sum().backward()
    assert norm.num_batches_tracked == 2
    norm = nn.BatchNorm1d(4)
    plain([norm], leaf(6, 4)).square().sum().backward()
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "forward alone"])
def test_a_module_that_stores_what_it_computed_keeps_no_earlier_forward_alive(backward):
    class Stores(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last, self.kept = nn.Linear(4, 4), None, [None]

        def forward(self, x):
            self.last = torch.sigmoid(self.linear(x))
            self.kept[0] = self.last.exp()
            alive.append(weakref.ref(self.last))
            return x + self.last

    alive, blocks = [], [Stores(), Stores()]
    for number in range(4):
        loss = apply_blocks(blocks, leaf(3, 4, number=number), hooks=[Checkpoint()]).sum()
        if backward:
            loss.backward()
        del loss
        gc.collect()
        assert sum(reference() is not None for reference in alive) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_looking_for_changed_parameters_takes_little_memory(dtype):
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(256, 512, dtype=dtype) for _ in range(2))
    blocks[1] = nn.Linear(512, 256, dtype=dtype)
    x = torch.randn(2, 256, dtype=dtype)

    # All parameters are compared in forwards 1, 2, 4, ..., and not in the third.
    peaks = [profiled_peak(lambda: apply_blocks(blocks, x, hooks=[Checkpoint()])) for _ in range(4)]
    assert max(peaks) <= peaks[2] + 0.1 * blocks[0].weight.nbytes
