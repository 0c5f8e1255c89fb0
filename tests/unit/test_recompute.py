"""Dropping, recomputing, early stop, checks: what a region's blocks, arguments and outputs may be."""

import contextlib
import contextvars
import decimal
import gc
import threading
import warnings
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from blockhooks import (
    Checkpoint,
    HookError,
    RecomputeError,
    apply_blocks,
    current_block,
    is_recomputing,
    plan,
)
from tests.agree import (
    Layer,
    agree,
    agrees,
    bits,
    describe,
    differs,
    generators,
    layers,
    leaf,
    outcome,
    plain,
    through,
)


def checkpointed(blocks, x, *args, **kwargs):
    return apply_blocks(blocks, x, *args, hooks=[Checkpoint()], **kwargs)


# ---- x of all kinds --------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x other")


@dataclass
class Data:
    x: torch.Tensor
    other: Any = None
    names: list = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    other: Any = None


class Custom:
    def __init__(self, x, other):
        self.x, self.other = x, other


class Slotted:
    __slots__ = ("other", "x")

    def __init__(self, x, other):
        self.x, self.other = x, other


def in_dict(x, other):
    return {"x": x, "other": other}


def in_list(x, other):
    return [x, other]


def in_tuple(x, other):
    return x, other


def nested(x, other):
    return {"deep": [(x, {"more": OrderedDict(other=other)})], "none": None, "number": 3}


def in_model_output(x, other):
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=other)


KINDS = [in_dict, in_list, in_tuple, nested, Pair, Data, Frozen, Custom, Slotted, in_model_output]


def parts(value):
    """The two tensors of any of the kinds."""
    if isinstance(value, dict):
        if "deep" in value:
            value = value["deep"][0]
            return value[0], value[1]["more"]["other"]
        return tuple(value.values())[:2]
    if isinstance(value, (list, tuple)):
        return value[0], value[1]
    return value.x, value.other


