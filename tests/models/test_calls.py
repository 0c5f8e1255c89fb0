"""However a model holds and calls its blocks, a step with hooks is the plain step, and memory is saved."""

import copy
import functools
import warnings

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from blockhooks import BlockhooksWarning, Checkpoint, attach, current_block, hookimpl, plan
from blockhooks.plan import Segment
from tests.models.toys import MODELS, Block, CacheLoop, Loop, TupleLoop, same, sequence, step


def saved_bytes(model, x):
    """Bytes that autograd keeps outside of regions, parameters left out."""
    storages = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    torch.manual_seed(7)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(nbytes for nbytes, _ in storages.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_plain_one(name):
    build, make_input = MODELS[name]
    plain, hooked = build(), build()
    hooked.load_state_dict(plain.state_dict())
    with attach(hooked, [Checkpoint()]) as handle:
        for _ in range(3):
            assert same(step(plain, make_input()), step(hooked, make_input()))
        assert handle.report().dropped_bytes > 0
    assert same(step(plain, make_input()), step(hooked, make_input()))


@pytest.mark.parametrize("name", MODELS)
def test_less_is_kept(name):
    build, make_input = MODELS[name]
    model = build()
    plain = saved_bytes(model, make_input())
    with attach(model, [Checkpoint()]):
        assert saved_bytes(model, make_input()) < plain
    assert saved_bytes(model, make_input()) == plain


def test_every_block_is_executed_once_and_once_again():
    model = Loop(4)
    events = []

    class Watch:
        @hookimpl(wrapper=True)
        def run_block(self, run, index, recomputing):
            events.append((run.names[index], "recompute" if recomputing else "forward"))
            return (yield)

    with attach(model, [Checkpoint(), Watch()]):
        step(model, sequence())
    forward = [(f"layers.{i}", "forward") for i in range(4)]
    assert events == forward + [(f"layers.{i}", "recompute") for i in (3, 2, 1, 0)]


def test_the_hooks_of_the_block_itself_stay_outside_and_fire_once():
    model, events = Loop(2), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: events.append("before"))
        layer.register_forward_hook(lambda module, args, output: events.append("after"))
    with attach(model, [Checkpoint()]):
        step(model, sequence())
    assert events == ["before", "after"] * 2


def test_what_the_block_returns_is_returned_as_it_is():
    model = TupleLoop()
    results = []
    model.h[1].register_forward_hook(lambda module, args, output: results.append(output))
    with attach(model, [Checkpoint()]):
        model(sequence())
    (result,) = results
    assert isinstance(result, tuple)
    assert len(result) == 4
    assert result[2] is None
    assert list(result[3]) == ["weights"]


def test_a_value_hook_changes_the_part_that_is_x():
    model = TupleLoop().eval()

    class Double:
        @hookimpl(wrapper=True)
        def run_block(self, index):
            x = yield
            return x * 2 if index == 1 else x

    seen = []
    model.h[1].register_forward_hook(lambda module, args, output: seen.append(output[0]))
    model(sequence())
    with attach(model, [Checkpoint(), Double()]):
        model(sequence())
    assert torch.equal(seen[1], seen[0] * 2)


def test_a_hook_can_skip_a_block():
    model = Loop(3).eval()
    shorter = copy.deepcopy(model)
    del shorter.layers[1]

    class Skip:
        @hookimpl
        def run_block(self, index, x):
            return x if index == 1 else None

    with attach(model, [Skip()]):
        assert torch.equal(model(sequence()), shorter(sequence()))


def test_a_layer_can_ask_where_it_is():
    seen = []

    class Asking(Block):
        def forward(self, x):
            block = current_block()
            seen.append((block.index, block.name, block.phase))
            return super().forward(x)

    model = Loop(2, Asking)
    with attach(model, [Checkpoint()]):
        step(model, sequence())
    assert seen[:2] == [(0, "layers.0", "forward"), (1, "layers.1", "forward")]
    assert seen[2:] == [(1, "layers.1", "recompute"), (0, "layers.0", "recompute")]


