"""What a step holds outside of its blocks is seen in its first backward, and nobody can tell that it was looked at."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockhooks import Checkpoint, apply_blocks, attach, budget, memory
from blockhooks.errors import BudgetError
from blockhooks.plan import Segment, every
from tests.models.toys import Block, Loop


class Doubled(torch.autograd.Function):
    """Somebody's own derivative, which counts its calls and keeps tensors in two ways."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.also = x * 2
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Doubled.calls += 1
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Tailed(nn.Module):
    """A stem, blocks, and a tail in which all kinds of things happen."""

    def __init__(self, width=32, vocabulary=128, n=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block(width) for _ in range(n))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.seen = []

    def forward(self, tokens):
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        x = Doubled.apply(self.norm(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: self.seen.append(gradient.shape))
        logits = self.head(x)
        return logits * torch.sigmoid(logits)  # two gradients for one tensor


def tokens(rows=48):
    return torch.randint(0, 128, (4, rows), generator=torch.Generator().manual_seed(rows))


def loss_of(model, given):
    return F.cross_entropy(model(given).flatten(0, 1), given.flatten())


def step(model, given, loss=loss_of):
    """One step from fixed seeds: the peak, and all that can be told of it."""
    torch.manual_seed(3)
    model.zero_grad()
    seen, calls = len(getattr(model, "seen", ())), Doubled.calls
    with memory.peak("cpu") as meter:
        value = loss(model, given)
        value.backward()
    told = [
        len(getattr(model, "seen", ())) - seen,
        Doubled.calls - calls,
        torch.get_rng_state().tolist(),
    ]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return meter.peak, [value.detach(), *gradients], told


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def budgeted(model, budget=0.5, steps=3, given=None, loss=loss_of):
    """Compare steps within a budget with the plain one, and return their peaks, the plain one first."""
    given = tokens() if given is None else given
    plain, results, told = step(model, given, loss)
    checkpoint, peaks = Checkpoint(memory_budget=budget), [plain]
    with attach(model, hooks=[checkpoint]):
        for _ in range(steps):
            peak, found, also = step(model, given, loss)
            assert same(found, results)
            assert also == told
            peaks.append(peak)
    (plan,) = checkpoint.planner.plans
    assert plan.plain_peak == pytest.approx(plain, rel=0.01)
    assert plan.peak == pytest.approx(peaks[-1], rel=0.02)
    return peaks


def test_hooks_and_derivatives_of_the_tail_are_called_once_and_the_budget_is_kept():
    plain, *peaks = budgeted(Tailed())

    assert max(peaks[1:]) <= 0.5 * plain


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, given: model(given).square().mean(),
        lambda model, given: model(given).logsumexp(-1).sum(),
        lambda model, given: (model(given)[:, :-1].softmax(-1) * 2).amax(-1).mean(),
        lambda model, given: F.l1_loss(*model(given).chunk(2)),
        lambda model, given: torch.stack([row.std() for row in model(given)]).sum(),
    ],
    ids=["square", "logsumexp", "softmax of a slice", "halves", "row by row"],
)
def test_the_users_own_loss_is_planned_around(loss):
    plain, *peaks = budgeted(Tailed(), loss=loss)

    assert max(peaks[1:]) <= 0.5 * plain


def test_results_that_the_user_keeps_are_planned_around():
    kept = []

    def loss(model, given):
        kept[:] = [model(given)]
        return kept[0].square().mean()

    plain, *peaks = budgeted(Tailed(), loss=loss)
    assert max(peaks[1:]) <= 0.5 * plain


def test_a_checkpoint_in_the_tail_recomputes_as_often_as_ever():
    executed = []

    class Recomputes(Tailed):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return torch.utils.checkpoint.checkpoint(self.logits, x, use_reentrant=False)

        def logits(self, x):
            executed.append(1)
            return self.head(F.gelu(self.norm(x)))

    model = Recomputes()
    _, expected, _ = step(model, tokens())
    with attach(model, hooks=[Checkpoint(memory_budget=0.6)]):
        for number in range(3):
            _, found, _ = step(model, tokens())
            assert same(found, expected)
            assert len(executed) == 2 * (number + 2)


def test_several_backwards_of_one_graph_and_gradients_of_gradients():
    def loss(model, given):
        logits = model(given)
        (slope,) = torch.autograd.grad(logits.square().mean(), model.norm.weight, create_graph=True)
        value = F.cross_entropy(logits.flatten(0, 1), given.flatten()) + slope.square().sum()
        value.backward(retain_graph=True)
        return value

    class Smooth(Tailed):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    model, given = Smooth(), tokens()
    expected = step(model, given, loss)[1]
    with attach(model, hooks=[Checkpoint(memory_budget=0.7)]):
        for _ in range(3):
            assert same(step(model, given, loss)[1], expected)