class On(nn.Module):
    """Makes a new x of the same kind."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, given):
        x, other = parts(given)
        return self.kind(
            torch.tanh(self.linear(x) * other), torch.dropout(other + x.mean(), 0.2, True)
        )


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_x_as(kind):
    def step(run):
        blocks, x, other = [On(kind) for _ in range(3)], leaf(3, 4), leaf(4, number=2)
        out = run(blocks, kind(x, other))
        assert type(out) is type(kind(x, other))
        one, two = parts(out)
        (one.square().sum() + two.sum()).backward()
        return out, blocks, x, other

    agree(step)


@pytest.mark.parametrize(
    "kind", [in_dict, in_list, Data, Custom, Slotted, nested], ids=lambda k: k.__name__
)
def test_x_changed_by_the_blocks_and_handed_on(kind):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given):
            x, other = parts(given)
            new = torch.tanh(self.linear(x) * other)
            if isinstance(given, dict) and "deep" in given:
                given["deep"][0] = (new, given["deep"][0][1])
                given["number"] += 1
            elif isinstance(given, dict):
                given["x"] = new
                given["depth"] = given.get("depth", 0) + 1
            elif isinstance(given, list):
                given[0] = new
                given.append(new.mean())
            else:
                given.x = new
            return given

    def step(run):
        blocks, x, other = [Changes() for _ in range(3)], leaf(3, 4), leaf(4, number=2)
        out = run(blocks, kind(x, other))
        parts(out)[0].square().sum().backward()
        return out, blocks, x, other

    agree(step)


# ---- outputs of all kinds --------------------------------------------------------------------------------------------


class Gives(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.linear, self.give = nn.Linear(4, 4), give

    def forward(self, x):
        return self.give(self, x, torch.tanh(self.linear(x)))


OUTPUTS = {
    "x itself": lambda self, x, y: x,
    "a view of x": lambda self, x, y: x.view(-1, 4),
    "a part of x": lambda self, x, y: x[:, :],
    "a transposed product": lambda self, x, y: (y @ y.t() @ x).t().t(),
    "expanded": lambda self, x, y: y.mean(0).expand(3, 4),
    "tuple": lambda self, x, y: (y, y.argmax(-1), None, "name", {"std": float(y.detach().std())}),
    "list": lambda self, x, y: [y, x],
    "a parameter added": lambda self, x, y: self.linear.weight[:3] + x * 0,
    "detached": lambda self, x, y: y.detach(),
    "partly detached": lambda self, x, y: y * x.detach().exp(),
    "under no_grad": lambda self, x, y: _no_grad(lambda: y * 2),
    "no_grad inside": lambda self, x, y: y * _no_grad(lambda: self.linear(x).sigmoid()),
    "in place on itself": lambda self, x, y: self.linear(y).mul_(2).add_(x),
    "in place on what linear gave": lambda self, x, y: torch.relu_(self.linear(x)) + y,
    "in place on a view": lambda self, x, y: _view_in_place(self.linear(y)),
    "several uses": lambda self, x, y: y * y + y.exp() * y.sin() + x,
}


def _no_grad(give):
    with torch.no_grad():
        return give()


def _view_in_place(y):
    y[:, 1:3].mul_(2)
    y[0] = 1
    return y


@pytest.mark.parametrize("give", OUTPUTS.values(), ids=OUTPUTS)
def test_block_that_gives(give):
    def step(run):
        blocks, x = [Layer(), Gives(give), Gives(give), Layer()], leaf(3, 4)
        out = run(blocks, x)
        out.square().sum().backward()
        return out, blocks, x

    agree(step)


@agrees
def test_blocks_that_give_a_parameter(run):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return self.weight

    blocks, x = [Layer(), Constant()], leaf(3, 4)
    out = run(blocks, x)
    assert out is blocks[1].weight
    out.square().sum().backward()
    return blocks, x


def test_identity_block_gives_x_itself():
    x = leaf(3, 4)
    assert checkpointed([nn.Identity(), lambda x: x], x) is x


@agrees
def test_input_and_output_kept_by_the_user(run):
    x = leaf(3, 4)
    hidden = x * 2
    hidden.retain_grad()
    out = run(layers(3), hidden)
    out.retain_grad()
    (out.square().sum() + hidden.sum()).backward()
    return x, hidden.grad, out.grad


@agrees
def test_views_of_the_output_changed_in_place(run):
    x = leaf(3, 4)
    out = run(layers(3), x)
    out[:, 0].mul_(2)
    out.add_(1)
    out.square().sum().backward()
    return x, out


# ---- x in place, aliased, strided ------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation, self.linear = nn.LeakyReLU(0.1, inplace=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.activation(x)) + x


class ViewInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x[:, :2].mul_(0.5)
        return self.linear(torch.tanh(x))


@pytest.mark.parametrize("kind", [InPlace, ViewInPlace])
def test_block_that_works_in_place_on_its_input(kind):
    def step(run):
        blocks, x = [Layer(), kind(), kind(), Layer()], leaf(3, 4)
        out = run(blocks, x * 1.0)
        out.square().sum().backward()
        return out, blocks, x

    agree(step)


@agrees
def test_in_place_only_in_the_first_operation_of_a_segment(run):
    blocks, x = (
        [nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True), nn.Linear(4, 4)],
        leaf(3, 4),
    )
    out = run(blocks, x * 1.0)
    out.square().sum().backward()
    return out, blocks, x


@agrees
def test_a_whole_stack_in_place(run):
    x = leaf(3, 4)
    hidden = x.abs()
    out = run([lambda h: h.mul_(2), lambda h: h.add_(1), lambda h: h.sqrt_()], hidden)
    assert out is hidden
    out.sum().backward()
    return x, out


@agrees
def test_x_is_a_side_input_too(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, memory, *, again):
            return torch.tanh(self.linear(x)) * memory + again.sum()

    blocks, x = [Block() for _ in range(3)], leaf(3, 4)
    hidden = x * 2
    run(blocks, hidden, hidden, again=hidden).square().sum().backward()
    run(blocks, x, x, again=x).square().sum().backward()
    return blocks, x


STRIDED = {
    "expanded": lambda: leaf(4).expand(3, 4),
    "transposed": lambda: leaf(4, 3).t(),
    "sliced": lambda: leaf(6, 8)[::2, ::2],
    "channels_last": lambda: leaf(2, 4, 3, 3).to(memory_format=torch.channels_last),
    "empty": lambda: leaf(0, 4),
    "one": lambda: leaf(1),
    "0-dimensional": lambda: leaf(1)[0],
    "conjugated": lambda: leaf(3, 4, dtype=torch.complex64).conj(),
    "negated": lambda: leaf(3, 4, dtype=torch.complex64).conj().imag,
    "double": lambda: leaf(3, 4, dtype=torch.float64),
    "bfloat16": lambda: leaf(3, 4, dtype=torch.bfloat16),
    "half": lambda: leaf(3, 4, dtype=torch.float16),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_x_that_is(make):
    def step(run):
        x = make()
        base = x._base if x._base is not None else x
        blocks = [
            lambda t: torch.tanh(t * 2),
            lambda t: t * t + t.exp(),
            lambda t: t.cumsum(-1) if t.dim() else t.sin(),
        ]
        out = run(blocks, x)
        out.abs().sum().backward()
        return out.stride(), out, base

    agree(step)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@agrees
def test_sparse_tensors(run):
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
    values = leaf(3)
    adjacency = torch.sparse_coo_tensor(indices, values, (3, 3))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, adjacency):
            return torch.tanh(torch.sparse.mm(adjacency, self.linear(x)))

    blocks, x = [Block() for _ in range(2)], leaf(3, 4)
    run(blocks, x, adjacency).sum().backward()
    return blocks, x, values.grad


@agrees
def test_sparse_gradients(run):
    table = nn.Embedding(10, 4, sparse=True)
    blocks = [table, Layer()]
    run(blocks, torch.tensor([[1, 2], [2, 3]])).square().sum().backward()
    return table.weight.grad.to_dense(), blocks[1]


@agrees
def test_token_ids_and_frozen_parts(run):
    blocks = [nn.Embedding(10, 4), *layers(2)]
    blocks[1].up.requires_grad_(False)
    out = run(blocks, torch.tensor([[1, 2], [2, 3]]))
    out.square().sum().backward()
    return out, blocks


@agrees
def test_x_without_grad(run):
    blocks, x = layers(3, dropout=0.1), leaf(3, 4, grad=False)
    blocks[0].requires_grad_(False)
    out = run(blocks, x)
    out.square().sum().backward()
    frozen = run([blocks[0]], x)
    return out, frozen, blocks


@agrees
def test_tensor_subclasses(run):
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs or {})
            if isinstance(result, Tagged):
                result.tag = (
                    next((a.tag for a in args if isinstance(a, Tagged) and hasattr(a, "tag")), 0)
                    + 1
                )
            return result

    def block(x):
        return torch.tanh(x * (1 + getattr(x, "tag", 0)))

    raw = leaf(3, 4)
    x = raw.as_subclass(Tagged)
    x.tag = 1
    out = run([block] * 3, x)
    out.sum().backward()
    return out.as_subclass(torch.Tensor), out.tag, raw.grad


@agrees
def test_nested_tensor_of_views_as_side_inputs(run):
    base = leaf(4, 4)
    rows = list(base.unbind(0))

    class Block(nn.Module):
        def forward(self, x, rows, last=None):
            return torch.tanh(x * rows[0] + rows[-1] + last)

    x = leaf(3, 4)
    run([Block()] * 3, x, rows, last=base[:, 1]).sum().backward()
    return base, x


def test_inference_tensors_as_side_inputs_and_buffers():
    with torch.inference_mode():
        mask = torch.arange(4.0)

    def step(run):
        block = Layer()
        block.register_buffer("mask", mask)
        x = leaf(3, 4)
        run(
            [lambda x, m: torch.tanh(x + m), lambda x, m: block(x) + block.mask], x, mask
        ).sum().backward()
        return x, [p.grad for p in block.parameters()]

    agree(step)


# ---- arguments of all kinds ------------------------------------------------------------------------------------------


@agrees
def test_side_inputs_of_all_kinds(run):
    class Marker:
        pass

    marker, seen = Marker(), []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, flag, nothing, pair, *rest, name, table, **more):
            assert flag is True
            assert nothing is None
            assert more["marker"] is marker
            seen.append(type(table["inner"][0]).__name__)
            y = torch.tanh(self.linear(x) * pair[0] + table["inner"][1] + sum(rest))
            return y + more["function"](x) * len(name) + more["array"][0]

    blocks, x, a, b, c = (
        [Block() for _ in range(3)],
        leaf(3, 4),
        leaf(4, number=1),
        leaf(4, number=2),
        leaf(4, number=3),
    )
    out = run(
        blocks, x, True, None, (a * 2, 0.5), b, c,
        name="four", table={"inner": ["text", a + b]}, marker=marker, function=torch.sin, array=(1.5, range(3)),
    )  # fmt: skip
    out.square().sum().backward()
    assert set(seen) == {"str"}
    return out, blocks, x, a, b, c


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1.0, 2.0]),
        lambda: (n for n in [1.0, 2.0]),
        lambda: map(float, "12"),
        lambda: zip([1.0], [2.0], strict=True),
    ],
    ids=["list iterator", "generator", "map", "zip"],
)
@pytest.mark.parametrize("as_x", [True, False], ids=["in x", "as a side input"])
def test_iterators_as_arguments_are_refused(make, as_x):
    def block(x, *side):
        x = x["x"] if isinstance(x, dict) else x
        return torch.tanh(x)

    x = leaf(3, 4)
    arguments = ({"x": x, "it": make()},) if as_x else (x, make())
    with pytest.raises(HookError, match=r"iterator.*pass a list or a tuple"):
        checkpointed([block], *arguments)


@agrees
def test_gradients_of_side_inputs(run):
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, memory, *, gate):
            return x + gate * ((self.query(x) @ self.key(memory).t()).softmax(-1) @ memory)

    blocks, x, memory, gate = (
        [Cross() for _ in range(3)],
        leaf(3, 4),
        leaf(5, 4, number=2),
        leaf(4, number=3),
    )
    out = run(blocks, x, memory * 1.5, gate=gate)
    out.square().sum().backward()
    return out, blocks, x, memory, gate


# ---- early stop ------------------------------------------------------------------------------------------------------


def swallow_exception(x, linear):
    try:
        y = torch.tanh(linear(x))
    except Exception:
        y = x * 0
    return linear(y.exp())


def swallow_everything(x, linear):
    try:
        y = torch.tanh(linear(x))
        z = linear(y.exp())
    except:  # noqa: E722
        z = x * 0
    return z


def finally_and_else(x, linear):
    log = []
    try:
        y = linear(x).exp()
        log.append(1)
    except ValueError:
        y = x
    else:
        y = y.sin()
    finally:
        log.append(2)
    return y * sum(log)


def suppressed(x, linear):
    with contextlib.suppress(BaseException):
        x = linear(x).exp()
    return x.sin()


def returns_in_finally(x, linear):
    y = x
    for _ in range(2):
        try:
            y = linear(y).exp().sin()
        finally:
            y = y * 0.5
    return y


@pytest.mark.parametrize(
    "inside",
    [swallow_exception, swallow_everything, finally_and_else, suppressed, returns_in_finally],
    ids=lambda f: f.__name__,
)
def test_early_stop_through(inside):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return inside(x, self.linear)

    def step(run):
        blocks, x = [Block() for _ in range(3)], leaf(3, 4)
        out = run(blocks, x)
        out.square().sum().backward()
        return out, blocks, x

    agree(step)


def test_early_stop_leaves_out_the_end_of_a_block():
    reached = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(torch.tanh(x))
            reached.append("end")
            return y

    for early_stop, ends in ((True, 1), (False, 2)):
        reached.clear()
        out = apply_blocks([Block()], leaf(3, 4), hooks=[Checkpoint(early_stop=early_stop)])
        out.sum().backward()
        assert len(reached) == ends


def test_a_block_that_nothing_was_saved_for_is_not_recomputed():
    calls = []

    def block(x):
        calls.append(1)
        return x + 1

    checkpointed([block], leaf(3, 4)).sum().backward()
    assert len(calls) == 1


def test_outputs_that_nobody_needs_are_not_recomputed():
    calls = []

    def block(x):
        calls.append(1)
        return x.exp()

    x = leaf(3, 4)
    out = checkpointed([block], x)
    x.sin().sum().backward()
    assert len(calls) == 1
    del out


# ---- exceptions ------------------------------------------------------------------------------------------------------


class Trouble(Exception):
    pass


@pytest.mark.parametrize(
    "error", [Trouble, ValueError, StopIteration, RecursionError, KeyboardInterrupt]
)
def test_exception_of_a_block_passes_unchanged(error):
    def fails(x):
        x = torch.dropout(x.exp(), 0.5, True)
        raise error("bad batch", 3)

    blocks = [Layer(dropout=0.3), fails, Layer()]
    found = []
    for run in (plain, checkpointed):
        torch.manual_seed(0)
        with pytest.raises(error, match=r".*bad batch.*") as caught:
            run(blocks, leaf(3, 4))
        assert caught.value.args == ("bad batch", 3)
        found.append(describe(generators()))
    assert differs(found[1], found[0]) is None


def test_exception_has_a_note_that_names_block_and_hooks():
    def fails(x):
        raise Trouble("no")

    with pytest.raises(Trouble, match="no") as caught:
        checkpointed([Layer(), fails], leaf(3, 4))
    (note,) = caught.value.__notes__
    assert note.startswith("while running block 1 (fails) in the forward pass (hooks: Checkpoint")


def test_exception_in_the_recompute_alone_has_one_note():
    def fails(x):
        y = torch.tanh(x).exp()
        if is_recomputing():
            raise Trouble("only now")
        return y.sin()

    out = checkpointed([Layer(), fails], leaf(3, 4))
    with pytest.raises(Trouble, match="only now") as caught:
        out.sum().backward()
    (note,) = caught.value.__notes__
    assert note.startswith(
        "while recomputing block 1 (fails) for the backward pass (hooks: Checkpoint"
    )


def test_after_an_exception_everything_is_as_before():
    norm = nn.BatchNorm1d(4)
    block = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(0.5))
    fail = [True]

    def fails(x):
        y = block(x).exp()
        if is_recomputing() and fail[0]:
            raise Trouble("only now")
        return y.sin()

    x = leaf(3, 4)
    out = checkpointed([fails], x)
    state, rng = describe(block.state_dict()), describe(generators())
    hooks = torch.autograd.graph.saved_tensors_hooks
    with pytest.raises(Trouble, match="only now"):
        out.sum().backward(retain_graph=True)
    assert differs(describe(block.state_dict()), state) is None
    assert differs(describe(generators()), rng) is None
    assert hooks is torch.autograd.graph.saved_tensors_hooks
    assert current_block() is None
    assert not is_recomputing()
    y = leaf(3).exp()
    assert type(y.grad_fn._saved_result) is torch.Tensor
    fail[0] = False
    out.sum().backward()
    torch.manual_seed(0)


@agrees
def test_step_after_an_exception(run):
    blocks = layers(2, dropout=0.3)

    def fails(x):
        if len(x) == 3:
            raise Trouble("three")
        return x * 2

    with pytest.raises(Trouble, match="three"):
        run([*blocks, fails], leaf(3, 4))
    x = leaf(4, 4)
    run([*blocks, fails], x).square().sum().backward()
    return blocks, x


# ---- autograd's own interface ----------------------------------------------------------------------------------------


@agrees
def test_grad_and_backward_for_some_inputs(run):
    blocks, x = layers(3, dropout=0.3), leaf(3, 4)
    loss = run(blocks, x).square().sum()
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    middle = list(blocks[1].parameters())
    loss.backward(inputs=middle, retain_graph=True)
    unused = torch.autograd.grad(loss, [x, leaf(2)], allow_unused=True, retain_graph=True)
    loss.backward(inputs=[p for b in (blocks[0], blocks[2]) for p in b.parameters()])
    return dx, unused, blocks, x


@pytest.mark.parametrize("width", [1, 2, 3], ids=["first order", "second order", "third order"])
def test_create_graph(width):
    def step(run):
        blocks, x = layers(2, dropout=0.25), leaf(3, 4)
        value = run(blocks, x).pow(3).sum()
        derivatives = []
        for _ in range(width):
            (derivative,) = torch.autograd.grad(value, x, create_graph=True)
            derivatives.append(derivative)
            value = derivative.square().sum()
        value.backward()
        return derivatives, blocks, x

    agree(step)


@agrees
def test_gradient_penalty(run):
    blocks, x = layers(2, dropout=0.25), leaf(3, 4)
    out = run(blocks, x)
    (dx,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    (out.square().sum() + (dx.norm(dim=1) - 1).square().sum()).backward()
    return dx, blocks, x


@agrees
def test_hessian_vector_products(run):
    blocks, x = layers(2), leaf(3, 4)
    hvp = torch.autograd.functional.hvp(lambda t: run(blocks, t).sin().sum(), x, torch.ones(3, 4))
    vhp = torch.autograd.functional.vhp(lambda t: run(blocks, t).sin().sum(), x, torch.ones(3, 4))
    jacobian = torch.autograd.functional.jacobian(lambda t: run(blocks, t), x[0])
    hessian = torch.autograd.functional.hessian(lambda t: run(blocks, t).exp().sum(), x[0])
    return hvp, vhp, jacobian, hessian


@agrees
def test_batched_gradients(run):
    blocks, x = layers(2), leaf(3, 4)
    out = run(blocks, x)
    return torch.autograd.grad(out, x, torch.eye(12).view(12, 3, 4), is_grads_batched=True)


def test_gradcheck():
    blocks = layers(2).double()
    x = leaf(2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: checkpointed(blocks, t), x)
    assert torch.autograd.gradgradcheck(lambda t: checkpointed(blocks, t), x)


@pytest.mark.filterwarnings("ignore:.*jit.script.*")  # of torch itself
@agrees
def test_torch_func(run):
    blocks, weight, x = layers(2), leaf(4, 4, number=3, grad=False), leaf(3, 4, grad=False)

    def loss(weight, x):
        return run(blocks, x @ weight).square().sum()

    one = leaf(4, number=5, grad=False)
    return (
        torch.func.grad(loss, argnums=(0, 1))(weight, x),
        torch.func.jacrev(lambda t: run(blocks, t))(one),
        torch.func.jacfwd(lambda t: run(blocks, t))(one),
        torch.func.hessian(lambda t: run(blocks, t).sum())(one),
        torch.func.vjp(lambda t: run(blocks, t), x)[1](x),
        torch.func.jvp(lambda t: run(blocks, t), (x,), (x * 2,)),
        torch.func.vmap(lambda t: run(blocks, t))(x),
        torch.func.vmap(torch.func.grad(lambda t: run(blocks, t).sum()))(x),
    )


@agrees
def test_per_sample_gradients(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = layers(2)

        def forward(self, x):
            return run(self.blocks, x)

    net = Net()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, (x,)).square().sum()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        parameters, leaf(5, 4, grad=False)
    )


@agrees
def test_transforms_inside_of_a_block(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            determinants = torch.func.vmap(torch.linalg.det)(
                x[:, None, :] * torch.eye(4) + self.matrix
            )
            gradient = torch.func.grad(lambda t: (t @ self.matrix).sin().sum())(x)
            return x * determinants[:, None].tanh() + gradient

    blocks, x = [Block() for _ in range(2)], leaf(3, 4)
    run(blocks, x).sum().backward()
    return blocks, x


@pytest.mark.filterwarnings("ignore:.*jit.script.*")  # of torch itself
@agrees
def test_forward_mode(run):
    blocks, x, tangent = layers(3), leaf(3, 4), leaf(3, 4, number=2, grad=False)
    with forward_ad.dual_level():
        out = run(blocks, forward_ad.make_dual(x, tangent))
        primal, derivative = forward_ad.unpack_dual(out)
        derivative = derivative.detach().clone()
        primal.square().sum().backward()
    return primal, derivative, blocks, x


@agrees
def test_backward_inside_of_a_block(run):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            probe = x.detach().requires_grad_()
            energy = torch.tanh(self.linear(probe)).square().sum()
            (force,) = torch.autograd.grad(energy, probe, create_graph=True)
            return torch.sin(self.linear(x)) - 0.1 * force

    blocks, x = [Inner() for _ in range(3)], leaf(3, 4)
    run(blocks, x).sum().backward()
    return blocks, x


@agrees
def test_backward_through_x_inside_of_a_block(run):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            energy = torch.tanh(self.linear(x)).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return torch.sin(self.linear(x)) - 0.1 * force

    blocks, x = [Inner() for _ in range(3)], leaf(3, 4)
    run(blocks, x * 1.0).sum().backward()
    return blocks, x


@agrees
def test_custom_functions(run):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, power):
            ctx.save_for_backward(x, weight)
            ctx.power = power
            return x * weight**power

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            again, _ = ctx.saved_tensors
            assert torch.equal(x, again)
            return (
                grad * weight**ctx.power,
                (grad * again * ctx.power * weight ** (ctx.power - 1)).sum(0),
                None,
            )

    class InPlaceExp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            result = x.exp_()
            ctx.mark_dirty(x)
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4) + 1)

        def forward(self, x):
            return InPlaceExp.apply(-torch.tanh(Scale.apply(x, self.weight, 2)))

    blocks, x = [Block() for _ in range(3)], leaf(3, 4)
    run(blocks, x).sum().backward()
    return blocks, x


@agrees
def test_gradient_hooks_fire_once(run):
    log = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.linear.register_full_backward_hook(
                lambda m, i, o: log.append(("module", o[0].clone()))
            )
            self.linear.register_full_backward_pre_hook(
                lambda m, o: log.append(("before", o[0].clone()))
            )
            self.linear.weight.register_hook(lambda g: log.append(("weight", g.clone())))
            self.linear.weight.register_post_accumulate_grad_hook(
                lambda p: log.append(("grad", p.grad.clone()))
            )

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            if y.requires_grad:
                y.register_hook(lambda g: log.append(("tensor", g.clone())) or g * 0.5)
                y.grad_fn.register_hook(lambda i, o: log.append(("node", o[0].clone())))
                y.grad_fn.register_prehook(lambda o: log.append(("prenode", o[0].clone())))
            return x + y

    block = Block()
    blocks, x = [block, Block(), block], leaf(3, 4)
    x.register_hook(lambda g: log.append(("x", g.clone())))
    run(blocks, x).square().sum().backward()
    return log, [p.grad for b in blocks for p in b.parameters()], x


@agrees
def test_anomaly_mode_and_multi_grad_hooks(run):
    seen = []
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        blocks, x = layers(3, dropout=0.2), leaf(3, 4)
        parameters = list(blocks.parameters())
        handle = torch.autograd.graph.register_multi_grad_hook(
            parameters, lambda g: seen.append(len(g))
        )
        run(blocks, x).square().sum().backward()
        handle.remove()
    return seen, [p.grad for p in parameters], x


@agrees
def test_saved_tensors_read_from_outside(run):
    x = leaf(3, 4)
    out = run([lambda t: t.sin().exp()], x)
    first, second = out.grad_fn._saved_result, out.grad_fn._saved_result
    values = first.clone(), second.clone()
    out.sum().backward()
    return values, x


@agrees
def test_backward_under_no_grad_and_other_modes(run):
    blocks, x = layers(3, dropout=0.2), leaf(3, 4)
    one, two = run(blocks, x).square().sum(), run(blocks, x).sin().sum()
    with torch.no_grad():
        one.backward()
    with torch.autograd.set_multithreading_enabled(False):
        two.backward()
    return blocks, x


@agrees
def test_grad_mode_switched_inside_of_a_block(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.set_grad_enabled(False):
                target = self.teacher(x).sigmoid()
                with torch.enable_grad():
                    kept = self.linear(x)
            with torch.inference_mode():
                shape = self.teacher(x).shape
            return torch.tanh(kept) * target * len(shape)

    blocks, x = [Block() for _ in range(3)], leaf(3, 4)
    run(blocks, x).sum().backward()
    return blocks, x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_each_block_runs_once(mode):
    calls = []

    def block(x):
        calls.append(current_block().phase)
        return torch.dropout(x, 0.5, True)

    with mode():
        out = checkpointed([block] * 3, leaf(3, 4))
    assert calls == ["forward"] * 3
    assert not out.requires_grad
    assert out.is_inference() == (mode is torch.inference_mode)


# ---- saved-tensor hooks ----------------------------------------------------------------------------------------------


@agrees
def test_saved_tensor_hooks_around(run):
    blocks, x, box = layers(3, dropout=0.2), leaf(3, 4), []

    def pack(tensor):
        box.append(tensor.detach().clone())
        return len(box) - 1

    with saved_tensors_hooks(pack, box.__getitem__):
        out = run(blocks, x * 1.0)
    assert box
    out.square().sum().backward()
    with save_on_cpu():
        again = run(blocks, x * 1.0)
    again.square().sum().backward()
    return blocks, x


@agrees
def test_saved_tensor_hooks_inside(run):
    box = {}

    def pack(tensor):
        box[len(box)] = tensor.detach().clone()
        return len(box) - 1

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layer(dropout=0.2)

        def forward(self, x):
            with saved_tensors_hooks(pack, box.__getitem__):
                x = self.inner(x)
            with save_on_cpu():
                return torch.tanh(x).exp()

    blocks, x = [Block() for _ in range(2)], leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_hooks_around_that_quantise_what_is_saved_inside(run):
    """A user's own compression inside of a block acts as without checkpointing."""

    def pack(tensor):
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def unpack(tensor):
        return tensor.float() if tensor.is_floating_point() else tensor

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with saved_tensors_hooks(pack, unpack):
                return torch.tanh(self.linear(x)).exp()

    blocks, x = [Block() for _ in range(3)], leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


