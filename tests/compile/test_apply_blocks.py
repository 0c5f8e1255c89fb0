"""`apply_blocks` under ``torch.compile``, and with compiled blocks; the back end computes as eager code does."""

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, apply_blocks, checkpoint, hookimpl, plan
from tests.agree import Layer, differs, layers, leaf, outcome, plain

pytestmark = [
    pytest.mark.slow,
    # Dynamo asks inputs for it, and hides the warning by a filter that `error` comes before (torch 2.13).
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, run, blocks):
        super().__init__()
        self.entry, self.blocks, self.run = nn.Linear(4, 4), nn.ModuleList(blocks), run

    def forward(self, x):
        return self.run(self.blocks, torch.tanh(self.entry(x))).sin()


class Observer:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def run_block(self, index, recomputing):
        self.seen.append((index, recomputing))
        return (yield)


def train(compiled, fullgraph=False, blocks=lambda: layers(3), hooks=()):
    """Two steps of a model, compiled or not, of batches of two sizes."""

    def step(run):
        net = Net(run if not compiled else lambda b, x: apply_blocks(b, x, hooks=hooks), blocks())
        call = torch.compile(net, backend="eager", fullgraph=fullgraph) if compiled else net
        xs = [leaf(rows, 4, number=rows) for rows in (3, 5)]
        for x in xs:
            call(x).square().sum().backward()
        return (
            [(name, p.detach(), p.grad) for name, p in net.named_parameters()],
            dict(net.named_buffers()),
            xs,
        )

    return step


@pytest.mark.parametrize(
    "plan_function",
    [plan.every(1), plan.every(2), plan.tree(2)],
    ids=["every(1)", "every(2)", "tree(2)"],
)
def test_a_compiled_model_in_one_graph(plan_function):
    hooks = [Checkpoint(plan_function)]
    found = outcome(train(True, fullgraph=True, hooks=hooks), plain)
    assert differs(found, outcome(train(False), plain)) is None


@pytest.mark.parametrize("replaced", [False, True], ids=["", "torch's name replaced"])
def test_hooks_made_inside_of_the_compiled_function(monkeypatch, replaced):
    if replaced:
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)

    def step(run):
        blocks, x = layers(3), leaf(3, 4)
        if run is not plain:
            run = torch.compile(
                lambda blocks, x: apply_blocks(blocks, x, hooks=[Checkpoint()]),
                backend="aot_eager",
                fullgraph=True,
            )
        run(blocks, x).square().sum().backward()
        return [(p.detach(), p.grad) for p in blocks.parameters()], x

    assert differs(outcome(step, None), outcome(step, plain)) is None


def test_a_compiled_model_with_dropout():
    def blocks():
        return layers(3, dropout=0.3)

    found = outcome(train(True, blocks=blocks, hooks=[Checkpoint()]), plain)
    assert differs(found, outcome(train(False, blocks=blocks), plain)) is None


def test_a_compiled_model_with_batch_norm():
    def blocks():
        return [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)) for _ in range(3)
        ]

    found = outcome(train(True, blocks=blocks, hooks=[Checkpoint()]), plain)
    assert differs(found, outcome(train(False, blocks=blocks), plain)) is None


def test_a_compiled_model_with_counting_blocks():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x):
            self.calls += 1
            return torch.tanh(self.linear(x) / self.calls)

    def blocks():
        made.append([Counts() for _ in range(3)])
        return made[-1]

    made = []
    found = outcome(train(True, blocks=blocks, hooks=[Checkpoint()]), plain)
    assert differs(found, outcome(train(False, blocks=blocks), plain)) is None
    assert [[block.calls for block in blocks] for blocks in made] == [[2, 2, 2]] * 2


def test_a_compiled_model_with_observers():
    observer = Observer()
    found = outcome(train(True, hooks=[observer, Checkpoint()]), plain)
    assert differs(found, outcome(train(False), plain)) is None
    assert (
        observer.seen == [(0, False), (1, False), (2, False), (2, True), (1, True), (0, True)] * 2
    )


def test_a_compiled_model_without_hooks():
    found = outcome(train(True, fullgraph=True), plain)
    assert differs(found, outcome(train(False), plain)) is None


def test_compiled_blocks():
    def step(run):
        blocks = layers(2)
        compiled = (
            [torch.compile(block, backend="eager") for block in blocks]
            if run is not plain
            else blocks
        )
        xs = [leaf(rows, 4, number=rows) for rows in (3, 5)]
        for x in xs:
            apply_blocks(
                compiled, x, hooks=[Checkpoint()] if run is not plain else ()
            ).square().sum().backward()
        return [(p.detach(), p.grad) for p in blocks.parameters()], xs

    assert differs(outcome(step, None), outcome(step, plain)) is None


def test_compiled_blocks_with_state():
    """What the compiler keeps on a module is no state of the block."""

    def step(run):
        blocks = [nn.Sequential(Layer(), nn.BatchNorm1d(4)) for _ in range(2)]
        if run is not plain:
            for block in blocks:
                block.compile(backend="eager")
        x = leaf(6, 4)
        for _ in range(2):
            apply_blocks(
                blocks, x, hooks=[Checkpoint()] if run is not plain else ()
            ).square().sum().backward()
        return (
            [[(n, p.detach(), p.grad) for n, p in b.named_parameters()] for b in blocks],
            [dict(b.named_buffers()) for b in blocks],
            x,
        )

    assert differs(outcome(step, None), outcome(step, plain)) is None
