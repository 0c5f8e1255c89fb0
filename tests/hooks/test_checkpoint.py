"""`Checkpoint`: options, plans, modes, and its place among other plugins."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from blockhooks import (
    BlockhooksWarning,
    Checkpoint,
    HookChain,
    HookError,
    PlanError,
    Segment,
    apply_blocks,
    hookimpl,
    plan,
)
from tests.agree import differs, layers, leaf, no_trace, outcome, plain, through


def count(blocks_count=6):
    calls = [0] * blocks_count

    def block(index):
        def call(x):
            calls[index] += 1
            return (x * 0.9).sin().exp()

        return call

    return [block(index) for index in range(blocks_count)], calls


NESTED = (
    Segment(0, 4, (Segment(0, 2), Segment(2, 4, (Segment(2, 3), Segment(3, 4, mode="keep"))))),
    Segment(4, 5, mode="keep"),
    Segment(5, 6),
)
PLANS = {
    "every(1)": plan.every(1),
    "every(4)": plan.every(4),
    "every(100)": plan.every(100),
    "sqrt": plan.sqrt(),
    "tree(3)": plan.tree(3),
    "binomial(2)": plan.binomial(2),
    "first(2)": plan.first(2),
    "blocks": plan.blocks([1, 3]),
    "nested": lambda n: NESTED,
    "a list": lambda n: [Segment(0, n)],
}


def rich(run):
    """A step with state, randomness, side inputs and two micro-batches."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

        def forward(self, x, memory, cache):
            self.calls += 1
            cache.append(float(x.detach().mean()))
            return torch.dropout(torch.tanh(self.norm(self.linear(x))) + memory, 0.2, True) / len(
                cache
            )

    blocks, memory, cache = [Block() for _ in range(6)], leaf(4, number=5), []
    xs = [leaf(6, 4, number=n) for n in range(2)]
    losses = [run(blocks, x, memory, cache).square().sum() for x in xs]
    for loss in losses:
        with no_trace(blocks, cache):
            loss.backward()
    return losses, blocks, memory, cache, xs


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("plan_function", PLANS.values(), ids=PLANS)
def test_a_rich_step_under_plan(plan_function, early_stop):
    found = outcome(rich, through([Checkpoint(plan_function, early_stop=early_stop)]))
    assert differs(found, outcome(rich, plain)) is None


@pytest.mark.parametrize("check", ["shapes", "values", "none"])
def test_a_rich_step_under_check(check):
    found = outcome(rich, through([Checkpoint(plan.every(2), check=check)]))
    assert differs(found, outcome(rich, plain)) is None


@pytest.mark.parametrize(
    ("plan_function", "expected"),
    [
        (PLANS["every(1)"], [2] * 6),
        (PLANS["every(4)"], [2] * 6),
        (PLANS["first(2)"], [2, 2, 1, 1, 1, 1]),
        (PLANS["blocks"], [1, 2, 1, 2, 1, 1]),
    ],
    ids=["every(1)", "every(4)", "first(2)", "blocks"],
)
def test_how_often_blocks_run(plan_function, expected):
    blocks, calls = count()
    apply_blocks(blocks, leaf(3), hooks=[Checkpoint(plan_function)]).sum().backward()
    assert calls == expected


def test_how_often_blocks_run_in_nested_segments():
    blocks, calls = count()
    apply_blocks(blocks, leaf(3), hooks=[Checkpoint(lambda n: NESTED)]).sum().backward()
    assert calls[4:] == [1, 2]
    assert all(2 <= number <= 4 for number in calls[:4])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_it_acts_in_train_and_in_eval_mode(training):
    blocks, calls = layers(2).train(training), []
    for block in blocks:
        block.up.forward = lambda x, own=block.up: (
            calls.append(1),
            nn.functional.linear(x, own.weight, own.bias),
        )[1]
    apply_blocks(blocks, leaf(3, 4), hooks=[Checkpoint()]).sum().backward()
    assert len(calls) == 4


def test_it_does_nothing_without_gradients():
    asked = []

    class Carries:
        @hookimpl
        def recompute_context(self):
            asked.append(1)

    with torch.no_grad():
        apply_blocks([torch.sin], leaf(3), hooks=[Checkpoint(), Carries()])
    assert not asked
    apply_blocks([torch.sin], leaf(3), hooks=[Checkpoint(), Carries()])
    assert asked == [1]


