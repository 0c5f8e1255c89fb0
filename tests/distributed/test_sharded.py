"""Tensor parallelism, whose blocks hold `DTensor`s and wait for other processes inside of themselves.

Processes that are not there, and whose collectives do nothing, are enough here: torch's ``fake`` backend.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from blockhooks import (
    Checkpoint,
    Profile,
    Selective,
    apply_blocks,
    attach,
    budget,
    memory,
    plan,
)
from blockhooks.errors import BudgetError, RecomputeError

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.slope = 1.0

    def forward(self, x):
        return x + self.slope * self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, hooks=()):
        super().__init__()
        self.blocks, self.hooks = nn.ModuleList(Block() for _ in range(4)), hooks

    def forward(self, x):
        return apply_blocks(self.blocks, x, hooks=self.hooks)


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def parallel(mesh):
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def hidden(rows=60):
    torch.manual_seed(1)
    return torch.randn(4, rows, WIDTH, requires_grad=True)


def step(model, x):
    torch.manual_seed(2)
    loss = model(x).square().sum()
    loss.backward()
    gradients = [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()
    ]
    return [loss.detach(), x.grad, *gradients, torch.get_rng_state()]


def two_steps(model):
    """With a memory budget, the first is measured and the second is planned."""
    for _ in range(2):
        model.zero_grad()
        step(model, hidden())


@pytest.mark.parametrize(
    "hooks",
    [
        Checkpoint(),
        Checkpoint(plan.every(2), check="values"),
        [Checkpoint(plan.first(2)), Selective(), Profile()],
    ],
    ids=["every block", "values", "all at once"],
)
def test_a_step_is_the_plain_one(mesh, hooks):
    expected = step(parallel(mesh), hidden())
    model = parallel(mesh)
    with attach(model, hooks=hooks):
        found = step(model, hidden())
    assert all(map(torch.equal, found, expected))


def test_values_of_a_block_that_differs_are_told(mesh):
    model = parallel(mesh)
    with attach(model, hooks=Checkpoint(check="values")):
        loss = model(hidden()).sum()
        model.blocks[1].up.weight.to_local().data.mul_(2)  # of which autograd knows nothing
        with pytest.raises(RecomputeError, match=r"(?s)blocks\.1\b.*different values"):
            loss.backward()


def test_a_profile_counts_the_bytes_of_this_process(mesh):
    kept = []
    for make in (Model, lambda: parallel(mesh)):
        profile = Profile()
        apply_blocks(make().blocks, hidden(), hooks=profile).sum().backward()
        kept.append(profile.to_dict()["blocks"][0]["kept_bytes"])
    # The input of gelu and its result are halved.
    wide = 4 * 60 * 4 * WIDTH * 4
    assert kept[0] - kept[1] == 2 * (wide - wide // 2)


def test_the_meter_counts_the_bytes_of_this_process(mesh):
    sharded = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])
    half, whole = 32 * 64 * 4, 64 * 64 * 4
    with memory.peak("cpu") as meter:
        twice = sharded * 2
        assert meter.now == half
        gathered = twice.redistribute(mesh, [Replicate()])
        assert half + whole <= meter.now <= meter.peak < 2 * (half + whole)
        del twice, gathered
    assert meter.now == 0


def test_no_budget_plans_for_blocks_that_wait_for_others(mesh):
    model = parallel(mesh)
    expected = r"blocks\.\d \(_c10d_functional\.all_reduce.*waits for other processes.*the same plan in all"
    with (
        attach(model, hooks=Checkpoint(memory_budget=0.7)),
        pytest.raises(BudgetError, match=expected),
    ):
        two_steps(model)


def test_a_plan_that_was_solved_for_once_is_for_all(mesh, tmp_path):
    model = parallel(mesh)
    solved = budget.solve(budget.measure(model.blocks, hidden()), 0.7)
    assert any(segment.mode == "recompute" for segment in solved.segments)
    solved.save(tmp_path / "plan.json")
    expected = step(parallel(mesh), hidden())
    with attach(model, hooks=Checkpoint(budget.Plan.load(tmp_path / "plan.json"))):
        assert all(map(torch.equal, step(model, hidden()), expected))


def test_a_budget_that_keeps_everything_needs_no_plan(mesh):
    expected = step(parallel(mesh), hidden())
    model = parallel(mesh)
    with attach(model, hooks=Checkpoint(memory_budget=1.0)):
        for _ in range(3):
            model.zero_grad()
            assert all(map(torch.equal, step(model, hidden()), expected))


def test_fsdps_blocks_are_not_measured_from_outside(mesh):
    from torch.distributed.fsdp import fully_shard

    model = Model(Checkpoint(memory_budget=0.7))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    with pytest.raises(
        BudgetError, match=r"(?s)Block cannot be measured.*waits for other processes.*attach"
    ):
        model(hidden())
