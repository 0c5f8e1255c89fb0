"""`apply_blocks`: the plain loop, and what it takes and gives."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, HookChain, HookError, apply_blocks, hookimpl, plan
from tests.agree import Layer, agree, agrees, bits, layers, leaf, plain, through

HOOKS = {
    "no hooks": (),
    "an observer": lambda: [Observer()],
    "checkpoint": lambda: [Checkpoint()],
    "a chain": lambda: HookChain([Observer(), Checkpoint(plan.every(2))]),
    "one plugin": lambda: Checkpoint(),
    "a tuple": lambda: (Observer(), Checkpoint()),
}


class Observer:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def run_block(self, index, recomputing):
        self.seen.append((index, recomputing))
        return (yield)


@pytest.fixture(params=HOOKS, ids=str)
def hooks(request):
    given = HOOKS[request.param]
    return given() if callable(given) else given


def test_blocks_are_applied_in_order(hooks):
    out = apply_blocks(
        [lambda x: x + 1, lambda x: x * 2, lambda x: x - 3], torch.zeros(2), hooks=hooks
    )
    assert out.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        iter,
        nn.ModuleList,
        nn.Sequential,
        lambda b: (x for x in b),
        lambda b: dict(enumerate(b)).values(),
    ],
    ids=["list", "tuple", "iterator", "ModuleList", "Sequential", "generator", "values of a dict"],
)
def test_blocks_are_any_iterable(make, hooks):
    blocks = layers(3)
    given = nn.Sequential(*blocks) if make is nn.Sequential else make(list(blocks))
    x = leaf(3, 4)
    assert bits(apply_blocks(given, x, hooks=hooks)) == bits(plain(blocks, x))


def test_no_blocks_give_x(hooks):
    x = {"any": object()}
    assert apply_blocks([], x, hooks=hooks) is x


def test_a_list_changed_after_the_forward_does_not_matter():
    blocks, x = list(layers(3)), leaf(3, 4)
    expected = torch.autograd.grad(plain(blocks, x).sum(), x)[0]
    stack = list(blocks)
    out = apply_blocks(stack, x, hooks=[Checkpoint()])
    stack.reverse()
    stack.clear()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


@agrees
def test_blocks_of_all_kinds(run):
    def scale(x, factor):
        return torch.tanh(x * factor)

    class Holder:
        def __init__(self):
            self.linear = nn.Linear(4, 4)

        def method(self, x):
            return x + self.linear(x).sin()

        @classmethod
        def of_class(cls, x):
            return x.sin()

        @staticmethod
        def static(x):
            return x.cos()

    class Callable:
        def __call__(self, x):
            return x * 1.5

    holder = Holder()
    blocks = [
        Layer(), functools.partial(scale, factor=0.7), holder.method, lambda x: x.exp(), Holder.of_class, Holder.static,
        Callable(), torch.tanh, torch.nn.functional.gelu, nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    ]  # fmt: skip
    x = leaf(3, 4)
    out = run(blocks, x)
    out.square().sum().backward()
    return out, blocks[0], holder, blocks[-1], x


def test_side_inputs_go_to_every_block(hooks):
    seen = []

    def block(x, one, *, two, three=None):
        seen.append((one, two, three))
        return x + 1

    assert apply_blocks([block] * 3, torch.zeros(()), 1, hooks=hooks, two="two") == 3
    assert seen == [(1, "two", None)] * 3


def test_the_first_of_a_tuple_is_carried_for_a_tensor_x(hooks):
    def block(x):
        return x + 1, "attention", None

    assert apply_blocks([block, lambda x: [x * 2, 3]], torch.ones(()), hooks=hooks) == 4


def test_a_tuple_x_stays_a_tuple(hooks):
    def block(pair):
        return pair[1], pair[0] + 1

    assert apply_blocks([block] * 3, (torch.tensor(0), torch.tensor(10)), hooks=hooks) == (11, 2)


def test_an_empty_tuple_is_carried_as_it_is(hooks):
    assert apply_blocks([lambda x: ()], torch.ones(()), hooks=hooks) == ()


def test_carry_picks_the_next_x(hooks):
    def block(x):
        return {"hidden": x + 1, "other": None}

    out = apply_blocks(
        [block] * 3, torch.zeros(()), hooks=hooks, carry=lambda output: output["hidden"]
    )
    assert out == 3


def test_collect_joins_what_came_before_and_the_output(hooks):
    def block(collected):
        return collected[-1] + 1

    out = apply_blocks(
        [block] * 3,
        [torch.zeros(())],
        hooks=hooks,
        collect=lambda previous, output: [*previous, output],
    )
    assert [value.item() for value in out] == [0, 1, 2, 3]


def test_collect_after_carry(hooks):
    out = apply_blocks(
        [lambda x: {"x": x * 2}] * 3,
        torch.ones(()),
        hooks=hooks,
        carry=lambda output: output["x"],
        collect=lambda previous, output: previous + output,
    )
    assert out == 27


def test_collect_with_gradients():
    def step(run_hooks):
        blocks, x = layers(3, dropout=0.1), leaf(3, 4)
        torch.manual_seed(1)

        def block(layer, states):
            return layer(states[-1])

        states = apply_blocks(
            [functools.partial(block, layer) for layer in blocks],
            (x,),
            hooks=run_hooks,
            collect=lambda states, output: (*states, output),
        )
        assert len(states) == 4
        torch.stack(states).square().sum().backward()
        return [p.grad for p in blocks.parameters()], x.grad

    torch.manual_seed(0)
    expected = step(())
    torch.manual_seed(0)
    found = step([Checkpoint()])
    assert all(map(torch.equal, expected[0], found[0]))
    assert torch.equal(expected[1], found[1])


def test_hooks_are_called_outermost_first():
    order = []

    class Marks:
        def __init__(self, name):
            self.name = name

        @hookimpl(wrapper=True)
        def run_block(self):
            order.append(self.name)
            try:
                return (yield)
            finally:
                order.append(self.name.upper())

    apply_blocks(
        [lambda x: order.append("block") or x], 1, hooks=[Marks("a"), Marks("b"), Marks("c")]
    )
    assert order == ["a", "b", "c", "block", "C", "B", "A"]


@pytest.mark.parametrize("hooks", [3, "Checkpoint", Checkpoint, [Checkpoint], [None]], ids=repr)
def test_something_else_than_plugins_is_refused(hooks):
    with pytest.raises(HookError, match=r"hooks\[0\]"):
        apply_blocks([torch.sin], leaf(3), hooks=hooks)


@pytest.mark.parametrize("hooks", [(), [Checkpoint()]], ids=repr)
def test_a_single_block_is_refused(hooks):
    with pytest.raises(
        HookError, match=r"iterable of blocks, found a Linear.*apply_blocks\(\[block\]"
    ):
        apply_blocks(torch.nn.Linear(3, 3), leaf(3), hooks=hooks)


@pytest.mark.parametrize("hooks", [(), [Checkpoint()]], ids=repr)
@pytest.mark.parametrize("name", ["carry", "collect"])
def test_carry_and_collect_are_functions(name, hooks):
    with pytest.raises(
        HookError, match=rf"apply_blocks\({name}=...\) expected a function, found 3"
    ):
        apply_blocks([torch.sin], leaf(3), hooks=hooks, **{name: 3})


def test_nested_runs_of_different_hooks():
    def step(run):
        inner, x = layers(2, dropout=0.2), leaf(3, 4)
        observer = Observer()

        def outer(x):
            return apply_blocks(inner, x, hooks=[observer] if run is not plain else ()).tanh()

        run([outer, outer], x).square().sum().backward()
        return inner, x

    agree(step)


@agrees
def test_names_copies_and_pickles_are_unchanged(run):
    blocks = layers(2, dropout=0.2)
    names = list(blocks.state_dict())
    run(blocks, leaf(3, 4)).sum().backward()
    assert list(blocks.state_dict()) == names
    again = []
    for other in (copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
        other.zero_grad()
        torch.manual_seed(1)
        run(other, leaf(3, 4)).sum().backward()
        other.load_state_dict(blocks.state_dict(), strict=True)
        again.append([p.grad for p in other.parameters()])
    return blocks, again


def test_a_training_loop_with_one_chain():
    chain = HookChain([Checkpoint()])

    def step(run):
        blocks = layers(3, dropout=0.1)
        optimizer = torch.optim.Adam(blocks.parameters(), lr=0.01)
        losses = []
        for number in range(4):
            optimizer.zero_grad()
            given = chain if run is not plain else ()
            loss = apply_blocks(blocks, leaf(3, 4, number=number), hooks=given).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, blocks

    agree(step, ["every block"])


def test_through_is_what_users_write():
    x = leaf(3, 4)
    blocks = layers(2)
    assert bits(through([Checkpoint()])(blocks, x)) == bits(
        apply_blocks(blocks, x, hooks=[Checkpoint()])
    )


def test_hooks_none_is_the_plain_loop():
    x = torch.ones(2, 3)
    assert torch.equal(apply_blocks([torch.sin, torch.cos], x, hooks=None), x.sin().cos())
