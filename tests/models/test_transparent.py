"""While hooks are attached, and after, nothing about a model has changed."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from blockhooks import AttachError, Checkpoint, attach
from tests.models.toys import CacheLoop, Loop, Vision, image, same, sequence, step

transformers = pytest.importorskip("transformers")


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokens():
    return torch.arange(10).view(2, 5)


MODELS = {
    "transformers": (llama, tokens),
    "vision": (Vision, image),
    "hand-written": (Loop, sequence),
}


@pytest.fixture(params=MODELS)
def both(request):
    """The same model twice, hooks attached to the second; and an input."""
    build, make_input = MODELS[request.param]
    plain = build()
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint()]) as handle:
        yield plain, hooked, make_input(), handle


def attributes(model):
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def test_attributes_of_all_modules_are_the_same_objects():
    model = Loop()
    before = attributes(model)
    with attach(model, [Checkpoint()]):
        step(model, sequence())
        model.zero_grad()
        during = attributes(model)
    for held in (during, attributes(model)):
        assert held.keys() == before.keys()
        for name, parts in held.items():
            assert parts.keys() == before[name].keys()
            assert all(parts[part] is before[name][part] for part in parts)


def test_names_parameters_and_repr(both):
    plain, hooked, _, _ = both
    assert list(dict(plain.named_modules())) == list(dict(hooked.named_modules()))
    assert list(dict(plain.named_parameters())) == list(dict(hooked.named_parameters()))
    assert list(dict(plain.named_buffers())) == list(dict(hooked.named_buffers()))
    assert repr(plain) == repr(hooked)
    assert dir(plain) == dir(hooked)


def test_classes(both):
    plain, hooked, _, _ = both
    for one, other in zip(plain.modules(), hooked.modules(), strict=True):
        assert type(one) is type(other)
        assert isinstance(other, type(one))
        assert type(other).__name__ == type(one).__name__


def test_state_dict_and_its_loading(both):
    plain, hooked, _, _ = both
    assert same(dict(plain.state_dict()), dict(hooked.state_dict()))
    fresh = {name: torch.full_like(tensor, 0.25) for name, tensor in plain.state_dict().items()}
    assert str(hooked.load_state_dict(fresh)) == str(plain.load_state_dict(fresh))
    assert same(dict(plain.state_dict()), dict(hooked.state_dict()))


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: saved_and_loaded(m)],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_is_a_plain_model(both, duplicate):
    plain, hooked, x, handle = both
    other = duplicate(hooked)
    expected = step(plain, x)
    assert same(expected, step(other, x))
    assert all(not block["calls"] for stack in handle.report().stacks for block in stack["blocks"])
    assert same(expected, step(hooked, x))
    with attach(other, [Checkpoint()]):
        pass


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_bytes_of_a_pickle_are_those_of_the_plain_model():
    model = Loop()
    before = pickle.dumps(model)
    with attach(model, [Checkpoint()]):
        assert pickle.dumps(model) == before


def test_save_pretrained(tmp_path):
    model = llama()
    with attach(model, [Checkpoint()]):
        model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert same(step(model, tokens()), step(loaded.train(), tokens()))


def test_moving_and_casting(both):
    plain, hooked, x, _ = both
    plain, other = plain.double(), hooked.double()
    assert other is hooked
    x = x.double() if x.is_floating_point() else x
    assert same(step(plain, x), step(hooked, x))


class Adapted(nn.Module):
    """A low-rank adapter around a linear layer, put in its place."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def adapt(model):
    torch.manual_seed(3)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ("q_proj" in name or name.endswith("mix.0")):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Adapted(module))


@pytest.mark.parametrize("build", [llama, Loop])
@pytest.mark.parametrize("first", ["hooks", "adapters"])
def test_adapters_before_and_after(build, first):
    x = tokens() if build is llama else sequence()
    plain = build()
    hooked = copy.deepcopy(plain)
    adapt(plain)
    if first == "adapters":
        adapt(hooked)
    with attach(hooked, [Checkpoint()]):
        if first == "hooks":
            adapt(hooked)
        assert same(step(plain, x), step(hooked, x))
    assert same(step(plain, x), step(hooked, x))


def test_parametrizations_before_and_after():
    """A parametrization gives its module a class of its own."""
    for early in (True, False):
        plain = Loop()
        hooked = copy.deepcopy(plain)
        parametrizations.weight_norm(plain.layers[1].mix[0])
        if early:
            parametrizations.weight_norm(hooked.layers[1].mix[0])
        with attach(hooked, [Checkpoint()]):
            if not early:
                parametrizations.weight_norm(hooked.layers[1].mix[0])
            assert same(step(plain, sequence()), step(hooked, sequence()))


