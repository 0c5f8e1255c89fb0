"""Runs and regions: what the blocks get, what they are called, and what a layer can ask."""

import functools

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, HookChain, Segment, apply_blocks, current_block, hookimpl, plan
from blockhooks.run import Region, Run
from tests.agree import Layer, layers, leaf


class Keeps:
    """A plugin that keeps the run and its regions."""

    def __init__(self):
        self.runs, self.regions = [], []

    @hookimpl(wrapper=True)
    def run_blocks(self, run):
        self.runs.append(run)
        return (yield)

    @hookimpl(wrapper=True)
    def run_segment(self, region):
        self.regions.append(region)
        return (yield)


def run_of(blocks, *args, hooks=(), **kwargs):
    keeps = Keeps()
    apply_blocks(blocks, leaf(3, 4), *args, hooks=[keeps, *hooks], **kwargs)
    return keeps


class Named(nn.Module):
    def forward(self, x):
        return x


def function(x):
    return x


def test_names_are_those_of_classes_and_functions():
    blocks = [Named(), function, functools.partial(function), Named().forward, lambda x: x]
    (run,) = run_of(blocks).runs
    assert run.names == ("Named", "function", "partial", "forward", "<lambda>")
    assert run.describe(0, 1) == "block 0 (Named)"
    assert run.describe(0, 3) == "blocks 0..2 (Named, function, partial)"
    assert run.describe(3, 5) == "blocks 3..4 (forward, <lambda>)"


def test_a_run_of_the_same_kind_names_it_once():
    (run,) = run_of(layers(4)).runs
    assert run.describe(0, 4) == "blocks 0..3 (Layer)"


def test_a_run_knows_blocks_side_inputs_and_segments():
    given = layers(4)
    side = torch.ones(4)

    def block(x, side, *, more):
        return x

    keeps = run_of([block] * 4, side, more="more", hooks=[Checkpoint(plan.every(3))])
    (run,) = keeps.runs
    assert run.blocks == (block,) * 4
    assert run.segments == (Segment(0, 3), Segment(3, 4))
    assert run.kept == {}
    assert run.state == {}
    (run,) = run_of(iter(given)).runs
    assert run.blocks == tuple(given)


def test_side_inputs_are_the_same_objects_in_every_execution():
    marker, seen = object(), []

    def block(x, side, *, again):
        seen.append((side, again))
        return x.exp().sin()

    out = apply_blocks([block, block], leaf(3), marker, again=marker, hooks=[Checkpoint()])
    out.sum().backward()
    assert len(seen) == 4
    assert all(side is marker and again is marker for side, again in seen)


def test_a_region_executes_its_blocks_and_tells_where_it_is():
    keeps = run_of(layers(4), hooks=[Checkpoint(plan.every(2))])
    one, two = keeps.regions
    assert isinstance(one, Region)
    assert isinstance(one.run, Run)
    assert (one.segment, two.segment) == (Segment(0, 2), Segment(2, 4))
    assert str(two) == (
        "blocks 2..3 (Layer) (hooks: Keeps, Checkpoint, VersionGuard, StateSnapshot, RNGSnapshot)"
    )


def test_a_region_may_be_called_more_than_once():
    phases = []

    class Twice:
        @hookimpl
        def run_segment(self, region, x):
            region(x)
            return region(x)

    def block(x):
        phases.append((current_block().index, current_block().phase))
        return x + 1

    out = apply_blocks([block, block], torch.zeros(()), hooks=[Twice()])
    assert out == 2
    assert phases == [(0, "forward"), (0, "recompute"), (1, "forward"), (1, "recompute")]


def test_current_block_has_index_name_and_phase():
    seen = []

    class Asks(nn.Module):
        def forward(self, x):
            block = current_block()
            seen.append((block.index, block.name, block.phase, repr(block)))
            return x.exp()

    assert current_block() is None
    apply_blocks([Asks(), Asks()], leaf(3), hooks=[Checkpoint()]).sum().backward()
    assert current_block() is None
    assert seen == [
        (0, "Asks", "forward", "<block 0 (Asks), forward>"),
        (1, "Asks", "forward", "<block 1 (Asks), forward>"),
        (1, "Asks", "recompute", "<block 1 (Asks), recompute>"),
        (0, "Asks", "recompute", "<block 0 (Asks), recompute>"),
    ]


def test_current_block_is_set_in_nested_segments():
    seen = []

    def block(x):
        seen.append((current_block().index, current_block().phase))
        return x.exp()

    tree = (Segment(0, 4, (Segment(0, 2), Segment(2, 4))),)
    out = apply_blocks([block] * 4, leaf(3) / 9, hooks=[Checkpoint(lambda n: tree)])
    assert seen == [(index, "forward") for index in range(4)]
    out.sum().backward()
    assert {phase for _, phase in seen[4:]} == {"recompute"}


def test_a_segment_to_keep_keeps_what_autograd_saved():
    calls = []

    def block(x):
        calls.append(1)
        return x.exp()

    segments = (Segment(0, 1, mode="keep"), Segment(1, 2))
    apply_blocks([block, block], leaf(3), hooks=[Checkpoint(lambda n: segments)]).sum().backward()
    assert len(calls) == 3


def test_the_reason_is_told_where_a_region_kept_what_autograd_saved():
    def in_place(x):
        return x.mul_(2)

    keeps = Keeps()
    apply_blocks([lambda x: x * 2, in_place], leaf(3), hooks=[keeps, Checkpoint()]).sum().backward()
    assert keeps.runs[0].kept == {Segment(1, 2): "it changes an input in place"}

    class Iterates(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = iter([1.0, 2.0])

        def forward(self, x):
            return (x * next(self.scales)).exp()

    keeps = Keeps()
    x = leaf(3)
    apply_blocks([Iterates()], x, hooks=[keeps, Checkpoint()]).sum().backward()
    assert keeps.runs[0].kept == {
        Segment(0, 1): "it holds an iterator, which can be read only once"
    }
    assert torch.equal(x.grad, x.detach().exp())


def test_a_run_keeps_no_tensor():
    keeps = run_of([Layer(), Layer()], hooks=[Checkpoint()])
    (run,) = keeps.runs
    held = [run.args, run.kwargs, run.kept, run.state, run.segments]
    assert not any(isinstance(value, torch.Tensor) for value in held)


@pytest.mark.parametrize("carry", [None, lambda output: output["x"]], ids=["default", "carry"])
def test_carry_picks_the_next_x_inside_of_the_region(carry):
    def block(x):
        return (x.exp(), "other") if carry is None else {"x": x.exp(), "other": None}

    chain = HookChain([Checkpoint()])
    x = leaf(3)
    out = apply_blocks([block, block], x, hooks=chain, carry=carry)
    out.sum().backward()
    assert torch.equal(out, x.exp().exp())
    assert x.grad is not None
