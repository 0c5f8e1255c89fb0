"""Whole steps of real blocks, as ratios to the plain loop.

    python tests/bench/bench_step.py

Each contender's step stands between two plain ones; what is told is the
median of the ratios and half the distance between their quartiles. The first row, the plain loop beside itself, tells
what the machine's noise makes of nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bench_overhead import Observer, loop, torch_checkpoint
from timing import paired, table

from blockhooks import Checkpoint, HookChain, Profile, apply_blocks
from blockhooks.demo import Block


def main(layers=12, width=128, tokens=128, rounds=15):
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    x = torch.randn(1, tokens, width, requires_grad=True)

    def step(forward):
        return lambda: forward(blocks, x).square().mean().backward()

    def hooked(*plugins):
        chain = HookChain(plugins)
        return step(lambda blocks, x: apply_blocks(blocks, x, hooks=chain))

    contenders = [
        ("plain loop again", step(loop), ""),
        ("no hooks", step(apply_blocks), "at most 1.01"),
        ("six observers", hooked(*(Observer() for _ in range(6))), ""),
        ("Profile()", hooked(Profile()), ""),
        ("torch.utils.checkpoint", step(torch_checkpoint), ""),
        ("Checkpoint()", hooked(Checkpoint()), ""),
        ("Checkpoint(), Profile()", hooked(Checkpoint(), Profile()), ""),
    ]
    rows = []
    for name, contender, target in contenders:
        ratio, spread = paired(step(loop), contender, rounds)
        rows.append((name, f"{ratio:.3f} ± {spread:.3f}", target))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
    print(table(main()))
