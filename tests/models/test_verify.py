"""`verify` says what differs, and where it begins."""

import json
import random

import numpy
import pytest
import torch
from torch import nn

from blockhooks import AttachError, Checkpoint, HookChain, HookError, hookimpl, verify
from tests.models.toys import MODELS, Block, Loop, Vision, image, same, sequence, step


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bit_for_bit(name):
    build, make_input = MODELS[name]
    result = verify(build(), make_input())
    assert result
    assert result.deterministic
    assert result.differences == ()
    assert result.report.dropped_bytes > 0
    assert str(result).startswith("the same, bit for bit: ")


def test_nothing_of_the_model_is_changed():
    model, untouched = Vision(), Vision()
    untouched.load_state_dict(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    verify(model, image())
    assert same(dict(model.state_dict()), dict(untouched.state_dict()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same(
        states, (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())
    )
    assert same(step(model, image()), step(untouched, image()))


def test_without_the_snapshot_of_buffers_the_buffer_and_its_module_are_named():
    result = verify(Vision(), image(), HookChain([Checkpoint()], without=("StateSnapshot",)))
    assert not result
    assert result.deterministic
    names = {difference.name for difference in result.differences if difference.kind == "buffer"}
    assert "layer1.0.norm.num_batches_tracked" in names
    first = next(d for d in result.differences if d.name == "layer1.0.norm.running_mean")
    assert (first.module, first.step) == ("layer1.0.norm", 0)
    assert "not the same" in str(result)


def test_without_the_snapshot_of_generators_the_gradient_is_named():
    result = verify(Loop(), sequence(), HookChain([Checkpoint()], without=("RNGSnapshot",)))
    assert {difference.kind for difference in result.differences} == {"gradient", "rng"}
    assert (
        result.first == "the backward of module layers.3.mix.2, gradient of layers.3.mix.2.weight"
    )


def test_a_changed_forward_is_located():
    class Nudge:
        @hookimpl(wrapper=True)
        def run_block(self, index):
            x = yield
            return x + 1 if index == 2 else x

    result = verify(Loop(4), sequence(), [Nudge()])
    assert result.first == "the forward of module layers.2, tensor output"
    assert {"loss", "output", "gradient"} <= {difference.kind for difference in result.differences}


def test_a_counter_that_is_an_attribute_is_compared():
    class Counting(Block):
        calls = 0

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    model = Loop(2, Counting)
    assert verify(model, sequence())
    result = verify(model, sequence(), HookChain([Checkpoint()], without=("StateSnapshot",)))
    assert [(d.kind, d.name) for d in result.differences] == [
        ("attribute", "layers.0.calls"),
        ("attribute", "layers.1.calls"),
    ]


def test_a_model_that_is_not_deterministic_is_said_to_be():
    counter = iter(range(1000))

    class Restless(Block):
        def forward(self, x):
            return super().forward(x) * (1 + 0.01 * (next(counter) % 7))

    result = verify(Loop(2, Restless), sequence())
    assert not result
    assert not result.deterministic
    assert str(result).startswith("the model itself is not deterministic: ")


generator = torch.Generator()


def test_a_generator_that_the_model_shares_with_its_copies_begins_anew_and_is_put_back():
    class Drawing(Block):
        def forward(self, x):
            return super().forward(x) * torch.rand((), generator=generator)

    before = generator.get_state()
    assert verify(Loop(2, Drawing), sequence())
    assert torch.equal(generator.get_state(), before)


def test_inputs_in_every_form_and_their_gradients():
    class Two(Loop):
        def forward(self, x, scale):
            return super().forward(x) * scale

    x, scale = sequence().requires_grad_(), torch.tensor(2.0, requires_grad=True)
    by_position = verify(Two(), (x, scale))
    by_name = verify(Two(), {"scale": scale, "x": x})
    assert by_position
    assert by_name
    assert (
        by_position.compared == by_name.compared == verify(Two(), [x.detach(), scale]).compared + 1
    )
    assert x.grad is None


def test_a_loss_of_ones_own():
    assert verify(Loop(2), sequence(), loss=lambda output: output.square().mean())


def test_an_output_without_a_gradient_is_an_error():
    class Frozen(Loop):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(
        ValueError, match="the model's output has no tensor with a gradient; give loss="
    ):
        verify(Frozen(), sequence())


def test_arguments_are_checked():
    with pytest.raises(AttachError, match=r"verify\(model, ...\) expected an nn.Module, found 3"):
        verify(3, sequence())
    with pytest.raises(HookError, match=r"verify\(loss=...\) expected a function .* found 3"):
        verify(Loop(), sequence(), loss=3)
    with pytest.raises(HookError, match=r"verify\(seed=...\) expected an integer of at least 0"):
        verify(Loop(), sequence(), seed=None)
    for loss in (lambda output: None, lambda output: output):
        with pytest.raises(ValueError, match=r"verify\(loss=...\) expected .* a scalar tensor"):
            verify(Loop(), sequence(), loss=loss)


def test_a_model_that_cannot_be_copied_is_told():
    class Fixed(Loop):
        def __deepcopy__(self, memo):
            raise TypeError("not me")

    with pytest.raises(TypeError, match="not me") as caught:
        verify(Fixed(), sequence())
    assert caught.value.__notes__ == [
        "verify compares copies of the model; Fixed cannot be copied."
    ]


def test_costs_and_the_report_as_plain_values():
    result = verify(
        Loop(4, lambda: nn.Sequential(*[Block() for _ in range(3)])), sequence(), blocks="layers.*"
    )
    assert 0 < result.hooked.peak_bytes < result.plain.peak_bytes
    assert result.hooked.seconds > 0
    told = json.loads(json.dumps(result.to_dict()))
    assert told["exact"] is True
    assert told["report"]["stacks"][0]["name"] == "layers"
