"""What `measure` says of blocks on the meta device is what it says of real ones, and nothing is allocated."""

import copy
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.wrap import wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockhooks import (
    Checkpoint,
    HookChain,
    Offload,
    Profile,
    Selective,
    apply_blocks,
    attach,
    budget,
    memory,
)
from blockhooks.budget import ChainProfile, measure, predict, solve
from blockhooks.errors import BudgetError
from blockhooks.estimating import Estimate, KnownValues
from blockhooks.plan import every, first, tree
from tests.budget.test_checkpoint import hidden, stack, step
from tests.models.test_budget import MODELS as REAL_MODELS

PLANS = (first(0), every(1), every(2), tree(2))


def bytes_of(profile):
    """All of a profile but its seconds."""
    seconds = {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
    blocks = [asdict(block) | seconds for block in profile.blocks]
    for block in blocks:
        block["modes"] = [mode | {"extra": 0.0} for mode in block["modes"]]
    return blocks, profile.tail_peak, profile.tail_forward


def on_meta(module):
    return copy.deepcopy(module).to("meta")


class Attention(nn.Module):
    """Attention with half as many heads for keys and values, as it is called in many ways."""

    def __init__(self, width=64, heads=4, **options):
        super().__init__()
        self.heads, self.options = heads, options
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv = nn.Linear(width, 2 * width)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norm(x)).tensor_split([x.shape[-1], x.shape[-1] * 3 // 2], dim=-1)
        shape = *x.shape[:2], -1, x.shape[-1] // self.heads
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **self.options)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Math(Attention):
    def forward(self, x, mask=None):
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x, mask)


