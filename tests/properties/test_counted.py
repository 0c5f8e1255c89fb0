"""Law 3: a block runs once in the forward, and as often again as the plan says, never more."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from blockhooks import Checkpoint, apply_blocks, hookimpl, plan
from blockhooks.testing import plans
from tests.strategies import Fixed


class Count:
    def __init__(self, n):
        self.forward, self.again = [0] * n, [0] * n

    @hookimpl(wrapper=True)
    def run_block(self, index, recomputing):
        (self.again if recomputing else self.forward)[index] += 1
        return (yield)


def run(segments, n, *, early_stop, backwards=1):
    """Count executions in a step; each block saves several tensors, the last of them at its end."""
    count = Count(n)
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(n)]
    hooks = [Checkpoint(Fixed(segments), early_stop=early_stop), count]
    loss = apply_blocks(blocks, torch.randn(1, 2, requires_grad=True), hooks=hooks).sum()
    for number in range(backwards):
        loss.backward(retain_graph=number < backwards - 1)
    return count


def enclosing(segments, index):
    """How many segments to be recomputed hold a block."""
    return sum(
        (segment.mode == "recompute") + enclosing(segment.children, index)
        for segment in segments
        if index in segment.indices
    )


@given(st.data())
def test_each_block_is_executed_once_more_for_each_segment_around_it(data):
    n = data.draw(st.integers(1, 8))
    segments = data.draw(plans(n))
    backwards = data.draw(st.integers(1, 2))
    count = run(segments, n, early_stop=False, backwards=backwards)
    assert count.forward == [1] * n
    assert count.again == [backwards * enclosing(segments, index) for index in range(n)]
    executions = plan.simulate(segments, early_stop=False).executions
    assert [1 + again // backwards for again in count.again] == list(executions)


@given(st.data())
def test_an_early_stop_executes_what_the_simulation_says(data):
    n = data.draw(st.integers(1, 8))
    segments = data.draw(plans(n))
    count = run(segments, n, early_stop=True)
    assert count.forward == [1] * n
    assert [1 + again for again in count.again] == list(plan.simulate(segments).executions)
    deepest = max(segment.depth for segment in segments)
    assert max(count.again) <= deepest


def test_a_block_whose_backward_is_not_needed_is_not_executed_again():
    count = Count(3)
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    blocks[0].requires_grad_(False)
    y = apply_blocks(blocks, torch.randn(1, 2), hooks=[Checkpoint(), count])
    y.sum().backward()
    assert count.forward == [1, 1, 1]
    assert count.again == [0, 1, 1]