# ---- nesting ---------------------------------------------------------------------------------------------------------


class Group(nn.Module):
    def __init__(self, run, inner, state=False):
        super().__init__()
        self.inner, self.run, self.calls = nn.ModuleList(inner), run, 0

    def forward(self, x):
        self.calls += 1
        return torch.dropout(self.run(list(self.inner), x), 0.2, True) / self.calls


def build(run):
    deep = [Group(run, [Layer(dropout=0.3), nn.BatchNorm1d(4)]) for _ in range(2)]
    blocks = [Group(run, deep), Layer(), Group(run, layers(2, dropout=0.3))]
    for module in nn.ModuleList(blocks).modules():
        if isinstance(module, Group):
            module.__dict__["run"] = run
    return blocks


def parameters_and_buffers(blocks):
    blocks = nn.ModuleList(blocks)
    return (
        dict(blocks.named_parameters()),
        dict(blocks.named_buffers()),
        [m.calls for m in blocks.modules() if isinstance(m, Group)],
    )


@agrees
def test_runs_inside_of_runs(run):
    blocks, xs = build(run), [leaf(3, 4, number=n) for n in range(2)]
    losses = [run(blocks, x).square().sum() for x in xs]
    for loss in losses:
        loss.backward()
    return losses, parameters_and_buffers(blocks), xs


