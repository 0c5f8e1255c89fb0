"""Law 1: any plan, any observers, any order: the step is that of the plain loop, bit for bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockhooks import Checkpoint, plan, testing
from tests import steps, strategies
from tests.strategies import KINDS, Stack


@settings(max_examples=150)
@given(st.data())
def test_a_step_is_that_of_the_plain_loop(data):
    stack = data.draw(strategies.stacks())
    hooks = data.draw(strategies.chains(len(stack)))
    mode = data.draw(st.sampled_from(steps.MODES))
    assert steps.difference(steps.step(stack, mode=mode), steps.step(stack, hooks, mode)) == []


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_block_alone_and_twice(kind, mode):
    stack = Stack((kind, kind), repeated=1, scale="with gradient")
    expected = steps.step(stack, mode=mode)
    for plans in (plan.every(1), plan.every(3), plan.tree(2)):
        found = steps.step(stack, [Checkpoint(plans)], mode)
        assert steps.difference(expected, found) == []


@settings(max_examples=10)
@given(testing.blocks(min_size=2, max_size=3), st.data())
def test_the_kit_for_plugin_authors_agrees(blocks, data):
    x = data.draw(testing.inputs())
    testing.assert_transparent(blocks, x, data.draw(testing.chains(len(blocks))))


def test_two_plain_steps_are_the_same_and_a_record_notices_a_single_bit():
    stack = Stack(tuple(KINDS), scale="with gradient")
    expected, again = steps.step(stack), steps.step(stack)
    assert steps.difference(expected, again) == []
    other = steps.step(Stack(tuple(KINDS), scale="with gradient", seed=1))
    assert len(steps.difference(expected, other)) > 20
