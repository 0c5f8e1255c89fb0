"""`handle.report()`: what was asked of each block, and what was really done in the last step."""

import io
import json

import pytest
import torch
from torch import nn

from blockhooks import (
    BlockhooksWarning,
    Checkpoint,
    Offload,
    Profile,
    Selective,
    attach,
    hookimpl,
    plan,
)
from blockhooks.plan import Segment
from tests.models.toys import WIDTH, Block, Loop, Vision, image, sequence, step


def done(handle):
    return [block["done"] for stack in handle.report().stacks for block in stack["blocks"]]


def test_as_text():
    model = Vision()
    with attach(model, [Checkpoint()]) as handle:
        before = str(handle.report()).splitlines()
        assert before[0] == "Vision: 2 stacks of blocks, no step yet"
        assert before[4].split() == [
            "layer1.0",
            "..",
            "2",
            "(3)",
            "ConvBlock",
            "-",
            "no",
            "call",
            "seen",
            "0",
            "-",
            "-",
        ]
        step(model, image())
        after = str(handle.report()).splitlines()
    assert after[0] == "Vision: 2 stacks of blocks, in the last step"
    assert after[2].split() == ["blocks", "class", "asked", "done", "calls", "saved", "dropped"]
    assert after[4].split()[:8] == [
        "layer1.0",
        "..",
        "2",
        "(3)",
        "ConvBlock",
        "recompute",
        "recomputed",
        "3",
    ]
    assert after[-1].split()[0] == "all"


def test_as_plain_values():
    model = Loop(2)
    with attach(model, [Checkpoint()]) as handle:
        step(model, sequence())
        told = json.loads(json.dumps(handle.report().to_dict()))
    assert list(told) == ["model", "stacks", "warnings", "saved_bytes", "dropped_bytes"]
    (stack,) = told["stacks"]
    first = stack["blocks"][0]
    assert first["name"] == "layers.0"
    assert first["segment"] == [0, 1]
    # What LayerNorm, both linear layers, GELU and dropout save of 10 positions, without x: it is kept.
    assert first["dropped_bytes"] == first["saved_bytes"] > 10 * WIDTH * 4
    assert told["dropped_bytes"] == 2 * first["dropped_bytes"]


def test_printed_by_rich():
    rich = pytest.importorskip("rich.console")
    with attach(Loop(), [Checkpoint()]) as handle:
        file = io.StringIO()
        rich.Console(file=file, width=120).print(handle.report())
    assert "layers.0 .. 3 (4)" in file.getvalue()


def test_the_handle_tells_itself():
    with attach(Vision(), [Checkpoint()]) as handle:
        assert repr(handle) == (
            "<hooks HookChain([Checkpoint, VersionGuard, StateSnapshot, RNGSnapshot]) on "
            "layer1: 3 x ConvBlock, layer2: 5 x ConvBlock>"
        )


DONE = {
    "nothing": ([Profile()], "", "kept"),
    "checkpoint": ([Checkpoint()], "recompute", "recomputed"),
    "spanning": ([Checkpoint(plan.every(2))], "recompute", "recomputed"),
    "keep": ([Checkpoint(plan.first(0))], "keep", "kept"),
    "selective": ([Selective(min_bytes=0)], "", "selective"),
    "offload": ([Offload(min_bytes=0)], "", "offloaded"),
    "both": ([Offload(min_bytes=0), Checkpoint()], "recompute", "recomputed"),
}


@pytest.mark.parametrize("what", DONE)
def test_what_was_asked_and_what_was_done(what):
    hooks, asked, expected = DONE[what]
    model = Loop(4)
    with attach(model, hooks) as handle:
        step(model, sequence())
        blocks = handle.report().stacks[0]["blocks"]
    assert {block["asked"] for block in blocks} == {asked}
    assert {block["done"] for block in blocks} == {expected}


def test_a_block_that_changes_its_input_is_kept_and_the_reason_is_told():
    class Inplace(Block):
        def forward(self, x):
            return super().forward(x.mul_(2))

    for plan_function in (plan.every(1), plan.every(3)):
        model = Loop(3, Inplace)
        with attach(model, [Checkpoint(plan_function)]) as handle:
            step(model, sequence())
            assert done(handle) == ["kept"] * 3
            report = handle.report()
        assert report.dropped_bytes == 0
        assert report.warnings == [
            "layers.0 .. 2 (3): kept what autograd saved: it changes an input in place."
        ]


