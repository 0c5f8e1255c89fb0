"""Which modules are taken for blocks, and what the errors say."""

import pytest
import torch
from torch import nn

from blockhooks import AttachError, Checkpoint, attach
from blockhooks.models.find import find_stacks, inner_stacks, select_stacks
from tests.models.toys import MODELS, WIDTH, Block, Loop, Mixer, Vision, sequence


def paths(stacks):
    return {stack.name: [path for path, _ in stack.members] for stack in stacks}


FOUND = {
    "loop": {"layers": [f"layers.{i}" for i in range(4)]},
    "vision": {
        "layer1": [f"layer1.{i}" for i in range(3)],
        "layer2": [f"layer2.{i}" for i in range(5)],
    },
    "shared": {"groups": ["groups.0"]},
    "repeated": {"layers": ["layers.0", "layers.1", "layers.2"]},
    "pairs": {"layers": [f"layers.{i}.{j}" for i in range(3) for j in (1, 2)]},
    "numbered": {"": ["block1", "block2", "block3"]},
    "skips": {"down": ["down.d0", "down.d1", "down.d2"], "up": ["up.0", "up.1", "up.2"]},
    "experts": {"layers": [f"layers.{i}" for i in range(4)]},
}


@pytest.mark.parametrize("name", FOUND)
def test_found_by_structure(name):
    assert paths(find_stacks(MODELS[name][0]())) == FOUND[name]


def test_packages_of_blocks_are_opened_and_lists_inside_of_blocks_are_not():
    class Stage(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.down = nn.Conv2d(WIDTH, WIDTH, 2, 2)
            self.blocks = nn.Sequential(*[Vision().layer1[0] for _ in range(depth)])

    model = nn.Module()
    model.stages = nn.ModuleList([Stage(2), Stage(1), Stage(9)])
    assert [len(stack.members) for stack in find_stacks(model)] == [2, 1, 9]


def test_an_encoder_and_a_decoder_of_one_class_are_two_stacks_not_two_blocks():
    model = nn.Module()
    model.encoder, model.decoder = Loop(3), Loop(2)
    assert list(paths(find_stacks(model))) == ["encoder.layers", "decoder.layers"]


def test_stacks_of_several_classes_are_one_stack_of_a_list():
    class Hybrid(Block):
        pass

    model = Loop(2)
    model.layers.append(Hybrid())
    (stack,) = find_stacks(model)
    assert stack.kind == "Block, Hybrid"


def test_parametrizations_are_no_blocks():
    model = Loop(2)
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer.mix[0])
    assert list(paths(find_stacks(model))) == ["layers"]


def test_attributes_of_one_class_are_the_last_resort():
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = Block(), Block()

    assert paths(find_stacks(Autoencoder())) == {"": ["encode", "decode"]}


def test_recurrent_layers_are_blocks_and_single_linear_layers_are_not():
    recurrent = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3)])
    assert len(find_stacks(recurrent)[0].members) == 3
    with pytest.raises(AttachError, match="no repeated blocks were found in Sequential"):
        find_stacks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


def test_the_error_lists_the_containers_that_were_looked_at():
    model = nn.Module()
    model.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    expected = (
        r"no repeated blocks .* Containers found: features: Sequential of 2 x Conv2d, 1 x ReLU\. If .* Name "
        r"them: attach\(model, hooks=\.\.\., blocks="
    )
    with pytest.raises(AttachError, match=expected):
        attach(model, [Checkpoint()])
    with pytest.raises(AttachError, match="It has no containers; its children: none"):
        attach(nn.Linear(2, 2), [Checkpoint()])


def test_parts_of_blocks_are_found_for_models_that_never_call_the_blocks():
    outer = find_stacks(MODELS["parts"][0]())
    assert [stack.name for stack in inner_stacks(outer)] == [f"layers.{i}.parts" for i in range(4)]