@agrees
def test_runs_inside_of_runs_to_the_second_order(run):
    blocks, x = [Group(run, layers(2, dropout=0.1))] * 1, leaf(3, 4)
    (dx,) = torch.autograd.grad(run(blocks, x).pow(3).sum(), x, create_graph=True)
    dx.square().sum().backward()
    return dx, parameters_and_buffers(blocks), x


@agrees
def test_runs_inside_of_runs_with_two_backwards(run):
    blocks, x = build(run), leaf(3, 4)
    out = run(blocks, x)
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()
    return parameters_and_buffers(blocks), x


@agrees
def test_inner_run_under_no_grad(run):
    class Guided(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.linear = layers(2, dropout=0.2), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                target = run(list(self.teacher), x)
            return torch.tanh(self.linear(x)) * target

    blocks, x = [Guided() for _ in range(2)], leaf(3, 4)
    run(blocks, x).sum().backward()
    return blocks, x


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@agrees
def test_torch_checkpoints_inside(run):
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layer(dropout=0.2)

        def forward(self, x):
            return torch.tanh(checkpoint(self.inner, x, use_reentrant=False))

    blocks, x = [Block() for _ in range(3)], leaf(3, 4)
    run(blocks, x).square().sum().backward()
    return blocks, x


@agrees
def test_inside_of_a_torch_checkpoint(run):
    from torch.utils.checkpoint import checkpoint

    blocks, x = layers(3, dropout=0.2), leaf(3, 4)
    out = checkpoint(lambda t: run(blocks, t), x, use_reentrant=False)
    out.square().sum().backward()
    return blocks, x


# ---- ambient state ---------------------------------------------------------------------------------------------------

TEMPERATURE = contextvars.ContextVar("temperature", default=1.0)


class Ambient(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4, dtype=torch.float32), read

    def forward(self, x):
        return torch.tanh(self.linear(x.float()) * self.read()) + x


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def variable(value):
    token = TEMPERATURE.set(value)
    try:
        yield
    finally:
        TEMPERATURE.reset(token)


@contextlib.contextmanager
def precision(digits):
    with decimal.localcontext() as context:
        context.prec = digits
        yield


@contextlib.contextmanager
def sdpa_math():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def matmul_precision(value):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def nondeterministic():
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


class Doubles(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.tanh else result


AMBIENT = {
    "bfloat16": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: 1.0),
    "float16": (lambda: torch.autocast("cpu", dtype=torch.float16), lambda: 1.0),
    "no autocast": (lambda: torch.autocast("cpu", enabled=False), lambda: 1.0),
    "dtype": (lambda: default_dtype(torch.float64), lambda: torch.linspace(0.1, 1.7, 4).log()),
    "device": (lambda: torch.device("meta"), lambda: 3.0 if torch.empty(0).is_meta else 0.5),
    "variable": (lambda: variable(0.25), lambda: TEMPERATURE.get()),
    "decimal": (lambda: precision(3), lambda: float(decimal.Decimal(1) / decimal.Decimal(7))),
    "function mode": (Doubles, lambda: torch.tanh(torch.ones(()))),
    "sdpa": (sdpa_math, lambda: 1.0 if torch.backends.cuda.flash_sdp_enabled() else 0.5),
    "matmul": (lambda: matmul_precision("high"), lambda: len(torch.get_float32_matmul_precision())),
    "nondeterministic": (
        nondeterministic,
        lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
    ),
}


@pytest.mark.parametrize(("around", "read"), AMBIENT.values(), ids=AMBIENT)
def test_ambient_state_left_before_the_backward(around, read):
    def step(run):
        blocks, x = [Ambient(read) for _ in range(3)], leaf(3, 4)
        before = read()
        with around():
            loss = run(blocks, x).float().square().sum()
        loss.backward()
        assert describe(read()) == describe(before)
        return blocks, x

    agree(step)


@pytest.mark.parametrize(("around", "read"), AMBIENT.values(), ids=AMBIENT)
def test_ambient_state_entered_before_the_backward(around, read):
    def step(run):
        blocks, x = [Ambient(read) for _ in range(3)], leaf(3, 4)
        loss = run(blocks, x).square().sum()
        with around():
            inside = describe(read())
            loss.backward()
            assert describe(read()) == inside
        return blocks, x

    agree(step)


@agrees
def test_ambient_state_changed_inside_of_a_block(run):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(x)
                with torch.autocast("cpu", enabled=False):
                    y = torch.tanh(self.linear(x.float())) * y.float()
            with variable(TEMPERATURE.get() * 0.5), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.warn("not seen", stacklevel=1)
                return y * TEMPERATURE.get() + torch.exp(x)

    blocks, x = [Block() for _ in range(3)], leaf(3, 4)
    filters = list(warnings.filters)
    with variable(3.0):
        loss = run(blocks, x).square().sum()
    loss.backward()
    assert warnings.filters == filters
    return blocks, x, TEMPERATURE.get()


@agrees
def test_context_variable_set_by_a_block_for_the_next(run):
    def first(x):
        TEMPERATURE.set(TEMPERATURE.get() + 0.5)
        return torch.tanh(x * TEMPERATURE.get())

    x = leaf(3, 4)
    token = TEMPERATURE.set(1.0)
    loss = run([first] * 4, x).sum()
    after = TEMPERATURE.get()
    loss.backward()
    assert TEMPERATURE.get() == after
    TEMPERATURE.reset(token)
    return x, after


@agrees
def test_autocast_and_its_cache_of_weights(run):
    linear = nn.Linear(8, 8)
    x = leaf(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            hint = linear(x).mean()
        out = run([lambda t: torch.tanh(linear(t)), lambda t: linear(t) + t], x)
        out = linear(out) + hint
    out.float().square().sum().backward()
    return linear, x


# ---- checks ----------------------------------------------------------------------------------------------------------


def clock():
    ticks = iter(range(1, 100))
    return lambda: next(ticks)


@pytest.mark.parametrize("values", [True, False], ids=["values", "shapes"])
def test_nondeterminism(values):
    class Clocked(nn.Module):
        def __init__(self, read):
            super().__init__()
            self.one, self.two, self.read = nn.Linear(4, 4), nn.Linear(4, 4), [read]

        def forward(self, x):
            return self.two(torch.tanh(self.one(x) * self.read[0]())) + x

    hooks = [Checkpoint(check="values" if values else "shapes")]
    out = apply_blocks([Layer(), Clocked(clock())], leaf(3, 4), hooks=hooks)
    if values:
        with pytest.raises(RecomputeError, match=r"block 1 \(Clocked\).*different values"):
            out.sum().backward()
    else:
        out.sum().backward()  # the documented limit: the shapes are alike


@pytest.mark.parametrize(
    ("now", "then", "message"),
    [
        (lambda x: x.exp().sin(), lambda x: x.sin(), "different number of tensors"),
        (lambda x: x.sin(), lambda x: x.exp().sin(), "more tensors|different number"),
        (
            lambda x: x.exp().sin(),
            lambda x: x.repeat(2, 1).exp().sin(),
            r"different metadata.*\n.*\[3, 4\]",
        ),
        (lambda x: x.exp().sin(), lambda x: x.double().exp().sin(), r"different (metadata|number)"),
    ],
    ids=["fewer", "more", "shape", "dtype"],
)
def test_another_path_in_the_recompute_is_an_error(now, then, message):
    def block(x):
        return (then if is_recomputing() else now)(x)

    out = apply_blocks([block], leaf(3, 4), hooks=[Checkpoint(early_stop=False)])
    with pytest.raises(RecomputeError, match=message):
        out.sum().backward()


# ---- changed between forward and backward ----------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["x", "side", "nested", "weight", "buffer"])
def test_changed_in_place_before_the_backward(victim):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x, side, nested):
            return torch.tanh(self.linear(x) * side * self.mask + nested["one"][0])

    block, hidden, side, nested = Block(), leaf(3, 4) * 2, torch.ones(4), {"one": [torch.ones(4)]}
    out = checkpointed([block], hidden, side, nested)
    with torch.no_grad():
        {
            "x": hidden, "side": side, "nested": nested["one"][0], "weight": block.linear.weight, "buffer": block.mask,
        }[victim].mul_(2)  # fmt: skip
    with pytest.raises(RecomputeError, match=r"block 0 \(Block\).*modified in place"):
        out.sum().backward()


@agrees
def test_optimizer_step_after_each_backward(run):
    blocks = layers(3, dropout=0.1)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=0.01)
    for number in range(3):
        for micro in range(2):
            (run(blocks, leaf(3, 4, number=2 * number + micro)).square().sum() / 2).backward()
        torch.nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    return blocks, [optimizer.state[p] for p in blocks.parameters()]


