"""`Profile` measures, and changes nothing."""

import contextlib
import copy
import gc
import io
import itertools
import json
import pickle
import time
import weakref

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from blockhooks import Checkpoint, apply_blocks, attach, hookimpl, memory, plan
from blockhooks.chain import HookChain
from blockhooks.errors import BlockhooksError, HookError
from blockhooks.hooks.profile import Profile
from blockhooks.plan import Segment
from tests.agree import differs, outcome, plain, through

ROWS, WIDTH = 128, 64
HIDDEN_BYTES = ROWS * WIDTH * 4


def stack(n=3):
    """Return blocks that save exactly their input and the output of their linear layer."""
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(n))


def hidden():
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def profiled(*hooks, blocks=None, x=None, steps=1, profile=None):
    """Take steps through a chain that ends with a profile, and return it."""
    profile = profile or Profile()
    blocks = stack() if blocks is None else blocks
    x = hidden() if x is None else x
    for _ in range(steps):
        apply_blocks(blocks, x, hooks=[*hooks, profile]).sum().backward()
    return profile


def calls(profile):
    return [tuple(block["calls"].values()) for block in profile.to_dict()["blocks"]]


def column(profile, key):
    return [block[key] for block in profile.to_dict()["blocks"]]


class Sleep(nn.Module):
    """A block that takes a known time in forward (and recompute), and another in backward, in milliseconds."""

    def __init__(self, forward, backward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.times = forward / 1e3, backward / 1e3

    def forward(self, x):
        return SleepFunction.apply(x * self.weight, *self.times)


class SleepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        ctx.save_for_backward(x)
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return gradient, None, None


# ----------------------------------------------------------------------------------------------------------- the law


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


def training_step(run):
    blocks = nn.ModuleList(Block() for _ in range(4))
    x = torch.randn(16, 8, requires_grad=True)
    for _ in range(2):
        loss = run(blocks, x).square().mean()
        loss.backward()
    return blocks, x, x.grad, loss


PROFILES = {
    "alone": lambda: [Profile()],
    "before Checkpoint": lambda: [Profile(), Checkpoint()],
    "after Checkpoint": lambda: [Checkpoint(), Profile()],
    "in pairs": lambda: [Checkpoint(plan.every(2)), Profile()],
    "in a tree": lambda: [Profile(), Checkpoint(plan.tree(2))],
    "with all options": lambda: [Checkpoint(), Profile(flops=True, ranges=True)],
    "every second step": lambda: [Checkpoint(), Profile(schedule=2)],
}


@pytest.mark.parametrize("chain", PROFILES)
def test_a_step_is_the_plain_loops_bit_for_bit(chain):
    expected = outcome(training_step, plain)
    assert differs(outcome(training_step, through(PROFILES[chain]())), expected) is None


@pytest.mark.parametrize("chain", PROFILES)
def test_nothing_is_left_on_the_model_or_the_tensors(chain):
    blocks, x = stack(), hidden()
    before = [set(vars(module)) for module in blocks.modules()]
    y = apply_blocks(blocks, x, hooks=PROFILES[chain]())
    y.sum().backward()
    assert [set(vars(module)) for module in blocks.modules()] == before
    for tensor in (x, y, *blocks.parameters()):
        assert not tensor.__dict__
        assert tensor._backward_hooks is None
    assert all(
        not module._forward_hooks and not module._backward_hooks for module in blocks.modules()
    )


@pytest.mark.parametrize("strategy", [list, lambda: [Checkpoint()]], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("between", ["forward and backward", "steps"])
def test_not_one_more_byte_is_alive(strategy, between):
    def live(hooks):
        blocks, x = stack(), hidden()
        for tensor in (x, *blocks.parameters()):
            tensor.grad = torch.zeros_like(tensor)
        gc.disable()
        try:
            with memory.peak("cpu") as meter:
                y = apply_blocks(blocks, x, hooks=hooks)
                if between == "steps":
                    y.sum().backward()
                    del y
            return meter.now, meter.peak
        finally:
            gc.enable()

    without = live(strategy())
    assert live([*strategy(), Profile()]) == without
    assert live([Profile(), *strategy()]) == without
    assert (without[0] == 0) == (between == "steps")


def test_the_graph_is_freed_without_the_garbage_collector():
    blocks, x, profile = stack(), hidden(), Profile()
    gc.disable()
    try:
        y = apply_blocks(blocks, x, hooks=profile)
        y.grad_fn.metadata["witness"] = witness = Sleep(0, 0)
        alive = weakref.ref(witness)
        del y, witness
        assert alive() is None
    finally:
        gc.enable()


def test_a_change_in_place_is_noticed_as_without_a_profile():
    def change(hooks):
        blocks, x = stack(), hidden()
        h = apply_blocks(blocks, x * 1, hooks=hooks)
        with torch.no_grad():
            blocks[0][0].weight.mul_(2)
            h.grad_fn._saved_self.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()

    change(())
    change(Profile())


def test_hooks_around_the_run_see_every_saved_tensor_and_give_it_back():
    blocks, x = stack(), hidden()

    def seen(hooks):
        packed, unpacked = [], []

        def pack(tensor):
            packed.append(tuple(tensor.shape))
            return tensor.detach()

        def unpack(tensor):
            unpacked.append(tuple(tensor.shape))
            return tensor

        with saved_tensors_hooks(pack, unpack):
            y = apply_blocks(blocks, x, hooks=hooks)
        y.sum().backward()
        return packed, unpacked

    assert seen(Profile()) == seen(())
    assert len(seen(())[0]) > 0


def test_an_error_of_a_block_passes_and_the_next_step_is_measured():
    class Sometimes(nn.Module):
        broken = True

        def forward(self, x):
            if self.broken:
                raise LookupError("not today")
            return x * 2

    last = Sometimes()
    blocks, profile = [*stack(2), last], Profile()
    with pytest.raises(LookupError, match="not today"):
        profiled(blocks=blocks, profile=profile)
    last.broken = False
    profiled(blocks=blocks, profile=profile)
    assert calls(profile) == [(2, 0, 1), (2, 0, 1), (2, 0, 1)]


def test_an_error_of_a_backward_leaves_no_span_open():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise LookupError("no gradient today")

    blocks, profile = [*stack(2), Broken.apply], Profile()
    with pytest.raises(LookupError, match="no gradient today"):
        profiled(blocks=blocks, profile=profile)
    profiled(blocks=stack(2), profile=profile)
    assert all(span["depth"] == 0 for span in profile.to_dict()["timeline"])
    assert calls(profile)[0] == (2, 0, 1)


# ------------------------------------------------------------------------------------------------------------- times


@pytest.mark.parametrize("order", ["profile first", "checkpoint first"])
def test_forward_recompute_and_backward_are_told_apart(order):
    blocks = [Sleep(20, 40), Sleep(40, 20)]
    profile, checkpoint = Profile(), Checkpoint()
    hooks = [profile, checkpoint] if order == "profile first" else [checkpoint, profile]
    apply_blocks(blocks, torch.ones(4), hooks=hooks).sum().backward()
    first, second = (block["ms"] for block in profile.to_dict()["blocks"])
    assert [first[phase]["mean"] // 20 for phase in first] == [1, 1, 2]
    assert [second[phase]["mean"] // 20 for phase in second] == [2, 2, 1]


def test_recompute_within_a_segments_backward_is_no_time_of_that_backward():
    blocks = [Sleep(30, 10), Sleep(30, 10), Sleep(0, 10)]
    profile = Profile()
    hooks = [Checkpoint(plan.every(3), early_stop=False), profile]
    apply_blocks(blocks, torch.ones(4), hooks=hooks).sum().backward()
    figures = profile.to_dict()["blocks"]
    assert [block["ms"]["recompute"]["mean"] // 30 for block in figures] == [1, 1, 0]
    assert all(10 <= block["ms"]["backward"]["mean"] < 30 for block in figures)


@pytest.mark.parametrize("strategy", [list, lambda: [Checkpoint()]], ids=["plain", "checkpoint"])
def test_the_phases_and_the_rest_add_up_to_the_wall_time(strategy):
    blocks, x, head = [Sleep(10, 20) for _ in range(4)], torch.ones(4), Sleep(30, 30)

    def step():
        profile = Profile()
        began = time.perf_counter()
        head(apply_blocks(blocks, x, hooks=[*strategy(), profile])).sum().backward()
        wall = (time.perf_counter() - began) * 1e3
        return profile.to_dict()["totals"]["ms"], wall

    def adds_up(ms, wall):
        parts = [ms[part]["mean"] for part in ("forward", "recompute", "backward", "rest")]
        assert sum(parts) == pytest.approx(ms["wall"]["mean"], rel=1e-9)
        assert ms["rest"]["mean"] >= 60  # the head
        return ms["wall"]["mean"] == pytest.approx(wall, rel=0.03)

    # A busy machine may take any time between the two clocks' readings.
    assert any(adds_up(*step()) for _ in range(5))


def test_spans_nest():
    profile = profiled(Checkpoint(plan.tree(2)), blocks=stack(4))
    spans = profile.to_dict()["timeline"]
    for one in spans:
        for other in spans:
            begin, end = (
                max(one["begin_ms"], other["begin_ms"]),
                min(one["end_ms"], other["end_ms"]),
            )
            inside = (begin, end) in (
                (one["begin_ms"], one["end_ms"]),
                (other["begin_ms"], other["end_ms"]),
            )
            assert begin >= end or inside
    recomputes = [span for span in spans if span["phase"] == "recompute"]
    assert recomputes
    assert all(span["depth"] == 1 for span in recomputes)


class Event:
    """Stands in for an event of a device that is always 10 ms behind."""

    waited = 0

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter() + 10e-3

    def query(self):
        return time.perf_counter() >= self.at

    def synchronize(self):
        Event.waited += 1
        time.sleep(max(0, self.at - time.perf_counter()))

    def elapsed_time(self, end):
        assert end.query(), "read before the device got there"
        return (end.at - self.at) * 1e3


def test_times_of_a_device_are_events_that_nothing_waits_for_until_they_are_read(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr("blockhooks.hooks.profile._device", lambda x: torch.device("xpu"))
    monkeypatch.setattr(Event, "waited", 0)
    profile, blocks = Profile(), [Sleep(20, 40)]
    for _ in range(3):
        apply_blocks(blocks, torch.ones(4), hooks=[Checkpoint(), profile]).sum().backward()
    assert Event.waited == 0
    ms = profile.to_dict()["blocks"][0]["ms"]
    assert Event.waited > 0
    assert [ms[phase]["p50"] // 20 for phase in ("forward", "recompute", "backward")] == [1, 1, 2]


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", [list, lambda: [Checkpoint()]], ids=["plain", "checkpoint"])
def test_times_on_a_gpu_add_up_to_those_of_events_around_the_step(strategy):
    blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8)).cuda()
    x, profile = torch.randn(8192, 2048, device="cuda", requires_grad=True), Profile()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    hooks = HookChain([*strategy(), profile])
    for _ in range(3):
        begin.record()
        apply_blocks(blocks, x, hooks=hooks).sum().backward()
        end.record()
    torch.cuda.synchronize()
    ms = profile._pending[-1].figures()
    assert sum(ms.sums_ms()) == pytest.approx(begin.elapsed_time(end), rel=0.03)
    assert ms.sums_ms()[2] > ms.sums_ms()[0] > ms.sums_ms()[3]
    assert calls(profile) == [(3, 3 * len(strategy()), 3)] * 8


@pytest.mark.cuda
def test_live_bytes_of_a_gpu_are_the_allocators():
    blocks, profile = nn.ModuleList(nn.Linear(512, 512) for _ in range(4)).cuda(), Profile()
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)

    def step(hooks):
        apply_blocks(blocks, x, hooks=hooks).square().sum().backward()

    step(())
    with memory.peak("cuda") as meter:
        step(())
    with profile.measure("cuda"):
        step(profile)
    figures = profile.to_dict()
    assert figures["totals"]["peak_bytes"] == meter.peak
    assert figures["device"].startswith("cuda:0 (")


# ------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (list, [(1, 0, 1)] * 4),
        (lambda: [Checkpoint()], [(1, 1, 1)] * 4),
        (lambda: [Checkpoint(plan.first(2))], [(1, 1, 1)] * 2 + [(1, 0, 1)] * 2),
        (lambda: [Checkpoint(plan.every(2))], [(1, 1, 1)] * 4),
    ],
    ids=["plain", "every block", "first two", "pairs"],
)
def test_calls_are_counted(strategy, expected):
    assert calls(profiled(*strategy(), blocks=stack(4))) == expected


def test_a_second_backward_is_counted():
    profile = Profile()
    y = apply_blocks(stack(), hidden(), hooks=[Checkpoint(), profile]).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert calls(profile) == [(1, 2, 2)] * 3


def test_a_block_whose_input_needs_no_gradient_ends_with_the_backward():
    profile = profiled(x=torch.randn(ROWS, WIDTH))
    assert calls(profile) == [(1, 0, 1)] * 3
    assert all(span["end_ms"] >= span["begin_ms"] for span in profile.to_dict()["timeline"])


def test_without_gradients_there_is_only_a_forward():
    profile = Profile()
    with torch.no_grad():
        for _ in range(2):
            apply_blocks(stack(), hidden(), hooks=profile)
    assert calls(profile) == [(2, 0, 0)] * 3
    assert column(profile, "kept_bytes") == [0, 0, 0]


def test_gradients_of_chosen_inputs_are_measured_as_far_as_they_go():
    blocks, x, profile = stack(), hidden(), Profile()
    y = apply_blocks(blocks, x, hooks=profile).sum()
    torch.autograd.grad(y, list(blocks[2].parameters()))
    assert calls(profile) == [(1, 0, 0), (1, 0, 0), (1, 0, 1)]


def test_containers_of_tensors_pass():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return {"h": self.linear(x["h"]) + x["e"], "e": x["e"], "n": 3}

    x = {
        "h": torch.randn(2, 8, requires_grad=True),
        "e": torch.randn(2, 8, requires_grad=True),
        "n": 3,
    }
    profile = Profile()
    y = apply_blocks([Pair(), Pair()], x, hooks=[Checkpoint(), profile])
    (y["h"].sum() + y["e"].sum()).backward()
    assert calls(profile) == [(1, 1, 1)] * 2


def test_a_run_without_blocks_is_nothing():
    x, profile = hidden(), Profile()
    assert apply_blocks([], x, hooks=profile) is x
    assert profile.to_dict()["blocks"] == []
    assert "all, 0 steps" in profile.table()


def test_a_block_that_does_nothing_has_no_backward():
    profile = profiled(blocks=[*stack(1), nn.Identity(), *stack(1)])
    assert calls(profile) == [(1, 0, 1), (1, 0, 0), (1, 0, 1)]


def test_a_backward_inside_of_a_block_is_within_its_forward():
    class Inner(nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                inside = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(inside.square().sum(), inside)
            return x * gradient

    profile = profiled(blocks=[*stack(1), Inner()])
    assert calls(profile) == [(1, 0, 1), (1, 0, 1)]


def test_torch_func_passes_a_profile():
    block, x = nn.Linear(8, 8), torch.randn(2, 8)

    def loss(x, hooks):
        return apply_blocks([block, torch.tanh], x, hooks=hooks).sum()

    profile = Profile()
    assert torch.equal(torch.func.grad(loss)(x, profile), torch.func.grad(loss)(x, ()))
    assert [count[0] for count in calls(profile)] == [1, 1]


def test_torch_func_within_a_block_passes_a_profile():
    def block(x):
        return x * torch.func.grad(lambda a: a.square().sum())(x.detach())

    profile = profiled(blocks=[block, block])
    assert calls(profile) == [(1, 0, 1)] * 2


# ------------------------------------------------------------------------------------------------------------- bytes


def test_kept_bytes_are_what_autograd_saved_besides_x_and_weights():
    profile = profiled()
    assert column(profile, "kept_bytes") == [HIDDEN_BYTES] * 3
    assert column(profile, "x_bytes") == [HIDDEN_BYTES] * 3
    assert column(profile, "dropped_bytes") == [0] * 3
    assert column(profile, "mode") == ["keep"] * 3


def test_bytes_are_the_meters():
    blocks, x, profile = stack(), hidden(), Profile()
    with memory.peak("cpu") as meter:
        y = apply_blocks(blocks, x, hooks=profile)
    totals = profile.to_dict()["totals"]
    # The first x was there before, the last one is not kept by a block.
    assert meter.now == totals["kept_bytes"] + totals["x_bytes"] - HIDDEN_BYTES + y.nbytes


def test_what_a_segment_drops_is_told_apart():
    profile = profiled(Checkpoint(plan.first(2)))
    assert column(profile, "kept_bytes") == [0, 0, HIDDEN_BYTES]
    assert column(profile, "dropped_bytes") == [HIDDEN_BYTES, HIDDEN_BYTES, 0]
    assert column(profile, "x_bytes") == [HIDDEN_BYTES] * 3
    assert column(profile, "mode") == ["recompute", "recompute", "keep"]


def test_a_longer_segment_keeps_one_x():
    profile = profiled(Checkpoint(plan.every(3)))
    assert column(profile, "x_bytes") == [HIDDEN_BYTES, 0, 0]
    assert column(profile, "dropped_bytes") == [HIDDEN_BYTES, 2 * HIDDEN_BYTES, 2 * HIDDEN_BYTES]


def test_the_meter_agrees_under_a_checkpoint():
    blocks, x, profile = stack(4), hidden(), Profile()
    with memory.peak("cpu") as meter:
        y = apply_blocks(blocks, x, hooks=[Checkpoint(plan.every(2)), profile])
    totals = profile.to_dict()["totals"]
    assert meter.now == totals["kept_bytes"] + totals["x_bytes"] - HIDDEN_BYTES + y.nbytes


def test_a_segment_that_keeps_after_all_is_told_as_kept():
    class InPlace(nn.Module):
        def forward(self, x):
            return torch.sigmoid(x.mul_(2))

    blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), InPlace()])
    profile = profiled(Checkpoint(plan.blocks([1])), blocks=blocks)
    assert column(profile, "mode") == ["keep", "keep"]
    assert column(profile, "dropped_bytes") == [0, 0]
    assert column(profile, "kept_bytes")[1] == HIDDEN_BYTES


