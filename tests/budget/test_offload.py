"""What moves away by a plan is counted to the byte, a budget may plan it, and each step is the plain one, bit for bit."""

import copy
import gc
import pickle
import random

import pytest
import torch
from torch import nn

from blockhooks import (
    Checkpoint,
    HookChain,
    HookedBlocks,
    HookError,
    Offload,
    PlanError,
    attach,
    memory,
    offloading,
)
from blockhooks import planner as planning
from blockhooks.budget import ChainProfile, measure, pareto, predict, solve
from blockhooks.errors import BudgetError, OffloadError
from blockhooks.plan import Segment, every
from tests.budget.test_checkpoint import Block, Model, hidden, plain, same, stack, step
from tests.budget.test_hooked_blocks import step as step_of
from tests.hooks.test_offload import fill_the_disk
from tests.models.test_budget import Training

pytest.importorskip("safetensors")

BLOCKS = 8


def files(directory):
    return list(directory.rglob("*.safetensors"))


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def moving(n):
    return tuple(Segment(index, index + 1, mode="offload") for index in range(n))


def random_plan(draw, start, stop, depth=2):
    """Segments of all modes, several blocks long, in and around one another."""
    segments = []
    while start < stop:
        middle = draw.randint(start + 1, stop)
        mode = draw.choice(("keep", "recompute", "selective", "offload"))
        nested = (
            depth and middle - start > 1 and mode in ("keep", "recompute") and draw.random() < 0.6
        )
        inside = random_plan(draw, start, middle, depth - 1) if nested else ()
        segments.append(Segment(start, middle, inside, mode))
        start = middle
    return tuple(segments)


@pytest.mark.parametrize("rows", [48, 96], ids=["x stays, being small", "x moves too"])
def test_measured_blocks_predict_the_peak_of_plans_that_move(rows, tmp_path):
    blocks, x = stack((256,) * BLOCKS), hidden(rows)
    _, expected = step(blocks, x)
    profile = measure(blocks, x, offload=tmp_path)
    assert all(block.figures("offload")[0] < 0.4 * block.kept for block in profile.blocks)

    for seed in range(12):
        segments = random_plan(random.Random(seed), 0, BLOCKS)
        chain = HookChain([Checkpoint(lambda n, segments=segments: segments, offload=tmp_path)])
        peak, record = step(blocks, x, chain)
        assert same(record, expected)
        assert predict(profile, segments).peak == pytest.approx(peak, rel=0.01)
    assert files(tmp_path) == []


class OnHost(offloading._Away):
    """Bytes of a device that are away in another memory, as those of a CUDA device are on the host."""

    def __init__(self, data):
        super().__init__()
        self.here, self.there, self.coming = data, data.numpy().copy(), None

    def leave(self):
        self.here = None

    def ask(self):
        if self.here is None and self.coming is None and self._held is None:
            self.coming = torch.from_numpy(self.there).clone()

    def get(self):
        if self.here is not None:
            return self.here
        self.ask()
        data, self.coming = self.coming, None
        return data


@pytest.fixture
def device(monkeypatch):
    """The CPU is a device, and its host has a memory of its own."""
    monkeypatch.setattr(offloading._Host, "move", lambda self, data, where: OnHost(data))


def test_what_moves_to_the_host_has_left_when_its_block_ends(device):
    blocks, x = stack((256,) * BLOCKS), hidden()
    plain_peak, expected = step(blocks, x)
    profile = measure(blocks, x, offload="cpu")

    for seed in range(12):
        segments = random_plan(random.Random(seed), 0, BLOCKS)
        chain = HookChain([Checkpoint(lambda n, segments=segments: segments)])
        peak, record = step(blocks, x, chain)
        assert same(record, expected)
        assert predict(profile, segments).peak == pytest.approx(peak, rel=0.01)
    peak, _ = step(blocks, x, [Checkpoint(moving)])
    assert peak < 0.4 * plain_peak


@pytest.mark.parametrize("new_gradients", [False, True])
@pytest.mark.parametrize("length", [48, 96])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "pyramid"])
def test_plans_of_a_model_that_move_take_what_they_are_said_to(
    name, length, new_gradients, tmp_path, monkeypatch
):
    draw = random.Random(length)
    modes = ("keep", "recompute", "selective", "offload")

    class AtRandom(planning.Solver):
        def solve(self, budget, *, beside):
            return self.plan(
                tuple(
                    Segment(index, index + 1, mode=draw.choice(modes))
                    for index in range(len(self.profile))
                )
            )

    monkeypatch.setattr(planning, "Solver", AtRandom)
    training = Training(name, new_gradients, lengths=(length,))
    for _ in range(3):
        checkpoint = Checkpoint(memory_budget=0.5, offload=tmp_path)
        with attach(training.model, hooks=[checkpoint]):
            for _ in range(2):
                peak, results = training.step(length)
                assert same(results, training.plain[length][1])
        (plan,) = checkpoint.planner.plans
        assert plan.peak == pytest.approx(peak, rel=0.01)
        assert files(tmp_path) == []


