"""`HookedBlocks(blocks, hooks=[Checkpoint(memory_budget=...)])` keeps its budget by itself, through all that is done to it."""

import copy
import io
import pickle

import torch

from blockhooks import Checkpoint, HookChain, HookedBlocks, memory
from tests.budget.test_checkpoint import Block, hidden, plain, same, stack

BUDGET = 0.6


def hooked(**options):
    return HookedBlocks(stack(**options), hooks=[Checkpoint(memory_budget=BUDGET)])


def planner(blocks):
    (checkpoint,) = (p for p in blocks.chain.plugins if isinstance(p, Checkpoint))
    return checkpoint.planner


def step(forward, blocks, x):
    """One training step: the peak of live bytes; loss, gradients and the generator's state."""
    torch.manual_seed(2)
    tensors = [x, *blocks.parameters()]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    with memory.peak() as meter:
        loss = forward(x).square().mean()
        loss.backward()
    return meter.peak, [loss.detach(), *(tensor.grad for tensor in tensors), torch.get_rng_state()]


def check(blocks, x, *, measured=False):
    """Three steps have the plain loop's bits, and all but a measuring first one keep the budget."""
    peak, expected = step(lambda x: plain(blocks, x), blocks, x)
    for number in range(3):
        found, record = step(blocks, blocks, x)
        assert same(record, expected)
        assert found <= BUDGET * peak or (number == 0 and not measured)


def test_the_budget_is_kept_bit_for_bit_and_anew_for_each_shape():
    blocks = hooked()

    check(blocks, hidden(64))
    check(blocks, hidden(96))
    check(blocks, hidden(64), measured=True)
    assert len(planner(blocks).plans) == 2


def test_blocks_added_replaced_and_removed_are_planned_anew():
    blocks, x = hooked(), hidden()
    check(blocks, x)

    blocks.append(Block(64, 256))
    check(blocks, x)
    assert [plan.segments[-1].stop for plan in planner(blocks).plans] == [6, 7]
    blocks[0] = Block(64, 512)
    check(blocks, x)
    del blocks[5:]
    check(blocks, x)
    blocks.insert(0, Block(64, 128))
    check(blocks, x)
    assert planner(blocks).plans[-1].segments[-1].stop == 6


def test_another_mode_and_frozen_parameters_are_planned_anew():
    blocks, x = hooked(), hidden()
    check(blocks, x)
    check(blocks.eval(), x)
    blocks.train()[0].requires_grad_(False)
    check(blocks, x)
    blocks[0].norm.requires_grad_(True)
    check(blocks, x)
    assert len(planner(blocks).plans) == 4


def test_a_copy_measures_its_own_blocks_and_leaves_the_other_alone():
    blocks, x = hooked(), hidden()
    check(blocks, x)

    for other in (copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
        assert planner(other) is not planner(blocks)
        assert planner(other).plans == []
        assert same(other.parameters(), blocks.parameters())
        check(other, x)
    assert len(planner(blocks).plans) == 1
    check(blocks, x, measured=True)


def test_the_state_dict_is_that_of_the_blocks_and_loading_it_keeps_the_plan():
    blocks, x = hooked(), hidden()
    check(blocks, x)
    assert list(blocks.state_dict()) == list(stack().state_dict())

    torch.save({name: t + 0.01 for name, t in blocks.state_dict().items()}, file := io.BytesIO())
    file.seek(0)
    blocks.load_state_dict(torch.load(file))
    check(blocks, x, measured=True)
    assert len(planner(blocks).plans) == 1


def test_a_slice_shares_the_chain_and_has_a_plan_of_its_own():
    blocks, x = hooked(), hidden()
    check(blocks, x)
    check(blocks[2:], x)
    assert sorted(plan.segments[-1].stop for plan in planner(blocks).plans) == [4, 6]


def test_two_lists_with_one_chain_do_not_disturb_each_other():
    chain = HookChain([Checkpoint(memory_budget=BUDGET)])
    one, other, x = HookedBlocks(stack(), hooks=chain), HookedBlocks(stack(), hooks=chain), hidden()

    check(one, x)
    check(other, x)
    check(one, x, measured=True)
    check(other, x, measured=True)