def test_each_step_is_told_for_itself():
    """The plan changes from step to step, and what is kept has no bytes of an earlier step."""

    class Alternating:
        steps = 0

        @hookimpl
        def plan_segments(self, run):
            self.steps += 1
            mode = "recompute" if self.steps % 2 else "keep"
            return [
                Segment(0, len(run.blocks), mode="keep") if mode == "keep" else Segment(0, 1)
            ] + ([] if mode == "keep" else [Segment(1, len(run.blocks), mode="keep")])

    model = Loop(2)
    with attach(model, [Alternating(), Checkpoint()]) as handle:
        for expected in (["recomputed", "kept"], ["kept", "kept"]) * 2:
            step(model, sequence())
            assert done(handle) == expected
            dropped = [block["dropped_bytes"] for block in handle.report().stacks[0]["blocks"]]
            assert [bool(value) for value in dropped] == [
                label == "recomputed" for label in expected
            ]


def test_calls_are_counted_in_the_last_step_alone():
    class Twice(Loop):
        def forward(self, x):
            for layer in self.layers:
                x = layer(layer(x))
            return x

    model = Twice(2)
    with attach(model, [Checkpoint()]) as handle:
        for _ in range(3):
            step(model, sequence())
        assert [block["calls"] for block in handle.report().stacks[0]["blocks"]] == [2, 2]


def test_a_stack_that_was_not_called_is_told():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.image = Loop(2), Loop(3)

        def forward(self, x):
            return self.text(x)

    model = Two()
    with attach(model, [Checkpoint()]) as handle:
        step(model, sequence())
        assert handle.report().warnings == [
            "image.layers: none of its 3 blocks was called in the last step."
        ]


class Reversible(torch.autograd.Function):
    """Runs blocks without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx, x, blocks):
        ctx.blocks = blocks
        ctx.save_for_backward(x)
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x
            for block in ctx.blocks:
                y = block(y)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def test_a_reversible_stack_is_left_alone_and_told():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([Block().eval() for _ in range(3)])

        def forward(self, x):
            return Reversible.apply(self.embed(x), self.layers)

    model, executions = Model(), []

    class Watch:
        @hookimpl(wrapper=True)
        def run_block(self, recomputing):
            executions.append((torch.is_grad_enabled(), recomputing))
            return (yield)

    expected = step(model, sequence())["gradients"]
    with attach(model, [Checkpoint(), Watch()]) as handle:
        found = step(model, sequence())["gradients"]
        (warning,) = handle.report().warnings
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert executions == [(False, False)] * 3  # and none in the backward
    assert warning == (
        "layers: a reversible stack, which keeps nothing between its blocks; it is left alone."
    )


def test_an_evaluation_is_not_the_last_step():
    model = Loop(2)
    with attach(model, [Checkpoint()]) as handle:
        with torch.no_grad():
            model(sequence())
        assert done(handle) == ["no gradients"] * 2
        step(model, sequence())
        after = handle.report().to_dict()
        with torch.no_grad():
            model(sequence())
            model.layers[0](sequence())
        assert handle.report().to_dict() == after
        assert done(handle) == ["recomputed"] * 2


def test_blocks_of_which_only_other_methods_are_called_are_told():
    class Inverse(Block):
        def inverse(self, x):
            return super().forward(x)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.flows = nn.ModuleList([Inverse() for _ in range(3)])

        def forward(self, x):
            for flow in self.flows:
                x = flow.inverse(x)
            return x

    model = Flow()
    with attach(model, [Checkpoint()]) as handle:
        assert handle.report().warnings == []
        with pytest.warns(BlockhooksWarning, match=r"\(flows\) was called .*hooks do nothing"):
            step(model, sequence())
        report = handle.report()
    assert report.title == "Flow: 1 stack of blocks, in the last step"
    assert report.warnings == ["flows: none of its 3 blocks was called in the last step."]