def test_the_graph_is_left_without_hooks_and_nothing_is_kept_alive(monkeypatch):
    gc.collect()  # steps of other tests that wait for a backward in vain
    torch.ones((), requires_grad=True).backward()
    model = Tailed()
    original = torch.autograd._engine_run_backward
    with attach(model, hooks=[Checkpoint(memory_budget=0.7)]):
        logits = model(tokens())
        assert torch.autograd._engine_run_backward is not original
        alive, value = weakref.ref(logits), logits.square().mean()
        value.backward(retain_graph=True)
        assert torch.autograd._engine_run_backward is original

        def never(*_):
            raise AssertionError("nothing is measured any more")

        with monkeypatch.context() as patch:
            patch.setattr(memory, "peak", never)
            value.backward()
        gc.disable()
        try:
            del logits, value
            assert alive() is None
        finally:
            gc.enable()


def equal_bits(model, loss=loss_of):
    """Compare steps within a budget with the plain one, without any meter around that would change both."""

    def once():
        torch.manual_seed(3)
        model.zero_grad()
        value = loss(model, tokens())
        value.backward()
        return [value.detach(), *[p.grad for p in model.parameters()], torch.get_rng_state()]

    expected = once()
    with attach(model, hooks=[Checkpoint(memory_budget=0.9)]):
        for _ in range(3):
            assert same(once(), expected)


class Tail(nn.Module):
    """A stack with something after it, and between its blocks."""

    def __init__(self, inside):
        super().__init__()
        self.model, self.inside = Tailed(n=4), inside
        self.model.layers[1].register_forward_hook(lambda _, args, x: inside(x))
        self.model.norm.register_forward_hook(lambda _, args, x: inside(x))

    def forward(self, given):
        return self.model(given)


def nested(x):
    return torch.nested.as_nested_tensor(list(x.unbind())).to_padded_tensor(0.0)


def jagged(x):
    parts = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)
    return parts.sin().values().view_as(x)


