"""`Offload("cpu")` on a CUDA device: the same bits, less memory, and no race between the streams."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockhooks import Checkpoint, HookChain, Segment, apply_blocks, budget, memory, plan
from blockhooks.hooks.offload import Offload
from blockhooks.hooks.selective import Selective

pytestmark = pytest.mark.cuda

WIDTH = 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def step(hooks, number=8, x=None):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(number)).cuda()
    x = torch.randn(16, 256, WIDTH, device="cuda", requires_grad=True) if x is None else x
    results = []
    for _ in range(3):
        y = apply_blocks(blocks, x, hooks=hooks)
        loss = y.square().mean()
        del y
        loss.backward()
        results.append(loss.detach())
    return [*results, x.grad, *(parameter.grad for parameter in blocks.parameters())]


CHAINS = {
    "alone": lambda: [Offload(min_bytes=0)],
    "checkpoint": lambda: [Offload(min_bytes=0), Checkpoint()],
    "mixed": lambda: [Checkpoint(plan.first(4)), Selective(), Offload(min_bytes=0)],
    "nested": lambda: [
        Offload(min_bytes=0),
        Checkpoint(lambda n: [Segment(0, n // 2), Segment(n // 2, n, mode="keep")]),
    ],
    "disk": lambda: [Offload("disk", min_bytes=0)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_hook_run_segment(chain):
    expected = step(())
    for found, value in zip(step(CHAINS[chain]()), expected, strict=True):
        assert torch.equal(found, value)


def test_peak_is_that_of_a_few_blocks():
    peaks = []
    for hooks in ((), [Offload()]):
        step(hooks)
        with memory.peak("cuda") as meter:
            step(hooks)
        peaks.append(meter.peak)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("modes", [("offload",), ("keep", "offload"), ("recompute", "offload")])
def test_a_plan_that_moves_to_the_host_takes_what_it_is_said_to(modes):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(8)).cuda()
    x = torch.randn(16, 256, WIDTH, device="cuda", requires_grad=True)
    for tensor in (x, *blocks.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    profile = budget.measure(blocks, x, offload="cpu")
    assert all(block.figures("offload")[0] < 0.1 * block.kept for block in profile.blocks)

    planned = tuple(Segment(i, i + 1, mode=modes[i % len(modes)]) for i in range(8))
    chain = HookChain([Checkpoint(lambda n: planned)])
    for _ in range(3):
        with memory.peak("cuda") as meter:
            y = apply_blocks(blocks, x, hooks=chain)
            loss = y.square().mean()
            del y
            loss.backward()
            del loss
    assert budget.predict(profile, planned).peak == pytest.approx(meter.peak, rel=0.02)


def test_a_budget_may_move_to_the_host():
    expected = step(())
    chain = HookChain([Checkpoint(memory_budget=0.2, offload="cpu")])
    for found, value in zip(step(chain), expected, strict=True):
        assert torch.equal(found, value)


def test_transfers_that_are_late_change_nothing():
    """The side stream is kept busy, so that each wait that is missing shows as a wrong number."""
    expected = step((), number=4)
    offload = Offload(min_bytes=0)
    step([offload], number=4)
    side = next(iter(offload._offloader._place._side.values()))
    ballast = torch.randn(2048, 2048, device="cuda")
    plain_pack = torch.cuda.Stream.wait_stream

    def slow(self, stream):
        plain_pack(self, stream)
        if self == side:
            with torch.cuda.stream(side):
                for _ in range(10):
                    ballast @ ballast

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.Stream, "wait_stream", slow)
        found = step([offload], number=4)
    assert all(map(torch.equal, found, expected))


def test_blocks_on_a_stream_of_their_own():
    expected = step((), number=4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step([Offload(min_bytes=0)], number=4)
    stream.synchronize()
    assert all(map(torch.equal, found, expected))


def test_dropped_outputs_and_second_backwards():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(4)).cuda()
    offload = Offload(min_bytes=0)
    x = torch.randn(16, 256, WIDTH, device="cuda", requires_grad=True)
    y = apply_blocks(blocks, x, hooks=[offload])
    assert offload.away > 0
    del y
    assert offload.away == 0
    gradients = []
    for hooks in ((), [offload]):
        torch.manual_seed(1)
        x.grad = None
        loss = apply_blocks(blocks, x, hooks=hooks).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert offload.away == 0


def test_with_the_stream_ordered_allocator():
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    names = [
        f"{__file__}::test_hook_run_segment",
        f"{__file__}::test_transfers_that_are_late_change_nothing",
    ]
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == environment["PYTORCH_CUDA_ALLOC_CONF"]:
        pytest.skip("it is this one")
    subprocess.run([sys.executable, "-m", "pytest", "-q", *names], check=True, env=environment)