def test_a_budget_that_recompute_cannot_keep_is_kept_by_moving(tmp_path):
    blocks, x = stack((128,) * 16), hidden(256)
    plain_peak, expected = step(blocks, x)
    floor = Checkpoint(memory_budget=1)
    with pytest.raises(BudgetError, match="cannot be kept") as caught:
        step(blocks, x, [floor])
    budget = caught.value.floor - x.nbytes
    checkpoint = Checkpoint(memory_budget=budget, offload=tmp_path)
    chain = HookChain([checkpoint])

    for number in range(4):
        peak, record = step(blocks, x, chain)
        assert same(record, expected)
        assert peak <= (budget if number else 0.15 * plain_peak)
        assert files(tmp_path) == []
    (plan,) = checkpoint.planner.plans
    assert plan.peak == pytest.approx(peak, rel=0.01)
    assert any(segment.mode == "offload" for segment in plan.segments)
    assert "offload" in checkpoint.report()
    assert checkpoint.report().endswith(f"offload to files in {tmp_path}")


def test_the_floor_with_blocks_that_move_is_named_and_reached(tmp_path, no_gc):
    blocks, x = stack((256,) * BLOCKS), hidden()
    with pytest.raises(BudgetError, match="cannot be kept") as caught:
        step(blocks, x, [Checkpoint(memory_budget=1000, offload=tmp_path)])
    floor = caught.value.floor
    with pytest.raises(BudgetError, match="cannot be kept") as recomputing:
        step(blocks, x, [Checkpoint(memory_budget=1000)])
    assert floor < recomputing.value.floor
    del caught, recomputing
    assert files(tmp_path) == []

    chain = HookChain([Checkpoint(memory_budget=floor, offload=tmp_path)])
    step(blocks, x, chain)
    assert step(blocks, x, chain)[0] <= floor


@pytest.mark.parametrize("keeps_them", [False, True], ids=["dropped", "held by the user"])
def test_hidden_states_that_the_user_holds_are_counted(keeps_them, tmp_path):
    class Tells(Model):
        def forward(self, x):
            states = []
            for block in self.wide:
                x = block(x)
                states.append(x)
            return x, states if keeps_them else len(states)

    torch.manual_seed(0)
    model, x = Tells(), hidden(128)
    model.wide[3] = Block(64, 512)  # where the peak is
    checkpoint = Checkpoint(memory_budget=0.5, offload=tmp_path)
    with attach(model, hooks=[checkpoint], blocks="wide"):
        for _ in range(3):
            for tensor in (x, *model.parameters()):
                tensor.grad = torch.zeros_like(tensor)
            with memory.peak() as meter:
                y, states = model(x)
                y.square().mean().backward()
                del states
    (plan,) = checkpoint.planner.plans
    moved = predict(checkpoint.planner.profiles[0], moving(4)).peak
    assert meter.peak == pytest.approx(plan.peak, rel=0.01)
    with attach(model, hooks=[Checkpoint(moving, offload=tmp_path)], blocks="wide"):
        with memory.peak() as meter:
            y, states = model(x)
            y.square().mean().backward()
            del states
    assert meter.peak == pytest.approx(moved, rel=0.01)


def test_what_a_block_keeps_of_its_own_result_is_not_let_go_by_the_next(tmp_path):
    blocks, x = [nn.Sequential(Block(64, 256), nn.Tanh()) for _ in range(BLOCKS)], hidden()
    profile = measure(blocks, x, offload=tmp_path)
    modes = ("keep", "offload", "recompute", "offload")
    plans = [tuple(Segment(i, i + 1, mode=modes[i % n]) for i in range(BLOCKS)) for n in (1, 2, 4)]

    for segments in (*plans, moving(BLOCKS)):
        chain = [Checkpoint(lambda n, segments=segments: segments, offload=tmp_path)]
        peak, _ = step(nn.ModuleList(blocks), x, chain)
        assert predict(profile, segments).peak >= 0.999 * peak