class Profiled(torch.autograd.Function):
    """A derivative in which somebody profiles."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return gradient * 2


INSIDE = {
    # Torch computes these in another way under a dispatch mode.
    "product": lambda x: x + torch.masked.prod(x, -1, keepdim=True, mask=x > 0) / 100,
    "filled": lambda x: x.masked_fill(x > 1, x.sum() / 1000),
    "nested": nested,
    "jagged": jagged,
    "profiled": Profiled.apply,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:Profiler clears events at the end of each cycle")
@pytest.mark.parametrize("name", INSIDE)
def test_what_is_between_and_after_blocks_has_the_derivatives_of_the_plain_step(name):
    equal_bits(Tail(INSIDE[name]))


def test_a_batched_backward_in_the_step_that_measures():
    def loss(model, given):
        logits = model(given)
        weight, directions = model.head.weight, torch.stack([logits.detach(), logits.detach() ** 2])
        (rows,) = torch.autograd.grad(
            logits, weight, directions, is_grads_batched=True, retain_graph=True
        )
        return logits.square().mean() + rows.mean()

    equal_bits(Tailed(), loss)


def test_torch_is_as_before_once_nobody_waits_for_a_backward():
    engine = torch.autograd._engine_run_backward
    model = Tailed()
    handle = attach(model, hooks=[Checkpoint(memory_budget=0.6)])
    loss_of(model, tokens())  # no backward follows
    assert torch.autograd._engine_run_backward is not engine
    handle.remove()
    del handle
    gc.collect()
    assert torch.autograd._engine_run_backward is engine


def test_somebody_else_may_replace_the_engine_function_meanwhile(monkeypatch):
    model, called = Tailed(), []

    def loss(model, given):
        value, engine = loss_of(model, given), torch.autograd._engine_run_backward

        def replaced(*args, **kwargs):
            called.append(1)
            return engine(*args, **kwargs)

        if not called:
            monkeypatch.setattr(torch.autograd, "_engine_run_backward", replaced)
        return value

    expected = step(model, tokens(32))[1]
    with attach(model, hooks=[Checkpoint(memory_budget=0.9)]):
        step(model, tokens(), loss)
        assert same(step(model, tokens(32), loss)[1], expected)
    assert called


def test_an_error_in_the_backward_leaves_the_next_step_right():
    class Fails(torch.autograd.Function):
        fail = True

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Fails.fail:
                raise ZeroDivisionError("in the backward")
            return gradient

    def loss(model, given):
        return Fails.apply(model(given)).square().mean()

    model, given = Tailed(), tokens()
    Fails.fail = False
    plain, expected, _ = step(model, given, loss)
    with attach(model, hooks=[Checkpoint(memory_budget=0.6)]):
        Fails.fail = True
        with pytest.raises(ZeroDivisionError, match="in the backward"):
            step(model, given, loss)
        Fails.fail = False
        peaks = []
        for _ in range(4):
            peak, found, _ = step(model, given, loss)
            assert same(found, expected)
            peaks.append(peak)
    assert max(peaks[1:]) <= 0.6 * plain


def test_evaluation_other_shapes_and_accumulation_in_between():
    model = Tailed()
    plain = {rows: step(model, tokens(rows)) for rows in (48, 32, 17)}
    checkpoint, seen = Checkpoint(memory_budget=0.6), set()
    with attach(model, hooks=[checkpoint]):
        for rows in (48, 48, 32, 17, 48, 17, 32):
            peak, found, _ = step(model, tokens(rows))
            assert same(found, plain[rows][1])
            assert rows not in seen or peak <= 0.6 * plain[rows][0]
            seen.add(rows)
            with torch.no_grad():  # an evaluation, in the midst of which nothing is forgotten
                model.eval()(tokens(rows))
            model.train()

    expected, model = [], copy.deepcopy(model)
    for hooks in ((), [Checkpoint(memory_budget=0.6)]):
        with attach(model, hooks=hooks):
            for _ in range(2):
                model.zero_grad()
                for rows in (48, 48, 32):
                    torch.manual_seed(rows)
                    loss_of(model, tokens(rows)).backward()
                expected.append([p.grad.clone() for p in model.parameters()])
    assert same(expected[2], expected[0])
    assert same(expected[3], expected[1])


def test_an_evaluation_between_forward_and_backward_is_no_end_of_the_step():
    model = Tailed()
    _, expected, _ = step(model, tokens())
    plans = []
    for evaluates in (False, True):

        def loss(model, given, evaluates=evaluates):
            value = loss_of(model, given)
            if evaluates:
                with torch.no_grad(), torch.random.fork_rng():
                    model(given)
            return value

        checkpoint = Checkpoint(memory_budget=0.6)
        with attach(model, hooks=[checkpoint]):
            for _ in range(3):
                assert same(step(model, tokens(), loss)[1], expected)
        plans += checkpoint.planner.plans
    assert plans[0].plain_peak == plans[1].plain_peak


def test_a_model_of_which_parts_are_called_is_planned_by_its_blocks():
    model = Loop(6).eval()
    x = torch.randn(64, 8, requires_grad=True)

    def run():
        y = x
        for layer in model.layers:
            y = layer(y)
        return torch.autograd.grad(y.square().sum(), [x, *model.layers.parameters()])

    expected = run()
    with attach(model, hooks=[Checkpoint(memory_budget=0.7)]):
        for _ in range(4):
            assert same(run(), expected)


def test_blocks_that_are_left_out_are_measured_when_they_come():
    class Drops(Tailed):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                if torch.rand(()) > 0.4:
                    x = layer(x)
            return self.head(self.norm(x))

    model = Drops()
    checkpoint = Checkpoint(memory_budget=0.8)
    ours = copy.deepcopy(model)
    with attach(ours, hooks=[checkpoint]):
        for number in range(12):
            results = []
            for each in (model, ours):
                torch.manual_seed(number)
                each.zero_grad()
                loss_of(each, tokens()).backward()
                results.append([p.grad for p in each.parameters() if p.grad is not None])
            assert same(*results)
    assert checkpoint.planner.plans


def test_a_block_that_is_never_called_is_left_out_of_the_plan():
    class Skips(Tailed):
        def forward(self, tokens):
            x = self.embed(tokens)
            for index, layer in enumerate(self.layers):
                if index != 5:
                    x = layer(x)
            return self.head(self.norm(x))

    plain, *peaks = budgeted(Skips(), budget=0.6)
    assert max(peaks[1:]) <= 0.6 * plain


class Again(Tailed):
    """Its blocks are gone through several times, at first without gradients."""

    def forward(self, tokens):
        x = self.embed(tokens)
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x))


def test_each_call_of_a_block_is_planned_for():
    model = Again(n=3)
    plain = step(model, tokens())[0]
    for allowed in (0.7, "the floor"):
        if allowed == "the floor":
            with attach(model, hooks=[Checkpoint(memory_budget=0.05)]):
                for _ in range(2):
                    step(model, tokens())
                with pytest.raises(BudgetError, match="cannot be kept") as caught:
                    step(model, tokens())
            allowed = caught.value.floor
        _, *peaks = budgeted(model, budget=allowed, steps=4)
        assert max(peaks[2:]) <= (allowed * plain if allowed == 0.7 else allowed)


class Cached(Tailed):
    """Its blocks put what they make into a cache that the model returns."""

    def forward(self, tokens):
        x, cache = self.embed(tokens), {}
        for index, layer in enumerate(self.layers):
            x = layer(x, cache, index)
        return {"logits": self.head(self.norm(x)), "cache": cache}


class Caching(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.key, self.inside = nn.Linear(width, width), Block(width)

    def forward(self, x, cache, index):
        cache[index] = self.key(x).tanh()
        return self.inside(x, cache[index])


@pytest.mark.parametrize("keep", [True, False])
def test_a_cache_is_planned_for_whether_the_user_keeps_it_or_not(keep):
    def loss(model, given):
        output = model(given)
        if keep:
            model.kept = output
        return F.cross_entropy(output["logits"].flatten(0, 1), given.flatten())

    model, given = Cached(n=0), tokens(8)  # so few that the new gradients take the most
    model.layers.extend(Caching() for _ in range(5))
    for allowed in (0.9, "the floor"):
        if allowed == "the floor":
            with attach(model, hooks=[Checkpoint(memory_budget=0.05)]):
                step(model, given, loss)
                with pytest.raises(BudgetError, match="cannot be kept") as caught:
                    step(model, given, loss)
            allowed = caught.value.floor
        plain, *peaks = budgeted(model, budget=allowed, given=given, loss=loss)
        assert max(peaks[1:]) <= (allowed * plain if allowed == 0.9 else allowed)


def floor_of(model, given, loss=loss_of):
    """The floor that the error names."""
    with attach(model, hooks=[Checkpoint(memory_budget=0.05)]):
        step(model, given, loss)
        with pytest.raises(BudgetError, match="cannot be kept") as caught:
            step(model, given, loss)
    return caught.value.floor


class Forked(Tailed):
    """The backward needs nothing of its last two blocks, whose results it gives too."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers[:-2]:
            x = layer(x)
        logits = self.head(self.norm(x))
        for layer in self.layers[-2:]:
            x = layer(x)
        return {"logits": logits, "features": x}


