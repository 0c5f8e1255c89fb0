"""Segments of several blocks on a loop that is not ours."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from blockhooks import Checkpoint, apply_blocks, attach, current_block, hookimpl, plan
from blockhooks.plan import Segment
from tests.models.test_calls import saved_bytes
from tests.models.toys import MODELS, WIDTH, Block, Loop, Named, same, sequence, step

PLANS = {
    "pairs": plan.every(2),
    "threes": plan.every(3),
    "all": plan.every(100),
    "tree": plan.tree(2),
    "first": plan.first(2),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_the_plain_one(name, plan):
    build, make_input = MODELS[name]
    plain = build()
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(PLANS[plan])]):
        for _ in range(2):
            assert same(step(plain, make_input()), step(hooked, make_input()))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("check", ["shapes", "values"])
def test_options_of_the_checkpoint_hold(early_stop, check):
    plain = Loop(5)
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(plan.every(2), early_stop=early_stop, check=check)]):
        assert same(step(plain, sequence()), step(hooked, sequence()))


class Watch:
    def __init__(self):
        self.events = []

    @hookimpl(wrapper=True)
    def run_block(self, index, recomputing):
        self.events.append(f"{'again' if recomputing else 'block'} {index}")
        return (yield)


def test_a_segment_is_recomputed_as_one():
    model, watch = Loop(4), Watch()
    with attach(model, [Checkpoint(plan.every(2)), watch]) as handle:
        step(model, sequence())
        report = handle.report()
    assert watch.events == [f"block {i}" for i in range(4)] + [
        "again 2",
        "again 3",
        "again 0",
        "again 1",
    ]
    assert report.warnings == []
    assert [block["segment"] for block in report.stacks[0]["blocks"]] == [
        [0, 2],
        [0, 2],
        [2, 4],
        [2, 4],
    ]
    assert {block["done"] for block in report.stacks[0]["blocks"]} == {"recomputed"}
    assert report.dropped_bytes == report.saved_bytes > 0


def test_a_longer_segment_keeps_less():
    model, kept = Loop(8), []
    for length in (1, 2, 4, 8):
        with attach(model, [Checkpoint(plan.every(length))]):
            kept.append(saved_bytes(model, sequence()))
    x = sequence().nbytes
    assert kept == [kept[3] + 7 * x, kept[3] + 3 * x, kept[3] + x, kept[3]]


class Interrupted(Loop):
    """Changes x between blocks, in a way of its own at each place."""

    def forward(self, x):
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = x * 1.5
            if i == 4:
                x.mul_(0.5)
        return self.head(x)


def test_a_segment_is_divided_where_x_is_not_handed_on_untouched():
    plain, watch = Interrupted(7), Watch()
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(plan.every(100)), watch]) as handle:
        assert same(step(plain, sequence()), step(hooked, sequence()))
        (warning,) = handle.report().warnings
    assert warning == (
        "layers: segments are divided where x was not handed on as one untouched tensor: "
        "before layers.2, layers.5."
    )
    again = [int(event[6:]) for event in watch.events if event.startswith("again")]
    assert again == [5, 6, 2, 3, 4, 0, 1]


def test_an_exception_in_the_loop_and_a_block_left_out_leave_nothing_open():
    class Leaving(Loop):
        leave = None

        def forward(self, x):
            x = self.embed(x)
            for i, layer in enumerate(self.layers):
                if i == 2 and self.leave == "raise":
                    raise KeyError("in the loop")
                if i == 2 and self.leave == "break":
                    break
                x = layer(x)
            return self.head(x)

    plain = Leaving(4)
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(plan.every(3))]) as handle:
        for leave in ("raise", "break", None, "break"):
            plain.leave = hooked.leave = leave
            if leave == "raise":
                with pytest.raises(KeyError, match="in the loop"):
                    hooked(sequence())
            else:
                assert same(step(plain, sequence()), step(hooked, sequence()))
        assert handle.report().dropped_bytes > 0


def test_a_value_hook_inside_is_part_of_the_region():
    class Shift:
        @hookimpl(wrapper=True)
        def run_block(self, index):
            x = yield
            return x * 1.25 + index

    by_block, by_segment = Loop(4), Loop(4)
    by_segment.load_state_dict(by_block.state_dict())
    with (
        attach(by_block, [Checkpoint(), Shift()]),
        attach(by_segment, [Checkpoint(plan.every(4)), Shift()]) as handle,
    ):
        assert same(step(by_block, sequence()), step(by_segment, sequence()))
        assert handle.report().warnings == []


def test_a_layer_is_told_that_it_is_recomputed():
    seen = []

    class Asking(Block):
        def forward(self, x):
            seen.append((current_block().name, current_block().phase))
            return super().forward(x)

    model = Loop(2, Asking)
    with attach(model, [Checkpoint(plan.every(2))]):
        step(model, sequence())
    names = ["layers.0", "layers.1"]
    assert seen == [(name, phase) for phase in ("forward", "recompute") for name in names]


def test_inside_of_somebody_else_s_checkpoint():
    class Around(Loop):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers[:3]:
                x = torch_checkpoint(layer, x, use_reentrant=False)
            rest = nn.Sequential(*self.layers[3:])
            return self.head(torch_checkpoint(rest, x, use_reentrant=False))

    plain = Around(6)
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(plan.every(100))]):
        one, other = step(plain, sequence()), step(hooked, sequence())
    assert same(one["gradients"], other["gradients"])
    assert same(one["output"], other["output"])


def test_a_hook_that_decides_otherwise_makes_it_block_by_block():
    class Mine:
        @hookimpl
        def run_segment(self, region, x):
            return None

    model = Loop(4)
    with attach(model, [Mine(), Checkpoint(plan.every(2))]) as handle:
        step(model, sequence())
        (warning,) = handle.report().warnings
    assert "executed block by block" in warning


def test_a_policy_for_single_operations_makes_it_block_by_block():
    plain = Loop(4)
    hooked = copy.deepcopy(plain)
    save = [torch.ops.aten.addmm.default]
    with attach(hooked, [Checkpoint(plan.every(2), save=save)]) as handle:
        assert same(step(plain, sequence()), step(hooked, sequence()))
        (warning,) = handle.report().warnings
    assert "executed block by block" in warning


def test_nothing_waits_for_the_garbage_collector():
    model = Loop(4)
    gone = []

    class Remember(nn.Module):
        def forward(self, x):
            gone.append(weakref.ref(x))
            return x.exp()

    model.layers[1].mix.append(Remember())
    model.layers[1].mix.append(nn.Linear(WIDTH, WIDTH))
    gc.collect()
    gc.disable()
    try:
        with attach(model, [Checkpoint(plan.every(4))]):
            loss = model(sequence()).sum()
            assert gone[0]() is None
            loss.backward()
            del loss
            assert gone[-1]() is None
    finally:
        gc.enable()


def test_two_backwards():
    plain = Loop(4)
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(plan.every(2))]):
        for model in (plain, hooked):
            torch.manual_seed(0)
            loss = model(sequence()).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(plain.parameters(), hooked.parameters(), strict=True)
    )


NESTED = {
    "tree": plan.tree(3),
    "binomial": plan.binomial(3),
    "uneven": lambda n: (
        Segment(0, 1, mode="keep"),
        Segment(1, n, (Segment(1, 3, mode="keep"), Segment(3, n, (Segment(3, 5), Segment(5, n))))),
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_segments_are_recomputed_as_by_apply_blocks(name):
    class Looped(Loop):
        def forward(self, x):
            return self.head(apply_blocks(self.layers, self.embed(x), hooks=self.hooks))

    ours, theirs = Watch(), Watch()
    plain = Loop(9)
    hooked, looped = copy.deepcopy(plain), Looped(9)
    looped.load_state_dict(plain.state_dict())
    looped.hooks = [Checkpoint(NESTED[name]), ours]
    with attach(hooked, [Checkpoint(NESTED[name]), theirs]) as handle:
        for _ in range(2):
            expected = step(plain, sequence())
            assert same(expected, step(hooked, sequence()))
            assert same(expected, step(looped, sequence()))
        assert saved_bytes(hooked, sequence()) == saved_bytes(looped, sequence())
        assert handle.report().warnings == []
    assert theirs.events == ours.events
    assert len([event for event in ours.events if event.startswith("again")]) > 2 * 9


def test_blocks_that_hand_on_a_dict_are_recomputed_one_by_one():
    plain = Named()
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint(plan.every(3))]) as handle:
        for _ in range(2):
            assert same(step(plain, sequence()), step(hooked, sequence()))
        report = handle.report()
        assert [block["done"] for block in report.stacks[0]["blocks"]] == ["recomputed"] * 3
        assert report.warnings == [
            "layers: segments are divided where x was not handed on as one untouched tensor: "
            "before layers.0, layers.1, layers.2."
        ]
        kept = saved_bytes(hooked, sequence())
    with attach(hooked, [Checkpoint()]):
        assert saved_bytes(hooked, sequence()) == kept
