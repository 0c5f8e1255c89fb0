"""`VersionGuard`: what was changed in place between forward and backward is noticed, and named."""

import ctypes
import functools

import pytest
import torch
from torch import nn

from blockhooks import (
    Checkpoint,
    HookChain,
    RecomputeError,
    VersionGuard,
    apply_blocks,
    checkpoint,
    plan,
)
from tests.agree import agree, leaf, plain


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("nothing", None)

    def forward(self, x, shift=None, *, settings=None):
        x = self.mix(x) * self.mask
        x = x if shift is None else x + shift
        return x if settings is None else x * settings["scale"][0]


def change(tensor):
    with torch.no_grad():
        tensor.add_(1)


CHANGES = {
    "weight": (
        lambda b, s, k: b[1].mix[0].weight,
        r"parameter 'weight' of block 1 \(Block\)\.mix\.0 of shape \[4, 4\]",
    ),
    "buffer": (lambda b, s, k: b[1].mask, r"buffer 'mask' of block 1 \(Block\) of shape \[4\]"),
    "positional": (lambda b, s, k: s, r"a tensor of side input 0 of shape \[4\]"),
    "keyword": (
        lambda b, s, k: k["scale"][0],
        r"a tensor of the side input 'settings' of shape \[\]",
    ),
}


@pytest.mark.parametrize(("pick", "message"), CHANGES.values(), ids=CHANGES)
def test_the_error_names_what_was_changed(pick, message):
    blocks, shift, settings = [Block(), Block()], torch.ones(4), {"scale": [torch.ones(())]}
    out = apply_blocks(blocks, leaf(3, 4), shift, hooks=[Checkpoint()], settings=settings)
    change(pick(blocks, shift, settings))
    with pytest.raises(
        RecomputeError,
        match=rf"^block 1 \(Block\): {message} was modified in place between forward and backward "
        r"\(version \d+, expected \d+\), so the recompute would use other values than the forward\. "
        r"Run the backward before changing it \(step the optimizer after\), or change a copy\.$",
    ):
        out.sum().backward()


def test_an_optimizer_step_before_the_backward_is_an_error():
    blocks = nn.ModuleList([Block(), Block()])
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    apply_blocks(blocks, leaf(3, 4), hooks=[Checkpoint()]).sum().backward()
    out = apply_blocks(blocks, leaf(3, 4), hooks=[Checkpoint()])
    optimizer.step()
    with pytest.raises(RecomputeError, match="parameter 'weight' of block 1"):
        out.sum().backward()


def test_segments_of_several_blocks_name_the_block_too():
    blocks = [Block() for _ in range(4)]
    out = apply_blocks(blocks, leaf(3, 4), hooks=[Checkpoint(plan.every(2))])
    change(blocks[2].mix[0].bias)
    with pytest.raises(
        RecomputeError,
        match=r"^blocks 2\.\.3 \(Block\): parameter 'bias' of block 2 \(Block\)\.mix\.0",
    ):
        out.sum().backward()


def test_a_shared_module_outside_of_the_blocks_tree():
    shared = nn.Linear(4, 4)

    def block(x):
        return torch.tanh(shared(x))

    out = apply_blocks([block], leaf(3, 4), hooks=[Checkpoint()])
    change(shared.weight)
    with pytest.raises(RecomputeError, match=r"block 0 \(block\): parameter 'weight' of Linear"):
        out.sum().backward()


def test_what_the_forward_changes_itself_is_not_guarded():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(4))

        def forward(self, x):
            self.calls += 1
            return torch.tanh(self.linear(x)) / self.calls.detach().clone()

    def step(run):
        blocks, xs = [Counts() for _ in range(3)], [leaf(3, 4, number=n) for n in range(3)]
        losses = [run(blocks, x).sum() for x in xs]
        for loss in losses:
            loss.backward()
        return blocks, xs

    agree(step)


def test_a_weight_of_another_segment_may_change():
    blocks = [Block() for _ in range(2)]
    x = leaf(3, 4)
    one = apply_blocks(blocks[:1], x, hooks=[Checkpoint()])
    two = apply_blocks(blocks[1:], x, hooks=[Checkpoint()])
    change(blocks[1].mix[0].weight)
    one.sum().backward()
    with pytest.raises(RecomputeError, match="was modified in place"):
        two.sum().backward()