@agrees
def test_scaler_accumulation_and_autocast(run):
    blocks = layers(3, dropout=0.1)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(3):
        for micro in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(blocks, leaf(3, 4, number=2 * number + micro)).float().square().sum() / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return blocks, scaler.get_scale()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watched(nn.Module):
    alive = []

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, x, extra=None):
        hidden = torch.sigmoid(self.up(x))
        self.alive.append(weakref.ref(hidden))
        return x + self.down(hidden * hidden)


def living():
    return sum(reference() is not None for reference in Watched.alive)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
def test_activations_are_dropped_without_the_garbage_collector(mode):
    Watched.alive.clear()
    blocks = (
        nn.ModuleList(Watched() for _ in range(3))
        .train(mode == "train")
        .requires_grad_(mode != "frozen")
    )
    out = checkpointed(blocks, leaf(3, 4))
    assert len(Watched.alive) == 3
    assert living() == 0
    out.square().sum().backward(retain_graph=True)
    assert len(Watched.alive) == 6
    assert living() == 0
    out.sum().backward()
    assert len(Watched.alive) == 9
    assert living() == 0
    plain([Watched()], leaf(3, 4))
    Watched.alive.clear()
    kept = plain([Watched()], leaf(3, 4))
    assert living() == 1, "the control"
    del kept


