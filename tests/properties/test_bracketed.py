"""Laws 2 and 5: wrappers are entered and left in the order of the chain, and what a context changes is put back."""

import contextlib

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from blockhooks import Checkpoint, apply_blocks, hookimpl, is_recomputing
from blockhooks.testing import plans
from tests.strategies import Fixed


class Trouble(Exception):
    pass


class Block(nn.Module):
    """Saves several tensors, and raises in a chosen execution."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.trouble = None

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.trouble == ("recompute" if is_recomputing() else "forward"):
            raise Trouble
        return self.second(x)


class Brackets:
    """Writes down each entering and leaving, with the plugin's place in the chain."""

    def __init__(self, place, events):
        self.place, self.events = place, events

    def around(self, *what):
        self.events.append(("enter", self.place, *what))
        try:
            return (yield)
        finally:
            self.events.append(("leave", self.place, *what))

    @hookimpl(wrapper=True)
    def run_blocks(self):
        return (yield from self.around("run_blocks"))

    @hookimpl(wrapper=True)
    def run_segment(self, segment):
        return (yield from self.around("run_segment", segment))

    @hookimpl(wrapper=True)
    def run_block(self, index):
        return (yield from self.around("run_block", index))

    @hookimpl
    def recompute_context(self, segment):
        @contextlib.contextmanager
        def context():
            yield from self.around("recompute_context", segment)

        return context


def is_bracketed(events, places):
    """Whether each leave ends what was entered last, and each hook is entered by all plugins in order."""
    open_ = []
    for kind, place, *what in events:
        if kind == "leave":
            if not open_ or open_.pop() != (place, *what):
                return False
            continue
        outside = open_[-1] if open_ else None
        if place != places[0] and outside != (places[places.index(place) - 1], *what):
            return False
        open_.append((place, *what))
    return not open_


@given(st.data())
def test_wrappers_and_contexts_are_well_nested(data):
    n = data.draw(st.integers(1, 5))
    events = []
    places = list(range(data.draw(st.integers(1, 3))))
    hooks = [Brackets(place, events) for place in places]
    checkpoint = Checkpoint(Fixed(data.draw(plans(n))), early_stop=data.draw(st.booleans()))
    hooks.insert(data.draw(st.integers(0, len(hooks))), checkpoint)
    blocks = [Block() for _ in range(n)]
    blocks[data.draw(st.integers(0, n - 1))].trouble = data.draw(
        st.sampled_from([None, "forward", "recompute"])
    )
    x = torch.randn(1, 2, requires_grad=True)
    with contextlib.suppress(Trouble):
        output = apply_blocks(blocks, x, hooks=hooks)
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    assert is_bracketed(events, places), events
    assert any(event[2] == "run_block" for event in events)


def test_the_brackets_are_checked():
    enter, leave = ("enter", 0, "run_blocks"), ("leave", 0, "run_blocks")
    for wrong in (
        [enter],
        [enter, ("enter", 1, "run_block"), leave, leave],
        [("enter", 1, "x"), ("leave", 1, "x")],
    ):
        assert not is_bracketed(wrong, [0, 1])


class Level:
    """Carries a number of the world across the boundary, as a plugin for a user's own state would."""

    def __init__(self, world):
        self.world = world

    @hookimpl
    def recompute_context(self):
        captured = self.world["level"]

        @contextlib.contextmanager
        def context():
            now = self.world["level"]
            self.world["level"] = captured
            try:
                yield
            finally:
                assert self.world["level"] == captured, "contexts are left in reverse"
                self.world["level"] = now

        return context


@given(st.data())
def test_each_recompute_sees_its_forward_and_leaves_no_trace(data):
    n = data.draw(st.integers(1, 5))
    world, seen = {"level": 0}, []

    class Reader:
        """A value hook that reads the level; in a recompute it also leaves another one behind."""

        @hookimpl(wrapper=True)
        def run_block(self, recomputing):
            level = world["level"]
            result = yield
            if recomputing:
                seen.append(level)
            return result * level

    checkpoint = Checkpoint(Fixed(data.draw(plans(n))), early_stop=data.draw(st.booleans()))
    blocks = [Block() for _ in range(n)]
    outputs = {}
    for level in (2, 3):
        world["level"] = level
        x = torch.randn(1, 2, requires_grad=True)
        outputs[level] = apply_blocks(blocks, x, hooks=[Level(world), checkpoint, Reader()])
    for step in range(4):
        world["level"] = 50 + step
        blocks[data.draw(st.integers(0, n - 1))].trouble = data.draw(
            st.sampled_from([None, "recompute"])
        )
        level = data.draw(st.sampled_from([2, 3]))
        seen.clear()
        with contextlib.suppress(Trouble):
            outputs[level].sum().backward(retain_graph=True)
        assert set(seen) <= {level}, "a recompute saw another level than its forward"
        assert world["level"] == 50 + step, "not put back"
        for block in blocks:
            block.trouble = None
