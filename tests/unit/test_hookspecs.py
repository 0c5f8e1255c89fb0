"""The contract of each hook: when it is called, on which side, and what becomes of its result."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, PlanError, Segment, apply_blocks, hookimpl, plan


@pytest.fixture
def blocks():
    return nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))


@pytest.fixture
def x():
    return torch.randn(2, 4, requires_grad=True)


class Named:
    """A plugin that writes its name into a list; subclasses say when."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls


def step(blocks, x, hooks):
    blocks.zero_grad()
    y = apply_blocks(blocks, x, hooks=hooks)
    y.square().sum().backward()
    return [y, *(p.grad for p in blocks.parameters())]


def same(a, b):
    return all(map(torch.equal, a, b))


def test_hook_plan_segments(blocks, x):
    calls = []

    class Planner(Named):
        @hookimpl
        def plan_segments(self, run):
            calls.append((self.name, len(run.blocks)))
            return None if self.name == "none" else [Segment(0, 3), Segment(3, 4)]

    class Watch:
        @hookimpl(wrapper=True)
        def run_segment(self, run, segment):
            calls.append(str(segment))
            assert run.segments == (Segment(0, 3), Segment(3, 4))
            return (yield)

    step(
        blocks,
        x,
        [Planner("none", calls), Planner("first", calls), Planner("second", calls), Watch()],
    )
    assert calls == [("none", 4), ("first", 4), "0..3", "3..4"]

    class Gap:
        @hookimpl
        def plan_segments(self):
            return [Segment(0, 2), Segment(3, 4)]

    with pytest.raises(PlanError, match=r"plan by hooks\[1\] \(Gap\) leaves a gap.*block 2"):
        apply_blocks(blocks, x, hooks=[Watch(), Gap()])


def test_hook_run_blocks(blocks, x):
    calls = []

    class Around(Named):
        @hookimpl(wrapper=True)
        def run_blocks(self, run, x):
            calls.append(f"{self.name} begins with {len(run.blocks)}")
            try:
                return (yield)
            finally:
                calls.append(f"{self.name} ends")

    plain = step(blocks, x, [])
    outer, inner = Around("outer", calls), Around("inner", calls)
    assert same(step(blocks, x, [outer, Checkpoint(), inner]), plain)
    assert calls == ["outer begins with 4", "inner begins with 4", "inner ends", "outer ends"]

    class Instead:
        @hookimpl
        def run_blocks(self, x):
            return x + 1

    assert torch.equal(apply_blocks(blocks, x, hooks=[Instead()]), x + 1)


def test_hook_run_segment(blocks, x):
    calls = []

    class Watch:
        @hookimpl(wrapper=True)
        def run_segment(self, segment, recomputing):
            calls.append(f"{segment}{' again' if recomputing else ''}")
            return (yield)

    plain = step(blocks, x, [])
    assert same(step(blocks, x, [Watch(), Checkpoint(plan.tree(2))]), plain)
    # Once per forward; the children once more in the recompute of their parents.
    assert calls == [
        "0..2", "0..1", "1..2", "2..4", "2..3", "3..4",
        "2..3 again", "3..4 again", "0..1 again", "1..2 again",
    ]  # fmt: skip

    class Twice:
        @hookimpl
        def run_segment(self, region, x):
            region(x)
            return region(x)

    assert torch.equal(apply_blocks(blocks, x, hooks=[Twice()]), plain[0])


def test_hook_recompute_context(blocks, x):
    calls = []

    class Carry(Named):
        @hookimpl
        def recompute_context(self, segment):
            calls.append(f"{self.name} captures {segment}")

            @contextmanager
            def restored():
                calls.append(f"{self.name} in")
                try:
                    yield
                finally:
                    calls.append(f"{self.name} out")

            return restored

    carries = [Carry("a", calls), Carry("b", calls)]
    step(blocks, x, carries)
    assert calls == []  # nothing is recomputed, so nothing is captured

    y = apply_blocks(blocks, x, hooks=[*carries, Checkpoint(plan.every(4))]).sum()
    assert calls == ["a captures 0..4", "b captures 0..4"]
    del calls[:]
    y.backward(retain_graph=True)
    assert calls == ["a in", "b in", "b out", "a out"]
    y.backward()
    assert calls == ["a in", "b in", "b out", "a out"] * 2


def test_hook_run_block(blocks, x):
    calls = []

    class Watch(Named):
        @hookimpl(wrapper=True)
        def run_block(self, index, block, recomputing):
            assert block is blocks[index]
            calls.append(f"{self.name} {index}{' again' if recomputing else ''}")
            return (yield)

    plain = step(blocks, x, [])
    hooks = [Watch("a", calls), Checkpoint(plan.first(1)), Watch("b", calls)]
    assert same(step(blocks, x, hooks), plain)
    assert calls == [
        "a 0",
        "b 0",
        "a 1",
        "b 1",
        "a 2",
        "b 2",
        "a 3",
        "b 3",
        "a 0 again",
        "b 0 again",
    ]

    class Skip:
        @hookimpl
        def run_block(self, index, x):
            return x if index in (1, 2) else None

    assert torch.equal(
        apply_blocks(blocks, x, hooks=[Checkpoint(), Skip()]), blocks[3](blocks[0](x))
    )
