"""What `measure` says of blocks is what a step with them takes, and nothing is changed by it."""

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, HookChain, apply_blocks, memory
from blockhooks.budget import measure, predict
from blockhooks.errors import BudgetError
from blockhooks.plan import Segment, every, first, sqrt, tree
from tests.budget.test_checkpoint import Model, hidden, stack, step


def test_measured_blocks_predict_the_peak_of_every_plan():
    blocks, x = stack(), hidden()
    profile = measure(blocks, x)

    assert [block.output for block in profile.blocks] == [4 * 96 * 64 * 4] * 6
    assert profile.plain.peak == pytest.approx(step(blocks, x)[0], rel=0.01)
    for plan in (every(1), every(2), first(3), sqrt(), tree(2), tree(3)):
        chain = HookChain([Checkpoint(plan)])
        step(blocks, x, chain)
        assert predict(profile, plan(6)).peak == pytest.approx(step(blocks, x, chain)[0], rel=0.01)


def test_selective_blocks_are_measured_too():
    blocks, x = stack(sizes=(256,) * 4), hidden()
    profile = measure(blocks, x)

    def plan(n):
        return (Segment(0, n, mode="selective"),)

    chain = HookChain([Checkpoint(plan)])
    for block in profile.blocks:
        assert block.figures("selective")[0] < block.kept
    # The plan is given: the plugin that executes selective segments is the same.
    step(blocks, x, chain)
    found = step(blocks, x, chain)[0]
    assert predict(profile, plan(4)).peak == pytest.approx(found, rel=0.01)


def test_measuring_leaves_parameters_gradients_buffers_and_generators_alone():
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(96), nn.Dropout()) for _ in range(3)
    )
    before = {name: t.clone() for name, t in blocks.state_dict().items()}
    x = hidden()
    generator = torch.get_rng_state()

    measure(blocks, x)

    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(t, before[name]) for name, t in blocks.state_dict().items())
    assert all(p.grad is None for p in blocks.parameters())


def test_a_models_stacks_are_found_and_follow_each_other():
    profile = measure(Model(), hidden())

    assert [block.name for block in profile.blocks] == [
        *(f"wide.{index}" for index in range(4)),
        *(f"narrow.{index}" for index in range(6)),
    ]


def test_it_takes_about_the_memory_of_a_block():
    blocks, x = stack(sizes=(256,) * 16), hidden()
    plain = step(blocks, x)[0]

    with memory.peak() as meter:
        measure(blocks, x)
    assert meter.peak < 0.2 * plain


def test_functions_and_blocks_without_gradients_are_measured():
    profile = measure([torch.sin, lambda x: x * 2], torch.randn(8, 8))

    assert [block.kept for block in profile.blocks] == [0, 0]
    assert [block.output for block in profile.blocks] == [256, 256]


def test_a_block_that_is_not_called_is_an_error():
    class Skips(Model):
        def forward(self, x):
            return self.wide[0](x)

    with pytest.raises(BudgetError, match="not every block was called"):
        measure(Skips(), hidden())


def test_blocks_that_run_under_no_grad_are_measured_with_gradients():
    blocks, x = stack(), hidden()
    with torch.no_grad():
        profile = measure(blocks, x)
    assert profile.plain.peak == pytest.approx(step(blocks, x)[0], rel=0.01)
    assert torch.equal(apply_blocks(blocks.eval(), x), apply_blocks(blocks.eval(), x, hooks=[]))