ENDS = {
    "never": lambda out: None,
    "backward": lambda out: out.sum().backward(),
    "twice": lambda out: (out.sum().backward(retain_graph=True), out.sum().backward()),
    "retained": lambda out: out.sum().backward(retain_graph=True),
    "second order": lambda out: (
        torch.autograd.grad(out.sum(), next(iter(WEIGHTS)), create_graph=True)[0].sum().backward()
    ),
}
WEIGHTS = []


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_everything_is_freed_with_the_output(end):
    blocks = [Watched(), Watched()]
    WEIGHTS[:] = [blocks[0].up.weight]
    hidden, extra = leaf(3, 4) * 1.0, leaf(3, 4, number=2) * 1.0
    out = checkpointed(blocks, hidden, extra)
    end(out)
    references = [weakref.ref(t) for t in (hidden, extra, blocks[0])]
    WEIGHTS.clear()
    blocks[0].zero_grad()
    del hidden, extra, blocks, out
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.usefixtures("_no_collector")
def test_everything_is_freed_after_an_exception():
    def fails(x, extra):
        x = x.exp()
        raise Trouble("no")

    hidden, extra = leaf(3, 4) * 1.0, leaf(3, 4, number=2) * 1.0
    references = [weakref.ref(hidden), weakref.ref(extra)]
    with contextlib.suppress(Trouble):
        checkpointed([Watched(), fails], hidden, extra)
    del hidden, extra
    assert [reference() for reference in references] == [None, None]