def test_a_list_of_blocks_keeps_its_budget_at_each_shape(tmp_path):
    blocks = HookedBlocks(
        stack((256,) * BLOCKS), hooks=[Checkpoint(memory_budget=0.3, offload=tmp_path)]
    )
    for number, rows in enumerate((96, 128, 96, 128)):
        x = hidden(rows)
        peak, expected = step_of(lambda x: plain(blocks, x), blocks, x)
        found, record = step_of(blocks, blocks, x)
        assert same(record, expected)
        assert number < 2 or found <= 0.3 * peak
    (checkpoint,) = (p for p in blocks.chain.plugins if isinstance(p, Checkpoint))
    assert len(checkpoint.planner.plans) == 2


def test_measuring_leaves_a_plugin_that_moves_alone(tmp_path):
    blocks, x = stack(), hidden()
    _, expected = step(blocks, x)
    outer = Offload("disk", min_bytes=0, directory=tmp_path)
    chain = HookChain([outer, Checkpoint(memory_budget=0.8, offload=tmp_path)])
    for _ in range(3):
        assert same(step(blocks, x, chain)[1], expected)
    assert outer.away == 0
    assert files(tmp_path) == []


def test_a_full_disk_while_measuring_is_told_and_the_next_step_is_right(
    tmp_path, monkeypatch, no_gc
):
    blocks, x = stack(), hidden()
    _, expected = step(blocks, x)
    chain = HookChain([Checkpoint(memory_budget=0.5, offload=tmp_path)])
    with monkeypatch.context() as patch:
        fill_the_disk(patch, room=5)
        with pytest.raises(OffloadError, match=r"block 0 .* could not be written .*Make room"):
            step(blocks, x, chain)
    assert files(tmp_path) == []
    for _ in range(3):
        assert same(step(blocks, x, chain)[1], expected)


def test_a_place_where_nothing_can_be_written_is_told_in_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=r"Choose another place by .*Checkpoint\(offload=Path"):
        step(stack(), hidden(), [Checkpoint(memory_budget=0.5, offload=tmp_path / "file" / "no")])


def test_to_the_host_nothing_moves_from_a_cpu_and_the_report_says_so():
    blocks, x = stack(), hidden()
    plain_peak, expected = step(blocks, x)
    checkpoint = Checkpoint(memory_budget=0.5, offload="cpu")
    chain = HookChain([checkpoint])
    step(blocks, x, chain)
    peak, record = step(blocks, x, chain)
    assert same(record, expected)
    assert peak <= 0.5 * plain_peak
    assert "no block holds less by offloading\n" in checkpoint.report()


def test_all_budgets_may_choose_it(tmp_path):
    profile = measure(stack((256,) * BLOCKS), hidden(), offload=tmp_path)
    points = pareto(profile).points
    assert points[0].memory < min(predict(profile, every(n)(BLOCKS)).peak for n in range(1, 9))
    assert any(s.mode == "offload" for s in solve(profile, points[0].memory).segments)
    profile.save(tmp_path / "profile.json")
    assert ChainProfile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("place", ["disc", "cuda", 3, True, "/tmp"], ids=repr)
def test_what_is_no_place_is_refused(place):
    with pytest.raises(HookError, match="expected 'cpu', 'disk', or a directory"):
        Checkpoint(memory_budget=0.5, offload=place)
    with pytest.raises(HookError, match="expected 'cpu', 'disk', or a directory"):
        measure(stack(), hidden(), offload=place)


def test_blocks_on_the_meta_device_have_nothing_to_move():
    with torch.device("meta"):
        blocks = stack()
    with pytest.raises(BudgetError, match="meta tensors, which have no bytes to move"):
        measure(blocks, hidden(), offload="disk")


def test_a_place_for_nothing_is_refused():
    with pytest.raises(PlanError, match="by default every block is recomputed"):
        Checkpoint(offload="disk")


def test_copies_and_pickles_keep_the_place(tmp_path):
    blocks, x = stack(), hidden()
    for checkpoint in (
        Checkpoint(memory_budget=0.6, offload=tmp_path),
        Checkpoint(every(2), offload=tmp_path),
    ):
        step(blocks, x, [checkpoint])
        for other in (copy.deepcopy(checkpoint), pickle.loads(pickle.dumps(checkpoint))):
            assert repr(other) == repr(checkpoint)
            assert repr(other).endswith(f", offload={tmp_path!r})")
            assert same(step(blocks, x, [other])[1], step(blocks, x)[1])