def test_the_class_has_its_own_forward_back_when_the_last_instance_is_free():
    first, second = Loop(), Loop()
    original = vars(type(first.layers[0]))["forward"]
    one, other = attach(first, [Checkpoint()]), attach(second, [Checkpoint()])
    one.remove()
    assert vars(type(first.layers[0]))["forward"] is not original
    other.remove()
    assert vars(type(first.layers[0]))["forward"] is original
    assert vars(Loop)["forward"].__qualname__ == "Loop.forward"


def test_a_class_that_inherits_its_forward_inherits_it_again():
    class Heir(Loop):
        pass

    model = Heir()
    with attach(model, [Checkpoint()]):
        assert "forward" in vars(Heir)
    assert "forward" not in vars(Heir)


def test_a_subclass_that_calls_its_parent_is_one_block():
    model = CacheLoop()
    with attach(model, [Checkpoint()], blocks=[type(model.layers[0])]) as handle:
        step(model, sequence())
        assert {block["calls"] for block in handle.report().stacks[0]["blocks"]} == {1}


def test_a_patch_put_over_ours_stays_and_calls_through():
    model = Loop()
    cls = type(model.layers[0])
    original = cls.forward
    handle = attach(model, [Checkpoint()])
    ours = cls.forward
    calls = []

    def patched(self, *args, **kwargs):
        calls.append(self)
        return ours(self, *args, **kwargs)

    cls.forward = patched
    try:
        handle.remove()
        expected = step(model, sequence())
        assert cls.forward is patched
        assert len(calls) == 4
    finally:
        cls.forward = original
    assert same(expected, step(model, sequence()))


def test_attaching_twice_raises_until_the_first_is_removed():
    model = Loop()
    handle = attach(model, [Checkpoint()])
    with pytest.raises(
        AttachError, match=r"block layers\.0 \(Block\) has hooks already; remove them first"
    ):
        attach(model, [Checkpoint()])
    handle.remove()
    handle.remove()
    attach(model, [Checkpoint()]).remove()


def test_two_handles_on_two_parts():
    plain, hooked = Vision(), Vision()
    hooked.load_state_dict(plain.state_dict())
    with (
        attach(hooked, [Checkpoint()], blocks="layer1"),
        attach(hooked, [Checkpoint()], blocks="layer2"),
    ):
        assert same(step(plain, image()), step(hooked, image()))


def test_a_module_with_a_forward_of_its_own_is_routed_too():
    """As accelerate's and others' hooks are put on: a function among the instance's attributes."""
    plain = Loop()
    for layer in plain.layers:
        layer.forward = wrapped(layer.forward)
    hooked = Loop()
    hooked.load_state_dict(plain.state_dict())
    for layer in hooked.layers:
        layer.forward = wrapped(layer.forward)
    with attach(hooked, [Checkpoint()]) as handle:
        assert same(step(plain, sequence()), step(hooked, sequence()))
        assert handle.report().dropped_bytes > 0
    assert "__call__" not in vars(type(hooked.layers[0]))


def with_a_hook(module, events):
    """Put a hook on a module as accelerate does."""
    module._old_forward = module.forward

    def forward(*args, **kwargs):
        events.append("before")
        output = module._old_forward(*args, **kwargs)
        events.append("after")
        return output

    module.forward = forward


@pytest.mark.parametrize("first", ["hooks", "accelerate"])
def test_hooks_of_accelerate_stay_outside_and_fire_once(first):
    plain, events = Loop(3), []
    hooked = copy.deepcopy(plain)
    if first == "accelerate":
        for layer in hooked.layers:
            with_a_hook(layer, events)
    before = attributes(hooked)
    with attach(hooked, [Checkpoint()]) as handle:
        assert attributes(hooked) == before
        if first == "hooks":
            for layer in hooked.layers:
                with_a_hook(layer, events)
        assert same(step(plain, sequence()), step(hooked, sequence()))
        assert events == ["before", "after"] * 3
        assert handle.report().dropped_bytes > 0
        for layer in hooked.layers[:2]:  # taken off while we are attached
            layer.forward = layer._old_forward
            del layer._old_forward
            assert not hasattr(layer, "_old_forward")
        assert same(step(plain, sequence()), step(hooked, sequence()))
    assert same(step(plain, sequence()), step(hooked, sequence()))
    assert "_old_forward" not in vars(type(hooked.layers[0]))


def wrapped(forward):
    return lambda x: forward(x) * 2


def test_a_deleted_model_takes_its_hooks_with_it():
    model = Loop()
    gone = weakref.ref(model)
    handle = attach(model, [Checkpoint()])
    step(model, sequence())
    del model
    gc.collect()
    assert gone() is None
    assert str(handle.report()).startswith("(deleted)")
    handle.remove()


def test_the_handle_need_not_be_held():
    model = Loop()
    attach(model, [Checkpoint()])
    gc.collect()
    with pytest.raises(AttachError, match="has hooks already"):
        attach(model, [Checkpoint()])
