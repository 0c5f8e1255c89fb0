"""Floating-point operations of a step, exactly: what is executed again, and what an early stop leaves out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from blockhooks import Checkpoint, apply_blocks, plan

aten = torch.ops.aten
FORMULAS = {  # the counter knows the kernels of GPUs alone
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, out_shape=None, **kwargs: (
        sdpa_flop_count(q, k, v)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *args, out_shape=None, **kwargs: (
        sdpa_backward_flop_count(grad, q, k, v)
    ),
}


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.before_attention(x)).view(b, t, 3, self.heads, d // self.heads)
        mixed = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, d)))
        return x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))))


def flops(hooks, dropout, n=12):
    torch.manual_seed(0)
    blocks = [Block(64, 4, dropout) for _ in range(n)]
    x = torch.randn(1, 64, 64, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        apply_blocks(blocks, x, hooks=hooks).square().mean().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("dropout", "most"), [(0.0, 1.24), (0.1, 1.327)], ids=["none", "trailing"])
def test_a_full_checkpoint_costs_less_than_a_forward(dropout, most):
    ratio = flops([Checkpoint()], dropout) / flops((), dropout)
    assert 1.2 < ratio <= most


def test_without_early_stop_a_recompute_is_a_forward():
    plain = flops((), 0.0)
    with torch.no_grad():
        forward = flops_of_a_forward()
    assert flops([Checkpoint(early_stop=False)], 0.0) == plain + forward
    assert flops([Checkpoint(plan.every(3), early_stop=False)], 0.0) == plain + forward
    assert flops([Checkpoint(plan.first(4), early_stop=False)], 0.0) == plain + forward // 3
    assert flops([Checkpoint(plan.first(0))], 0.0) == plain


def flops_of_a_forward(n=12):
    torch.manual_seed(0)
    blocks = [Block(64, 4, 0.0) for _ in range(n)]
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        apply_blocks(blocks, torch.randn(1, 64, 64))
    return counter.get_total_flops()


def test_an_early_stop_leaves_out_the_last_matrix_product_of_each_block():
    plain, full = flops((), 0.0), flops([Checkpoint(early_stop=False)], 0.0)
    last = (
        2 * 64 * (4 * 64) * 64
    )  # tokens x inputs x outputs, a multiplication and an addition each
    assert flops([Checkpoint()], 0.0) == full - 12 * last
    assert plain < full - 12 * last
