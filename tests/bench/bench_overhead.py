"""What the engine itself costs per block, beside the plain loop and `torch.utils.checkpoint`.

    python tests/bench/bench_overhead.py

Blocks are empty or tiny, so that nearly all of what is measured is
overhead; `bench_step` measures whole steps of real blocks.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from timing import interleaved, table
from torch import nn
from torch.utils.checkpoint import checkpoint

from blockhooks import Checkpoint, HookChain, apply_blocks, hookimpl

SNAPSHOTS = ("VersionGuard", "StateSnapshot", "RNGSnapshot")


class Empty(nn.Module):
    def forward(self, x):
        return x


class Observer:
    @hookimpl(wrapper=True)
    def run_block(self):
        return (yield)


def tiny(n):
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(n)]


def loop(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def stepper(blocks, forward):
    x = torch.randn(2, 8, requires_grad=True)
    return lambda: forward(blocks, x).sum().backward()


def torch_checkpoint(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def hooked(chain):
    return lambda blocks, x: apply_blocks(blocks, x, hooks=chain)


def empty_blocks(n=64):
    """Overhead in the forward alone, us a block."""
    blocks, x = [Empty() for _ in range(n)], torch.randn(2, 8)
    observers = HookChain([Observer() for _ in range(6)])
    seconds = interleaved(
        {
            "plain": lambda: loop(blocks, x),
            "no hooks": lambda: apply_blocks(blocks, x),
            "six observers": lambda: apply_blocks(blocks, x, hooks=observers),
        },
        repeat=10,
    )
    above = {name: (s - seconds["plain"]) / n * 1e6 for name, s in seconds.items()}
    return [
        ("no hooks, above the plain loop", f"{above['no hooks']:.2f} us a block", "at most 0.2"),
        ("six observers, above it", f"{above['six observers']:.2f} us a block", "at most 7"),
    ]


def checkpointing(n=64):
    """Forward and backward of tiny checkpointed blocks, us a block, and what of it is not the blocks' own."""
    blocks = tiny(n)
    full, bare = HookChain([Checkpoint()]), HookChain([Checkpoint()], without=SNAPSHOTS)
    seconds = interleaved(
        {
            "plain": stepper(blocks, loop),
            "torch": stepper(blocks, torch_checkpoint),
            "full": stepper(blocks, hooked(full)),
            "bare": stepper(blocks, hooked(bare)),
        },
        rounds=31,
    )
    us = {name: s / n * 1e6 for name, s in seconds.items()}
    fixed = {name: value - us["plain"] for name, value in us.items()}
    return [
        ("plain step", f"{us['plain']:.1f} us a block", ""),
        ("torch.utils.checkpoint, non-reentrant", f"{us['torch']:.1f} us a block", ""),
        ("Checkpoint()", f"{us['full']:.1f} us a block", ""),
        ("Checkpoint() without snapshots", f"{us['bare']:.1f} us a block", ""),
        (
            "Checkpoint() / torch, plain subtracted",
            f"{fixed['full'] / fixed['torch']:.3f}",
            "at most 0.8",
        ),
        ("without snapshots / torch", f"{fixed['bare'] / fixed['torch']:.3f}", "at most 0.4"),
    ]


def depth():
    """Whether the cost of a block grows with the number of blocks."""
    few, many = 12, 2000
    chain = HookChain([Checkpoint()])
    us = {}
    steps = {n: stepper(tiny(n), hooked(chain)) for n in (few, many)}
    short = interleaved({"few": steps[few]}, rounds=41, repeat=8)
    us[few] = short["few"] / few * 1e6
    us[many] = interleaved({"many": steps[many]}, rounds=7)["many"] / many * 1e6
    us[few] = min(us[few], interleaved({"few": steps[few]}, rounds=41, repeat=8)["few"] / few * 1e6)
    return [
        (f"Checkpoint(), {few} blocks", f"{us[few]:.1f} us a block", ""),
        (f"Checkpoint(), {many} blocks", f"{us[many]:.1f} us a block", ""),
        ("growth", f"{us[many] / us[few]:.3f}", "at most 1.1"),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
    print(table([*empty_blocks(), *checkpointing(), *depth()]))
