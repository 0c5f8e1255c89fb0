"""What plans save and take: peak of live bytes and FLOPs of a step, by the plain loop's. Exact, and the same each time.

python tests/bench/bench_plans.py [--blocks 12] [--width 256] [--dropout 0.1]
"""

import argparse

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from blockhooks import Checkpoint, apply_blocks, memory, plan
from blockhooks.demo import Block

BATCH, TOKENS = 2, 256


def costs(blocks, x, hooks):
    """Return peak bytes and FLOPs of a step whose gradients are allocated already."""

    def step():
        torch.manual_seed(0)
        apply_blocks(blocks, x, hooks=hooks).square().sum().backward()

    step()
    with memory.peak("cpu") as meter:
        step()
    with FlopCounterMode(display=False) as counter:
        step()
    return meter.peak, counter.get_total_flops()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(options.width) for _ in range(options.blocks))
    for block in blocks:
        block.dropout.p = options.dropout
    x = torch.randn(BATCH, TOKENS, options.width, requires_grad=True)
    n = options.blocks
    ways = {
        "plain loop": [],
        "every(1)": [Checkpoint(plan.every(1))],
        "every(2)": [Checkpoint(plan.every(2))],
        "sqrt()": [Checkpoint(plan.sqrt())],
        f"first({n // 4})": [Checkpoint(plan.first(n // 4))],
        f"first({n // 2})": [Checkpoint(plan.first(n // 2))],
        f"first({3 * n // 4})": [Checkpoint(plan.first(3 * n // 4))],
        "tree(2)": [Checkpoint(plan.tree(2))],
        "binomial(4)": [Checkpoint(plan.binomial(4))],
        "every(1), no early stop": [Checkpoint(plan.every(1), early_stop=False)],
    }
    plain_bytes, plain_flops = costs(blocks, x, [])
    print(
        f"{n} blocks, width {options.width}, dropout {options.dropout}; plain: {plain_bytes / 2**20:.1f} MiB"
    )
    print("| plan | peak / plain | FLOPs / plain |")
    print("|---|---|---|")
    for name, hooks in ways.items():
        peak, flops = costs(blocks, x, hooks)
        print(f"| `{name}` | {peak / plain_bytes:.3f} | {flops / plain_flops:.3f} |")


if __name__ == "__main__":
    main()