@pytest.mark.usefixtures("_no_collector")
def test_a_cache_and_what_it_holds_are_freed():
    class Cache:
        def __init__(self):
            self.keys = []

    def block(x, cache):
        cache.keys.append(x.exp())
        return torch.tanh(sum(cache.keys))

    cache = Cache()
    out = checkpointed([block, block], leaf(3, 4), cache)
    out.sum().backward()
    references = [weakref.ref(key) for key in cache.keys] + [weakref.ref(cache)]
    del cache, out
    assert [reference() for reference in references] == [None] * 3


# ---- depth and threads -----------------------------------------------------------------------------------------------


def test_two_thousand_blocks():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 0.01))

        def forward(self, x):
            return x + (x * self.weight).tanh() * 0.1

    def step(run):
        blocks, x = [Tiny() for _ in range(2000)], leaf(2, 3)
        run(blocks, x).sum().backward()
        return [block.weight.grad for block in blocks], x

    agree(step, ["every block"])


def test_backward_in_another_thread():
    def step(run):
        blocks, x, errors = layers(3, dropout=0.3), leaf(3, 4), []
        with variable(0.5), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run([*blocks, Ambient(TEMPERATURE.get)], x).float().square().sum()

        def backward():
            try:
                loss.backward()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert not errors
        return blocks, x

    agree(step)


