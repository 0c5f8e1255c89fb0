"""How often things are called, exactly; and that depth is no limit."""

import random
import sys

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, HookChain, RNGSnapshot, apply_blocks, hookimpl, plan


class Calls:
    """Counts the calls of each hook."""

    def __init__(self):
        self.made = dict.fromkeys(
            (
                "plan_segments",
                "run_blocks",
                "run_segment",
                "recompute_context",
                "entered",
                "forward",
                "again",
            ),
            0,
        )

    @hookimpl(tryfirst=True)
    def plan_segments(self):
        self.made["plan_segments"] += 1

    @hookimpl(wrapper=True)
    def run_blocks(self):
        self.made["run_blocks"] += 1
        return (yield)

    @hookimpl(wrapper=True)
    def run_segment(self):
        self.made["run_segment"] += 1
        return (yield)

    @hookimpl
    def recompute_context(self):
        self.made["recompute_context"] += 1
        return self.enter

    def enter(self):
        self.made["entered"] += 1
        return torch.enable_grad()

    @hookimpl(wrapper=True)
    def run_block(self, recomputing):
        self.made["again" if recomputing else "forward"] += 1
        return (yield)


@pytest.mark.parametrize(
    ("plans", "segments", "contexts", "entered", "again"),
    [
        (plan.every(1), 8, 8, 8, 8),
        (plan.every(4), 2, 2, 2, 8),
        (plan.first(3), 4, 3, 3, 3),
        (plan.first(0), 1, 0, 0, 0),
        # 14 segments in the forward. The recomputes of the 2 outermost call 4 segments each and end with the input of
        # the last half: 2 executions; those of the 4 below call 2 each: 1 execution; those of the 8 blocks: 1.
        (plan.tree(3), 14 + 2 * 4 + 4 * 2, 14 + 2 * 4 + 4 * 2, 14, 2 * 2 + 4 + 8),
    ],
    ids=["every(1)", "every(4)", "first(3)", "first(0)", "tree(3)"],
)
def test_each_hook_is_called_as_often_as_the_plan_says(plans, segments, contexts, entered, again):
    calls = Calls()
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(8)]
    x = torch.randn(1, 2, requires_grad=True)
    apply_blocks(blocks, x, hooks=[Checkpoint(plans), calls]).sum().backward()
    assert calls.made == {
        "plan_segments": 1,
        "run_blocks": 1,
        "run_segment": segments,
        "recompute_context": contexts,
        "entered": entered,
        "forward": 8,
        "again": again,
    }


def test_nothing_is_captured_when_nothing_is_recomputed(monkeypatch):
    captured = []

    class Snapshot(RNGSnapshot):
        @hookimpl
        def recompute_context(self, run, segment):
            captured.append(segment)
            return super().recompute_context(run, segment)

    blocks = [nn.Linear(2, 2) for _ in range(3)]
    x = torch.randn(1, 2, requires_grad=True)
    chain = HookChain([Snapshot(), Checkpoint()])
    with torch.no_grad():
        apply_blocks(blocks, x, hooks=chain)
    apply_blocks(blocks, x, hooks=Snapshot()).sum().backward()
    assert captured == []
    apply_blocks(blocks, x, hooks=chain).sum().backward()
    assert len(captured) == 3


def test_a_chain_is_scanned_once_for_each_class(monkeypatch):
    HookChain([Calls(), Checkpoint()])
    made = []
    monkeypatch.setattr("pluggy.PluginManager.__init__", lambda *args, **kwargs: made.append(args))
    HookChain([Calls(), Checkpoint(), Calls()])
    assert made == []


def test_two_thousand_blocks_need_no_deeper_stack():
    blocks = [nn.Linear(2, 2) for _ in range(2000)]
    x = torch.randn(1, 2, requires_grad=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        for plans in (plan.every(1), plan.sqrt()):
            apply_blocks(blocks, x, hooks=[Checkpoint(plans)]).sum().backward()
    finally:
        sys.setrecursionlimit(limit)
    assert x.grad is not None


def test_a_block_of_many_random_numbers_costs_one_restoring(monkeypatch):
    """Generators that nobody drew from are read, never written."""
    written = []
    monkeypatch.setattr("random.setstate", lambda state: written.append(state))

    def block(x):
        return torch.tanh(x * 2)

    def drawing(x):
        return torch.tanh(x * random.random())

    x = torch.randn(1, 2, requires_grad=True)
    apply_blocks([block] * 3, x, hooks=[Checkpoint()]).sum().backward()
    assert written == []