@pytest.mark.parametrize("keep", [True, False])
def test_blocks_that_the_backward_does_not_need_are_dropped_whether_the_user_keeps_their_results(
    keep,
):
    def loss(model, given):
        output = model(given)
        if keep:
            model.kept = output
        return F.cross_entropy(output["logits"].flatten(0, 1), given.flatten())

    model = Forked(n=5)
    floor = floor_of(model, tokens(), loss)
    for allowed in (0.9, floor):
        plain, *peaks = budgeted(model, budget=allowed, loss=loss)
        assert max(peaks[1:]) <= (allowed * plain if allowed == 0.9 else allowed)


class Masked(Tailed):
    """Its blocks are given something large that autograd does not keep; its head is transposed, and thrice tied."""

    def forward(self, tokens):
        x = self.embed(tokens)
        shift = torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view_as(x)
        for layer in self.layers:
            x = layer(x, shift) + self.embed(tokens)
        return self.norm(x) @ (self.head.weight.t() * 2)


def test_new_gradients_are_summed_and_copied_in_the_plan_as_in_the_step():
    model, given = Masked(n=0, vocabulary=512), tokens(2)
    model.layers.extend(Shifted(32) for _ in range(3))
    floor = floor_of(model, given)

    _, *peaks = budgeted(model, budget=floor, given=given)
    assert max(peaks[1:]) <= floor
    assert floor == pytest.approx(peaks[-1], rel=0.005)


