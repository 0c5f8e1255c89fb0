"""DistributedDataParallel and FSDP's hooks in one process over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from blockhooks import plan
from tests.agree import Layer, agree, layers, leaf, plain


@pytest.fixture
def _group(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, run, shared):
        super().__init__()
        self.run, self.shared = run, shared
        self.blocks = nn.ModuleList([*layers(2, dropout=0.2), nn.BatchNorm1d(4)])

    def forward(self, x):
        first, second, norm = self.blocks
        return self.run([first, norm, first, second] if self.shared else list(self.blocks), x)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("static", [False, True], ids=["dynamic graph", "static graph"])
@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weights"])
def test_ddp(shared, static):
    def step(run):
        net = Net(run, shared)
        model = net if run is plain else DistributedDataParallel(net, static_graph=static)
        losses = []
        for number in range(3):
            loss = model(leaf(6, 4, number=number)).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return (
            losses,
            [(name, p.detach(), p.grad) for name, p in net.named_parameters()],
            dict(net.named_buffers()),
        )

    agree(step, ["every block", "pairs", "tree"])


@pytest.mark.usefixtures("_group")
def test_ddp_with_unused_parameters_and_accumulation():
    class Half(nn.Module):
        def __init__(self, run):
            super().__init__()
            self.run, self.blocks, self.calls = run, layers(4), 0

        def forward(self, x):
            self.calls += 1
            return self.run(list(self.blocks)[: 2 + self.calls % 2], x)

    def step(run):
        net = Half(run)
        model = net if run is plain else DistributedDataParallel(net, find_unused_parameters=True)
        for number in range(4):
            model(leaf(6, 4, number=number)).square().sum().backward()
        return [(name, p.grad) for name, p in net.named_parameters()]

    agree(step, ["every block"])


@pytest.mark.usefixtures("_group")
def test_a_block_that_is_a_ddp_module():
    def step(run):
        blocks = layers(3)
        wrapped = blocks if run is plain else [DistributedDataParallel(block) for block in blocks]
        x = leaf(3, 4)
        run(wrapped, x).square().sum().backward()
        return [(p.detach(), p.grad) for p in blocks.parameters()], x

    agree(step, ["every block", "pairs"])


@pytest.mark.usefixtures("_group")
def test_fully_shard_of_the_blocks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def step(run):
        blocks = nn.ModuleList(Layer() for _ in range(3))
        if run is not plain:
            mesh = init_device_mesh("cpu", (1,))
            for block in blocks:
                fully_shard(block, mesh=mesh)
        xs = [leaf(3, 4, number=n) for n in range(2)]
        for x in xs:
            run(blocks, x).square().sum().backward()
        full = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in blocks.parameters()]
        return full, xs

    agree(step, ["every block", "pairs"])


def test_plans_are_the_same_on_every_rank():
    assert plan.tree(2)(7) == plan.tree(2)(7)
    assert torch.equal(torch.tensor([s.start for s in plan.sqrt()(9)]), torch.tensor([0, 3, 6]))