def test_what_can_be_reached_but_is_not_used_may_change():
    class Holder:
        def __init__(self):
            self.layers = [Block(), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))]
            self.table = torch.ones(4)

    def run_plainly(function, *args):
        return function(*args)

    def step(run):
        holder, x = Holder(), leaf(3, 4)

        def call(x, which):
            return holder.layers[which](x).sin()

        ck = run_plainly if run is plain else checkpoint
        y = ck(call, ck(call, x, 0), 1)
        change(holder.table)
        y.sum().backward()
        return [(p.detach(), p.grad) for layer in holder.layers for p in layer.parameters()], x

    agree(step)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("held", ["closure", "default", "partial", "container", "attribute"])
def test_a_tensor_that_a_function_holds(held, saved):
    table = torch.ones(4)

    def compute(x, table):
        return (x * table if saved else x + table).sin()

    class Callable:
        def __init__(self):
            self.table = table

        def __call__(self, x):
            return compute(x, self.table)

    function = {
        "closure": lambda x: compute(x, table),
        "default": lambda x, table=table: compute(x, table),
        "partial": functools.partial(compute, table=table),
        "container": lambda x, tables=({"t": table},): compute(x, tables[0]["t"]),
        "attribute": Callable(),
    }[held]
    y = checkpoint(function, leaf(3, 4))
    change(table)
    with pytest.raises(RecomputeError, match="modified in place between forward and backward"):
        y.sum().backward()


@pytest.mark.parametrize("call", [lambda block: block, lambda block: block.forward], ids=str)
def test_a_weight_that_a_kernel_reads_by_its_address(call):
    class ByAddress(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (x * ctypes.c_float.from_address(self.weight.data_ptr()).value).sin()

    block = ByAddress()
    y = checkpoint(call(block), leaf(3, 4))
    change(block.weight)
    with pytest.raises(RecomputeError, match=r"parameter 'weight' of .* was modified in place"):
        y.sum().backward()


def test_a_saved_tensor_that_nobody_can_reach():
    hidden = [torch.ones(4)]
    get = iter([hidden, hidden]).__next__

    def compute(x):
        return x * get()[0]

    y = checkpoint(compute, leaf(3, 4))
    change(hidden[0])
    with pytest.raises(RecomputeError, match="has been modified by an inplace operation"):
        y.sum().backward()


def test_a_block_that_catches_the_error_does_not_hide_it():
    table = torch.ones(4)

    def compute(x):
        try:
            return (x + table).sin()
        except RuntimeError:
            return x.sin()

    y = checkpoint(compute, leaf(3, 4))
    change(table)
    with pytest.raises(RecomputeError, match="a tensor in a closure of shape"):
        y.sum().backward()


def test_statistics_of_another_block_that_can_be_reached_may_change():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(Block(), nn.BatchNorm1d(4)) for _ in range(3))

        def forward(self, x, checkpoint):
            for i in range(3):
                x = checkpoint(lambda x, i=i: self.layers[i](x), x)
            return x

    def step(run):
        net, x = Net(), leaf(3, 4)
        for _ in range(2):
            net(x, checkpoint if run is not plain else plain_call).square().sum().backward()
        return net, x

    def plain_call(function, x):
        return function(x)

    agree(step)


def test_without_it_the_gradients_are_wrong_unnoticed():
    """The control, and the reason why it is in every chain."""
    x = leaf(3, 4)
    block = Block()
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    out = apply_blocks([block], x, hooks=HookChain([Checkpoint()], without=("VersionGuard",)))
    change(block.mix[0].bias)
    assert not torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_incremented_versions_are_changes():
    block = Block()
    out = apply_blocks([block], leaf(3, 4), hooks=[VersionGuard(), Checkpoint()])
    torch.autograd.graph.increment_version(block.mask)
    with pytest.raises(RecomputeError, match="buffer 'mask'"):
        out.sum().backward()
