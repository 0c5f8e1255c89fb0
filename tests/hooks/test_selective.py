"""`Selective` drops what can be rebuilt, and a step is the plain step, bit for bit."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from blockhooks import Checkpoint, HookError, RecomputeError, Segment, apply_blocks, memory, plan
from blockhooks.hooks.profile import Profile
from blockhooks.hooks.selective import Selective
from blockhooks.rebuild import Rebuilder
from blockhooks.recipes import RECIPES, recipe
from tests.agree import bits, differs, leaf, outcome, plain, through

aten = torch.ops.aten
WIDTH = 32


class PreNorm(nn.Module):
    """LayerNorm, attention in one call, GELU, dropout."""

    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(heads.transpose(1, 2).reshape(b, t, d)), self.dropout)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gated(nn.Module):
    """RMSNorm written out, attention written out, SwiGLU."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(width) + 0.5 for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def norm(self, x, weight):
        x = x.to(torch.float32)
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x):
        y = self.norm(x, self.weights[0])
        scores = torch.softmax(self.q(y) @ self.k(y).transpose(-1, -2) / x.shape[-1] ** 0.5, -1)
        x = x + F.dropout(scores, 0.2) @ self.v(y)
        y = self.norm(x, self.weights[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PostNorm(nn.Module):
    """A norm at the end, an activation written out, others that work in place."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = self.a(x)
        y = 0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.045 * y.pow(3))))
        y = F.silu(self.b(y), inplace=True)
        y = F.dropout(self.c(y), 0.1, inplace=True).relu_()
        return self.norm(x + y)


def stack():
    return nn.ModuleList([PreNorm(), Gated(), PostNorm(), PreNorm(), PostNorm(), Gated()])


def small():
    return Selective(min_bytes=0)


def agrees(step):
    assert differs(outcome(step, through(small())), outcome(step, plain)) is None


CHAINS = {
    "alone": lambda: [small()],
    "large tensors": lambda: [Selective()],
    "twice": lambda: [small(), small()],
    "checkpoint": lambda: [small(), Checkpoint(plan.first(3))],
    "behind checkpoint": lambda: [Checkpoint(plan.first(3)), small()],
    "under regions": lambda: [
        Checkpoint(
            lambda n: [Segment(0, n, (Segment(0, 3, mode="keep"), Segment(3, n, mode="keep")))],
            check="values",
        ),
        small(),
    ],
    "under regions, early stop": lambda: [
        small(),
        Checkpoint(lambda n: [Segment(0, n, (Segment(0, 3), Segment(3, n, mode="keep")))]),
    ],
    "profile": lambda: [small(), Profile()],
    "in profile": lambda: [Profile(), small(), Checkpoint(plan.first(2))],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_hook_run_segment(chain):
    def step(run):
        blocks, x = stack(), leaf(2, 8, WIDTH)
        for _ in range(2):
            run(blocks, x).square().mean().backward()
        return blocks, x

    expected, found = outcome(step, plain), outcome(step, through(CHAINS[chain]()))
    assert differs(found, expected) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_is_the_plain_step_in_other_dtypes_and_under_autocast(dtype):
    def step(run):
        blocks, x = stack(), leaf(2, 8, WIDTH)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            if dtype is torch.float64:
                blocks, x = blocks.to(dtype), leaf(2, 8, WIDTH, dtype=dtype)
            y = run(blocks, x)
        y.square().mean().backward()
        return blocks, x

    expected, found = outcome(step, plain), outcome(step, through(small()))
    assert differs(found, expected) is None


# ---- what is dropped -------------------------------------------------------------------------------------------------


def test_a_gpt_like_stack_peaks_at_seven_tenths_without_a_flop_more():
    blocks, x = nn.ModuleList(PreNorm(64) for _ in range(12)), leaf(2, 64, 64)
    plugin = small()

    def step(run):
        torch.manual_seed(0)
        run(blocks, x).square().mean().backward()

    figures = []
    for run in (plain, through(plugin)):
        step(run)
        with memory.peak("cpu") as meter:
            step(run)
        with FlopCounterMode(display=False) as flops:
            step(run)
        figures.append((meter.peak, flops.get_total_flops()))
    (peak, total), (selective_peak, selective_total) = figures
    assert selective_peak <= 0.70 * peak
    assert selective_total == total > 0


def given(x):
    """A tensor that has a history and is saved by another operation, so that it is kept anyway."""
    x = x * 1
    x.keeper = x.cosh()
    return x


def normed(x):
    return F.layer_norm(x, (6,), torch.rand(6).requires_grad_(), torch.rand(6).requires_grad_())


# One use of each recipe: its function of a kept tensor x of shape (4, 6).
USES = {
    "AbsBackward0": torch.abs,
    "AddBackward0": lambda x: torch.add(x, x.view(4, 6), alpha=2),
    "CeluBackward0": lambda x: F.celu(x, 0.7),
    "CloneBackward0": lambda x: x.transpose(0, 1).contiguous(),
    "CosBackward0": torch.cos,
    "DivBackward0": lambda x: x / 3,
    "EluBackward0": lambda x: F.elu(x, 0.5),
    "ErfBackward0": torch.erf,
    "ExpBackward0": torch.exp,
    "ExpandBackward0": lambda x: x.sin().unsqueeze(0).expand(3, 4, 6),
    "GeluBackward0": lambda x: F.gelu(x, approximate="tanh"),
    "HardsigmoidBackward0": F.hardsigmoid,
    "HardswishBackward0": F.hardswish,
    "HardtanhBackward0": F.relu6,
    "LeakyReluBackward0": lambda x: F.leaky_relu(x, 0.3),
    "LogBackward0": lambda x: x.exp().log(),
    "LogSigmoidBackward0": F.logsigmoid,
    "LogSoftmaxBackward0": lambda x: F.log_softmax(x, -2),
    "MishBackward0": F.mish,
    "MulBackward0": lambda x: x * 0.1,
    "NativeDropoutBackward0": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "NativeLayerNormBackward0": normed,
    "NegBackward0": torch.neg,
    "PermuteBackward0": lambda x: x.sin().permute(-1, 0),
    "PowBackward0": lambda x: x**3,
    "ReciprocalBackward0": torch.reciprocal,
    "ReluBackward0": torch.relu,
    "ReshapeAliasBackward0": None,
    "RsqrtBackward0": lambda x: x.abs().rsqrt(),
    "SelectBackward0": lambda x: x.sin().select(-1, 2),
    "SigmoidBackward0": torch.sigmoid,
    "SiluBackward0": lambda x: F.silu(x, inplace=False),
    "SinBackward0": torch.sin,
    "SliceBackward0": lambda x: x.sin()[..., 1:-1:2],
    "SoftmaxBackward0": lambda x: x.softmax(-1),
    "SoftplusBackward0": lambda x: F.softplus(x, 0.5, 3.0),
    "SplitBackward0": lambda x: x.sin().chunk(2, -1)[1],
    "SqrtBackward0": lambda x: x.abs().sqrt(),
    "SqueezeBackward0": lambda x: x.sin().unsqueeze(0).squeeze(),
    "SubBackward0": lambda x: x - x.exp(),
    "TanhBackward0": torch.tanh,
    "ToCopyBackward0": lambda x: x.to(torch.bfloat16),
    "TransposeBackward0": lambda x: x.sin().transpose(-1, -2),
    "UnsafeViewBackward0": lambda x: aten._unsafe_view(x.sin(), [24]),
    "UnsqueezeBackward0": lambda x: x.sin().unsqueeze(-1),
    "ViewBackward0": lambda x: x.sin().view(3, 8),
    "FusedRmsNormBackward0": None,
}
ELSEWHERE = {"FusedRmsNormBackward0", "ReshapeAliasBackward0"}  # nodes of other devices


def test_each_recipe_has_a_use():
    assert USES.keys() == RECIPES.keys()
    assert {name for name, use in USES.items() if use is None} == ELSEWHERE


@pytest.mark.parametrize("name", sorted(USES.keys() - ELSEWHERE))
def test_recipe_gives_the_bits_of_the_forward(name):
    with Rebuilder(0).forward("a test"):
        x = given(leaf(4, 6))
        result = USES[name](x)
        assert type(result.grad_fn).__name__ == name
        expected, layout = bits(result), result.stride()
        consumer = result.cosh().grad_fn
    storage = weakref.ref(result.untyped_storage())
    del result
    assert x.keeper is not None
    assert storage() is None, "the result is kept"
    rebuilt = consumer._saved_self
    assert (bits(rebuilt), rebuilt.stride()) == (expected, layout)


@pytest.mark.cuda
def test_rms_norm_of_the_device_is_rebuilt():
    with Rebuilder(0).forward("a test"):
        x = given(leaf(64, 256).cuda())
        weight = torch.rand(256, device="cuda", requires_grad=True)
        result = F.rms_norm(x, (256,), weight)
        assert type(result.grad_fn).__name__ == "FusedRmsNormBackward0"
        expected = result.detach().clone()
        consumer = result.cosh().grad_fn
    del result
    assert torch.equal(consumer._saved_self, expected)


def test_chains_of_recipes_end_somewhere():
    calls = []

    @recipe("CosBackward0", "self")
    def cos(x):
        calls.append(1)
        return aten.cos.default(x)

    try:
        x = leaf(4, 6)
        with Rebuilder(0).forward("a test"):
            y = given(x)
            for _ in range(40):
                y = y.cos()
        calls.clear()
        y.sum().backward()
    finally:
        recipe("CosBackward0", "self")(aten.cos.default)
    assert 20 < len(calls) <= 40 * 3


def test_what_several_operations_need_is_rebuilt_once(monkeypatch):
    calls = []
    norm = RECIPES["NativeLayerNormBackward0"]

    def counted(*tensors):
        calls.append(tensors)
        return norm.function(*tensors)

    monkeypatch.setitem(RECIPES, "NativeLayerNormBackward0", norm._replace(function=counted))
    linears = [nn.Linear(6, 6) for _ in range(3)]
    with Rebuilder(0).forward("a test"):
        y = normed(given(leaf(4, 6)))
        z = sum(linear(y) for linear in linears)
    calls.clear()
    z.sum().backward(retain_graph=True)
    assert len(calls) == 1
    z.sum().backward()
    assert len(calls) == 2


def test_users_extend_the_table():
    class Block(nn.Module):
        def forward(self, x):
            y = x * 1
            return y.atan().cosh() + y.sinh()

    def kept():
        x = leaf(64, 64)
        with memory.peak("cpu") as meter:
            y = apply_blocks([Block()], x, hooks=small())
            z = y.sum()
            del y
        z.backward()
        return meter.now, bits(x.grad)

    before, expected = kept()
    recipe("AtanBackward0", "self")(aten.atan.default)
    try:
        after, found = kept()
    finally:
        del RECIPES["AtanBackward0"]
    assert found == expected
    assert before - after == 64 * 64 * 4


def test_a_recipe_has_names_and_a_function():
    with pytest.raises(HookError, match="expected names, found 3"):
        recipe("AtanBackward0", 3)
    with pytest.raises(
        HookError, match=r"recipe\('AtanBackward0', ...\) expected a function, found 3"
    ):
        recipe("AtanBackward0", "self")(3)
    assert "AtanBackward0" not in RECIPES


def test_a_recipe_that_is_wrong_is_not_used():
    @recipe("AtanBackward0", "self")
    def wrong(x):
        return aten.atan.default(x) + 1e-7

    def step(run):
        x = leaf(8, 8)
        run([lambda x: (x * 1).atan().cosh()], x).sum().backward()
        return x

    try:
        expected, found = outcome(step, plain), outcome(step, through(small()))
    finally:
        del RECIPES["AtanBackward0"]
    assert differs(found, expected) is None


# ---- autograd's interface --------------------------------------------------------------------------------------------


def test_second_backward_double_backward_and_partial_gradients():
    def step(run):
        blocks, x = nn.ModuleList([Gated(), PreNorm(dropout=0.0)]), leaf(2, 8, WIDTH)
        # The derivative of fused attention has none.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = run(blocks, x)
        loss = y.square().mean()
        loss.backward(retain_graph=True)
        (partial,) = torch.autograd.grad(loss, blocks[0].gate.weight, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        return blocks, x, partial, gradient

    agrees(step)


def test_saved_attributes_can_be_read_outside_of_a_backward():
    with Rebuilder(0).forward("a test"):
        y = F.gelu(given(leaf(4, 6)))
        z = y.cosh()
    assert bits(z.grad_fn._saved_self) == bits(z.grad_fn._saved_self) == bits(y)


def test_a_dropped_output_frees_everything_without_the_garbage_collector():
    blocks, x = stack(), leaf(2, 8, WIDTH)
    through(small())(blocks, x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        with memory.peak("cpu") as meter:
            y = through(small())(blocks, x)
            assert meter.now > y.nbytes
            del y
            assert meter.now == 0
    finally:
        gc.enable()


def test_an_error_in_a_block_leaves_nothing_behind():
    def fail(x):
        raise ZeroDivisionError("in a block")

    blocks, x = [PreNorm(), fail], leaf(2, 8, WIDTH)
    with pytest.raises(ZeroDivisionError, match="in a block"):
        through(small())(blocks, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_kept_tensors_are_handed_to_the_hooks_around():
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.nbytes)
        return tensor.detach().clone()

    def unpack(tensor):
        unpacked.append(tensor.nbytes)
        return tensor

    def step(run):
        blocks, x = stack(), leaf(2, 8, WIDTH)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = run(blocks, x)
        y.sum().backward()
        return blocks, x

    expected = outcome(step, plain)
    everything = sum(packed)
    packed.clear()
    unpacked.clear()
    assert differs(outcome(step, through(small())), expected) is None
    assert sum(packed) < 0.8 * everything
    assert sum(unpacked) == sum(packed), "each comes back once"


def test_without_gradients_and_under_torch_func_blocks_run_plainly():
    blocks, x = [PreNorm(dropout=0.0)], leaf(2, 8, WIDTH)
    with torch.no_grad():
        assert torch.equal(through(small())(blocks, x), plain(blocks, x))
    gradient = torch.func.grad(lambda x: through(small())(blocks, x).sum())(x.detach())
    expected = torch.func.grad(lambda x: plain(blocks, x).sum())(x.detach())
    assert torch.equal(gradient, expected)


# ---- changes in place ------------------------------------------------------------------------------------------------


def test_a_tensor_changed_between_forward_and_backward_is_named():
    held = []

    def block(x):
        y = x * 2
        held.append(y)
        return F.gelu(y).cosh()

    z = through(small())([block], leaf(4, 6))
    with torch.no_grad():
        held[0].add_(1)
    message = (
        r"block 0 \(block\): one of the variables .* modified by an inplace operation: a tensor of shape \[4, 6\], "
        r"a result of MulBackward0, is at version 1, expected version 0\. Change a copy"
    )
    with pytest.raises(RecomputeError, match=message):
        z.sum().backward()


def test_a_result_changed_behind_autograd_is_kept_as_it_was_saved():
    def block(x):
        y = F.gelu(x * 2)
        with torch.no_grad():
            y.mul_(3)
        return y.cosh()

    agrees(lambda run: _gradient(run, block))


def test_a_source_changed_before_its_result_is_saved_is_not_used():
    def block(x):
        y = x * 2
        z = y.exp()  # keeps its result
        a = F.hardswish(z)
        w = y * z.detach()  # keeps y's partner alone
        z = z.add(1)
        return a.cosh() + w + z

    def inplace(x):
        y = (x * 2).cosh()
        z = y.abs()
        y.mul_(2)
        return z.sin() + y

    agrees(lambda run: _gradient(run, block))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradient(plain, inplace)
    with pytest.raises(RecomputeError, match="modified by an inplace operation"):
        _gradient(through(small()), inplace)


def _gradient(run, block):
    x = leaf(4, 6)
    run([block], x).sum().backward()
    return x


@pytest.mark.parametrize("min_bytes", [-1, "1MB", 0.5, True])
def test_arguments_are_checked(min_bytes):
    with pytest.raises(
        HookError, match=r"Selective\(min_bytes=...\) expected an integer of at least 0, found"
    ):
        Selective(min_bytes=min_bytes)
    assert repr(Selective(min_bytes=7)) == "Selective(min_bytes=7)"