def test_a_cache_is_written_once_and_given_back_as_in_the_plain_run():
    plain, hooked = CacheLoop(), CacheLoop()
    hooked.load_state_dict(plain.state_dict())
    with attach(hooked, [Checkpoint()]):
        one, other = step(plain, sequence()), step(hooked, sequence())
    assert [path for path, _ in one["output"]] == [".out", *[f".cache.keys[{i}]" for i in range(3)]]
    assert same(one, other)


def test_the_same_tensor_passed_twice_stays_one_tensor():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                [torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)]
            )
            self.layers[0].register_forward_pre_hook(lambda module, args: None)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, x, value=x, need_weights=False)[0]
            return x

    plain = Attention()
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(check="values")]):
        assert same(step(plain, sequence()), step(hooked, sequence()))


def test_without_gradients_nothing_is_recomputed_and_the_result_is_the_same():
    model = Loop().eval()
    with torch.no_grad(), attach(model, [Checkpoint()]) as handle:
        hooked = model(sequence())
        assert {block["done"] for block in handle.report().stacks[0]["blocks"]} == {"no gradients"}
    assert torch.equal(hooked, model(sequence()))


def test_a_plan_of_the_stack_decides_about_each_block():
    model = Loop(4)

    def halved(n):
        assert n == 4
        return (Segment(0, 1, mode="keep"), Segment(1, 4))

    with attach(model, [Checkpoint(halved)]) as handle:
        step(model, sequence())
        blocks = handle.report().stacks[0]["blocks"]
    assert [block["done"] for block in blocks] == ["kept", "recomputed", "recomputed", "recomputed"]


def test_the_handle_may_be_removed_between_forward_and_backward():
    plain, hooked = Loop(), Loop()
    hooked.load_state_dict(plain.state_dict())
    torch.manual_seed(0)
    plain(sequence()).sum().backward()
    torch.manual_seed(0)
    with attach(hooked, [Checkpoint()]):
        loss = hooked(sequence()).sum()
    loss.backward()
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(plain.parameters(), hooked.parameters(), strict=True)
    )


def test_a_part_of_the_model_can_be_called_by_itself():
    model = Loop()
    with attach(model, [Checkpoint()]) as handle:
        for layer in model.layers:
            layer(sequence()).sum().backward()
        assert {block["calls"] for block in handle.report().stacks[0]["blocks"]} == {1}


@pytest.mark.parametrize("plan_function", [plan.every(1), plan.every(3)])
def test_a_block_may_use_the_transforms_of_torch_func(plan_function):
    class Sensitive(Block):
        def forward(self, x):
            slope = torch.func.vmap(torch.func.grad(lambda row: self.mix(row).square().sum()))(
                x.flatten(0, 1)
            )
            return super().forward(x) + slope.view(x.shape)

    plain = Loop(3, Sensitive)
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(plan_function)]):
        assert same(step(plain, sequence()), step(hooked, sequence()))


@pytest.mark.parametrize("plan_function", [plan.every(1), plan.every(3)])
def test_inference_mode(plan_function):
    model = Loop(3).eval()
    with torch.inference_mode():
        plain = model(sequence())
        with attach(model, [Checkpoint(plan_function)]):
            assert torch.equal(plain, model(sequence()))


def other_class(module, forward):
    """Give a module a class that was made before, as `torch.distributed.fsdp.fully_shard` does."""
    module.__class__ = type("Other", (type(module),), {"forward": forward})


def test_a_block_whose_class_is_changed_later_keeps_its_hooks():
    plain, model = Loop(4), Loop(4)
    model.load_state_dict(plain.state_dict())
    forward = Block.forward  # from before there are hooks
    with attach(model, Checkpoint()) as handle:
        for block in model.layers:
            other_class(block, forward)
        for _ in range(2):
            assert same(step(plain, sequence()), step(model, sequence()))
            assert {
                block["done"] for block in handle.report().to_dict()["stacks"][0]["blocks"]
            } == {"recomputed"}
    assert "forward" in vars(type(model.layers[0]))
    assert same(step(plain, sequence()), step(model, sequence()))


def test_hooks_that_are_never_reached_are_told():
    model, forward = Loop(4), Block.forward
    attach(model, Checkpoint())
    for block in model.layers:
        block.forward = functools.partial(forward, block)
    with pytest.warns(
        BlockhooksWarning, match=r"layers\) was called .*hooks do nothing.*attach again"
    ):
        step(model, sequence())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, sequence())  # once is enough