class Classic(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(64, 4, 128, batch_first=True)


STACKS = {
    "dropout": (stack, {}),
    "causal": (lambda: nn.ModuleList(Attention(is_causal=True, scale=0.1) for _ in range(3)), {}),
    "a mask": (
        lambda: nn.ModuleList(Attention() for _ in range(3)),
        {"mask": torch.ones(4, 1, 96, 96, dtype=torch.bool)},
    ),
    "a mask with gradients": (
        lambda: nn.ModuleList(Attention() for _ in range(3)),
        {"mask": torch.zeros(96, 96, requires_grad=True)},
    ),
    "dropout in attention": (
        lambda: nn.ModuleList(Attention(dropout_p=0.1) for _ in range(3)),
        {},
    ),
    "attention by hand": (lambda: nn.ModuleList(Math() for _ in range(3)), {}),
    "encoder layers": (lambda: nn.ModuleList(Classic() for _ in range(3)), {}),
}


@pytest.mark.parametrize("name", STACKS)
def test_bytes_on_meta_are_those_of_the_cpu(name):
    make, side = STACKS[name]
    blocks = make()

    real, meta = measure(blocks, hidden(), **side), measure(on_meta(blocks), hidden(), **side)

    assert [b.kept for b in meta.blocks] == [b.kept for b in real.blocks]
    assert [b.output for b in meta.blocks] == [b.output for b in real.blocks]
    for plan in PLANS:
        found, expected = predict(meta, plan(len(meta))), predict(real, plan(len(real)))
        inside = 25_000 if name == "a mask" else 64  # what the kernels of a CPU take for themselves
        assert expected.peak - inside < found.peak <= expected.peak


def test_what_a_kernel_of_the_cpu_takes_inside_itself_is_not_known_on_meta():
    blocks = nn.ModuleList(nn.BatchNorm1d(96) for _ in range(3))

    real, meta = measure(blocks, hidden()), measure(on_meta(blocks), hidden())

    assert [(b.kept, b.output) for b in meta.blocks] == [(b.kept, b.output) for b in real.blocks]
    assert meta.plain.peak <= real.plain.peak


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit"])
def test_models_on_meta_are_measured_with_what_is_outside_of_their_blocks(name):
    torch.manual_seed(0)
    make, inputs, _ = REAL_MODELS[name]
    model, given = make().train(), inputs(48)
    with torch.device("meta"):
        like = make().train()  # moving a model would untie its weights

    real, meta = measure(model, **given), measure(like, **given)

    assert [b.kept for b in meta.blocks] == [b.kept for b in real.blocks]
    assert [b.gap for b in meta.blocks] == [b.gap for b in real.blocks]
    for plan in PLANS:
        found, expected = predict(meta, plan(len(meta))), predict(real, plan(len(real)))
        assert found.peak == pytest.approx(expected.peak, rel=1e-3)


def test_a_plan_made_on_meta_holds_for_the_real_blocks(tmp_path):
    blocks, x = stack(), hidden()
    measure(on_meta(blocks), x).save(tmp_path / "profile.json")
    profile = ChainProfile.load(tmp_path / "profile.json")
    assert "on meta (seconds are estimates)" in profile.about
    assert bytes_of(profile) == bytes_of(measure(on_meta(blocks), x.to("meta")))

    plain, expected = step(blocks, x)
    for fraction in (0.8, 0.5):
        plan = solve(profile, int(fraction * plain))
        chain = HookChain([Checkpoint(plan)])
        step(blocks, x, chain)
        peak, record = step(blocks, x, chain)
        assert peak <= fraction * plain
        assert peak == pytest.approx(plan.peak, rel=0.01)
        assert all(map(torch.equal, record, expected))
    assert len(budget.pareto(profile).points) > 3


def test_measuring_on_meta_allocates_nothing():
    with torch.device("meta"):
        blocks = stack(sizes=(1 << 20,) * 3, width=1 << 16)
    x = torch.empty(1 << 20, 1, device="meta").expand(-1, 1 << 16).requires_grad_()

    with memory.peak("cpu") as meter:
        profile = measure(blocks, x)

    assert profile.blocks[0].kept > 1 << 40
    assert meter.peak < 1 << 16


def test_measuring_leaves_a_model_on_meta_as_it_was():
    with torch.device("meta"):
        model = Asks()
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    ids, mask, state = torch.arange(16).reshape(2, 8), torch.ones(2, 8), torch.get_rng_state()

    measure(model, ids, mask)

    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not mask.is_meta


class Asks(nn.Module):
    """A model that asks for values which no batch decides, and for those of its mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, mask):
        self.calls += 1
        positions = torch.arange(ids.shape[1], device=ids.device)
        packed = (positions.diff() != 1).cumsum(0)
        assert packed[-1].item() == 0
        masked = None if (mask == 1).all() else mask[:, None, None, :].bool()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, masked)
        return x


@pytest.mark.parametrize("masks", [False, True])
def test_values_that_come_from_no_data_and_those_of_real_inputs_are_known(masks):
    model, ids, mask = Asks(), torch.randint(0, 9, (2, 8)), torch.ones(2, 8)
    mask[0, 0] = 1 - masks

    real, meta = measure(model, ids, mask), measure(on_meta(model), ids, mask)

    assert [b.kept for b in meta.blocks] == [b.kept for b in real.blocks]


def test_values_are_forgotten_when_others_are_written_over_them():
    unknown = torch.ones(4, device="meta")
    with KnownValues():
        base = torch.arange(4.0, device="meta")
        view, other = base[1:], base * 2
        assert view.sum().item() == 6
        base.add_(1)
        assert view.sum().item() == 9
        torch._foreach_add_([base], 1)
        assert view.sum().item() == 12
        for write in (lambda: base[2:].copy_(unknown[2:]), lambda: other.normal_()):
            write()
        for lost in (
            base,
            view,
            other,
            torch.rand(4, device="meta"),
            torch.zeros(2000, 2000).to("meta"),
        ):
            with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
                lost.sum().item()


def test_what_needs_values_is_an_error_that_names_the_block():
    class Data(nn.Module):
        def forward(self, x):
            return x * (2.0 if x.sum() > 0 else 1.0)

    blocks = [nn.Linear(64, 64, device="meta"), Data()]
    with pytest.raises(
        BudgetError, match=r"(?s)failed while running block 1 \(Data\).*item\(\) .*Only real inputs"
    ):
        measure(blocks, hidden())

    class Head(Asks):
        def forward(self, ids, mask):
            return super().forward(ids, mask) * self.embed.weight.sum().item()

    with torch.device("meta"):
        model = Head()
    with pytest.raises(BudgetError, match=r"failed outside of the blocks: Tensor.item\(\)"):
        measure(model, torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8))


def test_errors_of_the_users_stay_theirs():
    def fails(x):
        raise LookupError("no such data")

    with pytest.raises(LookupError, match="no such data"):
        measure([fails], hidden().to("meta"))


def test_autocast_and_fake_tensors_are_refused():
    blocks = on_meta(stack())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(BudgetError, match=r"under autocast.*model.to\(torch.bfloat16\)"),
    ):
        measure(blocks, hidden())
    with (
        FakeTensorMode(),
        pytest.raises(BudgetError, match=r"found a FakeTensor; .*device\('meta'\)"),
    ):
        measure(stack(), torch.randn(4, 96, 64))


def test_seconds_are_those_of_operations_and_bytes():
    a, b = (torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16) for _ in range(2))
    clock = Estimate()

    def time(work):
        with clock.running():
            begin = clock.now()
            work()
            return clock.between(begin, clock.now())

    assert time(lambda: a @ b) == pytest.approx(2 * 4096**3 / 312e12)
    assert time(lambda: a + b) == pytest.approx(3 * a.nbytes / 2e12)
    assert time(lambda: a.t()[3:].unsqueeze(0)) == 0


def test_higher_order_operators_are_looked_into():
    x = torch.empty(1024, device="meta")
    clock = Estimate()
    with KnownValues(), clock.running():
        y = wrap(lambda x: x + x, x)
    assert y.is_meta
    assert clock.now() > 0


def test_a_recompute_ends_early_in_estimates_too():
    with torch.device("meta"):
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)) for _ in range(2)
        )
    block = measure(blocks, torch.randn(4, 1024, 2048)).blocks[0]

    assert 0.4 < block.recompute_time / block.forward < 0.6  # without its last operation
    assert 1.7 < block.backward / block.forward < 2.3


@pytest.mark.parametrize("make", [Asks, stack], ids=["model", "blocks"])
@pytest.mark.parametrize(
    "hook",
    [
        Checkpoint(),
        Checkpoint(tree(2)),
        Checkpoint(check="values"),
        Checkpoint(memory_budget="3MiB"),
        Selective(),
        Offload(),
        Profile(flops=True),
    ],
    ids=["every", "tree", "values", "budget", "selective", "offload", "profile"],
)
def test_a_step_on_meta_runs_through_hooks(make, hook):
    with torch.device("meta"):
        module, x, mask = make(), hidden(), torch.ones(2, 8, 8, dtype=torch.bool)[:, None]

    def forward(*hooks):
        if not isinstance(module, Asks):
            return apply_blocks(module, x, hooks=hooks)
        y = module.embed.weight[None, :8].expand(2, -1, -1)
        if not hooks:
            for block in module.blocks:
                y = block(y, mask)
            return y
        return apply_blocks(module.blocks, y, mask, hooks=hooks)

    for _ in range(3):
        module.zero_grad()
        forward(hook).square().mean().backward()
        used = [p for n, p in module.named_parameters() if p.grad is not None]
        assert all(p.grad.is_meta and p.grad.shape == p.shape for p in used)
        assert len(used) == len(list(module.parameters()))


def test_a_checkpointed_step_on_meta_holds_what_a_real_one_holds():
    chain = HookChain([Checkpoint(every(2))])

    def peak(blocks, x):
        with memory.peak(x.device) as meter:
            apply_blocks(blocks, x, hooks=chain).square().mean().backward()
        return meter.peak

    blocks = stack()
    found = peak(on_meta(blocks), hidden().detach().to("meta").requires_grad_())
    assert found == pytest.approx(peak(blocks, hidden()), rel=1e-3)


def test_an_attached_model_on_meta_runs():
    with torch.device("meta"):
        model = REAL_MODELS["gpt2"][0]().train()
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    with attach(model, hooks=[Checkpoint()]) as handle:
        model(input_ids=ids, labels=ids).loss.backward()
    assert "recompute" in str(handle.report())
    assert all(p.grad.is_meta for p in model.parameters())
