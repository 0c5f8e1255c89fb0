"""Law 6: forwards, backwards, errors and dropped outputs in any order leave everything as the plain loop does."""

import random

import numpy
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockhooks import Checkpoint, Profile, apply_blocks
from blockhooks.testing import plans
from tests import steps
from tests.strategies import Fixed, Stack, Watch


class Trouble(Exception):
    pass


class Twins(RuleBasedStateMachine):
    """Two equal stacks, one run plainly and one through a hook chain; each action is done on both."""

    @initialize(data=st.data(), seed=st.integers(0, 3))
    def build(self, data, seed):
        kinds = ("mlp", "batch norm", "router", "draws", "spectral norm")
        chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=3))
        stack = Stack(tuple(chosen), seed=seed, scale="with gradient")
        (self.plain, self.x, self.plain_side), (self.hooked, _, self.hooked_side) = (
            stack.build(),
            stack.build(),
        )
        checkpoint = Checkpoint(
            Fixed(data.draw(plans(len(chosen)))), early_stop=data.draw(st.booleans())
        )
        self.hooks = data.draw(st.permutations([checkpoint, Watch(), Profile()]))
        self.pending = []
        self.generators = self.read()

    @staticmethod
    def read():
        return torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    @staticmethod
    def write(states):
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])

    def both(self, action):
        """Do something on each twin from the same random numbers, and compare what it gives."""
        begin = self.read()
        expected = action(self.plain, self.plain_side, ())
        states = steps.rng_states()
        self.write(begin)
        found = action(self.hooked, self.hooked_side, self.hooks)
        assert steps.rng_states() == states, "random generators"
        return expected, found

    def forward(self, blocks, side, hooks):
        return apply_blocks(blocks, self.x.detach().clone().requires_grad_(), hooks=hooks, **side)

    @rule()
    def run_forward(self):
        outputs = self.both(self.forward)
        assert steps.bits(outputs[0]) == steps.bits(outputs[1])
        self.pending.append(outputs)

    @rule()
    def run_forward_without_gradients(self):
        with torch.no_grad():
            outputs = self.both(self.forward)
        assert steps.bits(outputs[0]) == steps.bits(outputs[1])

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), retain=st.booleans())
    def run_backward(self, data, retain):
        at = data.draw(st.integers(0, len(self.pending) - 1))
        outputs = self.pending[at] if retain else self.pending.pop(at)
        twins = iter(outputs)
        self.both(lambda *_: steps.total(next(twins)).backward(retain_graph=retain))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def drop_an_output(self, data):
        self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))

    @rule(data=st.data())
    def raise_in_a_block(self, data):
        at = data.draw(st.integers(0, len(self.plain) - 1))

        def fail(module, args, output):
            raise Trouble

        def attempt(blocks, side, hooks):
            handle = blocks[at].register_forward_hook(fail)
            try:
                self.forward(blocks, side, hooks)
            except Trouble:
                return "raised"
            finally:
                handle.remove()

        assert self.both(attempt) == ("raised", "raised")

    @precondition(lambda self: not self.pending)
    @rule(training=st.booleans())
    def change_mode(self, training):
        for block in (*self.plain, *self.hooked):
            block.train(training)

    @precondition(lambda self: not self.pending)
    @rule()
    def step_the_optimizer(self):
        for block in (*self.plain, *self.hooked):
            for parameter in block.parameters():
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    @invariant()
    def everything_is_alike(self):
        if not hasattr(self, "plain"):
            return
        assert torch.is_grad_enabled()
        assert steps.difference(steps.state(self.plain), steps.state(self.hooked)) == []
        expected = steps.gradients(self.plain, self.plain_side)
        assert steps.difference(expected, steps.gradients(self.hooked, self.hooked_side)) == []


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=40, stateful_step_count=12)
