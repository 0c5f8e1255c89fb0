"""`Checkpoint(memory_budget=...)`: every step has the plain loop's bits, and from the second on the budget is kept."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, HookChain, Profile, apply_blocks, attach, hookimpl, memory
from blockhooks.errors import BlockhooksWarning, BudgetError, PlanError


class Block(nn.Module):
    def __init__(self, width, hidden, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        return x + scale * self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def stack(sizes=(256, 64, 512, 256, 128, 256), width=64):
    torch.manual_seed(0)
    return nn.ModuleList(Block(width, hidden) for hidden in sizes)


def hidden(rows=96, width=64):
    torch.manual_seed(1)
    return torch.randn(4, rows, width, requires_grad=True)


def step(blocks, x, hooks=(), **side):
    """One training step: loss, gradients, the generator's state, and the peak of live bytes."""
    torch.manual_seed(2)
    parameters = list(blocks.parameters())
    for tensor in (x, *parameters):
        tensor.grad = torch.zeros_like(tensor)
    with memory.peak() as meter:
        y = (
            apply_blocks(blocks, x, hooks=hooks, **side)
            if hooks != ()
            else plain(blocks, x, **side)
        )
        loss = y.square().mean()
        del y
        loss.backward()
    return meter.peak, [loss, *(t.grad for t in (x, *parameters)), torch.get_rng_state()]


def plain(blocks, x, **side):
    for block in blocks:
        x = block(x, **side)
    return x


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("budget", [1.0, 0.8, 0.6, 0.45])
def test_budgets_are_kept_bit_for_bit_and_the_peak_is_the_predicted_one(budget):
    blocks, x = stack(), hidden()
    peak, expected = step(blocks, x)
    checkpoint = Checkpoint(memory_budget=budget)
    chain = HookChain([checkpoint])

    peaks = []
    for _ in range(4):
        found, record = step(blocks, x, chain)
        peaks.append(found)
        assert same(record, expected)

    (plan,) = checkpoint.planner.plans
    assert plan.budget == int(budget * plan.plain_peak)
    assert max(peaks[1:]) <= budget * peak
    assert peaks[1:] == pytest.approx([plan.peak] * 3, rel=0.01)
    assert plan.plain_peak == pytest.approx(peak, rel=0.01)


def test_a_budget_is_kept_where_gradients_accumulate():
    blocks, x = stack(), hidden()
    checkpoint = Checkpoint(memory_budget=0.5)
    chain = HookChain([checkpoint])

    def peaks(hooks):
        """Peaks of three steps of three micro-batches, of which the first makes the gradients."""
        found = []
        for _ in range(3):
            for tensor in (x, *blocks.parameters()):
                tensor.grad = None
            for _ in range(3):
                with memory.peak() as meter:
                    apply_blocks(blocks, x, hooks=hooks).square().mean().backward()
                found.append(meter.peak)
        return found

    expected, found = peaks(()), peaks(chain)
    assert all(peak <= 0.5 * of for peak, of in zip(found[1:], expected[1:], strict=True))
    assert len(checkpoint.planner.plans) == 2  # one for each kind of step


def test_steps_with_and_without_autocast_have_plans_of_their_own():
    blocks, x = stack(), hidden()
    checkpoint = Checkpoint(memory_budget=0.5)
    chain = HookChain([checkpoint])
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            step(blocks, x, chain)

    full, half = checkpoint.planner.plans
    assert half.plain_peak < full.plain_peak


def test_what_a_budget_does_not_know_of_autocast_is_told_once():
    blocks, x = stack(), hidden()
    chain = HookChain([Checkpoint(memory_budget=0.8)])
    step(blocks, x, chain)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(BlockhooksWarning, match=r"under autocast, which keeps the weights"):
            step(blocks, x, chain)
        step(blocks, hidden(rows=48), chain)  # a warning would be an error


def test_the_measuring_step_needs_little_memory():
    blocks, x = stack(sizes=(256,) * 12), hidden()
    peak, _ = step(blocks, x)
    first, _ = step(blocks, x, [Checkpoint(memory_budget=1.0)])

    assert first < 0.3 * peak