class Universal(nn.Module):
    """One module, held by no list, applied many times; and a list that is not used."""

    def __init__(self, unused=0):
        super().__init__()
        self.embed, self.block = nn.Linear(WIDTH, WIDTH), Block()
        self.unused = nn.ModuleList([Mixer() for _ in range(unused)])
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, times=3):
        self.steps += 1
        x = self.embed(x)
        for _ in range(times):
            x = self.block(x)
        return x


@pytest.mark.parametrize(
    "example", [sequence(), (sequence(), 4), [sequence()], {"x": sequence(), "times": 2}]
)
def test_one_module_applied_many_times_is_found_in_a_real_call(example):
    model = Universal(unused=2)
    rng = torch.get_rng_state()
    with attach(model, [Checkpoint()], example=example) as handle:
        assert [stack["name"] for stack in handle.report().stacks] == [""]
        model(sequence())
        (stack,) = handle.report().stacks
        assert [(block["name"], block["calls"]) for block in stack["blocks"]] == [("block", 3)]
    assert model.steps == 1
    assert not torch.equal(rng, torch.get_rng_state())  # by our own call alone
    torch.set_rng_state(rng)
    with attach(model, [Checkpoint()], example=example):
        assert torch.equal(rng, torch.get_rng_state())
    with pytest.raises(
        AttachError, match=r"If one module is applied several times, show it: .*example=inputs"
    ):
        attach(Universal(), [Checkpoint()])


SELECTED = {
    "container": ("layers", ["layers.0", "layers.1", "layers.2", "layers.3"]),
    "block": ("layers.2", ["layers.2"]),
    "pattern": ("layers.[02]", ["layers.0", "layers.2"]),
    "one part": ("*.1", ["layers.1"]),
    "any parts": ("**.mix", [f"layers.{i}.mix" for i in range(4)]),
    "class": (Block, ["layers.0", "layers.1", "layers.2", "layers.3"]),
    "class name": ("Block", ["layers.0", "layers.1", "layers.2", "layers.3"]),
    "predicate": (lambda path, module: path.endswith(("0", "3")) and "mix" not in path, ["layers.0", "layers.3"]),
    "several": (["layers.3", "layers.0"], ["layers.0", "layers.3"]),
}  # fmt: skip


@pytest.mark.parametrize("how", SELECTED)
def test_selected(how):
    blocks, expected = SELECTED[how]
    stacks = select_stacks(Loop(4), blocks)
    assert [path for stack in stacks for path, _ in stack.members] == expected


def test_selected_by_the_module_itself():
    model = Loop(3)
    assert paths(select_stacks(model, model.layers[1])) == {"layers": ["layers.1"]}
    assert paths(select_stacks(model, [model.layers])) == {
        "layers": [f"layers.{i}" for i in range(3)]
    }


def test_selected_blocks_are_stacks_by_their_containers():
    stacks = select_stacks(Vision(), "*.[01]")
    assert paths(stacks) == {"layer1": ["layer1.0", "layer1.1"], "layer2": ["layer2.0", "layer2.1"]}
    pairs = select_stacks(MODELS["pairs"][0](), [Mixer, Block])
    assert list(paths(pairs)) == ["layers"]


def test_what_matches_nothing_is_an_error_with_near_misses():
    with pytest.raises(
        AttachError, match=r"blocks='layer\.0' matches no module of Loop\. Near misses: .*layers\.0"
    ):
        attach(Loop(), [Checkpoint()], blocks="layer.0")
    with pytest.raises(AttachError, match=r"blocks='Mixer' matches no module of Loop"):
        attach(Loop(), [Checkpoint()], blocks=Mixer)
    with pytest.raises(AttachError, match="blocks is empty"):
        attach(Loop(), [Checkpoint()], blocks=[])
    with pytest.raises(AttachError, match=r"blocks expected module paths, .* found 3"):
        attach(Loop(), [Checkpoint()], blocks=[3])


def test_a_scripted_module_is_no_block():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model = nn.ModuleList([scripted, scripted])
    with pytest.raises(AttachError, match="no repeated blocks"):
        find_stacks(model)