class Centred(nn.Module):
    """A block that autograd keeps no input of."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return x + self.second(torch.tanh(self.first(centred)))


def test_a_kept_block_does_not_hold_an_input_that_autograd_does_not_keep():
    model = Tailed(n=0)
    model.layers.extend(Centred() for _ in range(10))
    for allowed in (1.0, 0.8, floor_of(model, tokens())):
        plain, *peaks = budgeted(model, budget=allowed)
        assert max(peaks[1:]) <= (allowed if allowed > 1 else allowed * plain)


def test_an_input_that_the_user_keeps_is_held_although_autograd_does_not_keep_it():
    class Shows(Tailed):
        def forward(self, tokens):
            x = self.embed(tokens)
            self.inputs = []
            for layer in self.layers:
                self.inputs.append(x)
                x = layer(x)
            return self.head(self.norm(x))

    model = Shows(n=0)
    model.layers.extend(Centred() for _ in range(10))
    plain, *peaks = budgeted(model, budget=0.8)
    assert max(peaks[1:]) <= 0.8 * plain


def test_below_the_floor_the_error_names_what_is_held_outside_and_the_plan():
    model = Tailed()
    with attach(model, hooks=[Checkpoint(memory_budget=0.05)]):
        step(model, tokens())
        with pytest.raises(BudgetError, match="are held outside of the blocks") as caught:
            step(model, tokens())
    error = caught.value
    assert error.plan.peak == error.floor
    plain, *peaks = budgeted(model, budget=error.floor)
    assert max(peaks[1:]) <= error.floor < plain


class Shifted(nn.Module):
    """A block with a side input that autograd does not keep."""

    def __init__(self, width):
        super().__init__()
        self.inside = Block(width)

    def forward(self, x, shift):
        return self.inside(x) + shift


class TwoStacks(nn.Module):
    """The blocks of the first stack are given something that those of the second are not."""

    def __init__(self, width=32):
        super().__init__()
        self.encoder = nn.ModuleList(Shifted(width) for _ in range(2))
        self.decoder = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x):
        shift = torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view_as(x)
        for layer in self.encoder:
            x = layer(x, shift)
        for layer in self.decoder:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("first", "second"), [("keep", "recompute"), ("recompute", "keep")])
def test_a_side_input_is_held_for_blocks_that_are_given_it(first, second):
    model, x = TwoStacks(), torch.randn(64, 32)
    profile = budget.measure(model, x)
    segments = [Segment(i, i + 1, mode=first if i < 2 else second) for i in range(5)]

    def planned(n):
        return tuple(Segment(i, i + 1, mode=first if n == 2 else second) for i in range(n))

    peaks = []
    for plan in (every(1), planned):
        with attach(model, hooks=[Checkpoint(plan)]):
            for _ in range(2):  # the first makes the gradients
                with memory.peak("cpu") as meter:
                    model(x).backward()
            peaks.append(meter.peak)
    assert budget.predict(profile, every(1)(5)).peak == pytest.approx(peaks[0], rel=0.005)
    assert budget.predict(profile, segments).peak == pytest.approx(peaks[1], rel=0.005)


class Squashed(nn.Linear):
    """A block whose result autograd keeps for the block itself."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


def test_a_result_that_autograd_keeps_for_its_block_alone_is_held():
    class Residual(Tailed):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(self.norm(x))

    model = Residual(n=0)
    model.layers.extend(Squashed(32, 32) for _ in range(12))
    plain, *peaks = budgeted(model, budget=1.0)
    assert max(peaks[1:]) <= plain


class Moved(nn.Module):
    """A block that autograd keeps nothing of."""

    def __init__(self, width=32):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x + self.by


class Looped(Tailed):
    """Its blocks are run by `apply_blocks`, in which a measuring step recomputes many of them together."""

    hooks = ()

    def forward(self, tokens):
        x = apply_blocks(self.layers, self.embed(tokens), hooks=self.hooks)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("kinds", "allowed"),
    [
        ([lambda: Block(32), Centred], 0.8),
        ([Moved, Centred], 0.8),
        ([lambda: Squashed(32, 32), Moved], 0.8),
        ([Moved], 1.0),
    ],
    ids=["some", "all", "kept by the block before", "nothing at all is kept"],
)
def test_inputs_that_autograd_does_not_keep_are_known_in_a_loop_too(kinds, allowed):
    model = Looped(n=0)
    model.layers.extend(kind() for _ in range(4) for kind in kinds)
    plain, expected, _ = step(model, tokens())
    checkpoint = Checkpoint(memory_budget=allowed)
    model.hooks = [checkpoint]
    for _ in range(3):
        peak, found, _ = step(model, tokens())
        assert same(found, expected)
    (plan,) = checkpoint.planner.plans
    assert plan.plain_peak == pytest.approx(plain, rel=0.005)
    assert plan.peak == pytest.approx(peak, rel=0.005)
