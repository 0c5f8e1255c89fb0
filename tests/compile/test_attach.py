"""`attach` and `torch.compile`, in every order; the back end is one that computes as eager code does."""

import copy

import pytest
import torch
from torch import nn

from blockhooks import Checkpoint, attach, hookimpl
from blockhooks.plan import Segment
from tests.models.test_calls import saved_bytes
from tests.models.toys import WIDTH, same, sequence, step

pytestmark = [
    pytest.mark.slow,
    # Dynamo asks inputs for it, and hides the warning by a filter that `error` comes before (torch 2.13).
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, scale):
        return x + self.mix(self.norm(x)) * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_blocks(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


def replace_blocks(model):
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="aot_eager", fullgraph=True)


def compile_model(model):
    model.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("compiled", [compile_blocks, replace_blocks, compile_model])
@pytest.mark.parametrize("first", ["hooks", "compile"])
def test_a_compiled_step_is_the_same_and_keeps_less(compiled, first):
    plain, unhooked = Model(), Model()
    unhooked.load_state_dict(plain.state_dict())
    hooked = copy.deepcopy(plain)
    compiled(unhooked)
    if first == "compile":
        compiled(hooked)
    with attach(hooked, [Checkpoint()]) as handle:
        if first == "hooks":
            compiled(hooked)
        expected, found = step(plain, sequence()), step(hooked, sequence())
        assert same(list(expected["gradients"].values()), list(found["gradients"].values()))
        assert same(expected["output"], found["output"])
        assert saved_bytes(hooked, sequence()) < saved_bytes(unhooked, sequence())
        report = handle.report()
        around = first == "compile" and compiled is not compile_model
        assert [(b["asked"], b["done"]) for b in report.stacks[0]["blocks"]] == [
            ("recompute", "recomputed" if around else "compiled: recomputed")
        ] * 3
        unseen = "layers: calls of compiled blocks cannot be seen; what is told is how they were compiled."
        assert report.warnings == ([] if around else [unseen])
    assert same(expected["output"], step(hooked, sequence())["output"])


def test_segments_inside_of_a_kept_one_are_compiled_as_planned():
    nested = (Segment(0, 3, (Segment(0, 1, mode="keep"), Segment(1, 3)), mode="keep"),)
    model = Model()
    with attach(model, [Checkpoint(lambda n: nested)]) as handle:
        compile_model(model)
        step(model, sequence())
        done = [block["done"] for block in handle.report().stacks[0]["blocks"]]
    assert done == ["compiled: kept", "compiled: recomputed", "compiled: recomputed"]


def test_what_the_compiler_cannot_follow_runs_between_graphs_with_all_of_its_hooks():
    seen = []

    class Watch:
        @hookimpl(wrapper=True)
        def run_block(self, run, index):
            seen.append(run.names[index])
            return (yield)

    model = Model()
    with attach(model, [Watch()]):
        model.compile(backend="aot_eager")
        model(sequence())
    assert seen == ["layers.0", "layers.1", "layers.2"]


def test_what_the_compiler_cannot_follow_is_an_error_where_one_graph_is_demanded():
    class Watch:
        @hookimpl(wrapper=True)
        def run_block(self):
            return (yield)

    model = Model()
    with attach(model, [Watch()]):
        model.compile(backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="_uncompiled"):
            model(sequence())
