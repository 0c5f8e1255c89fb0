"""`HookedBlocks`, `HookedBlock` and `Checkpointed`: modules in the place of a list of blocks, and of one block."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from blockhooks import (
    Checkpoint,
    Checkpointed,
    HookChain,
    HookedBlock,
    HookedBlocks,
    HookError,
    hookimpl,
)
from tests.agree import leaf


class Block(nn.Module):
    """A residual block with statistics, dropout, a counter, and all kinds of results."""

    kind = "residual"

    def __init__(self, width=4):
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.calls, self.tag = 0, "tag"

    def forward(self, x, mask=None, *, scale=1.0, full=False):
        self.calls += 1
        y = x + self.dropout(torch.tanh(self.norm(self.layer(x)))) * scale
        return (y, {"mask": mask}, self.calls) if full else y

    def twice(self):
        return self.tag * 2

    @property
    def width(self):
        return self.layer.weight.shape[0]


def blocks(count=3):
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


WAYS = {
    "Checkpointed": Checkpointed,
    "Checkpointed to the end": functools.partial(Checkpointed, early_stop=False, check="values"),
    "HookedBlock": functools.partial(HookedBlock, hooks=[Checkpoint()]),
    "HookedBlock without hooks": HookedBlock,
    "twice": lambda block: Checkpointed(Checkpointed(block)),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def wrap(request):
    return request.param


# ---- the block in all but its call --------------------------------------------------------------------------------


def test_names_and_keys_are_those_of_the_blocks(wrap):
    expected, found = nn.ModuleList(blocks()), nn.ModuleList(map(wrap, blocks()))
    for names in ("named_parameters", "named_buffers", "named_modules", "state_dict"):
        assert list(dict(getattr(found, names)())) == list(dict(getattr(expected, names)()))
    assert repr(found) == repr(expected)
    found.load_state_dict(expected.state_dict(), strict=True)
    expected.load_state_dict(found.state_dict(), strict=True)


def test_it_is_an_instance_of_the_blocks_class(wrap):
    hooked = wrap(Block())
    assert isinstance(hooked, Block)
    assert isinstance(hooked, HookedBlock)
    assert type(wrap(Block())) is type(hooked)


def test_attributes_and_methods_are_shared_in_both_directions(wrap):
    block = Block()
    hooked = wrap(block)
    assert (hooked.twice(), hooked.width, hooked.kind) == ("tagtag", 4, "residual")
    hooked.tag, hooked.extra = "new", nn.Linear(2, 2)
    assert block.tag == "new"
    assert "extra" in dict(block.named_children())
    block.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert "scale" in dict(hooked.named_parameters())
    del hooked.tag
    assert not hasattr(block, "tag")
    with pytest.raises(AttributeError, match="nothing"):
        hooked.nothing  # noqa: B018  (reading it is the test)


def test_what_the_block_overrides_is_its_own(wrap):
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            return super().train(False)

        def extra_repr(self):
            return "frozen"

    block = Frozen(nn.Linear(4, 4), nn.Dropout(0.5))
    hooked = wrap(block)
    hooked.train()
    assert not hooked.training
    assert not block[1].training
    assert (len(hooked), hooked[0], list(hooked)) == (2, block[0], list(block))
    assert repr(hooked) == repr(block)


def test_modes_kinds_and_flags_reach_the_block(wrap):
    block = Block()
    hooked = wrap(block)
    hooked.eval()
    assert not block.training
    assert not block.norm.training
    hooked.train().to(torch.float64).requires_grad_(False)
    assert block.training
    assert block.layer.weight.dtype == block.norm.running_mean.dtype == torch.float64
    assert not block.layer.weight.requires_grad


def test_something_else_than_a_module_is_refused():
    with pytest.raises(HookError, match=r"Checkpointed\(block\) expected an nn.Module, found"):
        Checkpointed(torch.tanh)


def test_copies_and_pickles_are_hooked_and_whole(wrap):
    hooked = nn.ModuleList([wrap(Block())])
    stored = io.BytesIO()
    torch.save(hooked, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(hooked),
        pickle.loads(pickle.dumps(hooked)),
        torch.load(stored, weights_only=False),
    ):
        assert type(other[0]) is type(hooked[0])
        assert other[0].layer.weight is not hooked[0].layer.weight
        for name in ("_parameters", "_buffers", "_modules"):
            assert vars(other[0])[name].keys() == vars(hooked[0])[name].keys()
        x = leaf(5, 4)
        assert torch.equal(other.eval()[0](x), hooked.eval()[0](x))
    other[0].tag = "other"
    assert hooked[0].tag == "tag"


def test_nothing_waits_for_the_garbage_collector(wrap):
    gc.collect()
    gc.disable()
    try:
        block, x = Block(), leaf(5, 4)
        hooked = wrap(block)
        y, *_ = hooked(x, full=True)
        y.sum().backward()
        references = [weakref.ref(thing) for thing in (block, hooked, block.layer, x, y)]
        del block, hooked, x, y
        assert [reference() for reference in references] == [None] * 5
    finally:
        gc.enable()


# ---- in somebody's own loop ---------------------------------------------------------------------------------------


def with_tuples(stack, x):
    for block in stack:
        x, extra, calls = block(x, mask=x, scale=2.0, full=True)
        assert extra["mask"] is not None
        assert calls == 1
    return x


def with_keywords(stack, x):
    for block in stack:
        x = block(x=x, mask=None)
    return x


def with_skips(stack, x):
    states = [x]
    for block in stack:
        states.append(block(states[-1] + states[0], None))
    return sum(states)


@pytest.mark.parametrize("loop", [with_tuples, with_keywords, with_skips])
def test_a_step_is_that_of_the_blocks_alone(wrap, loop):
    def step(wrap):
        own = blocks()
        stack = nn.ModuleList(map(wrap, own))
        x = leaf(5, 4)
        torch.manual_seed(1)
        y = loop(stack, x)
        y.sum().backward()
        tensors = [y, x.grad, *(p.grad for p in stack.parameters()), *stack.buffers()]
        return [*tensors, torch.get_rng_state()], [block.calls for block in own]

    (found, calls), (expected, expected_calls) = step(wrap), step(lambda block: block)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert calls == expected_calls == [1, 1, 1]


def test_checkpointed_recomputes_and_a_hooked_block_does_what_its_hooks_do():
    executions = []

    class Counting(nn.Module):
        def forward(self, x):
            executions.append("block")
            return x.sin().exp()

    class Watch:
        @hookimpl(wrapper=True)
        def run_block(self, index, recomputing):
            executions.append((index, recomputing))
            return (yield)

    Checkpointed(Counting())(leaf(3)).sum().backward()
    assert executions == ["block"] * 2
    executions.clear()
    HookedBlock(Counting(), hooks=[Checkpoint(), Watch()])(leaf(3)).sum().backward()
    assert executions == [(0, False), "block", (0, True), "block"]


def test_module_hooks_fire_once_on_whichever_of_the_two_they_were_registered(wrap):
    fired, block = [], Block()
    hooked = wrap(block)
    hooked.register_forward_hook(lambda *_: fired.append("after"))
    block.register_forward_pre_hook(lambda *_: fired.append("before"))
    block.layer.register_forward_hook(lambda *_: fired.append("layer"))
    hooked.register_full_backward_hook(lambda *_: fired.append("backward"))
    hooked(leaf(5, 4)).sum().backward()
    assert fired == ["before", "layer", "after", "backward"]


def test_a_forward_hook_that_changes_the_output_changes_it_once(wrap):
    hooked = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = leaf(2, 4)
    alone = hooked(x).detach()
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert torch.equal(hooked(x), alone * 2)


def test_parts_that_are_replaced_after_wrapping_are_the_ones_used(wrap):
    block = Block()
    hooked = wrap(block)
    block.layer = nn.Linear(4, 4)
    hooked.norm.weight = nn.Parameter(torch.full((4,), 2.0))
    hooked(leaf(5, 4)).sum().backward()
    assert block.layer.weight.grad is not None
    assert block.norm.weight.grad is not None
    expected = Block()
    expected.load_state_dict(block.state_dict())
    assert torch.equal(expected.eval()(leaf(5, 4)), hooked.eval()(leaf(5, 4)))


def test_functional_call_gives_other_parameters(wrap):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def gradient(module):
        weight = leaf(4, 4, number=3)
        given = {"0.weight": weight, "0.bias": torch.zeros(4)}
        torch.func.functional_call(module, given, (leaf(2, 4),)).exp().sum().backward()
        return weight.grad

    assert torch.equal(gradient(wrap(block)), gradient(block))


# ---- HookedBlocks -------------------------------------------------------------------------------------------------


def test_hooked_blocks_are_a_module_list_whose_call_is_a_run():
    def step(run):
        own = blocks()
        x = leaf(5, 4)
        torch.manual_seed(1)
        y = run(own, x)
        y.sum().backward()
        return [
            y,
            x.grad,
            *(p.grad for b in own for p in b.parameters()),
            *(b.norm.running_mean for b in own),
        ]

    def loop(own, x):
        for block in own:
            x = block(x, None, scale=2.0)
        return x

    def hooked(own, x):
        return HookedBlocks(own, hooks=[Checkpoint()])(x, None, scale=2.0)

    def unhooked(own, x):
        return HookedBlocks(own)(x, None, scale=2.0)

    expected = step(loop)
    for run in (hooked, unhooked):
        assert all(map(torch.equal, step(run), expected))


def test_keys_of_hooked_blocks_are_those_of_a_module_list():
    found, expected = HookedBlocks(blocks(), hooks=[Checkpoint()]), nn.ModuleList(blocks())
    assert isinstance(found, nn.ModuleList)
    assert list(found.state_dict()) == list(expected.state_dict())
    assert [name for name, _ in found.named_modules()] == [
        name for name, _ in expected.named_modules()
    ]
    found.load_state_dict(expected.state_dict(), strict=True)


def test_a_chain_is_built_once_and_may_be_shared():
    chain = HookChain([Checkpoint()])
    one, other = HookedBlocks(blocks(), hooks=chain), HookedBlocks(blocks(), hooks=chain)
    assert one.chain is other.chain is chain
    assert HookedBlocks(blocks()).chain is None


def test_a_slice_keeps_the_chain():
    hooked = HookedBlocks(blocks(), hooks=[Checkpoint()])
    part = hooked[1:]
    assert isinstance(part, HookedBlocks)
    assert part.chain is hooked.chain
    assert list(part) == list(hooked)[1:]
    assert hooked[0] is next(iter(hooked))


def test_a_list_that_was_changed_runs_the_blocks_it_has_now():
    hooked = HookedBlocks(blocks(1), hooks=[Checkpoint()])
    hooked.append(Block())
    hooked.insert(0, Block())
    del hooked[1]
    hooked[0] = Block()
    hooked(leaf(5, 4)).sum().backward()
    assert [block.calls for block in hooked] == [1, 1]


def test_hooked_blocks_are_copied_and_pickled_with_their_chain():
    hooked = HookedBlocks(blocks(), hooks=[Checkpoint()]).eval()
    for other in (copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked))):
        assert isinstance(other.chain.plugins[0], Checkpoint)
        x = leaf(5, 4)
        assert torch.equal(other(x), hooked(x))


# ---- torch.compile ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def forward(self, x):
        for block in self.stack:
            x, _ = block(x, scale=2.0)
        return x


class Plain(nn.Module):
    """A block that a compiler can trace and whose result is a tuple."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, scale):
        return torch.tanh(self.layer(x)) * scale, 3


@pytest.mark.slow
def test_checkpointed_blocks_compile_to_one_graph():
    def step(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net(nn.ModuleList(Checkpointed(Plain()) for _ in range(3)))
        run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        x = leaf(2, 4)
        run(x).sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    assert all(map(torch.equal, step(True), step(False)))


@pytest.mark.slow
def test_hooks_that_cannot_be_traced_run_between_two_graphs():
    class Watch:
        @hookimpl(wrapper=True)
        def run_block(self, recomputing):
            seen.append(recomputing)
            return (yield)

    seen = []
    torch._dynamo.reset()
    net = Net(nn.ModuleList([HookedBlock(Plain(), hooks=[Checkpoint(), Watch()])]))
    torch.compile(net, backend="aot_eager")(leaf(2, 4)).sum().backward()
    assert seen == [False, True]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"HookedBlock\._run"):
        torch.compile(net, backend="aot_eager", fullgraph=True)(leaf(2, 4))
