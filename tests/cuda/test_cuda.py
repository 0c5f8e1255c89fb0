"""What only a GPU shows: autograd's own thread, device generators, streams."""

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, apply_blocks, current_block, is_recomputing, plan
from tests.agree import Layer, differs, layers, leaf, outcome, plain, through

pytestmark = pytest.mark.cuda

CHAINS = {"every block": lambda: [Checkpoint()], "tree": lambda: [Checkpoint(plan.tree(2))]}


def agree_on_cuda(step):
    def told(run):
        torch.cuda.manual_seed(0)
        result = on_cpu(step(run))
        return result, torch.cuda.get_rng_state()

    expected = outcome(told, plain)
    for name, make in CHAINS.items():
        difference = differs(outcome(told, through(make())), expected)
        assert difference is None, f"{name}: {difference}"


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu(), None if value.grad is None else value.grad.cpu()
    if isinstance(value, nn.Module):
        return [
            (name, on_cpu(p)) for name, p in (*value.named_parameters(), *value.named_buffers())
        ]
    if isinstance(value, (list, tuple)):
        return [on_cpu(item) for item in value]
    return value


def cuda_leaf(*shape, number=7):
    return leaf(*shape, number=number).detach().cuda().requires_grad_()


def test_dropout_and_batch_norm():
    def step(run):
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Tanh())
            for _ in range(3)
        ).cuda()
        xs = [cuda_leaf(6, 4, number=n) for n in range(2)]
        losses = [run(blocks, x).square().sum() for x in xs]
        for loss in losses:
            loss.backward()
        return losses, blocks, xs

    agree_on_cuda(step)


def test_a_device_generator_of_a_module():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.generator = torch.Generator("cuda").manual_seed(3)

        def forward(self, x):
            return torch.tanh(self.linear(x)) * torch.rand(
                4, generator=self.generator, device="cuda"
            )

    def step(run):
        blocks = nn.ModuleList(Noisy() for _ in range(3)).cuda()
        x = cuda_leaf(3, 4)
        run(blocks, x).square().sum().backward()
        return blocks, x, [block.generator.get_state() for block in blocks]

    agree_on_cuda(step)


def test_the_scoped_value_in_autograds_thread():
    seen = []

    def block(x):
        seen.append((current_block().index, current_block().phase, is_recomputing()))
        return x.exp()

    x = cuda_leaf(3)
    apply_blocks([block, block], x, hooks=[Checkpoint()]).sum().backward()
    assert seen == [
        (0, "forward", False),
        (1, "forward", False),
        (1, "recompute", True),
        (0, "recompute", True),
    ]
    assert current_block() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    def step(run):
        blocks, x = layers(3, dropout=0.2).cuda(), cuda_leaf(3, 4)
        with torch.autocast("cuda", dtype=dtype):
            loss = run(blocks, x).float().square().sum()
        loss.backward()
        return loss, blocks, x

    agree_on_cuda(step)


def test_a_side_stream():
    def step(run):
        blocks, x = layers(3, dropout=0.2).cuda(), cuda_leaf(64, 4)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = run(blocks, x).square().sum()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        torch.cuda.synchronize()
        return loss, blocks, x

    agree_on_cuda(step)


def test_attention():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return x + y.transpose(1, 2).flatten(2)

    def step(run):
        blocks, x = nn.ModuleList(Attend() for _ in range(3)).cuda(), cuda_leaf(2, 32, 64)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            loss = run(blocks, x).square().sum()
        loss.backward()
        return loss, blocks, x

    agree_on_cuda(step)


def test_less_memory_is_taken():
    def peak(run):
        blocks, x = nn.ModuleList(Layer(256) for _ in range(8)).cuda(), cuda_leaf(512, 256)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = run(blocks, x).square().sum()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        return kept

    assert peak(through([Checkpoint()])) < 0.6 * peak(plain)