def test_an_observer_around_and_inside():
    log = []

    class Observer:
        def __init__(self, name):
            self.name = name

        @hookimpl(wrapper=True)
        def run_segment(self, segment, recomputing):
            log.append((self.name, "segment", segment.start, recomputing))
            return (yield)

        @hookimpl(wrapper=True)
        def run_block(self, index, recomputing):
            log.append((self.name, "block", index, recomputing))
            return (yield)

    for hooks in ([Observer("o"), Checkpoint()], [Checkpoint(), Observer("o")]):
        log.clear()
        out = apply_blocks([torch.sin, torch.exp], leaf(3), hooks=hooks)
        forward = [
            ("o", "segment", 0, False), ("o", "block", 0, False), ("o", "segment", 1, False), ("o", "block", 1, False),
        ]  # fmt: skip
        assert log == forward
        out.sum().backward()
        assert log == [*forward, ("o", "block", 1, True), ("o", "block", 0, True)]


def test_a_value_hook_does_the_same_in_every_execution():
    class Scales:
        @hookimpl(wrapper=True)
        def run_block(self, index, x):
            return (yield) * (index + 2)

    def through_scales(checkpoint):
        def run(blocks, x):
            return apply_blocks(blocks, x, hooks=[*checkpoint, Scales()])

        return run

    def step(run):
        blocks, x = layers(3, dropout=0.2), leaf(3, 4)
        run(blocks, x).square().sum().backward()
        return blocks, x

    expected = outcome(step, through_scales([]))
    assert differs(outcome(step, through_scales([Checkpoint()])), expected) is None
    assert differs(outcome(step, through_scales([Checkpoint(plan.tree(2))])), expected) is None


def test_a_plugin_may_carry_what_it_reads():
    class Temperature:
        value = 1.0

        @hookimpl(wrapper=True)
        def run_block(self, x):
            return (yield) * self.value

        @hookimpl
        def recompute_context(self):
            return lambda value=self.value: Carried(self, value)

    class Carried:
        def __init__(self, owner, value):
            self.owner, self.value = owner, value

        def __enter__(self):
            self.now, self.owner.value = self.owner.value, self.value

        def __exit__(self, *error):
            self.owner.value = self.now

    def gradient(hooks, temperature):
        x = leaf(3)
        out = apply_blocks([lambda x: x.sin().exp()] * 2, x, hooks=[*hooks, temperature])
        temperature.value = 7.0
        out.sum().backward()
        assert temperature.value == 7.0
        return x.grad

    assert torch.equal(gradient([Checkpoint()], Temperature()), gradient([], Temperature()))


def test_two_checkpoints_nest_as_the_first_plans():
    blocks, calls = count(2)
    with pytest.warns(
        BlockhooksWarning, match=r"hooks\[1\] \(Checkpoint\) is shadowed by hooks\[0\]"
    ):
        chain = HookChain([Checkpoint(plan.every(2)), Checkpoint()])
    apply_blocks(blocks, leaf(3), hooks=chain).sum().backward()
    assert calls == [2, 2]


@pytest.mark.parametrize(
    "given", [3, "every", (Segment(0, 1),)], ids=["number", "text", "segments"]
)
def test_a_plan_that_is_no_function_is_refused(given):
    with pytest.raises(
        PlanError, match=r"Checkpoint\(plan=\.\.\.\) expected a plan function such as .*, found"
    ):
        Checkpoint(given)


def test_an_unknown_check_is_refused():
    with pytest.raises(
        HookError, match=r"Checkpoint\(check='all'\): expected one of 'shapes', 'values', 'none'\."
    ):
        Checkpoint(check="all")


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (
            (Segment(0, 1), Segment(2, 3)),
            r"plan by hooks\[0\] \(Checkpoint\) .*block 1 is in no segment",
        ),
        ((Segment(0, 2),), "block 2 is in no segment"),
        ((Segment(0, 2), Segment(1, 3)), "overlap"),
        ((Segment(0, 4),), "reaches beyond the end"),
    ],
    ids=["a gap", "too short", "an overlap", "too long"],
)
def test_a_plan_that_does_not_cover_the_blocks_is_refused(segments, message):
    with pytest.raises(PlanError, match=message):
        apply_blocks([torch.sin] * 3, leaf(3), hooks=[Checkpoint(lambda n: segments)])