def test_bytes_as_text_and_as_a_number_are_budgets_too():
    blocks, x = stack(), hidden()
    peak, _ = step(blocks, x)

    for budget in (peak // 2, f"{peak // 2} B", f"{peak / 2**21:.3f} MiB"):
        chain = HookChain([Checkpoint(memory_budget=budget)])
        step(blocks, x, chain)
        assert step(blocks, x, chain)[0] <= peak / 2 * 1.001


def test_plans_are_made_for_each_shape_and_remembered():
    blocks, checkpoint = stack(), Checkpoint(memory_budget=0.5)
    chain = HookChain([checkpoint])
    counted = []

    class Counts:
        @hookimpl(wrapper=True)
        def run_block(self):
            counted[-1] += 1
            return (yield)

    chain = HookChain([checkpoint, Counts()])
    for rows in (64, 96, 64, 96, 64):
        counted.append(0)
        step(blocks, hidden(rows), chain)
    assert len(checkpoint.planner.plans) == 2
    assert counted[2] == counted[4] < counted[0]  # measuring executes blocks more often
    assert counted[3] < counted[1]
    assert checkpoint.report().count("6 blocks, ") == 2


def test_eval_mode_side_inputs_and_another_stack_have_plans_of_their_own():
    one, other, checkpoint = stack(), stack((64, 64)), Checkpoint(memory_budget=0.9)
    chain = HookChain([checkpoint])

    step(one, hidden(), chain)
    step(other, hidden(), chain)
    assert len(checkpoint.planner.plans) == 2
    step(one.eval(), hidden(), chain)
    assert len(checkpoint.planner.plans) == 3
    step(one, hidden(), chain, scale=torch.ones(64))
    assert len(checkpoint.planner.plans) == 4


def test_without_gradients_nothing_is_measured():
    blocks, checkpoint = stack(), Checkpoint(memory_budget=0.5)

    with torch.no_grad():
        y = apply_blocks(blocks.eval(), hidden(), hooks=checkpoint)
    assert torch.equal(y, plain(blocks, hidden()))
    assert checkpoint.planner.plans == []


def test_a_budget_below_the_floor_names_it_in_the_first_step():
    blocks, x = stack(), hidden()

    with pytest.raises(
        BudgetError, match="cannot be kept: the least that a plan reaches is"
    ) as caught:
        step(blocks, x, [Checkpoint(memory_budget=1000)])
    chain = HookChain([Checkpoint(memory_budget=caught.value.floor)])
    step(blocks, x, chain)
    assert step(blocks, x, chain)[0] <= caught.value.floor


def test_a_budget_that_is_refused_leaves_nothing_for_the_garbage_collector():
    held = []

    class Watched(Block):
        def forward(self, x):
            y = super().forward(x)
            held.append(weakref.ref(y.untyped_storage()))
            return y

    blocks = nn.ModuleList(Watched(64, 128) for _ in range(4))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(BudgetError, match="cannot be kept"):
            step(blocks, hidden(), [Checkpoint(memory_budget=1000)])
        assert held
        assert [storage for storage in held if storage() is not None] == []
    finally:
        gc.enable()


def test_what_measuring_executes_leaves_no_trace():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.calls = nn.Linear(64, 64), nn.BatchNorm1d(96), 0
            self.noise = torch.Generator().manual_seed(3)

        def forward(self, x):
            self.calls += 1
            return self.linear(self.norm(x)) + torch.randn(64, generator=self.noise)

    def run(hooks):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Counts() for _ in range(4))
        gradients = []
        for parameter in blocks.parameters():
            parameter.register_hook(lambda g: gradients.append(g.shape))
        records = [step(blocks, hidden(), hooks)[1] for _ in range(3)]
        state = [t.clone() for t in blocks.state_dict().values()]
        generators = [block.noise.get_state() for block in blocks]
        return records, state, generators, [block.calls for block in blocks], len(gradients)

    expected, found = run(()), run(HookChain([Checkpoint(memory_budget=0.7)]))
    assert all(same(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert same(found[1], expected[1])
    assert same(found[2], expected[2])
    assert found[3:] == expected[3:] == ([3] * 4, 3 * len(stack_parameters(4)))


def stack_parameters(count):
    return [name for _ in range(count) for name in ("weight", "bias", "weight", "bias")]


def test_it_composes_with_a_profile():
    blocks, x = stack(), hidden()
    _, expected = step(blocks, x)

    for chain in (
        [Checkpoint(memory_budget=0.5), Profile()],
        [Profile(), Checkpoint(memory_budget=0.5)],
    ):
        built = HookChain(chain)
        for _ in range(3):
            assert same(step(blocks, x, built)[1], expected)


class Model(nn.Module):
    """A pyramid: two stacks of unequal blocks, called by its own loop."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList(Block(64, 256) for _ in range(4))
        self.between = nn.Linear(64, 32)
        self.narrow = nn.ModuleList(Block(32, 128) for _ in range(6))

    def forward(self, x):
        for block in self.wide:
            x = block(x)
        x = self.between(x)
        for block in self.narrow:
            x = block(x)
        return x


@pytest.mark.parametrize("budget", [0.8, 0.5])
def test_the_stacks_of_an_attached_model_share_a_budget(budget):
    torch.manual_seed(0)
    model = Model()

    def train(rows):
        torch.manual_seed(2)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = hidden(rows)
        with memory.peak() as meter:
            model(x).square().mean().backward()
        return meter.peak, [parameter.grad for parameter in model.parameters()]

    plain_steps = {rows: train(rows) for rows in (64, 96)}
    checkpoint = Checkpoint(memory_budget=budget)
    with attach(model, hooks=[checkpoint]):
        for number, rows in enumerate((64, 96, 64, 96, 64, 96)):
            peak, gradients = train(rows)
            assert same(gradients, plain_steps[rows][1])
            if number > 1:
                assert peak <= budget * plain_steps[rows][0]
    assert len(checkpoint.planner.plans) == 2  # of both stacks, for each shape


def test_the_budget_of_an_attached_model_that_cannot_be_kept_is_an_error_in_the_second_step():
    model = Model()
    with attach(model, hooks=[Checkpoint(memory_budget=0.01)]):
        model(hidden()).sum().backward()
        model.zero_grad()
        with pytest.raises(BudgetError, match="are held outside of the blocks") as caught:
            model(hidden())
    checkpoint = Checkpoint(memory_budget=caught.value.floor)
    with attach(model, hooks=[checkpoint]):
        for number in range(3):
            model.zero_grad()
            x = hidden()
            with memory.peak() as meter:
                model(x).sum().backward()
            assert number == 0 or meter.peak <= caught.value.floor
    assert caught.value.plan.peak == caught.value.floor


def test_a_block_that_returns_more_than_x_returns_its_own_in_the_measuring_step():
    class Pair(Block):
        def forward(self, x):
            y = super().forward(x)
            return y, y.sum()

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Pair(64, 128) for _ in range(3))

        def forward(self, x):
            total = 0.0
            for block in self.blocks:
                x, part = block(x)
                total = total + part
            return total

    torch.manual_seed(0)
    model = Loop()
    for hooks in ((), [Checkpoint(memory_budget=0.9)]):
        x = hidden()
        torch.manual_seed(2)
        if not hooks:
            expected = torch.autograd.grad(model(x), [x, *model.parameters()])
            continue
        with attach(model, hooks=hooks):
            assert same(torch.autograd.grad(model(x), [x, *model.parameters()]), expected)


def test_a_plan_and_a_budget_together_are_refused_as_is_what_is_no_budget():
    with pytest.raises(PlanError, match="give it one of them"):
        Checkpoint(lambda n: (), memory_budget=0.5)
    with pytest.raises(PlanError, match="a budget decides itself what is kept"):
        Checkpoint(save=[torch.ops.aten.mm.default], memory_budget=0.5)
    with pytest.raises(BudgetError, match="found '8 parsecs'"):
        Checkpoint(memory_budget="8 parsecs")


def test_copies_and_pickles_keep_the_budget_and_forget_the_blocks():
    blocks, checkpoint = stack(), Checkpoint(memory_budget=0.5)
    step(blocks, hidden(), [checkpoint])

    for other in (copy.deepcopy(checkpoint), pickle.loads(pickle.dumps(checkpoint))):
        assert repr(other) == repr(checkpoint) == "Checkpoint(memory_budget=0.5)"
        assert other.planner.plans == []
        chain = HookChain([other])
        step(blocks, hidden(), chain)
        assert len(other.planner.plans) == 1


def test_the_report_tells_budget_and_plan():
    checkpoint = Checkpoint(memory_budget=0.5)
    assert checkpoint.report() == "memory budget 50% of the plain loop's peak"
    step(stack(), hidden(), [checkpoint])
    assert "6 blocks, [4, 96, 64] float32 on cpu:" in checkpoint.report()
    assert str(checkpoint.planner.plans[0]).splitlines()[0] in checkpoint.report()


def test_a_block_whose_state_changes_for_the_first_time_is_measured_in_the_next_step():
    class Clips(Block):
        def forward(self, x):
            self.up.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    def blocks():
        torch.manual_seed(0)
        return nn.ModuleList(Clips(64, 128) for _ in range(6))

    ours, theirs, x = blocks(), blocks(), hidden()
    checkpoint = Checkpoint(memory_budget=0.6)
    chain = HookChain([checkpoint])
    for number in range(4):
        assert same(step(ours, x, chain)[1], step(theirs, x)[1])
        assert len(checkpoint.planner.plans) == (number > 0)


def test_a_block_that_works_in_place_on_its_input_is_kept_in_every_plan():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(x.mul_(0.5))

    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(64, 64), InPlace(), Block(64, 64)])
    x = hidden()
    expected = step(blocks, x)[1]
    checkpoint = Checkpoint(memory_budget=0.9)
    chain = HookChain([checkpoint])
    for _ in range(4):
        assert same(step(blocks, x, chain)[1], expected)
    (plan,) = checkpoint.planner.plans
    assert all(s.mode != "recompute" for s in plan.segments if 1 in s.indices)
