"""What `measure` says of blocks is what a step with them takes, and nothing is changed by it."""

import copy
import gc
import random
import types
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, HookChain, apply_blocks, attach, memory
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


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_blocks_are_measured_with_gradients_whether_they_are_enabled_or_not(around):
    blocks, x = stack(), hidden()
    expected = measure(blocks, x)
    with around():
        found = measure(blocks, x)
    assert all(block.kept > 0 for block in found.blocks)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert block.figures("keep")[:3] == other.figures("keep")[:3]


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


class Remembers(nn.Module):
    """A block that changes all that a block can change."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(64, 64), nn.BatchNorm1d(96), nn.Dropout()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.count, self.seen, self.state = 0, [], {"last": None}
        self.noise, self.mean = torch.Generator().manual_seed(0), torch.zeros(64)
        self.draws, self.statistics = random.Random(0), types.SimpleNamespace(total=0.0)

    def forward(self, x, cache):
        self.calls += 1
        self.count += 1
        self.seen.append(x.shape)
        self.state["last"] = x.detach()
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
        self.statistics.total += self.draws.random() + random.random() + np.random.random()
        self.fresh = x.sum().item()
        cache.setdefault(id(self), []).append(x)
        if cache["in place"]:
            cache["tensor"].add_(1)
        self.linear.training = False
        x = self.dropout(self.norm(self.linear(x)))
        return x + torch.randn(64, generator=self.noise)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.steps = nn.ModuleList(Remembers() for _ in range(3)), 0

    def forward(self, x, cache):
        self.steps += 1
        for block in self.blocks:
            x = block(x, cache)
        return x


def world(model, cache):
    modules = {
        name: {
            key: [copy.copy(value), getattr(value, "__dict__", {}).copy()]
            for key, value in vars(module).items()
            if not isinstance(value, (nn.Module, torch.Generator, random.Random, torch.Tensor))
        }
        for name, module in model.named_modules()
    }
    tensors = [*model.state_dict().values(), cache["tensor"], *(b.mean for b in model.blocks)]
    rngs = [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))]
    rngs += [block.noise.get_state() for block in model.blocks]
    plain = random.getstate(), [b.draws.getstate() for b in model.blocks], list(cache)
    return modules, plain, [t.clone() for t in tensors + rngs]


@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
@pytest.mark.parametrize("in_place", [True, False], ids=["side input in place", ""])
def test_measuring_leaves_everything_as_it_was(whole, in_place):
    torch.manual_seed(0)
    model, cache, x = Loop(), {"tensor": torch.zeros(3), "in place": in_place}, hidden()
    modules, plain, tensors = world(model, cache)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    profile = measure(model if whole else model.blocks, x, cache)

    assert [block.recompute == float("inf") for block in profile.blocks] == [in_place] * 3
    modules_after, plain_after, tensors_after = world(model, cache)
    assert modules_after == modules
    assert plain_after == plain
    assert all(map(torch.equal, tensors_after, tensors))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert x.grad is None


def test_a_failed_measurement_leaves_everything_as_it_was():
    class Fails(Loop):
        def forward(self, x, cache):
            super().forward(x, cache)
            raise ZeroDivisionError("by zero")

    model, cache, x = Fails(), {"tensor": torch.zeros(3), "in place": True}, hidden()
    modules, plain, tensors = world(model, cache)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        measure(model, x, cache)
    modules_after, plain_after, tensors_after = world(model, cache)
    assert (modules_after, plain_after) == (modules, plain)
    assert all(map(torch.equal, tensors_after, tensors))


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


def test_nothing_is_left_of_a_result_that_no_backward_reaches():
    class Drops(nn.Module):
        def forward(self, x):
            x.exp().tanh()
            return x * 2

    with memory.peak("cpu") as meter:
        measure(nn.ModuleList(Drops() for _ in range(3)), hidden())
        gc.collect()
        assert meter.now == 0


def test_functions_and_blocks_without_gradients_are_measured():
    profile = measure([torch.sin, lambda x: x * 2], torch.randn(8, 8))

    assert [block.kept for block in profile.blocks] == [0, 0]
    assert [block.output for block in profile.blocks] == [256, 256]


def test_side_inputs_that_lead_to_one_another_keep_their_graph():
    class Shares(Model):
        """Each block is given what those before have made."""

        def forward(self, x):
            shared = {"first": self.wide[0](x)}
            for index, block in enumerate(self.reading):
                x = block(x, shared, index)
            return x

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, shared, index):
            y = self.linear(x * shared["first"].tanh() * shared.get(index - 2, x).tanh())
            shared[index] = shared.get(index - 1, y) * y
            return y

    model = Shares()
    model.reading = nn.ModuleList(Reads() for _ in range(4))
    x = hidden()

    def gradients():
        torch.manual_seed(3)
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with attach(model, hooks=[Checkpoint(memory_budget=0.9)], blocks="reading"):
        for _ in range(3):
            assert all(map(torch.equal, gradients(), plain))


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


@pytest.mark.parametrize("blocks", [None, 3, [], Model], ids=str)
def test_without_any_block_nothing_is_measured(blocks):
    with pytest.raises(BudgetError, match="expected a model, or a sequence of at least one block"):
        measure(blocks, hidden())


class Watched(nn.Module):
    """A block on whose backward the user looks in all ways."""

    def __init__(self, told):
        super().__init__()
        self.inner, self.outer, self.told = nn.Linear(32, 96), nn.Linear(96, 32), told
        self.inner.register_full_backward_hook(lambda *_: told.append("module"))
        self.inner.register_full_backward_pre_hook(lambda *_: told.append("module, before"))
        self.register_full_backward_hook(lambda *_: told.append("block"))
        self.outer.weight.register_hook(lambda grad: told.append("parameter"))
        self.outer.bias.register_post_accumulate_grad_hook(lambda _: told.append("accumulated"))

    def forward(self, x, scale):
        x = nn.functional.gelu(self.inner(x))
        x.register_hook(lambda grad: self.told.append("tensor"))
        return self.outer(x) * scale


@pytest.mark.parametrize("closed", [False, True], ids=["modules", "functions"])
def test_no_hook_of_a_backward_is_called_by_measuring(closed):
    told = []
    blocks, source = nn.ModuleList(Watched(told) for _ in range(4)), torch.randn(16, 32)
    called = [partial(block.__call__) for block in blocks] if closed else blocks
    every = nn.modules.module.register_module_full_backward_hook(lambda *_: told.append("every"))

    def step(hooks):
        told.clear()
        blocks.zero_grad()
        scale = source.clone().requires_grad_().sigmoid()
        scale.retain_grad()
        scale.register_hook(lambda grad: told.append("side input"))
        x = source.clone().requires_grad_()
        apply_blocks(called, x, scale, hooks=hooks).sum().backward()
        return sorted(told), [scale.grad, *(p.grad for p in blocks.parameters())]

    try:
        names, expected = step(())
        checkpoint = Checkpoint(memory_budget=1.0)
        for _ in range(3):
            found, gradients = step([checkpoint])
            assert found == names
            assert all(map(torch.equal, gradients, expected))
    finally:
        every.remove()
    assert len(set(names)) == 8
    assert torch.Tensor.register_hook.__module__ == "torch._tensor"
