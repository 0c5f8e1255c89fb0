"""An observer keeps nothing alive: not at the peak, and not afterwards."""

import gc

import torch
from torch import nn

from blockhooks import Checkpoint, Profile, apply_blocks, memory


def live_bytes(hooks):
    """Return the peak of a step and what is still alive after it, with the garbage collector off."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))
    x = torch.randn(128, 64, requires_grad=True)
    for tensor in (x, *blocks.parameters()):
        tensor.grad = torch.zeros_like(tensor)
    gc.disable()
    try:
        with memory.peak("cpu") as meter:
            apply_blocks(blocks, x, hooks=hooks).square().sum().backward()
        return meter.peak, meter.now
    finally:
        gc.enable()


def test_a_profile_costs_no_byte_and_leaves_none_behind():
    for strategy in ([], [Checkpoint()]):
        assert live_bytes([*strategy, Profile()]) == live_bytes(strategy)
        assert live_bytes([Profile(), *strategy]) == live_bytes(strategy)
    assert live_bytes([Checkpoint(), Profile()])[1] == 0