def test_two_threads_go_back_through_one_graph():
    x = leaf(3, 4)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.4))
    out = checkpointed([block, Layer()], x)
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    found = [None] * 4

    def work(index):
        found[index] = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(expected, other) for other in found)


def test_current_block_in_forward_recompute_and_nested_runs():
    seen = []

    def inner(x):
        seen.append(("inner", current_block().index, current_block().phase, is_recomputing()))
        return x.exp().sin()

    def outer(x):
        seen.append(("outer", current_block().index, current_block().phase, is_recomputing()))
        x = apply_blocks([inner], x, hooks=[Checkpoint()])
        seen.append(("outer", current_block().index, current_block().phase, is_recomputing()))
        return x.exp().sin()

    assert current_block() is None
    out = apply_blocks([torch.sin, outer], leaf(3), hooks=[Checkpoint(early_stop=False)])
    assert current_block() is None
    forward = [
        ("outer", 1, "forward", False),
        ("inner", 0, "forward", False),
        ("outer", 1, "forward", False),
    ]
    assert seen == forward
    seen.clear()
    out.sum().backward()
    assert seen[0] == ("outer", 1, "recompute", True)
    assert {phase for _, _, phase, _ in seen} == {"recompute"}


# ---- call counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan_function", "runs"),
    [
        (plan.every(1), [2, 2, 2, 2]),
        (plan.every(2), [2, 2, 2, 2]),
        (plan.first(2), [2, 2, 1, 1]),
        (plan.blocks([1]), [1, 2, 1, 1]),
    ],
    ids=["every(1)", "every(2)", "first(2)", "blocks([1])"],
)
def test_each_block_runs_as_often_as_the_plan_says(plan_function, runs):
    calls = [0] * 4

    def block(index):
        def call(x):
            calls[index] += 1
            return x.sin().exp()

        return call

    out = apply_blocks([block(i) for i in range(4)], leaf(3), hooks=[Checkpoint(plan_function)])
    assert calls == [1] * 4
    out.sum().backward()
    assert calls == runs
    assert bits(out) == bits(plain([block(i) for i in range(4)], leaf(3)))


def test_outcomes_of_the_comparison_itself_can_differ():
    """The control of `agree`: a step that asks whether it is recomputed does not agree."""

    def step(run):
        x = leaf(3)
        run([lambda t: (t * (2.0 if is_recomputing() else 1.0)).exp()], x).sum().backward()
        return x

    assert differs(outcome(step, through([Checkpoint()])), outcome(step, plain)) is not None


@pytest.mark.parametrize("hooks", [(), [Checkpoint()]], ids=["plain", "checkpointed"])
def test_a_saved_tensor_overwritten_inside_of_a_block_is_an_error_in_backward(hooks):
    def block(x):
        y = x.exp()  # autograd saves the result
        y.mul_(2)
        return y * 3

    y = apply_blocks([block], torch.randn(3, requires_grad=True), hooks=hooks)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
