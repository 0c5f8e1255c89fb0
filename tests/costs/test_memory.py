"""Live bytes, exactly: the peak is at most torch's, observers add nothing, nothing waits for the garbage collector."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from blockhooks import Checkpoint, HookChain, Profile, apply_blocks, hookimpl, memory, plan
from tests.costs.test_flops import Block
from tests.strategies import First, Last, Watch


def build(n=8, dropout=0.1):
    torch.manual_seed(0)
    blocks = [Block(32, 4, dropout) for _ in range(n)]
    x = torch.randn(2, 64, 32, requires_grad=True)
    for tensor in (x, *(p for block in blocks for p in block.parameters())):
        tensor.grad = torch.zeros_like(tensor)  # so that only activations are counted
    return blocks, x


def peak(forward, **options):
    """The peak of a step's live bytes, with the garbage collector off, and what is left behind."""
    blocks, x = build(**options)
    gc.collect()
    gc.disable()
    try:
        with memory.peak("cpu") as meter:
            forward(blocks, x).square().mean().backward()
        return meter.peak, meter.now
    finally:
        gc.enable()


def hooked(*hooks):
    return lambda blocks, x: apply_blocks(blocks, x, hooks=hooks)


def by_torch(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
def test_the_peak_is_at_most_that_of_torch(dropout):
    ours, left = peak(hooked(Checkpoint()), dropout=dropout)
    theirs, _ = peak(by_torch, dropout=dropout)
    plain, _ = peak(hooked(), dropout=dropout)
    assert ours <= theirs < plain / 3
    assert left == 0


@pytest.mark.parametrize(
    "plans", [plan.every(1), plan.every(3), plan.tree(2), plan.first(3)], ids=repr
)
def test_observers_add_nothing_to_the_peak(plans):
    class Swallow:
        """Catches what passes and lets it go on: its frame refers to the exception."""

        @hookimpl(wrapper=True)
        def run_block(self, x):
            try:
                return (yield)
            except BaseException as error:
                self.last = type(error)
                raise

    alone = peak(hooked(Checkpoint(plans)))
    for observers in (
        [Watch()],
        [First(), Last()],
        [Swallow()],
        [Watch() for _ in range(6)],
        [Profile()],
    ):
        assert peak(hooked(Checkpoint(plans), *observers)) == alone
        assert peak(hooked(*observers, Checkpoint(plans))) == alone


def test_observers_alone_add_nothing_to_the_peak():
    assert peak(hooked(Watch(), First(), Last(), Profile())) == peak(hooked())


def test_longer_chains_of_blocks_hold_one_input_more_for_each_block():
    shorter, longer = (peak(hooked(Checkpoint()), n=n)[0] for n in (8, 16))
    assert longer - shorter == 8 * 2 * 64 * 32 * 4


def test_a_tree_holds_less_than_single_segments():
    peaks = [peak(hooked(Checkpoint(plans)), n=16)[0] for plans in (plan.every(1), plan.tree(4))]
    assert peaks[1] < peaks[0]


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        y = super().forward(x)
        if self.fails:
            raise ValueError("a block fails")
        return torch.tanh(super().forward(y))


def garbage_of(action):
    """What only the garbage collector would have freed."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        action()
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


@pytest.mark.parametrize("how", ["step", "two backwards", "dropped", "error", "error in recompute"])
@pytest.mark.parametrize("plans", [plan.every(1), plan.tree(2)], ids=repr)
def test_no_tensor_is_left_to_the_garbage_collector(how, plans):
    hooks = HookChain([Watch(), Checkpoint(plans), Watch(), Last(), Profile()])
    blocks = [Failing(4, 4) for _ in range(4)]

    def action():
        blocks[2].fails = how == "error"
        x = torch.randn(2, 4, requires_grad=True)
        try:
            loss = apply_blocks(blocks, x, hooks=hooks).sum()
            blocks[2].fails = how == "error in recompute"
            if how == "two backwards":
                loss.backward(retain_graph=True)
            if how != "dropped":
                loss.backward()
        except ValueError:
            assert how.startswith("error")
        blocks[2].fails = False

    action()  # what is done once (a chain learns, torch imports) is not part of the question
    garbage = garbage_of(action)
    assert [value for value in garbage if isinstance(value, torch.Tensor)] == []


@pytest.mark.parametrize("block", [Failing, lambda *sizes: torch.nn.Sequential(Failing(*sizes))])
def test_a_checkpointed_step_leaves_nothing_to_the_garbage_collector(block):
    hooks = HookChain([Checkpoint()])
    blocks = [block(4, 4) for _ in range(4)]

    def action():
        x = torch.randn(2, 4, requires_grad=True)
        apply_blocks(blocks, x, hooks=hooks).sum().backward()

    action()
    assert garbage_of(action) == []


def test_the_search_for_garbage_finds_a_tensor():
    def action():
        cycle = [torch.ones(1)]
        cycle.append(cycle)

    assert any(isinstance(value, torch.Tensor) for value in garbage_of(action))


def test_memory_grows_with_the_logarithm_of_the_number_of_blocks():
    scale, state = torch.ones(64, requires_grad=True), 64 * 4

    def block(x):
        return torch.sin(x * scale)

    def step(blocks, hooks):
        torch.manual_seed(0)
        x = torch.randn(64, requires_grad=True)
        x.grad, scale.grad = torch.zeros_like(x), torch.zeros_like(scale)
        with memory.peak("cpu") as meter:
            loss = apply_blocks(blocks, x, hooks=hooks).square().mean()
            loss.backward()
        return meter.peak, [loss.detach(), x.grad, scale.grad]

    for count, slots in ((1000, 10), (100, 7), (10, 4)):
        plain, expected = step([block] * count, ())
        ours, found = step([block] * count, [Checkpoint(plan.binomial(slots))])
        assert plain > 2 * count * state
        assert ours <= (slots + 7) * state  # the states, and what one block takes
        assert all(map(torch.equal, found, expected))