def test_its_repr_tells_the_plan():
    assert repr(Checkpoint(plan.every(2))) == "Checkpoint(every(2))"
    assert "Checkpoint" in repr(HookChain(Checkpoint()))


class _Projects(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


def _saves_addmm(context, operator, *args, **kwargs):
    return operator == torch.ops.aten.addmm.default


@pytest.mark.parametrize(
    "save", [[torch.ops.aten.addmm.default], _saves_addmm], ids=["list", "policy"]
)
def test_saved_operations_are_not_executed_again(save):
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(_Projects() for _ in range(3))
    x = torch.randn(4, 16)

    def step(hooks):
        torch.manual_seed(1)
        blocks.zero_grad()
        with FlopCounterMode(display=False) as counter:
            apply_blocks(blocks, x, hooks=hooks).sum().backward()
        return [p.grad.clone() for p in blocks.parameters()], counter.get_total_flops()

    plain, flops = step(())
    everything, more = step([Checkpoint()])
    selected, same = step([Checkpoint(save=save)])
    assert all(map(torch.equal, selected, plain))
    assert all(map(torch.equal, everything, plain))
    assert same == flops < more


@pytest.mark.parametrize(
    "save",
    [
        "mm",
        3,
        ["mm"],
        [torch.ops.aten.mm],
        torch.ops.aten.mm,
        torch.ops.aten.mm.default,
        Checkpoint,
    ],
    ids=str,
)
def test_what_to_save_is_a_list_of_overloads_or_a_policy(save):
    with pytest.raises(HookError, match=r"Checkpoint\(save=...\) expected a list of .* found"):
        Checkpoint(save=save)


@pytest.mark.parametrize("value", ["no", None, 1])
def test_early_stop_is_true_or_false(value):
    with pytest.raises(
        HookError, match=r"Checkpoint\(early_stop=...\) expected True or False, found"
    ):
        Checkpoint(early_stop=value)


@pytest.mark.parametrize("check", ["shapes", "values", "none"])
@pytest.mark.parametrize(
    "last",
    [
        nn.RReLU(),  # saves its noise first, and draws it then
        lambda x: nn.functional.rrelu(x.sin(), training=True),
        lambda x: nn.functional.rrelu(nn.functional.rrelu(x, training=True), training=True) + 1,
    ],
    ids=["module", "function", "twice"],
)
def test_a_segment_may_end_with_a_randomised_relu(last, check):
    def step(run):
        blocks, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), leaf(3, 4)
        run(
            [lambda x, block=block: last(block(x)) for block in blocks], x
        ).square().sum().backward()
        return blocks, x

    found = outcome(step, through([Checkpoint(check=check)]))
    assert differs(found, outcome(step, plain)) is None


@pytest.mark.parametrize("made", [plan.every, lambda n: None], ids=["uncalled", "None"])
def test_a_plan_function_must_give_segments(made):
    with pytest.raises(PlanError, match="expected segments"):
        apply_blocks([nn.Linear(4, 4)], torch.ones(1, 4), hooks=[Checkpoint(made)])


def test_a_plan_may_give_each_block_another_mode():
    modes = ("offload", "recompute", "selective", "keep")

    def planned(n):
        return tuple(Segment(i, i + 1, mode=modes[i % 4]) for i in range(n))

    def step(run):
        blocks, x = layers(8), leaf(3, 4)
        run(blocks, x).square().sum().backward()
        return blocks, x

    found = outcome(step, through([Checkpoint(planned)]))
    assert differs(found, outcome(step, plain)) is None


def test_a_checkpoint_can_be_copied_and_pickled():
    checkpoint = Checkpoint(plan.every(2), early_stop=False)
    for twin in (copy.deepcopy(checkpoint), pickle.loads(pickle.dumps(checkpoint))):
        assert (twin.plan, twin.early_stop, twin.check) == (plan.every(2), False, "shapes")