def test_a_storage_saved_twice_and_buffers_and_side_inputs_are_not_counted_again():
    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.randn(ROWS, WIDTH))

        def forward(self, x, mask):
            h = x * self.scale * mask
            return h.view(-1).view(ROWS, WIDTH) * h

    profile = Profile()
    mask = torch.randn(ROWS, WIDTH)
    apply_blocks([Mask()], hidden(), mask, hooks=profile).sum().backward()
    assert column(profile, "kept_bytes") == [HIDDEN_BYTES]
    assert column(profile, "x_bytes") == [0]


def test_what_two_blocks_save_is_counted_once():
    blocks = [
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
    ]  # the ReLU's result is the next one's x
    x, profile = hidden(), Profile()
    with memory.peak("cpu") as meter:
        y = apply_blocks(blocks, x, hooks=profile)
    assert column(profile, "kept_bytes") == [0, HIDDEN_BYTES, 0]
    assert column(profile, "x_bytes") == [HIDDEN_BYTES, 0, 0]
    assert meter.now == sum(column(profile, "kept_bytes")) + y.nbytes


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_a_part_that_is_dropped_is_told_by_what_is_alive(order):
    class Half:
        """Drops what is saved of one size, and gives it back from a copy that nobody counts."""

        def pack(self, tensor):
            return (
                tensor.numpy(force=True).copy()
                if tensor.shape[-1] == WIDTH // 2
                else tensor.detach()
            )

        def unpack(self, packed):
            return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)

        @hookimpl(wrapper=True)
        def run_segment(self):
            with saved_tensors_hooks(self.pack, self.unpack):
                return (yield)

    block = nn.Sequential(
        nn.Linear(WIDTH, WIDTH // 2), nn.GELU(), nn.Linear(WIDTH // 2, WIDTH), nn.GELU()
    )
    profile = Profile()
    hooks = [Half(), profile] if order == "inside" else [profile, Half()]
    apply_blocks([block], hidden(), hooks=hooks).sum().backward()
    assert column(profile, "dropped_bytes") == [HIDDEN_BYTES]  # two of half the width
    assert column(profile, "kept_bytes") == [HIDDEN_BYTES]
    assert column(profile, "x_bytes") == [HIDDEN_BYTES]
    assert column(profile, "mode") == ["selective"]


def test_bytes_are_counted_again_when_x_changes():
    blocks, profile = stack(), Profile()
    profiled(blocks=blocks, profile=profile)
    profiled(blocks=blocks, x=torch.randn(2 * ROWS, WIDTH, requires_grad=True), profile=profile)
    assert column(profile, "kept_bytes") == [2 * HIDDEN_BYTES] * 3
    profiled(Checkpoint(), blocks=blocks, profile=profile)
    assert column(profile, "dropped_bytes") == [HIDDEN_BYTES] * 3


def test_measure_gives_the_meters_peak_and_that_of_each_block():
    blocks, x = stack(), hidden()

    def step(hooks):
        apply_blocks(blocks, x, hooks=hooks).sum().backward()

    step(())
    with memory.peak("cpu") as meter:
        step(Checkpoint())
    profile = Profile()
    with profile.measure("cpu"):
        step([Checkpoint(), profile])
    figures = profile.to_dict()
    assert figures["totals"]["peak_bytes"] == meter.peak
    assert max(column(profile, "peak_bytes")) == meter.peak
    assert min(column(profile, "peak_bytes")) > HIDDEN_BYTES
    assert max(live for _, live in figures["memory"]["live"]) == meter.peak
    assert figures["steps"] == 1


def test_a_measured_step_does_not_count_among_the_times():
    blocks, profile = stack(), Profile()
    profiled(blocks=blocks, profile=profile, steps=2)
    with profile.measure("cpu"):
        profiled(blocks=blocks, profile=profile)
    profiled(blocks=blocks, profile=profile)
    assert profile.to_dict()["steps"] == 3
    assert calls(profile) == [(3, 0, 3)] * 3


def test_measure_without_a_run_says_what_is_missing():
    with pytest.raises(BlockhooksError, match="found no run with this profile"):
        with Profile().measure("cpu"):
            pass


# ------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("early_stop", [True, False])
def test_flops_of_linear_blocks_are_the_closed_forms(early_stop):
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    profile = Profile(flops=True)
    profiled(Checkpoint(early_stop=early_stop), blocks=blocks, profile=profile, steps=2)
    forward = 2 * ROWS * WIDTH * WIDTH
    # A linear layer saves its input alone: an early stop comes before the product.
    recompute = 0 if early_stop else forward
    expected = {"forward": forward, "recompute": recompute, "backward": 2 * forward}
    assert column(profile, "flops") == [expected] * 3
    totals = profile.to_dict()["totals"]
    assert totals["model_flops"] == 9 * forward
    assert totals["hardware_flops"] == 9 * forward + 3 * recompute


def test_the_first_block_has_one_product_less_where_x_needs_no_gradient():
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    profile = Profile(flops=True)
    profiled(blocks=blocks, x=torch.randn(ROWS, WIDTH), profile=profile)
    forward = 2 * ROWS * WIDTH * WIDTH
    assert [block["backward"] for block in column(profile, "flops")] == [forward, 2 * forward]


def test_flops_are_counted_again_when_the_plan_changes():
    plans = iter([plan.tree(2), plan.every(1), plan.every(1)])
    checkpoint, profile = Checkpoint(), Profile(flops=True)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    hardware = []
    for checkpoint.plan in plans:
        profiled(checkpoint, blocks=blocks, profile=profile)
        hardware.append(profile.to_dict()["totals"]["hardware_flops"] / (2 * ROWS * WIDTH * WIDTH))
    # Forward, backward, and each block once more; in a tree those that another one begins with twice.
    assert hardware == [4 + 8 + 4 + 2, 4 + 8 + 4, 4 + 8 + 4]


def test_flops_are_none_unless_asked_for():
    figures = profiled().to_dict()
    assert figures["totals"]["model_flops"] is None
    assert [block["flops"] for block in figures["blocks"]] == [None] * 3


# ------------------------------------------------------------------------------------------------------------- steps


def test_every_nth_step_is_recorded():
    assert calls(profiled(profile=Profile(schedule=3), steps=7)) == [(3, 0, 3)] * 3


def test_torchs_schedules_are_taken():
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    assert calls(profiled(profile=Profile(schedule=schedule), steps=8)) == [(2, 0, 2)] * 3


def test_a_schedule_of_no_step_is_refused():
    for schedule in (0, -1, 0.5, "2", True, Profile):
        with pytest.raises(
            HookError, match=r"Profile\(schedule=...\) expected n of at least 1, .* found"
        ):
            Profile(schedule=schedule)


@pytest.mark.parametrize("option", ["flops", "ranges", "live"])
def test_switches_are_true_or_false(option):
    with pytest.raises(
        HookError, match=rf"Profile\({option}=...\) expected True or False, found 'no'"
    ):
        Profile(**{option: "no"})


def test_only_profiles_are_compared_and_reported(tmp_path):
    profile, page = Profile(), tmp_path / "page.html"
    with pytest.raises(HookError, match=r"compare\(other\) expected a Profile, found 3"):
        profile.compare(3)
    with pytest.raises(
        HookError, match=r"report\(others=...\) expected profiles by name, .* Profile\("
    ):
        profile.report(page, Profile())
    with pytest.raises(HookError, match=r"report\(others={'a': ...}\) expected a Profile, found 3"):
        profile.report(page, {"a": 3})
    with pytest.raises(HookError, match=r"report\(pareto=...\) expected what .*\.pareto returns"):
        profile.report(page, pareto=3)
    with pytest.raises(HookError, match=r"report\(plan=...\) expected what .*\.solve returns"):
        profile.report(page, plan=plan.every(2))
    assert not page.exists()


def test_steps_are_divided_by_hand():
    profile, blocks = Profile(), stack()
    for _ in range(2):
        profile.step()
        for _ in range(3):  # accumulated gradients
            profiled(blocks=blocks, profile=profile)
    assert profile.to_dict()["steps"] == 2
    assert calls(profile) == [(6, 0, 6)] * 3


def test_two_stacks_of_a_model_are_one_step():
    encoder, decoder, profile = stack(2), nn.ModuleList([nn.Tanh()]), Profile()
    for _ in range(2):
        h = apply_blocks(encoder, hidden(), hooks=profile)
        apply_blocks(decoder, h, hooks=profile).sum().backward()
    figures = profile.to_dict()
    assert figures["steps"] == 2
    assert column(profile, "name") == ["0: Sequential", "1: Sequential", "0: Tanh"]


def test_a_backward_that_comes_after_the_next_forward_is_its_own_steps():
    blocks, profile = stack(), Profile()
    losses = [apply_blocks(blocks, hidden(), hooks=profile).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert profile.to_dict()["steps"] == 2
    assert calls(profile) == [(2, 0, 2)] * 3


def test_figures_can_be_read_between_forward_and_backward():
    profile = Profile()
    y = apply_blocks(stack(), hidden(), hooks=profile)
    assert calls(profile) == [(1, 0, 0)] * 3
    y.sum().backward()
    assert calls(profile) == [(1, 0, 1)] * 3


def test_a_model_of_one_class_of_blocks_and_one_of_several_have_readable_names():
    assert column(profiled(), "name") == ["0: Sequential", "1: Sequential", "2: Sequential"]
    assert column(profiled(blocks=[nn.Tanh(), nn.GELU()]), "name") == ["Tanh", "GELU"]


def test_what_is_kept_of_a_step_does_not_grow():
    profile, blocks, x = Profile(), [nn.Tanh()], torch.ones(2, requires_grad=True)

    def tracked():
        gc.collect()
        return len(gc.get_objects())

    profiled(blocks=blocks, x=x, profile=profile, steps=600)
    before = tracked()
    profiled(blocks=blocks, x=x, profile=profile, steps=200)
    assert tracked() - before < 200
    assert profile.to_dict()["steps"] == 800


# ----------------------------------------------------------------------------------------------------------- exports


def test_the_figures_are_json():
    profile = profiled(Checkpoint(), profile=Profile(flops=True))
    figures = profile.to_dict()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["chain"] == "Checkpoint, Profile, VersionGuard, StateSnapshot, RNGSnapshot"
    assert figures["plan"] == [
        {**Segment(i, i + 1).to_dict(), "blocks": [f"{i}: Sequential"]} for i in range(3)
    ]
    assert figures["device"] == "cpu"
    assert figures["versions"]["torch"] == torch.__version__


def test_the_plan_of_an_attached_model_is_the_one_in_use_as_it_was_made():
    profile, checkpoint = Profile(), Checkpoint()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
    with attach(model, [checkpoint, profile], blocks="[0-9]"):
        for checkpoint.plan in (plan.every(1), plan.tree(1), plan.first(2)):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
            assert profile.to_dict()["plan"] == [
                {**segment.to_dict(), "blocks": list("0123")[segment.start : segment.stop]}
                for segment in checkpoint.plan(4)
            ]


def test_the_table_has_a_line_for_each_block_with_and_without_rich(monkeypatch):
    profile = profiled(Checkpoint())
    drawn = profile.table()
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    for table in (drawn, profile.table()):
        lines = table.splitlines()
        for name in ("0: Sequential", "1: Sequential", "2: Sequential"):
            (line,) = [line for line in lines if name in line]
            assert "recompute" in line
            assert "1+1+1" in line
            assert line.count("32.00 KiB") == 2  # dropped, and x


def test_a_notebook_and_rich_show_the_table():
    profile = profiled()
    assert "<td>1: Sequential</td>" in profile._repr_html_()
    console = Console(file=io.StringIO(), width=160)
    console.print(profile)
    assert "1: Sequential" in console.file.getvalue()
    assert repr(profile) == "Profile(steps=1)"


def test_the_chrome_trace_has_recompute_on_its_own_track_and_nests(tmp_path):
    profile = profiled(Checkpoint(plan.every(2)), blocks=stack(4), steps=2)
    path = tmp_path / "trace.json"
    profile.chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {e["tid"] for e in spans if e["cat"] == "recompute"} == {tracks["recompute"]}
    assert {e["tid"] for e in spans if e["cat"] in ("forward", "backward")} == {
        tracks["forward and backward"]
    }
    assert {e["name"] for e in spans if e["cat"] == "recompute"} == {
        f"{i}: Sequential" for i in range(4)
    }
    for track in tracks.values():
        on_track = sorted(
            (e for e in spans if e["tid"] == track), key=lambda e: (e["ts"], -e["dur"])
        )
        open_ends = []
        for event in on_track:
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= begin + 1e-6:
                open_ends.pop()
            assert (
                not open_ends or end <= open_ends[-1] + 1e-6
            )  # Perfetto drops what overlaps by halves
            open_ends.append(end)
    assert sum(e["cat"] == "step" for e in spans) == 2


def test_ranges_show_in_torchs_profiler():
    profile = Profile(ranges=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        profiled(Checkpoint(), blocks=stack(2), profile=profile)
    counts = {event.key: event.count for event in recorded.key_averages()}
    for index in range(2):
        for phase in ("forward", "recompute", "backward"):
            assert counts[f"{index}: Sequential {phase}"] == 1


def test_scalars_are_numbers_by_path_and_go_to_a_writer():
    class Writer:
        def __init__(self):
            self.scalars, self.texts = {}, {}

        def add_scalar(self, path, value, step):
            self.scalars[path] = value, step

        def add_text(self, path, text, step):
            self.texts[path] = text

    profile, writer = profiled(Checkpoint()), Writer()
    profile.log_to(writer, step=7)
    figures, scalars = profile.to_dict(), profile.scalars()
    assert writer.scalars == {f"blockhooks/{path}": (value, 7) for path, value in scalars.items()}
    assert scalars["blocks/1: Sequential/dropped_bytes"] == HIDDEN_BYTES
    assert scalars["step/wall_ms"] == figures["totals"]["ms"]["wall"]["mean"]
    assert "| 1: Sequential | recompute |" in writer.texts["blockhooks/table"]


def test_two_profiles_are_compared():
    plain, checkpointed = profiled(), profiled(Checkpoint())
    difference = checkpointed.compare(plain)
    assert difference["totals"]["kept_bytes_more"] == -3 * HIDDEN_BYTES
    assert difference["totals"]["recompute_ratio"] is None
    assert difference["totals"]["wall_ratio"] > 0
    assert [block["dropped_bytes_more"] for block in difference["blocks"]] == [HIDDEN_BYTES] * 3


def test_the_live_strip_is_drawn_at_most_four_times_a_second():
    profile = Profile(live=True)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    shown = []
    strip = profile._strip
    strip._live.console = console
    show = strip.show
    strip.show = lambda step: (shown.append(time.perf_counter()), show(step))
    began = time.perf_counter()
    with contextlib.closing(profile):
        while time.perf_counter() - began < 0.8:
            profiled(profile=profile)
    assert 2 <= len(shown) <= 4
    assert all(later - sooner > 0.2 for sooner, later in itertools.pairwise(shown))
    assert "step" in console.file.getvalue()


def test_a_copy_is_a_profile_of_its_own():
    profile = profiled(profile=Profile(schedule=2, flops=True), steps=3)
    for twin in (copy.deepcopy(profile), pickle.loads(pickle.dumps(profile))):
        assert repr(twin) == "Profile(steps=0)"
        assert calls(profiled(profile=twin, steps=3)) == [(2, 0, 2)] * 3
        assert column(twin, "flops")[0] is not None
    assert repr(profile) == "Profile(steps=2)"


def test_a_profile_can_stand_among_other_plugins():
    order = []

    class Observer:
        @hookimpl(wrapper=True)
        def run_block(self, index, recomputing):
            order.append((index, recomputing))
            return (yield)

    profile = Profile()
    chain = HookChain([Observer(), profile, Checkpoint(), Observer()])
    apply_blocks(stack(1), hidden(), hooks=chain).sum().backward()
    assert order == [(0, False), (0, False), (0, True), (0, True)]
    assert calls(profile) == [(1, 1, 1)]
